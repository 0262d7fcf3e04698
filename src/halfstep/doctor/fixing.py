"""Resolve conflicting settings in the files themselves: all of them, or none."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from halfstep.doctor.checkup import Conflict, SettingsVerdict, judge, read_sources
from halfstep.doctor.repairs import line_for
from halfstep.doctor.settings import FoundSetting
from halfstep.errors import WrongUse
from halfstep.files import replacing
from halfstep.precision.names import AUTO, precision_names, read_precision
from halfstep.recipe.sources import is_path

_MOST = 20
"""The most lines to change, more than any project has precision settings: a bound for the loop."""


class Change(NamedTuple):
    """A line of a file before and after the change."""

    file: str
    line: int
    before: str
    after: str


def make_agree(
    precision: str,
    recipe: str | None = None,
    *,
    accelerate: str | None = None,
    deepspeed: str | None = None,
    variables: Mapping[str, str] = os.environ,
) -> list[Change]:
    """Change every line that conflicts with `precision`; restore all files where that fails.

    Raise `WrongUse` where a setting cannot be changed automatically.
    """
    wanted = read_precision(precision).name
    if wanted not in precision_names():
        raise WrongUse(f"--fix {precision}", allowed=", ".join(precision_names()), do="--fix bf16")
    originals: dict[Path, bytes] = {}

    def verdict() -> SettingsVerdict:
        sources = read_sources(recipe, accelerate, deepspeed, variables)
        return judge([setting for source in sources for setting in source.precision])

    try:
        return _fix_all(verdict, wanted, originals)
    except BaseException:
        for path, content in originals.items():
            rewrite(path, content)
        raise


def _fix_all(verdict: Callable[[], SettingsVerdict], wanted: str, originals: dict[Path, bytes]) -> list[Change]:
    """Change one line and check again: a dormant format may become active with its switch."""
    changes: list[Change] = []
    while len(changes) < _MOST:
        found = verdict()
        if not found.conflicts:
            _check_precision(found, wanted)
            return changes
        changes.append(_fix_line(found.conflicts[0], wanted, originals))
    raise WrongUse(
        f"settings that still contradict each other after {_MOST} changes",
        allowed="files whose settings can be made to agree",
        do="halfstep doctor without --fix names them",
    )


def _check_precision(verdict: SettingsVerdict, wanted: str) -> None:
    if verdict.precision not in (wanted, AUTO):
        raise WrongUse(
            f"--fix {wanted}, where nothing contradicts and everything asks for {verdict.precision or 'nothing'}",
            allowed="--fix settles contradictions",
            do=f"--fix {verdict.precision or 'bf16'}, or write {wanted} where the page names a setting",
        )


def _fix_line(conflict: Conflict, wanted: str, originals: dict[Path, bytes]) -> Change:
    """Change the line of the setting that does not ask for `wanted`; where neither does, one after the other."""
    setting = conflict.other if conflict.ways[0].precision == wanted else conflict.one
    path = _file_of(setting, wanted)
    content = path.read_bytes()
    # The first content of each file is the original; it is what an error restores.
    originals.setdefault(path, content)
    lines = content.decode("utf-8").splitlines(keepends=True)
    number = setting.line or 0
    before = lines[number - 1]
    lines[number - 1] = _changed(before, setting, wanted)
    rewrite(path, "".join(lines).encode("utf-8"))
    return Change(setting.place, number, before.strip(), lines[number - 1].strip())


def rewrite(path: Path, content: bytes) -> None:
    """Replace the file behind a symlink, and keep its permissions."""
    with replacing(path.resolve()) as draft:
        draft.write_bytes(content)
        shutil.copymode(path, draft)


def _file_of(setting: FoundSetting, wanted: str) -> Path:
    """Return the file to write: only a user's own, given by path. Raise `WrongUse` otherwise."""
    if setting.kind in ("recipe", "accelerate") and setting.line and is_path(setting.place):
        return Path(setting.place)
    raise _by_hand(setting, wanted)


_LINE = r"(?P<indent>\s*)(?P<quote>['\"]?){key}(?P=quote)\s*:(?P<value>[^#\n]*\S)?(?P<rest>\s*(#.*)?\n?)"


def _changed(line: str, setting: FoundSetting, wanted: str) -> str:
    """Return the line with another value; indentation and comment stay."""
    # Only a key that begins its line can be changed safely: inside a flow mapping, the rest of the line would be lost.
    found = re.fullmatch(_LINE.format(key=re.escape(setting.leaf)), line)
    new = line_for(setting, wanted).split(" and ")
    if found is None or not found["value"] or not new[0].startswith(f"{setting.leaf}:"):
        raise _by_hand(setting, wanted)
    more = "".join(f"{found['indent']}{one}\n" for one in new[1:])
    return f"{more}{found['indent']}{new[0]}{found['rest']}"


def _by_hand(setting: FoundSetting, wanted: str) -> WrongUse:
    return WrongUse(
        f"--fix {wanted} cannot change {setting} ({setting.where})",
        allowed="settings on lines of their own, in YAML files of yours",
        do=f"write there: {line_for(setting, wanted)}",
    )
