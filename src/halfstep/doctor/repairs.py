"""The exact line that makes a setting ask for another precision, in the vocabulary of its file. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from halfstep.doctor.located import Edit, split_lines
from halfstep.doctor.settings import FoundSetting
from halfstep.doctor.sources.environment import FABRIC, LIGHTNING
from halfstep.doctor.sources.reading import LIGHTNING_TRUE
from halfstep.precision.names import FLAGS

_ACCELERATE = {"fp32": "'no'", "tf32": "'no'"}
_LIGHTNING = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LIGHTNING_WORDS = {*_LIGHTNING.values(), "16", "32", *LIGHTNING_TRUE}
_TORCH_WORDS = {*_TORCH.values(), "bfloat", "half", "float", "float8_e4m3fn", "float8_e5m2"}
_FULL = ("fp32", "tf32")
_UNQUOTED = ("accelerate", "recipe", "hydra")
"""Kinds of settings whose keys are written without quotes, also where their file is JSON."""


def format_setting_line(setting: FoundSetting, precision: str) -> str:
    """Return what to write so that `setting` asks for `precision`."""
    if setting.kind == "environment":
        return _format_variable_line(setting, precision)
    if setting.kind == "deepspeed":
        # A file that uses DeepSpeed's old spelling must not get both spellings.
        old = setting.key.partition(".")[0] == "bfloat16"
        names = {"fp16": "fp16", "bf16": "bfloat16" if old else "bf16"}
        return ", ".join(f'"{name}": {{"enabled": {str(one == precision).lower()}}}' for one, name in names.items())
    return " and ".join(_format_target(setting, target) for target in _list_targets(setting, precision))


def _format_variable_line(setting: FoundSetting, precision: str) -> str:
    value = _choose_variable_value(setting, precision)
    if value is None:
        return f"unset {setting.key}"
    if setting.place.endswith(".py"):
        return f'os.environ["{setting.key}"] = "{value}"'
    return f"export {setting.key}={value}"


def _choose_variable_value(setting: FoundSetting, precision: str) -> str | None:
    """Return the value of a variable; None if it must not be set."""
    if setting.claim and setting.claim.says is None and setting.claim.denies == {"tf32"}:
        return None
    if setting.key in (LIGHTNING, FABRIC):
        return _LIGHTNING.get(precision, precision)
    return "no" if precision in _FULL else precision


class _Target(NamedTuple):
    """What a setting should be: its key, which a flag may change, and its value as it is written there."""

    key: str
    value: str


def _list_targets(setting: FoundSetting, precision: str) -> list[_Target]:
    """Return what to write instead of a setting, and a flag that must be added to its own."""
    if setting.kind == "accelerate":
        return [_Target("mixed_precision", _ACCELERATE.get(precision, precision))]
    if setting.kind in ("recipe", "hydra"):
        return _list_recipe_targets(setting, precision)
    return [_build_setting_target(setting, precision)]


def _list_recipe_targets(setting: FoundSetting, precision: str) -> list[_Target]:
    key = setting.leaf
    if key in ("amp", "use_amp") or (isinstance(setting.value, bool) and key == "mixed_precision"):
        return [_Target(key, str(precision not in _FULL))]
    if key in FLAGS:
        needs_another = precision != key and (precision in FLAGS if key == "fp32" else precision in ("fp16", "bf16"))
        return [_Target(key, str(key == precision)), *([_Target(precision, "True")] if needs_another else ())]
    if key == "mixed_precision":
        return [_Target(key, _ACCELERATE.get(precision, precision))]
    if key == "amp_dtype" and setting.claim is None:
        return [_Target(key, _TORCH[precision])]
    # A dtype cannot switch autocast off; use_amp does.
    if key == "amp_dtype" and precision in _FULL:
        return [_Target("use_amp", "False")]
    word = str(setting.value).strip().lower().removeprefix("torch.") if setting.claim and setting.claim.says else ""
    words = _LIGHTNING if word in _LIGHTNING_WORDS else _TORCH if word in _TORCH_WORDS else {}
    return [_Target(key, words.get(precision, precision))]


def _build_setting_target(setting: FoundSetting, precision: str) -> _Target:
    """Return what to write instead of a setting outside of YAML of the project's own."""
    key = _parse_keyword(setting)
    if key in ("fp16", "bf16"):
        return _build_flag_target(setting, key, precision)
    if key == "mixed_precision" or setting.tool == "accelerate":
        word = "no" if precision in _FULL else precision
        return _Target(key, f'"{word}"' if setting.kind == "code" else word)
    if key == "precision":
        word = _LIGHTNING.get(precision, precision)
        return _Target(key, f'"{word}"' if setting.kind == "code" else word)
    if setting.kind == "code" and "autocast" in setting.key:
        return _Target("dtype", f"torch.{_TORCH.get(precision, 'float32')}")
    if key in ("amp", "use_amp"):
        return _Target(key, str(precision not in _FULL))
    return _Target(key, _TORCH.get(precision, precision))


