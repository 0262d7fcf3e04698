"""Find the code of a project that computes in 16 bits: autocast, scalers, policies, casts. Imports no torch."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from halfstep.doctor.code import autocasts
from halfstep.doctor.code.autocasts import can_open_autocast
from halfstep.doctor.code.facts import ScriptFacts, build_script_facts
from halfstep.doctor.code.formats import find_cast_format, find_named_format
from halfstep.doctor.code.script import Script, find_argument, find_method_name, format_variable, has_matching_name
from halfstep.doctor.code.values import list_possible_values
from halfstep.doctor.code.words import collect_words
from halfstep.doctor.located import is_test_file
from halfstep.doctor.settings import format_safe_text

LARGEST = 1_000_000
"""Characters. A larger file is data or generated."""
_SWITCHED = ("GradScaler", "MixedPrecision", "amp.initialize", ".to_fp16(", ".to_bf16(", ".AMP.", "set_default_dtype")
_NARROW = (".half(", ".bfloat16(", "float16", "torch.half")
_AUTOCASTS = autocasts.OLD | autocasts.NEW
_CALLS = frozenset({"apex.amp.initialize", "torch.distributed.fsdp.MixedPrecision"})
_CALLS |= {"torch.distributed.fsdp.MixedPrecisionPolicy", "torch.distributed._composable.fsdp.MixedPrecisionPolicy"}
_CALLS |= {"torch.distributed.fsdp.fully_sharded_data_parallel.MixedPrecision"}
_OF_FASTAI = ("to_fp16", "to_bf16")
_LOADED = re.compile(r"from_\w+")
"""Functions that make a model: `from_pretrained`, `from_config`, `from_single_file`."""
_LONGEST = 60
"""Characters of a call that are shown; of a longer one, the arguments that decide."""
_DECIDING = frozenset({"dtype", "enabled", "torch_dtype", "param_dtype", "opt_level"})


class PrecisionCode(NamedTuple):
    """A place where code, and no setting, decides on computing in 16 bits."""

    file: str
    line: int
    code: str


class PrecisionSigns(NamedTuple):
    """The code of a project that decides, or else its casts of what may be anything."""

    decisions: list[PrecisionCode]
    casts: list[PrecisionCode]


_OPENS, _OF_MIXED_PRECISION, _OF_A_MODEL, _OF_ANYTHING = range(4)
_Order = tuple[int, bool, bool, int, str, int]


class _Sign(NamedTuple):
    rank: int
    """What opens mixed precision, belongs to it, casts a model, or casts what may be any tensor."""
    node: ast.AST


def find_mixed_precision(texts: Mapping[str, str]) -> PrecisionSigns:
    """Return the places in a project's files, given their texts: the strongest first, those in tests never.

    Casts are looked for only where nothing else is found.
    """
    files = [file for file in texts if file.endswith((".py", ".ipynb")) and not is_test_file(file)]
    found: list[tuple[_Order, PrecisionCode]] = []
    for may_have in (_may_open_mixed_precision, _may_cast):
        for file in files:
            text = texts[file]
            # Of several files, one that trains is named first.
            order = ("backward(" not in text, "train" not in posixpath.basename(file).lower(), file.count("/"))
            if len(text) <= LARGEST and may_have(text):
                found += [((rank, *order, one.file, one.line), one) for rank, one in _list_signs(file, text)]
        found.sort(key=lambda row: row[0])
        if strong := [one for (rank, *_), one in found if rank <= _OF_MIXED_PRECISION]:
            return PrecisionSigns(strong, [])
    models = [one for (rank, *_), one in found if rank == _OF_A_MODEL]
    return PrecisionSigns(models, [] if models else [one for _, one in found])


def _may_open_mixed_precision(text: str) -> bool:
    return collect_words(text).has_any(*_SWITCHED) or can_open_autocast(text)


def _may_cast(text: str) -> bool:
    return collect_words(text).has_any(*_NARROW) and not _may_open_mixed_precision(text)


def _list_signs(file: str, text: str) -> list[tuple[int, PrecisionCode]]:
    try:
        facts = build_script_facts(file, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    unique = {id(sign.node): sign for sign in _iterate_signs(facts)}
    return [(sign.rank, _build_place(facts.script, sign.node)) for sign in unique.values()]


def _build_place(script: Script, node: ast.AST) -> PrecisionCode:
    text = script.text(node)
    if isinstance(node, ast.Call) and len(text) > _LONGEST:
        passed = [ast.unparse(one) for one in node.args[:1] if _find_last_word(node.func) == "partial"]
        deciding = [*passed, *(ast.unparse(keyword) for keyword in node.keywords if keyword.arg in _DECIDING)]
        text = f"{_find_last_word(node.func)}({', '.join(deciding)})" if deciding else text
    return PrecisionCode(script.file, getattr(node, "lineno", 1), format_safe_text(text))


def _iterate_signs(facts: ScriptFacts) -> Iterator[_Sign]:
    script = facts.script
    for opened in facts.autocasts.on:
        # One in fp32 is an island, and `accelerator.autocast()` follows the precision of its library.
        if opened.format != "fp32" and "accelerator" not in (format_variable(opened.call.func) or "").lower():
            yield _Sign(_OPENS, opened.call)
    called = {one.call.func for one in facts.autocasts.all}
    for node in script.each(ast.Name, ast.Attribute):
        if _is_passed_autocast(script, node) and node not in called:
            yield _Sign(_OPENS, _find_partial(script, node))
        elif isinstance(node, ast.Attribute) and node.attr == "ENABLED" and _find_last_word(node.value) == "AMP":
            yield _Sign(_OF_MIXED_PRECISION, node)
    yield from (_Sign(_OPENS, call) for call in script.calls_of(_CALLS))
    yield from (_Sign(_OF_MIXED_PRECISION, made.call) for made in facts.scalers.made if made.enabled is not False)
    for call in script.calls():
        if find_method_name(call) in _OF_FASTAI and not call.args:
            yield _Sign(_OPENS, call)
        elif _is_narrow_model(script, call):
            yield _Sign(_OF_MIXED_PRECISION, call)
        elif find_cast_format(script, call) in ("fp16", "bf16"):
            yield _Sign(_OF_A_MODEL if _is_cast_of_model(call) else _OF_ANYTHING, call)


def _find_last_word(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_passed_autocast(script: Script, node: ast.Name | ast.Attribute) -> bool:
    """Return whether autocast itself is a value, as in `partial(torch.autocast)` or `autocast if amp else suppress`."""
    if _find_last_word(node) != "autocast" or not isinstance(node.ctx, ast.Load):
        return False
    outer = script.parents[node]
    is_type = isinstance(outer, (ast.arg, ast.AnnAssign, ast.ClassDef, ast.Attribute, *_FUNCTIONS))
    is_test = isinstance(outer, ast.Call) and _find_last_word(outer.func) in ("isinstance", "issubclass", "hasattr")
    return not is_type and not is_test and script.is_one_of(node, _AUTOCASTS)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _find_partial(script: Script, node: ast.AST) -> ast.AST:
    outer = script.parents[node]
    return outer if isinstance(outer, ast.Call) and _find_last_word(outer.func) == "partial" else node


_MODEL = re.compile(
    r"model|module|weight|param|(^|_)(u?net|vae|gan|lm|llm)(_|$)|coder|transformer|backbone|critic|criterion|generator"
    r"|discriminator|student|teacher|policy|actor|learner|clip|bert|gpt",
    re.IGNORECASE,
)


_MAKES = re.compile(r"_?(get|build|create|make|load|init)|[A-Z]")
"""How the name of a function or class starts that returns a model; `model(x)` returns numbers."""


def _is_cast_of_model(call: ast.Call) -> bool:
    """Return whether a cast is of a module or of weights, by the names in front of it."""
    node: ast.AST = call
    while isinstance(node, ast.Call):
        last = _find_last_word(node.func)
        if node is not call and _MAKES.match(last):
            return bool(last[0].isupper() or _MODEL.search(last))
        if not isinstance(node.func, ast.Attribute):
            return False
        node = node.func.value
    return getattr(node, "id", "") == "self" or has_matching_name(node, _MODEL)


def _is_narrow_model(script: Script, call: ast.Call) -> bool:
    """Return whether a call makes a model in 16 bits, or makes 16 bits the default."""
    last = _find_last_word(call.func)
    if last == "set_default_dtype" and call.args:
        named = list_possible_values(script, call.args[0])
        is_other = any(name.startswith("torch.") for name in script.names(call.args[0]))
        # A format that the file does not fix may be one of those that it names.
        return bool({"fp16", "bf16"} & set(named)) if named else "float16" in script.source and not is_other
    given = find_argument(call, "torch_dtype") or (find_argument(call, "dtype") if _LOADED.fullmatch(last) else None)
    word = given.value if isinstance(given, ast.Constant) else find_named_format(script, given)
    return word in ("fp16", "bf16", "float16", "bfloat16")
