"""`halfstep selftest`: check on this device what halfstep promises, and write a JSON that an issue can have."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli._options import HalfstepCommand, OnDevice, create_flag_option, exit_if_interrupted, print_json
from halfstep.errors import SOFTWARE, FolderTaken, WrongUse, build_unknown_name_error
from halfstep.files import replace_storage_errors
from halfstep.launch_variables import read_launched_rank
from halfstep.status_line import show_on_terminal as show_line

GROUP = "Files"
_STDOUT = "-"


class _OptionalFileCommand(HalfstepCommand):
    """A command whose `--json` may stand without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, with `-` after a `--json` that no file follows."""
        words: list[str] = []
        for word, following in pairwise([*args, "--"]):
            is_alone = following.startswith("-") and following != _STDOUT
            words += [word, _STDOUT] if word == "--json" and is_alone else [word]
        return super().parse_args(ctx, words)


COMMAND = {"cls": _OptionalFileCommand}


def run(
    only: Annotated[
        list[str] | None, typer.Option(metavar="PART", help="Run this part alone; may be repeated.")
    ] = None,
    device: OnDevice = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="[FILE]", help="Write the result to FILE as JSON; without FILE, print it."),
    ] = None,
    list: Annotated[bool, create_flag_option("--list", "List the parts, and run nothing.")] = False,
) -> None:
    """Test halfstep's guarantees on this device in a few minutes; print a table, and write a JSON file for bug reports.

    Exit code 0: no part failed; a part that cannot run here is skipped, with the reason. 70: a part failed, and is
    named. 130: interrupted.
    """
    from halfstep.draw.terminal import show_page
    from halfstep.selftest import page
    from halfstep.selftest.names import PARTS

    if list:
        show_page(page.build_list_page())
        return
    _refuse_ranks()
    for name in only or ():
        if name not in PARTS:
            raise build_unknown_name_error("part", name, PARTS)
    names = [name for name in PARTS if not only or name in only]
    file = _resolve_json_file(json)
    from halfstep.selftest.run import selftest

    with _interrupt_on_signals():
        report = selftest(names, device=device, on_part=_show_part)
    if json == _STDOUT:
        print_json(report)
    else:
        show_page(page.build_results_page(report))
    if file is not None:
        _write_selftest_json(file, report)
    if json != _STDOUT:
        show_page(page.build_end_page(report, file))
    exit_if_interrupted(bool(report.get("interrupted")))
    if not report["passed"]:
        raise typer.Exit(SOFTWARE)


def _show_part(name: str, number: int, of: int) -> None:
    show_line(f"halfstep selftest: {f'part {number} of {of}, {name}' if name else 'looking at the device'}")


def _refuse_ranks() -> None:
    if read_launched_rank().world_size > 1:
        raise WrongUse(
            "halfstep selftest as one of several ranks",
            allowed="one process: it starts torchrun by itself",
            do="halfstep selftest, without torchrun or srun",
        )


def _resolve_json_file(given: str | None) -> Path | None:
    """Return the file to write; fail before anything runs where it cannot be written."""
    if given is None or given == _STDOUT:
        return None
    file = Path(given)
    if file.suffix != ".json":
        raise WrongUse(f"--json {given}", allowed="a name that ends in .json", do=f"--json {given}.json")
    if file.is_dir() or file.is_symlink():
        raise FolderTaken(f"{given} is a {'folder' if file.is_dir() else 'link'}", allowed="a file", do="another name")
    with replace_storage_errors(
        f"{given} cannot be written", allowed="a folder that this user can write to", do="another --json FILE"
    ):
        draft = file.with_name(f".{file.name}.draft")
        draft.touch()
        draft.unlink()
    return file


def _write_selftest_json(file: Path, report: dict[str, Any]) -> None:
    from halfstep.files import write_json

    with replace_storage_errors(
        f"{file} cannot be written", allowed="a folder that this user can write to", do="another --json FILE"
    ):
        write_json(file, report)


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Take SIGTERM and SIGHUP as Ctrl-C, so that processes and folders go with the command."""
    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
