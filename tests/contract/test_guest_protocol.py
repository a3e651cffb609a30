"""Bytes that are wrong: versions, order, garbage, cuts. The guest answers, closes, and never ends.

The same bytes go to the guest as it is shipped and to one built with the address and undefined-behaviour
sanitizers, whose reports would lie in a directory of their own.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudyard.testing.guest_client import PATH, GuestClient, RunningGuest, running_guest
from cloudyard.wire.guest import FIELD, HEADER, PROTOCOL_VERSION, Kind, Options, Tag, encode
from guest_fixture import guest_binary, make_guest

__all__ = ["guest_binary"]

CUTS = 300
HELLO = encode(Kind.HELLO, 0, (Tag.VERSION_MIN, PROTOCOL_VERSION), (Tag.VERSION_MAX, PROTOCOL_VERSION))
RUN_ONE = encode(
    Kind.EXEC, 1, (Tag.SHELL, b"head -c 20000 /dev/zero; cat"), (Tag.ENV, b"PATH=" + PATH.encode())
)


@pytest.fixture(scope="module", params=["shipped", "sanitized"])
def guest(
    request: pytest.FixtureRequest, guest_binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGuest]:
    if request.param == "shipped":
        with running_guest(guest_binary) as running:
            yield running
        return
    make_guest("asan")
    reports = tmp_path_factory.mktemp("reports")
    env = dict.fromkeys(("ASAN_OPTIONS", "UBSAN_OPTIONS"), f"log_path={reports}/report:halt_on_error=1")
    with running_guest(guest_binary.with_name("guest-asan"), env={**os.environ, **env}) as running:
        yield running
        still_works(running)
    found = "\n".join(path.read_text(errors="replace") for path in reports.iterdir())
    # It also warns of the stack on which a command's child lives between clone and exec.
    assert "ERROR" not in found, found
    assert "runtime error" not in found, found


def still_works(guest: RunningGuest) -> None:
    with guest.connect() as client:
        for number, state in client.list().items():
            client.signal(number, 9)
            acked = state.number(Tag.STDOUT_ACKED), state.number(Tag.STDERR_ACKED)
            told = client.resume(number, stdout=acked[0], stderr=acked[1])
            client.until(lambda told=told: told.result is not None)
            client.send(Kind.FORGET, number)
        told = client.run(900_000, "echo fine")
        assert (told.stdout, told.exit_code) == (b"fine\n", 0)


def refused(guest: RunningGuest, *pieces: bytes) -> list[str]:
    """What the guest says before it closes."""
    with guest.connect(hello=False) as client:
        for piece in pieces:
            client.send_bytes(piece)
        with pytest.raises(ConnectionError):
            client.until(lambda: False, bound_s=5)
        return client.errors()


@pytest.mark.parametrize("versions", [(2, 9), (0, 0), (PROTOCOL_VERSION + 1, PROTOCOL_VERSION)])
def test_a_version_that_is_not_spoken_is_refused(guest: RunningGuest, versions: tuple[int, int]) -> None:
    text = refused(
        guest, encode(Kind.HELLO, 0, (Tag.VERSION_MIN, versions[0]), (Tag.VERSION_MAX, versions[1]))
    )
    assert text == ["this guest speaks version 1 of the protocol and no other"]
    still_works(guest)


def test_a_range_that_holds_ours_is_agreed(guest: RunningGuest) -> None:
    with guest.connect(hello=False) as client:
        client.send(Kind.HELLO, 0, (Tag.VERSION_MIN, 0), (Tag.VERSION_MAX, 99))
        client.until(lambda: bool(client.frames))
        assert client.frames[0].number(Tag.VERSION) == PROTOCOL_VERSION


WRONG = {
    "anything before HELLO": (encode(Kind.LIST),),
    "HELLO without versions": (encode(Kind.HELLO),),
    "HELLO twice": (HELLO, HELLO),
    "a kind nobody knows": (HELLO, encode(Kind.LIST).replace(b"\x08", b"\x63", 1)),
    "a kind of the other side": (HELLO, encode(Kind.STARTED, 1)),
    "a size past the bound": (HELLO, HEADER.pack(2**32 - 1, Kind.STDIN, 0, 1)),
    "a field past its frame": (HELLO, HEADER.pack(6, Kind.PING, 0, 0) + FIELD.pack(Tag.DATA, 1)),
    "a number of two bytes": (HELLO, encode(Kind.SIGNAL, 1, (Tag.SIGNAL, b"\x09\0"))),
    "a command without a number": (HELLO, encode(Kind.EXEC, 0, (Tag.SHELL, b"true"))),
    "a large PING": (HELLO, encode(Kind.PING, 0, (Tag.DATA, bytes(1025)))),
    "text": (b"GET / HTTP/1.1\r\nHost: sandbox\r\n\r\n",),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_bytes_are_answered_and_the_connection_ends(guest: RunningGuest, what: str) -> None:
    assert len(refused(guest, *WRONG[what])) == 1
    still_works(guest)


def test_fields_of_a_newer_edge_are_skipped(guest: RunningGuest) -> None:
    with guest.connect() as client:
        new = FIELD.pack(999, 3) + b"new"
        ping = encode(Kind.PING, 0, (Tag.DATA, b"x"))
        client.send_bytes(HEADER.pack(len(ping) - 16 + len(new), Kind.PING, 7, 0) + new + ping[16:])
        client.until(lambda: client.frames[-1].kind == Kind.PONG)


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ((Tag.ARG, b"true"), (Tag.SHELL, b"true")),
        ((Tag.ARG, b"tr\0ue"),),
        ((Tag.SHELL, b""), (Tag.CWD, b"\0")),
        ((Tag.ARG, b"true"), (Tag.USER, b"x" * 500)),
        ((Tag.ARG, b"true"), (Tag.CWD, b"/" + b"x" * 9000)),
        tuple((Tag.ARG, b"") for _ in range(100_000)),
    ],
    ids=["nothing", "both", "zero", "cwd", "user", "long cwd", "arguments"],
)
def test_an_exec_that_makes_no_sense_is_not_started(
    guest: RunningGuest, fields: tuple[tuple[Tag, bytes], ...]
) -> None:
    with guest.connect() as client:
        client.send(Kind.EXEC, 5, *fields)
        told = client.told[5]
        client.until(lambda: told.result is not None)
        assert told.result is not None
        assert told.result.kind == Kind.NOT_STARTED
        client.send(Kind.FORGET, 5)
    still_works(guest)


def test_a_frame_may_come_byte_by_byte(guest: RunningGuest) -> None:
    with guest.connect(hello=False) as client:
        for byte in HELLO + encode(Kind.PING, 0, (Tag.DATA, b"slow")):
            client.send_bytes(bytes([byte]))
        client.until(lambda: any(frame.data(Tag.DATA) == b"slow" for frame in client.frames))


def test_connections_that_never_say_hello_keep_nobody_out(guest: RunningGuest) -> None:
    idle = [guest.connect(hello=False) for _ in range(40)]
    still_works(guest)
    for client in idle:
        client.close()


def test_streams_that_are_cut_or_corrupted_anywhere_do_no_harm(guest: RunningGuest) -> None:
    """The whole conversation of a command, cut at a random place, or with a random byte changed."""
    chance = random.Random(7)
    talk = (
        HELLO + RUN_ONE + encode(Kind.LIST) + encode(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"x" * 900))
    )
    talk += encode(Kind.OUTPUT_ACK, 1, (Tag.STREAM, 1), (Tag.OFFSET, 300)) + encode(
        Kind.PING, 0, (Tag.DATA, b"p")
    )
    talk += encode(Kind.RESUME, 1, (Tag.STREAM, 1), (Tag.OFFSET, 400)) + encode(
        Kind.SIGNAL, 1, (Tag.SIGNAL, 9)
    )
    talk += encode(Kind.RESIZE, 1, (Tag.ROWS, 3), (Tag.COLS, 4)) + encode(Kind.FORGET, 1)
    for turn in range(CUTS):
        data = bytearray(talk)
        if turn % 2:
            data[chance.randrange(len(data))] = chance.randrange(256)
        else:
            del data[chance.randrange(len(data)) :]
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(guest.path))
            raw.setblocking(False)
            try:
                raw.send(data)
            except OSError:
                continue
        if turn % 50 == 0:
            still_works(guest)
    still_works(guest)


def test_the_listening_socket_is_out_of_every_commands_reach(guest: RunningGuest) -> None:
    with guest.connect() as client:
        for command, options in enumerate((Options(0), Options.STDIN, Options.PTY), 910_000):
            told = client.run(command, "ls -l /proc/self/fd; cat </dev/null", options=options)
            assert b"socket" not in told.stdout
        assert b"Num" in client.run(920_000, ["cat", "/proc/net/unix"]).stdout


def test_a_client_sees_what_it_should(guest: RunningGuest) -> None:
    with GuestClient(guest.path) as client:
        assert client.frames[0].text(Tag.BUILD)
