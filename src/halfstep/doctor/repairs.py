"""The exact line that makes a setting ask for another precision, in the words of the file that it stands in."""

from __future__ import annotations

from halfstep.doctor.settings import Setting
from halfstep.precision.names import FLAGS

_ACCELERATE = {"fp32": "'no'", "tf32": "'no'"}
_LIGHTNING = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FULL = ("fp32", "tf32")


def line_for(setting: Setting, precision: str) -> str:
    """What to type so that `setting` asks for `precision`."""
    if setting.kind == "environment":
        return _variable(setting, precision)
    if setting.kind == "deepspeed":
        return _deepspeed(setting, precision)
    if setting.kind == "accelerate":
        return f"mixed_precision: {_ACCELERATE.get(precision, precision)}"
    return _recipe_line(setting, precision)


def _deepspeed(setting: Setting, precision: str) -> str:
    old = setting.key.partition(".")[0] == "bfloat16"
    names = {"fp16": "fp16", "bf16": "bfloat16" if old else "bf16"}
    return ", ".join(f'"{name}": {{"enabled": {str(one == precision).lower()}}}' for one, name in names.items())


def _variable(setting: Setting, precision: str) -> str:
    if setting.claim and setting.claim.says is None and setting.claim.denies == {"tf32"}:
        return f"unset {setting.key}"
    word = "no" if precision in _FULL else precision
    return f"export {setting.key}={word}"


def _recipe_line(setting: Setting, precision: str) -> str:
    key = setting.leaf
    if key in ("amp", "use_amp") or (isinstance(setting.value, bool) and key == "mixed_precision"):
        return f"{key}: {precision not in _FULL}"
    if key in FLAGS:
        return _flags(key, precision)
    if key == "mixed_precision":
        return f"{key}: {_ACCELERATE.get(precision, precision)}"
    if key == "amp_dtype" and precision in _FULL:
        return "use_amp: False"
    took = setting.claim.says.took if setting.claim and setting.claim.says else ""
    words = _LIGHTNING if "Lightning" in took else _TORCH if "torch" in took else {}
    return f"{key}: {words.get(precision, precision)}"


def _flags(key: str, precision: str) -> str:
    own = f"{key}: {key == precision}"
    needs_another = precision in FLAGS if key == "fp32" else precision in ("fp16", "bf16")
    return f"{own} and {precision}: True" if precision != key and needs_another else own
