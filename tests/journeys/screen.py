"""What a terminal of 80 × 24 shows after the bytes that a command wrote: enough of VT100 for a live console."""

from __future__ import annotations

import codecs
import re
import unicodedata

CONTROL = re.compile(
    r"\x1b\[(?P<values>[0-9;:<=>?]*)[ -/]*(?P<final>[@-~])"  # CSI: colors, cursor, erasing
    r"|\x1b\](?P<system>[^\x07\x1b]*)(?:\x07|\x1b\\)"  # OSC: titles, links, the clipboard
    r"|\x1b[PX^_](?P<string>[^\x1b]*)\x1b\\"
    r"|\x1b[ -/]*(?P<escape>[0-~])"
)
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:<=>? -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)?$")
LONGEST_CONTROL = 4096


class Screen:
    """The characters on a terminal, with what has scrolled off its top, and the controls that are no drawing."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.columns, self.lines = columns, lines
        self.history: list[str] = []
        self.rows: list[list[str]] = [self._blank() for _ in range(lines)]
        self.row = self.column = 0
        self.broken_lines: list[str] = []
        """Lines that were too wide, and that the terminal broke wherever its edge was."""
        self.system_commands: list[str] = []
        """What changes the terminal itself: its title, its clipboard, its state."""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes) -> None:
        text = self._rest + self._decode(data)
        unfinished = UNFINISHED.search(text)
        self._rest = unfinished.group() if unfinished and len(unfinished.group()) < LONGEST_CONTROL else ""
        text = text[: len(text) - len(self._rest)]
        position = 0
        while position < len(text):
            control = CONTROL.match(text, position)
            if control is None:
                self._put(text[position])
                position += 1
            else:
                self._obey(control)
                position = control.end()

    def display(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]

    def text(self) -> str:
        """Everything that a person could scroll back to, and what stands on the screen now."""
        return "\n".join([*self.history, *self.display()]).rstrip()

    def _blank(self) -> list[str]:
        return [" "] * self.columns

    def _put(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self.column = 0
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\t":
            self.column = min(self.columns - 1, (self.column // 8 + 1) * 8)
        elif character >= " " and character != "\x7f":
            self._write(character)

    def _write(self, character: str) -> None:
        width = 2 if unicodedata.east_asian_width(character) in "WF" else 0 if unicodedata.combining(character) else 1
        if width == 0:
            self.rows[self.row][max(0, self.column - 1)] += character
            return
        if self.column + width > self.columns:
            self.broken_lines.append("".join(self.rows[self.row]))
            self.column = 0
            self._down()
        self.rows[self.row][self.column] = character
        if width == 2:
            self.rows[self.row][self.column + 1] = ""
        self.column += width

    def _down(self) -> None:
        if self.row < self.lines - 1:
            self.row += 1
        else:
            self.history.append("".join(self.rows.pop(0)).rstrip())
            self.rows.append(self._blank())

    def _obey(self, control: re.Match[str]) -> None:
        if control["final"] is None:
            self.system_commands.append(control.group())
            return
        if re.search("[<=>?]", control["values"]) or control["final"] == "m":
            return  # the cursor's look, synchronized output, colors: nothing that can be read
        values = [int(value) for value in control["values"].split(";") if value]
        self._act(control["final"], values)

    def _act(self, final: str, values: list[int]) -> None:
        count = max(1, values[0]) if values else 1
        if final in "AF":
            self.row = max(0, self.row - count)
        elif final in "BE":
            self.row = min(self.lines - 1, self.row + count)
        elif final in "CD":
            self.column = min(self.columns - 1, max(0, self.column + (count if final == "C" else -count)))
        elif final == "G":
            self.column = min(self.columns, count) - 1
        elif final in "Hf":
            self.row = min(self.lines, count) - 1
            self.column = min(self.columns, max(1, values[1]) if len(values) > 1 else 1) - 1
        elif final in "JK":
            self._erase(final, values[0] if values else 0)
        else:
            self.system_commands.append(f"CSI {values} {final}")
        if final in "EF":
            self.column = 0

    def _erase(self, final: str, what: int) -> None:
        row, cells = self.rows[self.row], range(self.columns)
        here = {0: cells[self.column :], 1: cells[: self.column + 1]}.get(what, cells)
        for column in here:
            row[column] = " "
        if final == "J":
            others = {0: range(self.row + 1, self.lines), 1: range(self.row)}.get(what, range(self.lines))
            for line in others:
                self.rows[line] = self._blank()
