"""Faults that can be planted in a Python source, found by its syntax tree and written as an edit of one line.

Pure: a source gives the same faults in the same order, everywhere and always. Formatting, comments and every
other line stay as they are. Faults lie in the bodies of functions; what is nested in one belongs to it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from cloudyard.rollout.making.rules import Change, Put, changes
from cloudyard.rollout.making.text import NotPython, Text, parse

SOURCES_REMEMBERED = 64  # whose outermost statements are known, for one is edited many times
_NO_CODE = ("annotation", "returns", "decorator_list", "type_comment", "type_params")


class Fault(Struct, frozen=True):
    """One change: characters `start` to `end` of a line become `text`."""

    kind: str
    function: str
    """Outermost function that it lies in, with the classes around that: `Cache.pop`."""
    line: int
    """Counted from 1."""
    start: int
    end: int
    text: str


class Function(NamedTuple):
    """Where a function is. Several may have one name: a property's parts, or one for each platform."""

    name: str
    first: int
    """Its first line, counted from 1, and its last."""
    last: int


class _Site(NamedTuple):
    """A node in the body of a function, and how to put another in its place."""

    function: str
    node: ast.AST
    put: Put


def find(source: str) -> list[Fault]:
    """All faults of a source, by place. A text that is no Python has none."""
    try:
        tree, text = parse(source), Text(source)
    except NotPython:
        return []
    found = {_fault(function, change) for function, change in _changes(tree, text)}
    return sorted(found, key=lambda fault: (fault.line, fault.start, fault.end, fault.kind, fault.text))


def apply(source: str, fault: Fault) -> str | None:
    """The source with this fault in it.

    Returns:
        The edited text; None where it would not mean what was meant (an operator that binds otherwise in its
        new place, say), or where the fault is of another source.
    """
    around = [span for span in _statements(source) if span[0] <= fault.line <= span[1]]
    if not around:
        return None
    before, last = around[0][0] - 1, around[0][1]
    statement = "\n".join(source.split("\n")[before:last])  # all that can change; the rest may be long
    moved = replace(fault, line=fault.line - before)
    try:
        tree, text = parse(statement), Text(statement)
        change = next((one for name, one in _changes(tree, text) if _fault(name, one) == moved), None)
        if change is None:
            return None
        change.make()
        meant = ast.dump(tree)
        return edit(source, fault) if ast.dump(parse(edit(statement, moved))) == meant else None
    except NotPython:
        return None


@lru_cache(SOURCES_REMEMBERED)
def _statements(source: str) -> list[tuple[int, int]]:
    """First and last line of every statement at the top of a module; none of a text that is no Python."""
    try:
        return [(node.lineno, node.end_lineno or node.lineno) for node in parse(source).body]
    except NotPython:
        return []


def edit(source: str, fault: Fault) -> str:
    """The text with the fault's line edited, whatever that means."""
    lines = source.split("\n")
    line = lines[fault.line - 1]
    lines[fault.line - 1] = line[: fault.start] + fault.text + line[fault.end :]
    return "\n".join(lines)


def functions(source: str) -> list[Function]:
    """The outermost functions and methods, in order. A text that is no Python has none."""
    try:
        tree = parse(source)
    except NotPython:
        return []
    return [
        Function(name, node.lineno, node.end_lineno or node.lineno) for name, node in _functions(tree, "")
    ]


def _fault(function: str, change: Change) -> Fault:
    return Fault(change.kind, function, *change.span, change.text)


def _changes(tree: ast.Module, text: Text) -> Iterator[tuple[str, Change]]:
    for name, node in _functions(tree, ""):
        for site in _sites(name, node):
            for change in changes(site.node, text, site.put):
                yield name, change


def _functions(
    node: ast.Module | ast.ClassDef | ast.stmt, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + child.name, child
            case ast.ClassDef():
                yield from _functions(child, f"{prefix}{child.name}.")
            case ast.If() | ast.Try() | ast.With():
                yield from _functions(child, prefix)
            case _:
                pass


def _sites(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Site]:
    """Every node below the function's statements, in order of the text."""
    for at, statement in enumerate(function.body):
        yield from _walk(name, statement, _setter(function.body, at))


def _walk(name: str, node: ast.AST, put: Put) -> Iterator[_Site]:
    yield _Site(name, node, put)
    if isinstance(node, ast.JoinedStr):
        return  # the parser does not say where on the line its parts are
    for field, value in ast.iter_fields(node):
        if field in _NO_CODE:
            continue
        if isinstance(value, ast.AST):
            yield from _walk(name, value, _field_setter(node, field))
        elif isinstance(value, list):
            for at, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from _walk(name, item, _setter(value, at))


def _setter(siblings: list[ast.stmt] | list[ast.AST], at: int) -> Put:
    def put(node: ast.AST) -> None:
        siblings[at] = node  # type: ignore[call-overload]  # of the kind that was there

    return put


def _field_setter(parent: ast.AST, field: str) -> Callable[[ast.AST], None]:
    return lambda node: setattr(parent, field, node)
