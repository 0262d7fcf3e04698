"""As much of a terminal as the live console speaks to: what a person would see, and whether the cursor is there."""

from __future__ import annotations

import re

from rich.cells import cell_len

_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Screen:
    def __init__(self, width: int) -> None:
        self.width, self.wrapped, self.cursor_hidden = width, 0, False
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, text: str) -> Screen:
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found:
                self._obey(*found.groups())
                at = found.end()
                continue
            assert text[at] != "\x1b", f"an unknown sequence: {text[at : at + 12]!r}"
            self._take(text[at])
            at += 1
        return self

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def _obey(self, number: str, kind: str) -> None:
        if kind == "A":
            self._row = max(0, self._row - int(number or 1))
        elif kind == "K":
            self._rows[self._row] = [] if number == "2" else self._rows[self._row][: self._column]
        elif number == "?25":
            self.cursor_hidden = kind == "l"
        else:
            assert kind == "m", f"an unknown sequence: {number}{kind}"

    def _take(self, sign: str) -> None:
        if sign == "\r":
            self._column = 0
        elif sign == "\n":
            self._row += 1
            self._column = 0
        else:
            self._put(sign)
        while len(self._rows) <= self._row:
            self._rows.append([])

    def _put(self, sign: str) -> None:
        if self._column >= self.width:
            self.wrapped += 1
            self._row, self._column = self._row + 1, 0
            self._rows.append([])
        row = self._rows[self._row]
        cells = [sign] + [""] * (cell_len(sign) - 1)
        row += [" "] * (self._column - len(row))
        row[self._column : self._column + len(cells)] = cells
        self._column += len(cells)
