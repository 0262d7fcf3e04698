"""Collect changes of a file's lines, each of which a program can make without understanding the rest."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from halfstep.doctor.located import Edit

_BLOCKS = ("body", "orelse", "finalbody")


class Patch:
    """Changes of lines; one that cannot be made safely spoils the whole patch, which then has no edits."""

    def __init__(self, file: str, lines: Sequence[str], parents: Mapping[ast.AST, ast.AST]) -> None:
        self._file, self._lines, self._parents = file, lines, parents
        self._above: dict[int, list[str]] = {}
        self._below: dict[int, list[str]] = {}
        self._changed: dict[int, str | None] = {}
        self._spoiled = False

    def edits(self) -> tuple[Edit, ...]:
        """Return the edits by line; none if one of the changes cannot be made safely."""
        if self._spoiled:
            return ()
        numbers = sorted({*self._above, *self._below, *self._changed})
        return tuple(edit for number in numbers if (edit := self._edit(number)).before != edit.after)

    def spoil(self) -> None:
        """Give up: a person has to make this change."""
        self._spoiled = True

    def insert_before(self, statement: ast.stmt, *new: str) -> None:
        """Put lines before a statement, with its indentation."""
        self._demand(self._has_own_lines(statement))
        indent = self._indent(statement)
        self._above.setdefault(statement.lineno, []).extend(indent + line for line in new)

    def insert_after(self, statement: ast.stmt, *new: str) -> None:
        """Put lines after a statement, with its indentation."""
        self._demand(self._has_own_lines(statement))
        indent = self._indent(statement)
        self._below.setdefault(statement.end_lineno or 0, []).extend(indent + line for line in new)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put another text in the place of an expression or statement that stands on one line."""
        number = node.lineno
        self._demand(node.end_lineno == number)
        line = self._current(number)
        # Columns are counted in bytes of UTF-8, from the original line: changes on one line go from right to left.
        raw, original = line.encode(), self._lines[number - 1].encode()
        start, end = node.col_offset, node.end_col_offset or 0
        self._demand(raw[:end] == original[:end])
        self._changed[number] = (raw[:start] + text.encode() + raw[end:]).decode(errors="replace")

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement that is not the only one of its block."""
        self._demand(self._has_own_lines(statement) and len(self._block(statement)) > 1)
        for number in self._numbers(statement):
            self._changed[number] = None

    def reindent(self, statement: ast.stmt, indent: str) -> None:
        """Give a statement, with all that is in it, another indentation."""
        # The indentation inside of a text of several lines is part of it.
        texts = [node for node in ast.walk(statement) if isinstance(node, (ast.Constant, ast.JoinedStr))]
        self._demand(self._has_own_lines(statement) and all(node.end_lineno == node.lineno for node in texts))
        old = self._indent(statement)
        for number in self._numbers(statement):
            line = self._current(number)
            self._demand(line.startswith(old) or not line.strip())
            self._changed[number] = indent + line[len(old) :] if line.strip() else line

    def indent(self, statement: ast.stmt) -> str:
        """Return the white space before a statement."""
        return self._indent(statement)

    def line(self, number: int, text: str) -> None:
        """Put another text in the place of a whole line."""
        self._changed[number] = text

    def _edit(self, number: int) -> Edit:
        before = self._lines[number - 1]
        own = self._changed.get(number, before)
        after = [*self._above.get(number, ()), *([] if own is None else [own]), *self._below.get(number, ())]
        return Edit(self._file, number, before, "\n".join(after))

    def _current(self, number: int) -> str:
        line = self._changed.get(number, self._lines[number - 1])
        self._demand(line is not None)
        return line or ""

    def _demand(self, holds: bool) -> None:
        self._spoiled = self._spoiled or not holds

    def _indent(self, statement: ast.stmt) -> str:
        line = self._lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def _numbers(self, statement: ast.stmt) -> range:
        return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)

    def _block(self, statement: ast.stmt) -> list[ast.stmt]:
        parent = self._parents[statement]
        blocks = (getattr(parent, name, []) for name in _BLOCKS)
        return next((block for block in blocks if isinstance(block, list) and statement in block), [statement])

    def _has_own_lines(self, statement: ast.stmt) -> bool:
        """Return whether nothing else stands on the statement's lines, except for a comment."""
        first, last = self._lines[statement.lineno - 1].encode(), self._lines[(statement.end_lineno or 1) - 1].encode()
        rest = last[statement.end_col_offset or 0 :].strip()
        return not first[: statement.col_offset].strip() and (not rest or rest.startswith(b"#"))