def _parse_keyword(setting: FoundSetting) -> str:
    """Return the word itself: `mixed_precision` of `Accelerator(mixed_precision)` and of `--mixed_precision`."""
    inner = re.search(r"\((\w+)\)", setting.key)
    if inner:
        return inner[1]
    words = setting.key.lstrip("-").partition(" ")[0].replace("-", "_")
    return words.rpartition(".")[2] if setting.kind != "launch" else words


def _build_flag_target(setting: FoundSetting, key: str, precision: str) -> _Target:
    lower = setting.kind in ("transformers", "deepspeed")
    on = setting.claim is not None and setting.claim.says is not None
    if on and precision in ("fp16", "bf16") and precision != key:
        # `fp16: true` becomes `bf16: true`.
        return _Target(precision, "true" if lower else "True")
    value = str(key == precision)
    return _Target(key, value.lower() if lower else value)


def _format_target(setting: FoundSetting, target: _Target) -> str:
    if setting.kind == "launch":
        dashes = "--" if setting.key.startswith("-") else ""
        joined = " " if dashes else "="
        if setting.value is True and target.value in ("True", "False"):
            return f"{dashes}{target.key}" if target.value == "True" else f"nothing: delete {setting.key}"
        return f"{dashes}{target.key}{joined}{target.value}"
    if setting.kind == "code":
        outer = setting.key.partition("(")[0]
        return f"default={target.value}" if " default" in setting.key else f"{outer}({target.key}={target.value})"
    quote = '"' if setting.place.endswith(".json") and setting.kind not in _UNQUOTED else ""
    return f"{quote}{target.key}{quote}: {target.value}"


def build_setting_edits(
    setting: FoundSetting, precision: str, settings: Sequence[FoundSetting], texts: Mapping[str, str]
) -> tuple[Edit, ...]:
    """Return the edits after which `setting` asks for `precision`; none if a program cannot make them safely.

    `settings` are all of the run: a file that has both `fp16` and `bf16` gets both changed.
    """
    siblings = _list_sibling_settings(setting, settings)
    return _build_line_edits((setting, *siblings), precision, bool(siblings), texts) or ()


def build_agreeing_edits(
    against: Sequence[FoundSetting], precision: str, settings: Sequence[FoundSetting], texts: Mapping[str, str]
) -> tuple[Edit, ...]:
    """Return the edits after which all settings that are `against` it ask for `precision`, as far as a program can."""
    found: dict[tuple[str, int], Edit] = {}
    for setting in against:
        siblings = _list_sibling_settings(setting, settings)
        edits = _build_line_edits((setting, *siblings), precision, bool(siblings), texts, found)
        found |= {(edit.file, edit.line): edit for edit in edits or ()}
    return tuple(found.values())


def _list_sibling_settings(setting: FoundSetting, settings: Sequence[FoundSetting]) -> list[FoundSetting]:
    return [s for s in settings if s.place == setting.place and s is not setting and _are_paired_flags(s, setting)]


def _build_line_edits(
    settings: Sequence[FoundSetting],
    precision: str,
    paired: bool,
    texts: Mapping[str, str],
    made: Mapping[tuple[str, int], Edit] | None = None,
) -> tuple[Edit, ...] | None:
    """Return one edit for each line, after those that were made before; None if a setting cannot be changed."""
    edits = dict(made or {})
    for setting in settings:
        if setting.place.endswith((".py", ".ipynb")):
            # Python is edited for mistakes in code only.
            return None
        lines = split_lines(texts.get(setting.place, ""))
        line = lines[setting.line - 1].rstrip("\r\n") if setting.line and setting.line <= len(lines) else None
        place = (setting.place, setting.line or 0)
        before = edits[place].after if place in edits else line
        after = _change_line(setting, precision, paired, before) if before is not None else None
        if line is None or after is None:
            return None
        edits[place] = Edit(*place, line, after)
    return tuple(edit for edit in edits.values() if edit.before != edit.after)


def _are_paired_flags(one: FoundSetting, other: FoundSetting) -> bool:
    names = {_find_flag_format(one), _find_flag_format(other)}
    return names == {"fp16", "bf16"} and one.key.count(".") == other.key.count(".")


