"""What `yard.call`, `yard.call_many` and `cloudyard call` make of what they are given."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from cloudyard.cli import Parser, calls as command
from cloudyard.core.call_placement import choose
from cloudyard.core.placement import Fleet
from cloudyard.errors import (
    CloudyardError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Unsupported,
    YardUnavailable,
)
from cloudyard.model import (
    EDGE_SILENT_S,
    CallResult,
    CallSpec,
    Case,
    CaseResult,
    EdgeId,
    EdgeLoad,
    Fault,
    Heartbeat,
)
from cloudyard.sdk.calls import spec_of, specs_of


def parsed(*words: str) -> Namespace:
    parser = Parser(prog="cloudyard call", description="")
    command.add_arguments(parser)
    return parser.parse_args(words)


def asked(*words: str) -> CallSpec:
    code, options = command.what_is_asked(parsed(*words))
    return spec_of(code, options)


# --- the SDK's arguments --------------------------------------------------------------------------------


def test_text_becomes_bytes_and_sizes_are_counted() -> None:
    spec = spec_of("x", {"stdin": "\u00e4", "files": {"a": "b", "c": b"\xff"}, "memory": "64MiB"})
    assert spec == CallSpec(
        code="x", stdin="\u00e4".encode(), files={"a": b"b", "c": b"\xff"}, memory=64 * 2**20
    )


def test_cases_come_as_pairs_dicts_and_cases() -> None:
    spec = spec_of("x", {"cases": [("1", "2"), (b"3", None), {"stdin": "4"}, Case(expected=b"5")]})
    assert spec.cases == [
        Case(stdin=b"1", expected=b"2"),
        Case(stdin=b"3"),
        Case(stdin=b"4"),
        Case(expected=b"5"),
    ]


@pytest.mark.parametrize(("suffix", "language"), [(".py", "python"), (".sh", "shell"), (".c", "c")])
def test_the_language_is_told_by_the_suffix(tmp_path: Path, suffix: str, language: str) -> None:
    file = tmp_path / f"main{suffix}"
    file.write_text("text")
    assert spec_of(None, {"file": file}).language == language
    assert spec_of(None, {"file": str(file), "language": "shell"}).language == "shell"


@pytest.mark.parametrize(
    ("code", "options", "kind", "words"),
    [
        (None, {}, InvalidRequest, "either code or file"),
        ("x", {"file": "y"}, InvalidRequest, "either code or file"),
        ("x", {"time_s": 3}, InvalidRequest, "Did you mean timeout_s?"),
        ("x", {"language": "cobol"}, InvalidRequest, "cobol"),
        ("x", {"timeout_s": "long"}, InvalidRequest, "timeout_s"),
        ("x", {"args": "one two"}, InvalidRequest, "Pass a list"),
        ("x", {"stdin": 3}, InvalidRequest, "stdin is a int"),
        ("x", {"stdin": "\udc80"}, InvalidRequest, "no text"),
        ("x", {"files": 3}, InvalidRequest, "mapping of paths"),
        ("x", {"files": "/nowhere/at/all"}, NotFound, "no directory"),
        ("x", {"cases": ["just text"]}, InvalidRequest, "pair"),
        ("x", {"cases": [{"input": "1"}]}, InvalidRequest, "pair"),
        (None, {"file": "/nowhere.py"}, NotFound, "/nowhere.py"),
    ],
)
def test_what_makes_no_call_is_refused_in_words(
    code: str | None, options: dict[str, Any], kind: type[CloudyardError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        spec_of(code, options)
    assert words in str(caught.value)


def test_files_that_are_no_program_are_refused(tmp_path: Path) -> None:
    (tmp_path / "main.rs").write_text("x")
    (tmp_path / "bytes.py").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="cannot be told"):
        spec_of(None, {"file": tmp_path / "main.rs"})
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        spec_of(None, {"file": tmp_path / "bytes.py"})
    for number in range(65):
        (tmp_path / f"{number}").touch()
    with pytest.raises(LimitExceeded, match="too large for a call"):
        spec_of("x", {"files": tmp_path})


def test_a_batch_shares_options_and_each_call_has_its_own() -> None:
    specs = specs_of(
        ["a", {"code": "b", "timeout_s": 2}, CallSpec(code="c")], {"timeout_s": 1, "image": "python"}
    )
    assert [(spec.code, spec.timeout_s, spec.image) for spec in specs] == [
        ("a", 1, "python"),
        ("b", 2, "python"),
        ("c", 10, "debian"),
    ]


# --- the command line -------------------------------------------------------------------------------------


def test_a_whole_command_line(tmp_path: Path) -> None:
    for name, content in {"main.py": "code", "in": "typed", "data": "kept"}.items():
        (tmp_path / name).write_text(content)
    words = (
        f"{tmp_path}/main.py one two --stdin {tmp_path}/in --file {tmp_path}/data --file d/e={tmp_path}/data "
        "--env A=1=2 --preload json --preload math --timeout 3 --memory 64MiB --image python --output-limit 9"
    )
    assert asked(*words.split()) == CallSpec(
        code="code",
        image="python",
        preload=["json", "math"],
        args=["one", "two"],
        stdin=b"typed",
        files={"data": b"kept", "d/e": b"kept"},
        env={"A": "1=2"},
        timeout_s=3.0,
        memory=64 * 2**20,
        output_limit_bytes=9,
    )


def test_code_given_in_words_takes_all_others_as_arguments() -> None:
    spec = asked("-c", "print(1)", "--language", "shell", "a", "b")
    assert (spec.code, spec.language, spec.args) == ("print(1)", "shell", ["a", "b"])


def test_cases_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(
        '{"stdin": "1\\n", "expected": "2"}\n\n{"stdin_base64": "/w==", "expected_base64": "AA=="}\n{}\n'
    )
    spec = asked("-c", "x", "--cases", str(file), "--compare", "exact", "--stop-at-first")
    assert spec.cases == [Case(stdin=b"1\n", expected=b"2"), Case(stdin=b"\xff", expected=b"\0"), Case()]
    assert (spec.compare, spec.stop_at_first) == ("exact", True)


@pytest.mark.parametrize("line", ["{", '{"input": "1"}', '{"stdin_base64": "?"}', '{"stdin": 3}', ""])
def test_a_line_that_is_no_case_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(InvalidRequest, match=r"Line 2 of|has no cases"):
        asked("-c", "x", "--cases", str(file))


@pytest.mark.parametrize("words", [(), ("-", "--stdin", "-"), ("-c", "x", "--env", "A"), ("/",)])
def test_arguments_that_contradict_each_other_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        asked(*words)


@pytest.mark.parametrize(
    ("result", "judged", "code"),
    [
        (CallResult(exit_code=0), False, 0),
        (CallResult(exit_code=7), False, 7),
        (CallResult(signal=11), False, 139),
        (CallResult(signal=9, timed_out=True), False, 124),
        (CallResult(phase="compile", exit_code=1), False, 1),
        (CallResult(phase="compile", exit_code=2), True, 2),
        (CallResult(cases=[CaseResult(verdict="passed")]), True, 0),
        (CallResult(cases=[CaseResult(verdict="passed"), CaseResult(verdict="wrong")]), True, 1),
        (CallResult(exit_code=0, fault=Fault(label="infra", reason="lost")), False, 1),
    ],
)
def test_the_exit_code_mirrors_the_call(result: CallResult, judged: bool, code: int) -> None:
    assert command.exit_code_of(result, judged=judged) == code


def test_json_holds_every_byte() -> None:
    result = CallResult(exit_code=0, stdout=b"\xff", cases=[CaseResult(verdict="wrong", stdout=b"\xfe")])
    fields = json.loads(json.dumps(command._as_json(result)))
    assert (fields["stdout_base64"], fields["cases"][0]["stdout_base64"]) == ("/w==", "/g==")
    assert (fields["ok"], fields["passed"], fields["timed_out"]) == (True, False, False)


# --- which edge -------------------------------------------------------------------------------------------


def fleet(**edges: dict[str, Any]) -> Fleet:
    made = Fleet()
    for name, how in edges.items():
        load = EdgeLoad(cpu_total=how.pop("cpu", 2.0), memory_total_bytes=2**30)
        how = {"backends": ["container", "function"], "images": ["debian"], **how}
        made.hear(Heartbeat(edge=name, boot="b", load=load, **how), 0.0)
    return made


def chosen(made: Fleet, under_way: dict[str, int] | None = None, **how: Any) -> str:
    counts = {EdgeId(name): count for name, count in (under_way or {}).items()}
    how = {"image": "debian", "now": 0.0, "random": lambda: 0.5, **how}
    return choose(made, how.pop("image"), under_way=counts, **how)


def test_a_call_goes_where_the_fewest_are_for_each_core() -> None:
    made = fleet(e1={"cpu": 2.0}, e2={"cpu": 8.0})
    for under_way, edge in (({"e1": 1, "e2": 1}, "e2"), ({"e1": 0, "e2": 7}, "e1"), ({"e1": 1}, "e2")):
        picked = {chosen(made, under_way, random=iter([0.0, 0.99] * 9).__next__)}
        assert picked == {edge}


def test_an_edge_that_refused_is_not_asked_again() -> None:
    made = fleet(e1={}, e2={})
    assert chosen(made, {"e2": 99}, exclude={"e1"}) == "e2"


@pytest.mark.parametrize(
    ("edges", "how", "kind", "code"),
    [
        ({}, {}, YardUnavailable, "no_edge"),
        ({"e1": {}}, {"now": EDGE_SILENT_S + 1}, YardUnavailable, "no_edge"),
        ({"e1": {"backends": ["container"]}}, {}, Unsupported, "no_functions"),
        ({"e1": {}}, {"image": "other"}, NotFound, "image_not_found"),
        ({"e1": {"draining": True}}, {}, LimitExceeded, "no_capacity"),
        ({"e1": {}}, {"exclude": {"e1"}}, LimitExceeded, "no_capacity"),
    ],
)
def test_where_no_edge_takes_it_the_reason_is_said(
    edges: dict[str, Any], how: dict[str, Any], kind: type[CloudyardError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        chosen(fleet(**{name: dict(value) for name, value in edges.items()}), **how)
    assert caught.value.code == code
