"""The fenced blocks of a page, and what each is for: run, shown as output, written as a file, or not run and why.

`python -m tests.docs.blocks` lists what is not run in every test, with the reasons.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"halfstep", "python", "pip", "torchrun", "export"}
SHELLS = {"", "bash", "sh", "shell", "console"}
DATA = {"json", "yaml", "mermaid"}
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[\w-]*)[^`]*$")
MARK = re.compile(r"^ *<!-- (?P<what>run|output|file)(?:: (?P<value>.*?))? -->$")
SETUP = re.compile(r"^<!-- setup(?P<commands>: commands)?$")
WHEN = {"full", "gpu"}


@dataclass(frozen=True)
class Block:
    """One fenced block, or a `<!-- setup` comment, which holds what the page does not show."""

    page: str
    line: int
    """Of its first line of code, counted from 1."""
    language: str
    text: str
    mark: str = ""
    """`run`, `output` or `file`: what the comment before it says; empty without one."""
    value: str = ""

    @property
    def kind(self) -> str:
        """Return `python`, `commands`, `data`, `file`, `output`, `not run`, or `unknown`."""
        if self.mark == "output":
            return "output"
        if self.mark == "run" and self.value.startswith("no"):
            return "not run"
        if self.mark == "file":
            return "file"
        if self.language in {"python", "py", "setup"}:
            return "python"
        if self.language in SHELLS and self.commands:
            return "commands"
        return "data" if self.language in DATA else "unknown"

    @property
    def when(self) -> str:
        """Return `full` or `gpu` where it runs in those tests only; empty where it always does."""
        return self.value if self.mark == "run" and self.value in WHEN else ""

    @property
    def added(self) -> list[str]:
        """Return the words that a test adds to its commands, so that they end sooner."""
        return self.value.removeprefix("with ").split() if self.value.startswith("with ") else []

    @property
    def codes(self) -> list[int]:
        """Return the exit codes that its commands should end with, one after another; 0 for those that come later."""
        return [int(code) for code in re.findall(r"\d+", self.value)] if self.value.startswith("ends with ") else []

    @property
    def reason(self) -> str:
        """Return why it is never run."""
        return self.value.removeprefix("no").lstrip(": ")

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each command; none where a line is neither a command nor the output below one."""
        lines = [line for line in re.sub(r"\\\n", " ", self.text).splitlines() if line.strip()]
        prompted = any(line.startswith("$ ") for line in lines)
        typed = [line.removeprefix("$ ") for line in lines if not prompted or line.startswith("$ ")]
        found = [words for line in typed for words in _split(line)]
        return found if all(words[0] in PROGRAMS for words in found) else []

    @property
    def shown(self) -> str:
        """Return what is printed below the commands of a block with `$`."""
        lines = self.text.splitlines()
        return "\n".join(line for line in lines if any(one.startswith("$ ") for one in lines) and line[:2] != "$ ")


def pages() -> list[str]:
    """Return every page whose blocks are run, as paths from the repository's root."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert len(found) >= 30, "the pages were not found"
    return ["README.md", *found]


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of a page, top to bottom."""
    lines = ((ROOT / page).read_text(encoding="utf-8") if text is None else text).splitlines()
    found, mark, index = [], ("", ""), 0
    while index < len(lines):
        start = index
        if fence := FENCE.match(lines[index]):
            index = _end(page, lines, index + 1, rf" *{fence['marks']} *")
            body = "\n".join(line.removeprefix(fence["indent"]) for line in lines[start + 1 : index])
            found.append(_named(Block(page, start + 2, fence["language"], body, *mark)))
        elif setup := SETUP.match(lines[index]):
            index = _end(page, lines, index + 1, "-->")
            language = "bash" if setup["commands"] else "setup"
            found.append(Block(page, start + 2, language, "\n".join(lines[start + 1 : index])))
        said = MARK.match(lines[start])
        mark = (said["what"], said["value"] or "") if said else ("", "")
        index += 1
    return found


def _end(page: str, lines: list[str], index: int, pattern: str) -> int:
    for end in range(index, len(lines)):
        if re.fullmatch(pattern, lines[end]):
            return end
    raise AssertionError(f"{page}:{index}: this block has no end")


def _named(block: Block) -> Block:
    """Return a block of Python that begins with its file's name as that file."""
    name = re.match(r"# (\w+\.py)\n", block.text)
    if name is None or block.mark:
        return block
    return Block(block.page, block.line, block.language, block.text, "file", name[1])


def _split(line: str) -> list[list[str]]:
    """Return the commands of one line, which `&&` and `;` divide; a `#` begins a comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&;"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def main() -> None:
    """Print the blocks that tests without `--full` leave out."""
    every = [block for page in pages() for block in blocks(page)]
    for block in every:
        why = block.reason if block.kind == "not run" else block.when
        if why:
            print(f"{block.page}:{block.line}: {why}")
    ran = [block for block in every if block.kind in {"python", "commands", "file", "data"}]
    later = {when: sum(block.when == when for block in ran) for when in sorted(WHEN)}
    left = sum(block.kind == "not run" for block in every)
    print(f"{len(ran)} blocks run, of them {later['full']} with --full and {later['gpu']} on a GPU; {left} do not")


if __name__ == "__main__":
    main()