def _find_flag_format(setting: FoundSetting) -> str:
    words = re.findall(r"fp16|bf16|bfloat16", setting.key)
    return words[-1].replace("bfloat16", "bf16") if words else ""


def _change_line(setting: FoundSetting, precision: str, paired: bool, line: str) -> str | None:
    if setting.kind == "environment":
        new = _choose_variable_value(setting, precision)
        return _replace_once(rf"(?<!\w)({setting.key}=)([\"']?)[\w-]+\2", rf"\g<1>{new}", line) if new else None
    if _find_flag_format(setting) and setting.kind != "launch":
        return _switch_format(setting, precision, paired, line)
    if setting.kind == "launch":
        return _change_word(setting, precision, line)
    if setting.kind == "code":
        return _change_keyword(setting, precision, line)
    if setting.kind == "deepspeed" or (setting.place.endswith(".json") and setting.kind not in _UNQUOTED):
        return None
    (key, value), *others = _list_targets(setting, precision)
    if key != setting.leaf or (others and not line.lstrip(" \"'").startswith(key)):
        return None
    if others:
        indent = line[: len(line) - len(line.lstrip())]
        own = _replace_once(rf"((?<!\w){re.escape(key)}[\"']?\s*:\s*)[^\s,#}}]+", rf"\g<1>{value}", line)
        return f"{indent}{_format_target(setting, others[0])}\n{own}" if own is not None else None
    if setting.place.endswith(".json"):
        value = value.lower() if value in ("True", "False") else f'"{value.strip(_QUOTES)}"'
    return _replace_once(rf"((?<!\w){re.escape(key)}[\"']?\s*:\s*)[^\s,#}}]+", rf"\g<1>{value}", line)


_QUOTES = "'\""


def _switch_format(setting: FoundSetting, precision: str, paired: bool, line: str) -> str | None:
    own, on = _find_flag_format(setting), setting.claim is not None and setting.claim.says is not None
    key = "enabled" if setting.leaf == "enabled" else own
    rename = on and not paired and precision in ("fp16", "bf16") and precision != own
    if rename and key == "enabled":
        # Words on the loss scale have no place below bf16: the section stays, and is switched off.
        alone = _replace_once(rf'"{own}"(\s*:\s*{{\s*"enabled"\s*:\s*true\s*}})', rf'"{precision}"\g<1>', line)
        off = rf'"{precision}": {{"enabled": true}}, "{own}"\g<1>false'
        return alone or _replace_once(rf'"{own}"(\s*:\s*{{[^}}]*"enabled"\s*:\s*)true', off, line)
    new = precision if rename else key
    value = rename or own == precision
    written = str(value) if setting.kind == "code" or "True" in line or "False" in line else str(value).lower()
    equals = r"\s*=\s*" if setting.kind == "code" else r"[\"']?\s*:\s*"
    return _replace_once(rf"(?<!\w){key}({equals})(true|false|True|False|\"auto\")", rf"{new}\g<1>{written}", line)


def _change_word(setting: FoundSetting, precision: str, line: str) -> str | None:
    target = _build_setting_target(setting, precision)
    flag = re.escape(setting.key)
    if setting.value is True:
        # A flag without a value is there or not.
        new = f" {_rename_setting(setting, target)}" if target.value == "True" else ""
        return _replace_once(rf"\s+{flag}(?=\s|$)", new, line)
    return _replace_once(
        rf"(?<!\S){flag}(=|\s+)[\"']?[\w.-]+[\"']?", rf"{_rename_setting(setting, target)}\g<1>{target.value}", line
    )


def _rename_setting(setting: FoundSetting, target: _Target) -> str:
    return setting.key.replace(_parse_keyword(setting), target.key) if target.key in ("fp16", "bf16") else setting.key


def _change_keyword(setting: FoundSetting, precision: str, line: str) -> str | None:
    target = _build_setting_target(setting, precision)
    key = "default" if " default" in setting.key else target.key
    if key == "default" and setting.value in (True, False):
        target = target._replace(value=str(precision not in _FULL))
    literal = r"(\"[^\"]*\"|'[^']*'|True|False|torch\.\w+|\d+)"
    return _replace_once(rf"(?<!\w)({key}\s*=\s*){literal}", rf"\g<1>{target.value}", line)


def _replace_once(pattern: str, new: str, line: str) -> str | None:
    """Return the line with the only match replaced; None if there is none, or more than one."""
    return re.sub(pattern, new, line) if len(re.findall(pattern, line)) == 1 else None
