"""Faults planted in Python sources: one line, one change of the tree, and everything else as it was."""

from __future__ import annotations

import ast
import csv
import inspect
import shlex
import textwrap
from types import ModuleType

import pytest
from hypothesis import given, settings, strategies as st

from cloudyard.rollout.making import faults
from cloudyard.rollout.making.faults import Fault

# Real code of many styles, and nothing that is ours to change.
MODULES: list[ModuleType] = [csv, shlex, textwrap]
SOURCES = [inspect.getsource(module) for module in MODULES]
FOUND = [faults.find(source) for source in SOURCES]


def edits(line: str) -> set[str]:
    """What faults make of one statement in a function."""
    source = f"def f(a, b, c, x):\n    {line}\n"
    applied = (faults.apply(source, fault) for fault in faults.find(source))
    return {text.split("\n")[1].strip() for text in applied if text is not None}


@st.composite
def planted(draw: st.DrawFn) -> tuple[str, Fault]:
    """A source and one of its faults."""
    which = draw(st.integers(0, len(SOURCES) - 1))
    return SOURCES[which], draw(st.sampled_from(FOUND[which]))


@settings(max_examples=60, deadline=None)
@given(planted())
def test_a_fault_changes_one_line_and_the_tree_and_keeps_the_rest(case: tuple[str, Fault]) -> None:
    source, fault = case
    edited = faults.apply(source, fault)
    if edited is None:
        return
    before, after = source.split("\n"), edited.split("\n")
    assert len(before) == len(after)
    changed = [
        number for number, lines in enumerate(zip(before, after, strict=True), 1) if lines[0] != lines[1]
    ]
    assert changed == [fault.line]
    old, new = before[fault.line - 1], after[fault.line - 1]
    assert new[: fault.start] == old[: fault.start]
    assert new[fault.start + len(fault.text) :] == old[fault.end :]
    assert ast.dump(ast.parse(edited)) != ast.dump(ast.parse(source))


@settings(max_examples=40, deadline=None)
@given(planted())
def test_a_fault_lies_in_the_function_that_it_names(case: tuple[str, Fault]) -> None:
    source, fault = case
    there = [function for function in faults.functions(source) if function.name == fault.function]
    assert any(function.first <= fault.line <= function.last for function in there)


@given(st.text())
def test_any_text_is_searched_without_an_error(text: str) -> None:
    faults.find(text)


@settings(max_examples=30, deadline=None)
@given(planted())
def test_most_kinds_are_undone_by_another_fault(case: tuple[str, Fault]) -> None:
    source, fault = case
    edited = faults.apply(source, fault)
    if edited is None or fault.kind not in ("comparison", "constant", "boolean", "arguments", "callee"):
        return
    here = [undo for undo in faults.find(edited) if undo.line == fault.line]
    assert source in [faults.edit(edited, undo) for undo in here]


def test_the_same_source_gives_the_same_faults() -> None:
    assert [faults.find(source) for source in SOURCES] == FOUND


def test_nearly_all_faults_found_can_be_planted() -> None:
    sample = FOUND[2]
    planted = [faults.apply(SOURCES[2], fault) for fault in sample]
    assert sum(1 for text in planted if text is None) < len(sample) / 20


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return a <= b", "return a > b"}),
        ("return a is not b", {"return a is b"}),
        ("x = a not  in b  # why", {"x = a in b  # why"}),
        ("return a and b and c", {"return a or b and c", "return a and b or c"}),
        ("return a or b and c", set()),  # `and` would bind otherwise: refused
        ("x = a + b", {"x = a - b"}),
        ("x += a", {"x -= a"}),
        ("x = 0x0F", {"x = 0x10", "x = 0x0E"}),
        ("x = 0", {"x = 1"}),
        ("if not a: pass", {"if a: pass"}),
        ("if a or b: pass", {"if not (a or b): pass", "if a and b: pass"}),
        ("while a: continue", {"while not a: continue", "while a: break"}),
        ("f(a, b)", {"f(b, a)"}),
        ("f(a, *b)", {"f(*b, a)"}),
        ("x = a[1:]", {"x = a[:]", "x = a[2:]", "x = a[0:]", "x = a[1:-1]"}),
        ("x = a[:b]", {"x = a[1:b]"}),
        ("x = a[:-1]", {"x = a[:]", "x = a[:-2]", "x = a[:-0]", "x = a[1:-1]"}),
        ("x = max(a)", {"x = min(a)"}),
        ("x = a.lstrip()", {"x = a.rstrip()"}),
        ("x = True", {"x = False"}),
        ("x = f'{a + 1}'", set()),
        ("return None", set()),
        (
            'x = "ä" if a < b else c',
            {'x = "ä" if a <= b else c', 'x = "ä" if a > b else c', 'x = "ä" if not a < b else c'},
        ),
    ],
)
def test_kinds_of_faults(line: str, expected: set[str]) -> None:
    assert {text for text in edits(line) if text != "return None"} == expected


def test_a_return_value_is_dropped() -> None:
    assert "return None" in edits("return a + b")


def test_an_operator_over_several_lines_is_edited_on_its_own() -> None:
    source = "def f(a, b):\n    return (\n        a\n        + b  # more\n    )\n"
    (fault,) = [fault for fault in faults.find(source) if fault.kind == "arithmetic"]
    assert faults.apply(source, fault) == source.replace("+ b", "- b")


def test_what_is_nested_belongs_to_the_outer_function_and_methods_to_their_class() -> None:
    source = (
        "class A:\n    def m(self):\n        def inner(x):\n            return x + 1\n        return inner\n"
    )
    assert {fault.function for fault in faults.find(source)} == {"A.m"}


def test_no_fault_lies_outside_of_functions_or_in_annotations_and_defaults() -> None:
    source = "LIMIT = 10 - 3\n\ndef f(a: 'x' = 1 + 2) -> 3 + 4:\n    b: 5 + 6\n    return a\n"
    assert {fault.kind for fault in faults.find(source)} == {"return"}


def test_a_fault_of_another_source_is_not_applied() -> None:
    assert faults.apply("def f():\n    pass\n", Fault("constant", "f", 2, 4, 8, "1")) is None


@pytest.mark.parametrize("source", ["def f(:", "x = 1\r\n", "\0", "def f():\n\treturn 1\n        return 2\n"])
def test_what_is_no_python_or_ends_its_lines_otherwise_has_no_faults(source: str) -> None:
    assert faults.find(source) == []
