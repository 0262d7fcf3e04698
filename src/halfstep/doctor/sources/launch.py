"""Launch lines in shell and Slurm scripts: the launcher, its flags, the script's flags, and variables. Runs nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from halfstep.doctor.located import split_lines
from halfstep.doctor.settings import UNRESOLVED, FoundSetting, SettingSource, build_unknown_reading
from halfstep.doctor.sources.accelerate import WORDS, build_accelerate_claim
from halfstep.doctor.sources.environment import TOOLS, VARIABLES, read_variable
from halfstep.doctor.sources.reading import (
    CLIPPING,
    LEARNING_RATE,
    Claims,
    read_halfstep_word,
    read_lightning_word,
    read_own_word,
    read_precision_word,
)
from halfstep.errors import HalfstepError
from halfstep.precision.names import FLAGS, PRECISION_KEYS, SWITCHES

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_WRAPPERS = frozenset({"srun", "nohup", "time", "exec", "env", "mpirun", "then", "else", "do", "uv", "poetry", "run"})
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_FILE = re.compile(r".*\.(ya?ml|json)", re.IGNORECASE)
_HYDRA = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w./]*)=(?P<value>.*)")
_NUMBER = re.compile(r"[0-9.eE+-]+")
SPEAKS = re.compile(r"accelerate|torchrun|python|deepspeed|halfstep|fabric|PRECISION|TF32|XLA_|ACCELERATE_USE_CPU")
"""Words without which a line starts no training and sets no variable that is read."""
_LONGEST = 20_000
"""Characters. A longer line is data."""
EARLY = "early flag"
"""The level of a flag of LightningCLI that stands before --config."""
_MOST_WORDS = 2_000
"""The most words of one command; a longer one is cut."""


class CommandWord(NamedTuple):
    """A word of a command, and its line."""

    text: str
    line: int


@dataclass(frozen=True)
class LaunchLine:
    """One command of a script that starts a training."""

    source: SettingSource
    """Flags of the launcher and of the script, and the variables that are set where the command runs."""
    line: int
    launcher: str
    """accelerate, torchrun, python, deepspeed, fabric or halfstep."""
    script: str
    """The script or module that it starts; for halfstep, the recipe."""


def from_shell(place: str, text: str) -> list[LaunchLine]:
    """Return the launch lines of a script; one that only sets variables is returned with an empty launcher."""
    variables: dict[str, FoundSetting] = {}
    launches = []
    for words in iterate_commands(text):
        exported, command = _split_assignments(words)
        settings = {s.key: s for s in (_read_assigned_variable(place, word) for word in exported) if s}
        if not command:
            variables |= settings
        elif launch := _parse_launch_line(place, command, {**variables, **settings}):
            launches.append(launch)
    if not launches and variables:
        return [LaunchLine(SettingSource("launch", place, list(variables.values())), 1, "", "")]
    return launches


def iterate_commands(text: str) -> Iterator[list[CommandWord]]:
    """Yield the commands that start something or set a variable, as words with their lines; continued lines joined."""
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(split_lines(text), 1):
        bare = line.rstrip()
        lines.append((number, bare.removesuffix("\\")))
        if not bare.endswith("\\"):
            yield from _iterate_line_commands(lines)
            lines = []
    yield from _iterate_line_commands(lines)


def _iterate_line_commands(lines: Sequence[tuple[int, str]]) -> Iterator[list[CommandWord]]:
    # Splitting into words is slow, and most lines of most scripts start nothing.
    if any(len(line) < _LONGEST and SPEAKS.search(line) for _, line in lines):
        words = [
            CommandWord(word, number) for number, line in lines if len(line) < _LONGEST for word in _split_words(line)
        ]
        yield from _split_commands(words[:_MOST_WORDS])


def _split_words(line: str) -> list[str]:
    # A quote that ends on another line belongs to no launch line that this reader knows.
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        return list(lexer)
    except ValueError:
        return []


def _split_commands(words: Sequence[CommandWord]) -> Iterator[list[CommandWord]]:
    part: list[CommandWord] = []
    for word in words:
        if word.text and set(word.text) <= set(";&|()<>"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _split_assignments(words: Sequence[CommandWord]) -> tuple[list[CommandWord], list[CommandWord]]:
    """Return the variables that a command sets, and the rest of the command."""
    left = list(words)
    if left and left[0].text in ("export", "declare", "set"):
        return [word for word in left[1:] if _ASSIGNMENT.fullmatch(word.text)], []
    found = []
    while left and (_ASSIGNMENT.fullmatch(left[0].text) or left[0].text in _WRAPPERS):
        word = left.pop(0)
        found += [word] if _ASSIGNMENT.fullmatch(word.text) else []
        # `srun --ntasks 2 python`: the wrapper's own options end at the launcher.
        while word.text in _WRAPPERS and left and not _begins_launch(left[0].text):
            if _ASSIGNMENT.fullmatch(left[0].text) or left[0].text in _WRAPPERS:
                break
            left.pop(0)
    return found, left


def _begins_launch(text: str) -> bool:
    return text in ("accelerate", "torchrun", "deepspeed", "fabric", "halfstep") or bool(_PYTHON.fullmatch(text))


def _read_assigned_variable(place: str, word: CommandWord) -> FoundSetting | None:
    found = _ASSIGNMENT.fullmatch(word.text)
    if not found or found["name"] not in VARIABLES or not found["value"]:
        return None
    if "$" in found["value"]:
        setting = FoundSetting("environment", place, found["name"], found["value"], UNRESOLVED, word.line)
        return replace(setting, tool=TOOLS.get(setting.key, ""), is_computed=setting.key in TOOLS)
    try:
        return replace(read_variable(found["name"], found["value"]), place=place, line=word.line)
    except HalfstepError as error:
        unread = FoundSetting("environment", place, found["name"], found["value"], "", word.line, tool="accelerate")
        return unread.read_as(build_unknown_reading(error.given))


def _parse_launch_line(
    place: str, words: Sequence[CommandWord], variables: dict[str, FoundSetting]
) -> LaunchLine | None:
    launcher, rest = _split_launcher(words)
    if not launcher:
        return None
    own, script, theirs = _split_at_script(rest)
    if not script:
        return None
    reader = "halfstep" if "halfstep" in (launcher, script) else "script"
    settings = [
        *variables.values(),
        *_iterate_precision_flags(place, own, launcher),
        *_iterate_precision_flags(place, theirs, reader),
    ]
    training = list(_iterate_training_flags(place, theirs))
    names = [script, *(word.text for word in (*own, *theirs) if _FILE.fullmatch(word.text))]
    names += [value for word in (*own, *theirs) if _FILE.fullmatch(value := word.text.partition("=")[2])]
    source = SettingSource("launch", place, settings, training, names=names, tools=frozenset({launcher}))
    return LaunchLine(source, words[0].line, launcher, script)


_MODULES = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "lightning": "fabric",
}


def _split_launcher(words: Sequence[CommandWord]) -> tuple[str, Sequence[CommandWord]]:
    """Return who starts the script, and the words after that; an empty name for any other command."""
    texts = [word.text for word in words]
    if texts[:2] in (["accelerate", "launch"], ["fabric", "run"], ["halfstep", "train"]):
        return texts[0], words[2:]
    if texts[:1] in (["torchrun"], ["deepspeed"]):
        return texts[0], words[1:]
    if not texts or not _PYTHON.fullmatch(texts[0]):
        return "", ()
    if texts[1:3] == ["-m", "halfstep"] and texts[3:4] == ["train"]:
        return "halfstep", words[4:]
    if texts[1:2] == ["-m"] and len(texts) > 2:
        module = _MODULES.get(texts[2])
        return (module, words[3:]) if module else ("python", words[1:])
    return "python", words[1:]


def _split_at_script(words: Sequence[CommandWord]) -> tuple[Sequence[CommandWord], str, Sequence[CommandWord]]:
    """Return the launcher's words, the script or module, and the script's words."""
    for index, word in enumerate(words):
        if word.text in ("-m", "--module") and index + 1 < len(words):
            # torchrun -m halfstep train RECIPE
            if words[index + 1].text == "halfstep" and [w.text for w in words[index + 2 : index + 3]] == ["train"]:
                return words[:index], "halfstep", words[index + 3 :]
            return words[:index], words[index + 1].text, words[index + 2 :]
        if word.text.endswith(".py") or (index == 0 and _FILE.fullmatch(word.text)):
            return words[:index], word.text, words[index + 1 :]
    first = words[0].text if words else ""
    return ((), first, words[1:]) if first and not first.startswith("-") else ((), "", ())


def _iterate_precision_flags(place: str, words: Sequence[CommandWord], reader: str) -> Iterator[FoundSetting]:
    """Yield the flags that speak of precision, with the meaning that `reader` gives them."""
    # LightningCLI reads from left to right: a file that is named after a flag wins over it.
    config = next((index for index, word in enumerate(words) if word.text.partition("=")[0] == "--config"), 0)
    before = [word for word in words[:config] if word.text.startswith("--trainer.")]
    for key, value, word in iterate_flag_values(words):
        leaf = key.lstrip("-").replace("-", "_").removeprefix("no_")
        short = leaf.rpartition(".")[2]
        if short == "precision" and leaf not in ("precision", "trainer.precision", "fit.trainer.precision"):
            continue
        if short in PRECISION_KEYS:
            setting = _build_flag_setting(place, key, value, word, reader)
            yield replace(setting, level=EARLY) if word in before and key.startswith("--") else setting
        elif reader == "accelerate" and key == "--cpu":
            yield FoundSetting("launch", place, key, True, "accelerate runs on the CPU", word.line, tool=reader)


def iterate_flag_values(words: Sequence[CommandWord]) -> Iterator[tuple[str, object, CommandWord]]:
    """Yield flags with their values: `--a b`, `--a=b`, `--a` and Hydra's `a=b`."""
    for index, word in enumerate(words):
        text = word.text
        if text.startswith("--"):
            key, equals, value = text.partition("=")
            following = words[index + 1].text if index + 1 < len(words) else "--"
            yield key, value if equals else (True if following.startswith("-") else following), word
        elif hydra := _HYDRA.fullmatch(text):
            yield hydra["key"], hydra["value"], word


