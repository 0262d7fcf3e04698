"""The items of docs/guides.md, read from its tables; `python -m tests.guides.items` writes the counts at its top."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides.md"
STATES = ("done", "GPU", "decided")
BEGIN, END = "<!-- counts: python -m tests.guides.items -->\n", "<!-- end of counts -->"
_ROW = re.compile(r"\| (?P<number>\d+) \| (?P<item>.+) \| (?P<state>\w+) \| (?P<evidence>.+) \|")


class Item(NamedTuple):
    guide: str
    number: int
    text: str
    state: str
    evidence: str

    @property
    def shown(self) -> list[str]:
        """What is cited: tests, files and commands."""
        return re.findall(r"`([^`]+)`", self.evidence)

    @property
    def said(self) -> str:
        """What is written around the citations."""
        return re.sub(r"`[^`]+`", "", self.evidence)


def items(page: str) -> list[Item]:
    found, guide = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            guide = line.removeprefix("## ")
        row = _ROW.fullmatch(line)
        if row:
            found.append(Item(guide, int(row["number"]), row["item"], row["state"], row["evidence"]))
    return found


def counts(found: list[Item]) -> str:
    """A table: a row for each guide, and one for all."""
    guides = list(dict.fromkeys(item.guide for item in found))
    lines = [f"| guide | items | {' | '.join(STATES)} |", "|---" * (2 + len(STATES)) + "|"]
    for name in (*guides, "all"):
        states = Counter(item.state for item in found if name in (item.guide, "all"))
        lines.append(f"| {name} | {states.total()} | {' | '.join(str(states[state]) for state in STATES)} |")
    return "\n".join(lines) + "\n"


def with_counts(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{counts(items(page))}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_counts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(counts(items(PAGE.read_text(encoding="utf-8"))), end="")
