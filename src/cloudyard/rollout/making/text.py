"""A Python source as its syntax tree and as text at once: where on a line a node or an operator stands.

Pure. Columns are counted in characters, lines from 1; the parser's own columns are bytes and are converted
here.
"""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from bisect import bisect_left
from typing import NamedTuple, Protocol


class Located(Protocol):
    """A node that the parser gave a place."""

    lineno: int
    col_offset: int
    end_lineno: int | None
    end_col_offset: int | None


class Span(NamedTuple):
    """A stretch of one line: characters `start` to `end` of line `line`."""

    line: int
    start: int
    end: int


class Place(NamedTuple):
    """A point in the text."""

    line: int
    column: int


class Token(NamedTuple):
    """A token that lies on one line."""

    text: str
    start: Place
    end: Place

    @property
    def span(self) -> Span:
        return Span(self.start.line, self.start.column, self.end.column)


class NotPython(Exception):
    """A text that Python's parser does not take, or whose lines are not ended by a line feed alone."""


def parse(source: str) -> ast.Module:
    """The syntax tree of a source.

    Raises:
        NotPython: it has none.
    """
    if "\r" in source or "\f" in source or source.startswith("\ufeff"):
        raise NotPython("its lines are not ended by a line feed alone")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes and the like: not ours to judge
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise NotPython(str(exc)) from exc


class Text:
    """The lines and tokens of a source, and the places of its nodes.

    Raises:
        NotPython: it cannot be cut into tokens.
    """

    def __init__(self, source: str) -> None:
        self.lines = source.split("\n")
        try:
            self._tokens = [
                Token(token.string, Place(*token.start), Place(*token.end))
                for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING)
                and token.start[0] == token.end[0]
            ]
        except (tokenize.TokenError, SyntaxError) as exc:
            raise NotPython(str(exc)) from exc
        self._starts = [token.start for token in self._tokens]

    def start(self, node: Located) -> Place:
        """Where a node begins. Parentheses around it are no part of it."""
        return self._place(node.lineno, node.col_offset)

    def end(self, node: Located) -> Place:
        """Where a node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def span(self, node: Located) -> Span | None:
        """The stretch of a line that a node takes; None if it takes several lines."""
        start, end = self.start(node), self.end(node)
        return Span(start.line, start.column, end.column) if start.line == end.line else None

    def read(self, span: Span) -> str:
        """The text of a span."""
        return self.lines[span.line - 1][span.start : span.end]

    def between(self, after: Place, before: Place) -> list[Token]:
        """Tokens that begin at or after one place and before another."""
        return self._tokens[bisect_left(self._starts, after) : bisect_left(self._starts, before)]

    def find(self, words: str, after: Place, before: Place) -> Span | None:
        """The span of an operator, which may have two words (`not in`), between two places on one line."""
        wanted = words.split()
        tokens = [token for token in self.between(after, before) if token.text not in ("(", ")")]
        if [token.text for token in tokens] != wanted or tokens[0].start.line != tokens[-1].end.line:
            return None
        return Span(tokens[0].start.line, tokens[0].start.column, tokens[-1].end.column)

    def first(self, word: str, after: Place) -> Token | None:
        """The first token of this text at or after a place."""
        for token in self._tokens[bisect_left(self._starts, after) :]:
            if token.text == word:
                return token
        return None

    def _place(self, line: int, bytes_before: int) -> Place:
        text = self.lines[line - 1]
        if text.isascii():
            return Place(line, bytes_before)
        return Place(line, len(text.encode()[:bytes_before].decode()))