def _build_flag_setting(place: str, key: str, value: object, word: CommandWord, reader: str) -> FoundSetting:
    name = key.lstrip("-").replace("-", "_")
    off = name.startswith("no_")
    short = name.removeprefix("no_").rpartition(".")[2]
    is_known = value is True or "$" in str(value)
    if short in (*SWITCHES, *FLAGS) and not is_known and read_precision_word(short, value).claim is None:
        # `--bf16 data/`: the word after a switch is the next argument.
        value = True
    setting = FoundSetting("launch", place, key, value, UNRESOLVED, word.line, tool=reader, argument=name)
    if "$" in str(value):
        # A switch is on, or as if it were not given.
        outcomes = (read_own_word(short, True).claim, None) if short in FLAGS else ()
        return replace(setting, is_computed=True, outcomes=outcomes)
    if reader == "accelerate":
        return _convert_to_accelerate_setting(setting)
    # The script's own parser reads it; `_owned` of linking names the library where one does.
    read: Claims = {"halfstep": read_halfstep_word, "fabric": read_lightning_word}.get(reader, read_own_word)
    read_as = setting.read_as(read(short, False if off else value))
    return replace(read_as, claim=replace(read_as.claim, key=key, value=value) if read_as.claim else None)


def _convert_to_accelerate_setting(setting: FoundSetting) -> FoundSetting:
    word = str(setting.value).lower()
    if word not in WORDS:
        return setting.read_as(build_unknown_reading(f"accelerate knows {', '.join(WORDS)}"))
    claim = build_accelerate_claim(setting.key, setting.value, word)
    means = "accelerate opens no autocast: fp32" if word == "no" else f"accelerate runs prepared models in {word}"
    return replace(setting, claim=claim, means=means)


def _iterate_training_flags(place: str, words: Sequence[CommandWord]) -> Iterator[FoundSetting]:
    for key, value, word in iterate_flag_values(words):
        short = key.lstrip("-").replace("-", "_").rpartition(".")[2]
        if short in LEARNING_RATE | CLIPPING and _NUMBER.fullmatch(str(value)):
            what = "learning rate" if short in LEARNING_RATE else "gradient clipping"
            yield FoundSetting("launch", place, short, value, what, word.line)
