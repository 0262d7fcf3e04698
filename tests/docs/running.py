"""Runs the blocks of a page as a reader would: Python in one namespace, commands in the same folder.

Processes are forked from the server that has torch loaded. Python has one of its own for the page; each command is a
new one, since the autograd threads of a process do not survive a fork.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import re
import sys
import time
import tokenize
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.docs.blocks import ROOT, Block
from tests.support import curves
from tests.support.commands import Command, typed
from tests.support.preloaded import server, settle
from tests.support.ranks import Ranks

PATIENCE = 170.0
"""Seconds for a block; with `--full` ten times as long."""
TRAINING = {"train", "bench", "plan", "profile"}
RUNNERS = {
    "python": "_run_python",
    "commands": "_run_commands",
    "file": "_write",
    "output": "_look_at_output",
}
LITERAL = re.compile(r"(True|False|None|[-+\d.(\[{'\"]|tensor)")


class Page:
    """A page that is run from its first block to its last, in a new folder."""

    def __init__(self, folder: Path, full: bool) -> None:
        self.folder, self.full = folder, full
        self.seconds: dict[int, float] = {}
        self._environment: dict[str, str] = {}
        self._said = ""
        self._python: Connection | None = None

    def run(self, block: Block) -> None:
        """Run one block, or compare it with what the one before it printed; raise AssertionError where it fails."""
        began = time.monotonic()
        if block.when and not (self.full and block.when == "full"):
            self._said = ""
        else:
            getattr(self, RUNNERS.get(block.kind, "_only_read"))(f"{block.page}:{block.line}", block)
        self.seconds[block.line] = time.monotonic() - began

    def _only_read(self, where: str, block: Block) -> None:
        if block.language == "python":
            compile(block.text, where, "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)

    def _look_at_output(self, where: str, block: Block) -> None:
        if not block.value:
            _compare(where, block.text, self._said)

    def _write(self, where: str, block: Block) -> None:
        self._only_read(where, block)
        (self.folder / block.value).write_text(block.text + "\n", encoding="utf-8")

    def _run_python(self, where: str, block: Block) -> None:
        self._said = self._exec(block)

    def _run_commands(self, where: str, block: Block) -> None:
        codes = [*block.codes, *[0] * len(block.commands)]
        self._said = "\n".join(
            self._type(where, _shortened(words, block), code)
            for words, code in zip(block.commands, codes, strict=False)
        )
        if block.shown:
            _compare(where, block.shown, self._said)

    def close(self) -> None:
        """End the page's process."""
        if self._python is not None:
            self._python.close()
            self._process.join(10)
            self._process.kill()

    def _exec(self, block: Block) -> str:
        if self._python is None:
            self._python, theirs = server().Pipe()
            arguments = (theirs, str(self.folder), {**os.environ, **self._environment})
            self._process = server().Process(target=_serve, args=arguments, daemon=True)
            self._process.start()
            theirs.close()
        self._python.send((block.page, block.line, block.text))
        assert self._python.poll(PATIENCE * (10 if self.full else 1)), f"{block.page}:{block.line}: still running"
        failure, printed = self._python.recv()
        assert not failure, f"{block.page}:{block.line}:\n{failure}\n{printed}"
        return str(printed)

    def _type(self, where: str, words: list[str], ends: int) -> str:
        program, *rest = words
        if program == "export":
            self._environment.update(word.split("=", 1) for word in rest)  # type: ignore[arg-type]
            return ""
        if program == "pip":
            return _check_install(where, rest)
        if program == "torchrun":
            return self._launch(where, rest)
        if program == "python":
            if rest[:2] != ["-m", "halfstep"]:
                return self._finish(where, words, Command(before=_Script(rest), environment=self._variables()), ends)
            rest = rest[2:]
        return self._finish(where, words, Command(*rest, environment=self._variables()), ends)

    def _finish(self, where: str, words: list[str], command: Command, ends: int) -> str:
        code, out, err = command.ended(within=PATIENCE * (10 if self.full else 1))
        assert code == ends, f"{where}: {' '.join(words)} ended with {code}\n{out}\n{err}"
        return f"{out}\n{err}"

    def _launch(self, where: str, words: list[str]) -> str:
        """Be torchrun on this machine: `--nproc_per_node=N -m halfstep ...`."""
        processes = next(int(word.split("=")[1]) for word in words if re.match("--nproc[-_]per[-_]node=", word))
        module = words.index("-m")
        assert words[module + 1] == "halfstep", f"{where}: torchrun of something else"
        assert processes <= 4, f"{where}: too many processes for a test"
        ranks = Ranks(processes, backend=None, deadline=PATIENCE)
        try:
            ended = ranks(typed, *words[module + 2 :])
        finally:
            ranks.stop()
        assert {code for code, _, _ in ended} == {0}, f"{where}: {ended}"
        return "\n".join(out + err for _, out, err in ended)

    def _variables(self) -> dict[str, str]:
        # A script finds the packages of the repository, and a case the file beside it, as in a reader's folder.
        paths = [str(self.folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {**self._environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _shortened(words: list[str], block: Block) -> list[str]:
    return [*words, *block.added] if words[1:2] and words[1] in TRAINING else words


class _Script:
    """`python WORDS`, in the process that is forked for it."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def __call__(self) -> None:
        import runpy

        sys.path[:0] = [os.getcwd(), str(ROOT)]
        if self._words[0] == "-m":
            sys.argv = self._words[1:]
            runpy.run_module(self._words[1], run_name="__main__", alter_sys=True)
        elif self._words[0] == "-c":
            exec(compile(self._words[1], "<-c>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = self._words
            here = Path(self._words[0])
            runpy.run_path(str(here if here.exists() else ROOT / here), run_name="__main__")
        raise SystemExit(0)


def _serve(connection: Connection, folder: str, environment: Mapping[str, str]) -> None:
    """Be the page's Python until the page is closed."""
    settle(folder, environment)
    torch.set_num_threads(1)
    curves.leave_out()
    sys.path[:0] = [folder, str(ROOT)]
    namespace: dict[str, Any] = {"__name__": "__main__", "print": print}
    with contextlib.suppress(EOFError):
        while True:
            page, line, text = connection.recv()
            failure, printed = _execute(f"{page}:{line}", text, namespace)
            connection.send((failure, printed))


def _execute(name: str, text: str, namespace: dict[str, Any]) -> tuple[str, str]:
    out, said = io.StringIO(), dict[int, str]()

    def watched(*values: Any, **named: Any) -> None:
        shown = io.StringIO()
        print(*values, **{"file": shown, **named})
        if "file" not in named:
            said[sys._getframe(1).f_lineno] = shown.getvalue().rstrip("\n")
            out.write(shown.getvalue())

    namespace["print"] = watched
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            exec(compile(text, name, "exec"), namespace)
        return "\n".join(_contradicted(text, said)), out.getvalue()
    except SystemExit as ended:
        return (f"ended with {ended.code}" if ended.code else ""), out.getvalue()
    except BaseException:
        return traceback.format_exc(), out.getvalue()


def _contradicted(text: str, said: Mapping[int, str]) -> list[str]:
    """Compare what was printed with the comment beside its `print` that begins like a value; `...` is anything."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comment = token.string.removeprefix("#").strip()
        printed = said.get(token.start[0])
        if token.type != tokenize.COMMENT or printed is None or not LITERAL.match(comment):
            continue
        pattern = ".*".join(map(re.escape, comment.split(": ")[0].split("...")))
        if not comment.startswith(printed) and not re.fullmatch(pattern, printed):
            found.append(f"the comment says {comment!r}, and {printed!r} was printed")
    return found


def _check_install(where: str, words: list[str]) -> str:
    """Hold an installation against pyproject.toml, without installing anything."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^([\w-]+) = \[", project.split("\n[")[0], flags=re.MULTILINE))
    for word in words[1:]:
        named = re.fullmatch(r"(?:halfstep|\.)(?:\[([\w,-]+)\])?", word)
        assert named, f"{where}: pip install {word} is not checked; say why with <!-- run: no: ... -->"
        unknown = set(filter(None, (named[1] or "").split(","))) - extras
        assert not unknown, f"{where}: no such extra: {unknown}"
    return ""


def _compare(where: str, shown: str, said: str) -> None:
    """Look for every line of an output in what was printed; numbers and the width of the terminal may differ."""
    printed = _plain(said)
    missing = [line for line in shown.splitlines() if not _is_in(line, printed)]
    assert not missing or not said, f"{where}: not printed:\n" + "\n".join(missing) + f"\n--- printed was\n{said}"


def _is_in(line: str, printed: str) -> bool:
    parts = [_plain(part) for part in line.split("...")]
    return re.search(".*".join(map(re.escape, parts)), printed) is not None


def _plain(text: str) -> str:
    """Return the text without numbers, bars, and the breaks of its lines."""
    text = re.sub(r"[-+]?(?:\d[\d,.]*(?:e[-+]?\d+)?|nan\b|inf\b)", "0", text)
    return re.sub(r"[\s─━│┃╭╮╰╯▏▎▍▌▋▊▉█░▒|+]+", " ", text).strip()
