"""The kinds of faults: small changes of one node of a syntax tree, each with the edit of the text for it.

Pure. A rule gives *changes*: the span of one line to replace, the text to put there, and a function that does
the same change in the tree. Whoever applies one parses the edited text and compares: only where both agree
is it a fault. So a rule need not think of precedence or parentheses.

Most kinds are each other's inverse (`<` becomes `<=`, and `<=` becomes `<`), which is what a repairer tries.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cloudyard.rollout.making.text import Span, Text

INT_MAX = 2**63  # larger constants are keys and hashes, not counts
Put = Callable[[ast.AST], None]


class Change(NamedTuple):
    """A change of the text, and the same one of the tree."""

    kind: str
    span: Span
    text: str
    make: Callable[[], None]


COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
WORDS: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.And: "and",
    ast.Or: "or",
}
_PAIRS = (
    ("min", "max"),
    ("any", "all"),
    ("startswith", "endswith"),
    ("lower", "upper"),
    ("lstrip", "rstrip"),
    ("find", "rfind"),
    ("index", "rindex"),
    ("split", "rsplit"),
    ("partition", "rpartition"),
    ("popleft", "pop"),
)
CALLEES = dict(_PAIRS) | {right: left for left, right in _PAIRS}


def changes(node: ast.AST, text: Text, put: Put) -> Iterator[Change]:
    """All changes of this one node, its children left out. `put` replaces the node in its parent."""
    match node:
        case ast.Compare():
            yield from _comparison(node, text)
        case ast.BinOp():
            yield from _arithmetic(node, text)
        case ast.AugAssign():
            yield from _augmented(node, text)
        case ast.BoolOp():
            yield from _and_or(node, text)
        case ast.Constant():
            yield from _constant(node, text)
        case ast.UnaryOp(op=ast.Not()):
            yield from _not_removed(node, text, put)
        case ast.If() | ast.While() | ast.IfExp():
            yield from _not_added(node, text)
        case ast.Return(value=ast.expr()):
            yield from _return_dropped(node, text)
        case ast.Call():
            yield from _arguments(node, text)
            yield from _callee(node, text)
        case ast.Subscript(slice=ast.Slice() as bounds):
            yield from _slice(bounds, text)
        case ast.Break() | ast.Continue():
            yield from _jump(node, text, put)
        case _:
            pass


def _comparison(node: ast.Compare, text: Text) -> Iterator[Change]:
    operands = [node.left, *node.comparators]
    for at, operator in enumerate(node.ops):
        before, after = text.end(operands[at]), text.start(operands[at + 1])
        span = text.find(WORDS[type(operator)], before, after)
        for other in COMPARISONS[type(operator)] if span else ():

            def make(at: int = at, other: type[ast.cmpop] = other) -> None:
                node.ops[at] = other()

            assert span is not None
            yield Change("comparison", span, WORDS[other], make)


def _arithmetic(node: ast.BinOp, text: Text) -> Iterator[Change]:
    for other in OPERATORS.get(type(node.op), ()):
        if span := text.find(WORDS[type(node.op)], text.end(node.left), text.start(node.right)):

            def make(other: type[ast.operator] = other) -> None:
                node.op = other()

            yield Change("arithmetic", span, WORDS[other], make)


def _augmented(node: ast.AugAssign, text: Text) -> Iterator[Change]:
    for other in OPERATORS.get(type(node.op), ()):
        if span := text.find(f"{WORDS[type(node.op)]}=", text.end(node.target), text.start(node.value)):

            def make(other: type[ast.operator] = other) -> None:
                node.op = other()

            yield Change("arithmetic", span, f"{WORDS[other]}=", make)


def _and_or(node: ast.BoolOp, text: Text) -> Iterator[Change]:
    """One `and` becomes `or`, or the other way. `and` binds closer, so the tree is grouped anew around it."""
    word = WORDS[type(node.op)]
    values = list(node.values)
    for at in range(len(values) - 1):
        span = text.find(word, text.end(values[at]), text.start(values[at + 1]))
        if span is None:
            continue

        def make(at: int = at) -> None:
            if isinstance(node.op, ast.And):
                node.values = [_all_of(values[: at + 1]), _all_of(values[at + 1 :])]
            else:
                node.values = [*values[:at], _all_of(values[at : at + 2]), *values[at + 2 :]]
            if len(node.values) == 1:
                node.op, node.values = ast.And(), values
            else:
                node.op = ast.Or()

        yield Change("and-or", span, "or" if word == "and" else "and", make)


def _all_of(values: list[ast.expr]) -> ast.expr:
    return values[0] if len(values) == 1 else ast.BoolOp(ast.And(), values)


def _constant(node: ast.Constant, text: Text) -> Iterator[Change]:
    span = text.span(node)
    if span is None:
        return
    written = text.read(span)
    new: list[tuple[str, bool | int, str]] = []
    if node.value is True or node.value is False:
        new.append(("boolean", not node.value, str(not node.value)))
    elif isinstance(node.value, int) and node.value < INT_MAX:
        values = (node.value + 1, node.value - 1) if node.value else (1,)
        new += [("constant", value, shown) for value in values if (shown := _like(written, value))]
    for kind, value, shown in new:

        def make(value: bool | int = value) -> None:
            node.value = value

        yield Change(kind, span, shown, make)


def _like(written: str, value: int) -> str:
    """An integer as the source writes them: decimal, or hexadecimal of the same width and case."""
    if written.isdecimal() and written.isascii():
        return str(value)
    if written[:2] == "0x" and "_" not in written:
        letters = "X" if any(letter in "ABCDEF" for letter in written) else "x"
        return f"0x{value:0{len(written) - 2}{letters}}"
    return ""


def _not_removed(node: ast.UnaryOp, text: Text, put: Put) -> Iterator[Change]:
    start = text.start(node)
    tokens = text.between(start, text.end(node))
    if len(tokens) > 1 and tokens[0].text == "not" and tokens[1].start.line == start.line:
        span = Span(start.line, start.column, tokens[1].start.column)
        yield Change("negation", span, "", lambda: put(node.operand))


def _not_added(node: ast.If | ast.While | ast.IfExp, text: Text) -> Iterator[Change]:
    test = node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return

    def make() -> None:
        node.test = ast.UnaryOp(ast.Not(), test)

    if not isinstance(test, ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr):
        start = text.start(test)
        yield Change("negation", Span(start.line, start.column, start.column), "not ", make)
    elif span := text.span(test):
        yield Change("negation", span, f"not ({text.read(span)})", make)


def _return_dropped(node: ast.Return, text: Text) -> Iterator[Change]:
    value = node.value
    assert value is not None
    span = text.span(value)
    if span is None or (isinstance(value, ast.Constant) and value.value is None):
        return

    def make() -> None:
        node.value = ast.Constant(None)

    yield Change("return", span, "None", make)


def _arguments(node: ast.Call, text: Text) -> Iterator[Change]:
    """Two neighbouring arguments change places."""
    for at, (left, right) in enumerate(zip(node.args, node.args[1:], strict=False)):
        one, two = text.span(left), text.span(right)
        if one is None or two is None or one.line != two.line or ast.dump(left) == ast.dump(right):
            continue

        def make(at: int = at, left: ast.expr = left, right: ast.expr = right) -> None:
            node.args[at : at + 2] = [right, left]

        middle = text.read(Span(one.line, one.end, two.start))
        whole = Span(one.line, one.start, two.end)
        yield Change("arguments", whole, f"{text.read(two)}{middle}{text.read(one)}", make)


def _callee(node: ast.Call, text: Text) -> Iterator[Change]:
    """A function or method is taken for its neighbour: `min` for `max`, `lstrip` for `rstrip`."""
    match node.func:
        case ast.Name(id=name) as called if name in CALLEES:
            field = "id"
        case ast.Attribute(attr=name) as called if name in CALLEES:
            field = "attr"
        case _:
            return
    end = text.end(called)
    span = Span(end.line, end.column - len(name), end.column)
    if text.read(span) == name:
        yield Change("callee", span, CALLEES[name], lambda: setattr(called, field, CALLEES[name]))


def _slice(bounds: ast.Slice, text: Text) -> Iterator[Change]:
    """`[1:]` and `[:]`, `[:-1]` and `[:]`: a bound is forgotten, or comes from nowhere."""
    colon = text.first(":", text.end(bounds.lower) if bounds.lower else text.start(bounds))
    if colon is None:
        return

    def lower(value: ast.expr | None) -> Callable[[], None]:
        return lambda: setattr(bounds, "lower", value)

    def upper(value: ast.expr | None) -> Callable[[], None]:
        return lambda: setattr(bounds, "upper", value)

    line, after = colon.end
    match bounds.lower:
        case None:
            before = Span(line, colon.start.column, colon.start.column)
            yield Change("slice", before, "1", lower(ast.Constant(1)))
        case ast.Constant(value=1) as one if span := text.span(one):
            yield Change("slice", span, "", lower(None))
    match bounds.upper:
        case None if bounds.step is None:
            minus_one = ast.UnaryOp(ast.USub(), ast.Constant(1))
            yield Change("slice", Span(line, after, after), "-1", upper(minus_one))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)) as last if span := text.span(last):
            yield Change("slice", span, "", upper(None))


def _jump(node: ast.Break | ast.Continue, text: Text, put: Put) -> Iterator[Change]:
    if span := text.span(node):
        other, word = (ast.Continue, "continue") if isinstance(node, ast.Break) else (ast.Break, "break")
        yield Change("jump", span, word, lambda: put(other()))
