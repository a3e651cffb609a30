"""What a launcher or bubblewrap says, when it is not what it should be: an error of ours, never another."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import anyio
import pytest
from hypothesis import given, strategies as st

from cloudyard.edge.backends.container.launcher import REPORT, Launcher, Order
from cloudyard.edge.backends.container.site import Site
from cloudyard.errors import CloudyardError

BOUND_S = 10.0
READY = REPORT.pack(0, b"ready", b"")
ORDER = Order(hostname="h", user_namespaces="0", layers=["/l"], filters=[], argv=["/bin/true"])
REPORTS = st.one_of(
    st.binary(max_size=2 * REPORT.size),
    st.builds(REPORT.pack, st.integers(-(2**31), 2**31 - 1), st.binary(max_size=60), st.binary(max_size=256)),
)
INFOS = st.one_of(
    st.binary(max_size=5000),
    st.sampled_from(
        [b"{}", b"[}", b'{"child-pid": "x"}', b'{"child-pid": null}', b'{"child-pid": []}', b"}" * 9000]
    ),
)


class _Place:
    slot = 1


@contextmanager
def launcher(said: bytes, info: bytes) -> Iterator[Launcher]:
    """A launcher that has said this, and bubblewrap that, and both are gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = os.pipe(), os.pipe()
    ours.setblocking(False)
    for reading, _ in ends:
        os.set_blocking(reading, False)
    made = Launcher(cast(Site, _Place()), 0, control=ours, info=ends[0][0], words=ends[1][0])
    try:
        theirs.send(said)
        os.write(ends[0][1], info)
        yield made
    finally:
        theirs.close()
        made.close()
        for _, writing in ends:
            os.close(writing)


@given(REPORTS)
async def test_whatever_it_reports_it_is_ready_or_failed(said: bytes) -> None:
    with launcher(said, b"") as made, anyio.fail_after(BOUND_S):
        if len(said) == REPORT.size and REPORT.unpack(said)[0] == 0:
            await made.parked()
        else:
            with pytest.raises(CloudyardError):
                await made.parked()


@given(REPORTS, INFOS)
async def test_whatever_is_said_of_the_child_it_is_a_pid_or_an_error(said: bytes, info: bytes) -> None:
    with launcher(said, info + b"}") as made, anyio.fail_after(BOUND_S), pytest.raises(CloudyardError):
        await made.go(ORDER)
