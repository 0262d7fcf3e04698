"""Walk a project's folder and read every file that a precision can come from. Imports no torch, and runs nothing."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfstep.doctor.checkpoints import PICKLED, check_checkpoint
from halfstep.doctor.code import check_code
from halfstep.doctor.located import LocatedFinding
from halfstep.doctor.notebook import extract_notebook_code
from halfstep.doctor.settings import SettingSource, format_safe_text
from halfstep.doctor.sources import launch, python
from halfstep.doctor.sources.kinds import from_configuration
from halfstep.doctor.sources.launch import LaunchLine, from_shell
from halfstep.errors import HalfstepError, WrongUse

CHECKS: tuple[Callable[[str, str], list[LocatedFinding]], ...] = (check_code,)
"""Checks of one Python file, given its path in the project and its text; none of them imports or runs it."""
LARGEST = 2**20
"""Bytes. Larger files are data."""
MOST_FILES = 10_000
"""Files that are read at most; the report says when there are more."""
SKIPPED = frozenset(
    {".git", ".hg", ".venv", "venv", "env", "node_modules", "__pycache__", "site-packages", "build", "dist", ".tox"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints"}
    | {"runs", "outputs", "wandb", "mlruns", "lightning_logs"}
)
"""Folders that hold no settings of the project: caches, environments, results."""
LARGEST_NOTEBOOK = 2**24
"""Bytes. A notebook holds its pictures."""
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_SHELL = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".job", ".env")
_CHECKPOINTS = (".safetensors", *PICKLED)
_WANTED = frozenset({".py", ".ipynb", *_CONFIGURATIONS, *_SHELL, *_CHECKPOINTS, ""})
_SHEBANG = re.compile(r"#!.*\b(ba|z|da)?sh\b")
_NOT_A_CONFIGURATION = frozenset({"package.json", "package-lock.json", "tsconfig.json", "tokenizer.json", "vocab.json"})


@dataclass
class Project:
    """Everything that was read in a folder."""

    root: Path
    changed: Mapping[str, str] = field(default_factory=dict)
    """Texts that stand in the place of files, by their path in the project."""
    sources: list[SettingSource] = field(default_factory=list)
    """Configurations and scripts in Python."""
    launches: list[LaunchLine] = field(default_factory=list)
    findings: list[LocatedFinding] = field(default_factory=list)
    """Files that could not be read, and what the checks of single files found."""
    texts: dict[str, str] = field(default_factory=dict)
    """The text of each file that was read, by its path in the project."""
    cells: dict[str, str] = field(default_factory=dict)
    """The code of each notebook, on the lines that it has there."""
    files: int = 0
    more: bool = False
    """Whether there are more files than are read."""


def read_project(folder: str, changed: Mapping[str, str] | None = None) -> Project:
    """Read a folder, with the texts of `changed` in the place of its files; raise `WrongUse` if it is none."""
    root = Path(folder)
    if not root.is_dir():
        raise WrongUse(
            f"{folder} is not a folder", allowed="the folder of a project", do=f"look for it with ls {folder}"
        )
    project = Project(root, changed or {})
    # Syntax trees have no cycles: looking for some takes a third of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for place in _iterate_project_files(root):
            if project.files >= MOST_FILES:
                project.more = True
                break
            project.files += 1
            _read_project_file(project, place)
    finally:
        if was_enabled:
            gc.enable()
    return project


def _iterate_project_files(root: Path) -> Iterator[str]:
    """Yield the files of a folder by their path in it, in order; links are not followed out of the folder."""
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.endswith(".egg-info"))
        own = Path(folder).relative_to(root).as_posix()
        wanted = [name for name in files if _find_suffix(name) in _WANTED and name not in _NOT_A_CONFIGURATION]
        for name in sorted(wanted):
            path = os.path.join(folder, name)
            if not os.path.islink(path) or Path(path).resolve().is_relative_to(inside):
                yield f"{own}/{name}" if own != "." else name


def _find_suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _read_project_file(project: Project, place: str) -> None:
    suffix = _find_suffix(place)
    if suffix in _CHECKPOINTS:
        project.findings += check_checkpoint(project.root / place, place)
        return
    largest = LARGEST_NOTEBOOK if suffix == ".ipynb" else LARGEST
    text = project.changed.get(place) or _read_text_file(project.root / place, largest)
    if text is None:
        return
    try:
        if suffix == ".py":
            _read_python_file(project, place, text)
        elif suffix == ".ipynb":
            # Look for mistakes in the cells; nothing is edited in a notebook.
            code = (
                extract_notebook_code(text)
                if any(word in text for word in ("autocast", "GradScaler", "torch"))
                else None
            )
            found = [finding for check in CHECKS for finding in check(place, code)] if code else []
            project.findings += [replace(finding, edits=()) for finding in found]
            project.cells |= {place: code} if code else {}
        elif suffix in _CONFIGURATIONS:
            source = from_configuration(place, text)
            if source:
                project.sources.append(source)
                project.texts[place] = text
        elif (suffix or _SHEBANG.match(text)) and launch.SPEAKS.search(text):
            project.launches += from_shell(place, text)
            project.texts[place] = text
    except HalfstepError as error:
        project.findings.append(_build_unreadable_finding(place, error))


def _read_text_file(path: Path, largest: int) -> str | None:
    """Return the text of a regular file of at most `largest` bytes; None for anything else."""
    try:
        if not path.is_file() or path.stat().st_size > largest:
            return None
        content = path.read_bytes()[: largest + 1]
        return None if b"\0" in content else content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None


def _read_python_file(project: Project, place: str, text: str) -> None:
    project.texts[place] = text
    try:
        if python.has_possible_settings(text):
            project.sources.append(python.from_python(place, text))
        elif named := python.find_named_files(place, text):
            project.sources.append(named)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        evidence = f"{format_safe_text(place)} is not Python that this version can parse"
        fix = f"python -m py_compile {place}"
        project.findings.append(LocatedFinding("project.not_read", "note", evidence, fix, place, line))
        return
    # Right after the settings, so that the file is parsed once.
    for check in CHECKS:
        project.findings += check(place, text)


def _build_unreadable_finding(place: str, error: HalfstepError) -> LocatedFinding:
    """Return a word that nobody understands as an error, and a file that this reader refuses as a note."""
    from halfstep.errors import BadRecipe, Unsafe

    refused = isinstance(error, (BadRecipe, Unsafe)) and error.id != "unknown-word"
    name, severity = ("project.not_read", "note") if refused else ("settings.unreadable", "error")
    given = error.given.removeprefix(place).lstrip(":, ")
    return LocatedFinding(name, severity, f"{place}: {given}", error.do, place, error.line)  # type: ignore[arg-type]
