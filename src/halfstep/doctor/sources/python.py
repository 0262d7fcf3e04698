"""Settings in Python scripts, read from the syntax tree; nothing is imported or run."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from halfstep.doctor.code.script import syntax_tree
from halfstep.doctor.settings import UNRESOLVED, FoundSetting, SettingSource
from halfstep.doctor.sources.accelerate import WORDS, claim_of
from halfstep.doctor.sources.environment import VARIABLES, read_variable
from halfstep.doctor.sources.reading import CLIPPING, LEARNING_RATE, lightning_claim, safe_claim
from halfstep.errors import HalfstepError
from halfstep.precision.names import PRECISION_KEYS, SWITCHES, Claim

_CALLED = ("Accelerator(", "Trainer(", "Fabric(", "autocast(", "GradScaler(", ".half(", ".bfloat16(", "add_argument(")
_NAMED = ("TrainingArguments", "LightningCLI", "SFTConfig", "DPOConfig", "GRPOConfig", "hydra.main", "clip_grad_norm")
_SWITCHED = ("allow_tf32", "fp32_precision", "float32_matmul_precision", *VARIABLES)
_OPENED = tuple(f"{ending}{quote}" for ending in (".yaml", ".yml", ".json") for quote in "\"'")
_WORDS = (*_CALLED, *_NAMED, *_SWITCHED, *_OPENED, "lr=", "__main__")
"""Words without which a script has no setting; scripts without them are not parsed."""
_LINE_WORDS = (*_WORDS, "import ", "lr =", "learning_rate", "clip_", "_clip", "max_norm", "max_grad_norm")
"""The same for the lines of a script that is parsed."""
_MOST_NODES = 200_000
"""The most nodes of a syntax tree that are looked at."""


@dataclass
class Script:
    """A parsed script: its constants, its arguments' defaults, and what was found in it."""

    place: str
    constants: Mapping[str, object]
    arguments: dict[str, tuple[object, int]] = field(default_factory=dict)
    """The default of each argument of an ArgumentParser, with its line."""
    found: list[FoundSetting] = field(default_factory=list)
    training: list[FoundSetting] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tools: set[str] = field(default_factory=set)

    def setting(self, node: ast.AST, key: str, value: object, means: str, claim: Claim | None = None) -> FoundSetting:
        """Return a setting at a node of the tree."""
        return FoundSetting("code", self.place, key, value, means, getattr(node, "lineno", None), claim, "script")


def speaks(text: str) -> bool:
    """Return whether a script may have a setting."""
    return any(word in text for word in _WORDS)


def from_python(place: str, text: str) -> SettingSource:
    """Return the settings of a script, the files and modules that it names, and the libraries that it uses.

    Raise `SyntaxError` for what is no Python, and `ValueError` or `RecursionError` for what cannot be parsed.
    """
    tree = syntax_tree(text)
    nodes = _nodes(tree, text)
    script = Script(place, _constants(tree))
    for node in nodes:
        if isinstance(node, ast.Call) and _called(node).endswith("add_argument"):
            _argument(script, node)
    for node in nodes:
        _look(script, node)
    found = _without_alternatives([*script.found, *_own_arguments(script)])
    return SettingSource("code", place, found, script.training, names=script.names, tools=frozenset(script.tools))


_LOOKED_AT = (ast.Call, ast.Assign, ast.Constant, ast.Import, ast.ImportFrom)


def _nodes(tree: ast.Module, text: str) -> list[ast.AST]:
    """Return the nodes that may hold a setting, line by line.

    Only what stands round a line that speaks is descended into: a walk over the whole tree takes longer than
    parsing it.
    """
    lines = _speaking_lines(text)
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        node = waiting.pop()
        if not _stands_round(node, lines):
            continue
        if isinstance(node, _LOOKED_AT):
            found.append(node)
        waiting += ast.iter_child_nodes(node)
    return sorted(found, key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


def _speaking_lines(text: str) -> list[int]:
    """Return the numbers of the lines that speak of a setting or import, in order, as the parser counts them."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    lines, line, last = [], 1, 0
    for place in sorted(place for word in _LINE_WORDS for place in _places(word, plain)):
        line, last = line + plain.count("\n", last, place), place
        lines.append(line)
    return lines


def _places(word: str, text: str) -> Iterator[int]:
    # str.find: one expression with all words took longer than parsing.
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + 1)


def _stands_round(node: ast.AST, lines: Sequence[int]) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        return True
    # A decorator stands above the line of its function.
    first = min([first, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    index = bisect_left(lines, first)
    return index < len(lines) and lines[index] <= last


def _constants(tree: ast.Module) -> dict[str, object]:
    """Return names that are assigned once, at the top of the module, to a plain value."""
    found: dict[str, object] = {}
    times: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            times[name] = times.get(name, 0) + 1
            if isinstance(node.value, ast.Constant):
                found[name] = node.value.value
            elif dtype := _dtype(node.value):
                found[name] = dtype
    return {name: value for name, value in found.items() if times[name] == 1}


def _look(script: Script, node: ast.AST) -> None:
    if isinstance(node, ast.Call):
        _call(script, node)
    elif isinstance(node, ast.Assign):
        _assigned(script, node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _FILE.fullmatch(node.value):
        script.names.append(node.value)
    elif isinstance(node, ast.Import):
        script.names += [f"{alias.name.replace('.', '/')}.py" for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = (node.module or "").replace(".", "/")
        script.names += [f"{module}.py", *(f"{module}/{alias.name}.py".lstrip("/") for alias in node.names)]


_FILE = re.compile(r"[\w./-]{1,200}\.(ya?ml|json)", re.IGNORECASE)


def _called(node: ast.Call) -> str:
    return _dotted(node.func)


def _dotted(node: ast.AST) -> str:
    """Return `torch.cuda.amp.autocast` for the expression of that name; `?` for a part that is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))


_DTYPES = {"bfloat16", "float16", "half", "float32", "float"}


def _dtype(node: ast.AST) -> str:
    name = _dotted(node)
    return name if name.startswith("torch.") and name.rpartition(".")[2] in _DTYPES else ""


class _Unknown:
    """The value of an expression that only the run itself computes."""


def _value(script: Script, node: ast.expr) -> tuple[object, str]:
    """Return the value of an expression and the script's argument that it comes from, if it does."""
    if isinstance(node, ast.Constant):
        return node.value, ""
    if dtype := _dtype(node):
        return dtype, ""
    if isinstance(node, ast.Name) and node.id in script.constants:
        return script.constants[node.id], ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in script.arguments:
        return script.arguments[node.attr][0], node.attr
    return _Unknown, ""


def _keywords(node: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}


# -- calls ------------------------------------------------------------------------------------------------------------


def _call(script: Script, node: ast.Call) -> None:
    name = _called(node)
    last = name.rpartition(".")[2]
    reader = _CALLS.get(last) or (_training_arguments if last.endswith("TrainingArguments") else None)
    if reader:
        reader(script, node)
    _numbers(script, node)
    if last in ("half", "bfloat16") and isinstance(node.func, ast.Attribute) and not node.args:
        means = f"casts to {'fp16' if last == 'half' else 'bf16'}"
        script.found.append(script.setting(node, f"{name}()", last, means))


def _say(script: Script, node: ast.Call, keyword: str, tool: str, claim_for: _Claims) -> None:
    """Add the setting of a keyword, if it is given and is not None."""
    given = _keywords(node).get(keyword)
    script.tools.add(tool)
    if given is None:
        return
    value, argument = _value(script, given)
    if value is None:
        return
    key = f"{_called(node).rpartition('.')[2]}({keyword})"
    where = given if hasattr(given, "lineno") else node
    if value is _Unknown:
        # Not a number of words: the expression itself is shown.
        setting = script.setting(where, key, ast.unparse(given)[:80], UNRESOLVED)
    else:
        claim, means = claim_for(key, value)
        setting = script.setting(where, key, value, means, claim)
    script.found.append(replace(setting, tool=tool, argument=argument))


_Claims = Callable[[str, object], tuple[Claim | None, str]]


def _accelerate_claim(key: str, value: object) -> tuple[Claim | None, str]:
    word = str(value).lower()
    if word not in WORDS:
        return None, f"cannot be read: accelerate knows {', '.join(WORDS)}"
    claim = claim_of(key, value, word)
    return claim, "accelerate opens no autocast: fp32" if word == "no" else f"accelerate runs prepared models in {word}"


def _accelerator(script: Script, node: ast.Call) -> None:
    _say(script, node, "mixed_precision", "accelerate", _accelerate_claim)


def _trainer(script: Script, node: ast.Call) -> None:
    # transformers' Trainer has no precision, and takes `args` and `model` by these names.
    if {"args", "train_dataset", "eval_dataset", "data_collator"} & set(_keywords(node)):
        script.tools.add("transformers")
        return
    _say(script, node, "precision", "lightning", lightning_claim)


def _fabric(script: Script, node: ast.Call) -> None:
    _say(script, node, "precision", "fabric", lightning_claim)


def _lightning_cli(script: Script, node: ast.Call) -> None:
    script.tools.add("lightning cli")
    defaults = _keywords(node).get("trainer_defaults")
    for key, value in zip(defaults.keys, defaults.values, strict=True) if isinstance(defaults, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == "precision" and isinstance(value, ast.Constant):
            claim, means = lightning_claim("trainer_defaults(precision)", value.value)
            setting = script.setting(value, "trainer_defaults(precision)", value.value, means, claim)
            script.found.append(replace(setting, tool="lightning cli", level="default"))


def _training_arguments(script: Script, node: ast.Call) -> None:
    for key in ("fp16", "bf16"):
        _say(script, node, key, "transformers", lambda full, value: _flag_claim(full, value))


def _flag_claim(key: str, value: object) -> tuple[Claim | None, str]:
    claim, means = safe_claim(key.partition("(")[2].rstrip(")"), value)
    return (replace(claim, key=key, value=value) if claim else None), means


def _argument_parser(script: Script, node: ast.Call) -> None:
    text = ast.dump(node)
    if "TrainingArguments" in text or "SFTConfig" in text:
        script.tools.add("transformers")


_AUTOCASTS = frozenset(
    {
        "autocast",
        "torch.autocast",
        "torch.amp.autocast",
        "torch.cuda.amp.autocast",
        "torch.cpu.amp.autocast",
        "amp.autocast",
        "cuda.amp.autocast",
    }
)
"""torch's own; `accelerator.autocast()` and `fabric.autocast()` follow the precision of their library."""


def _autocast(script: Script, node: ast.Call) -> None:
    """Add an autocast that is on; one that is off keeps a part of the model in fp32 and says nothing of the run."""
    given = _keywords(node)
    enabled, argument = _value(script, given["enabled"]) if "enabled" in given else (True, "")
    if _called(node) not in _AUTOCASTS or (enabled is False and not argument):
        return
    dtype = _value(script, given["dtype"])[0] if "dtype" in given else _default_dtype(_device(script, node))
    value = dtype if isinstance(dtype, str) else "..."
    claim, means = _autocast_claim(enabled, dtype)
    setting = script.setting(node, "autocast(enabled)" if argument else "autocast", value, means)
    claim = replace(claim, key=setting.key, value=value) if claim else None
    script.found.append(replace(setting, claim=claim, argument=argument))


def _autocast_claim(enabled: object, dtype: object) -> tuple[Claim | None, str]:
    if enabled is False:
        return safe_claim("amp", False)
    if enabled is True and isinstance(dtype, str):
        return lightning_claim("autocast", dtype)
    return None, UNRESOLVED


def _device(script: Script, node: ast.Call) -> str:
    given = _keywords(node)
    first = node.args[0] if node.args else given.get("device_type")
    if first is None:
        return "cpu" if ".cpu." in _called(node) else "cuda"
    value = _value(script, first)[0]
    return value if isinstance(value, str) else ""


def _default_dtype(device: str) -> object:
    # torch's own defaults: bf16 on a CPU, fp16 on a GPU. A device that is not known leaves the format open.
    return {"cpu": "torch.bfloat16", "cuda": "torch.float16"}.get(device.partition(":")[0], _Unknown)


def _grad_scaler(script: Script, node: ast.Call) -> None:
    given = _keywords(node)
    enabled = _value(script, given["enabled"])[0] if "enabled" in given else True
    known = {True: "scales the loss, which fp16 needs", False: "off: no loss is scaled"}
    means = known[enabled] if isinstance(enabled, bool) else UNRESOLVED
    shown = enabled if isinstance(enabled, bool) else "..."
    script.found.append(script.setting(node, "GradScaler(enabled)", shown, means))


def _matmul_precision(script: Script, node: ast.Call) -> None:
    value = _value(script, node.args[0])[0] if node.args else _Unknown
    if isinstance(value, str):
        means = "strict fp32 products" if value == "highest" else "fp32 products may run as tf32 or less"
        script.found.append(script.setting(node, "set_float32_matmul_precision", value, means))


def _hydra_main(script: Script, node: ast.Call) -> None:
    given = {key: _value(script, value)[0] for key, value in _keywords(node).items()}
    folder, name = given.get("config_path"), given.get("config_name")
    if isinstance(name, str) and _called(node).startswith("hydra"):
        script.names.append(f"{folder or '.'}/{name.removesuffix('.yaml')}.yaml")


_CALLS: dict[str, Callable[[Script, ast.Call], None]] = {
    "Accelerator": _accelerator,
    "Trainer": _trainer,
    "Fabric": _fabric,
    "LightningCLI": _lightning_cli,
    "SFTConfig": _training_arguments,
    "DPOConfig": _training_arguments,
    "GRPOConfig": _training_arguments,
    "HfArgumentParser": _argument_parser,
    "autocast": _autocast,
    "GradScaler": _grad_scaler,
    "set_float32_matmul_precision": _matmul_precision,
    "main": _hydra_main,
}


def _numbers(script: Script, node: ast.Call) -> None:
    for key, given in _keywords(node).items():
        value = _value(script, given)[0]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and (key in LEARNING_RATE | CLIPPING - {"max_norm"} or (key == "max_norm" and _clips(node))):
            what = "learning rate" if key in LEARNING_RATE else "gradient clipping"
            script.training.append(script.setting(given, key, value, what))
    if _clips(node) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        script.training.append(script.setting(node, "max_norm", node.args[1].value, "gradient clipping"))


def _clips(node: ast.Call) -> bool:
    return _called(node).rpartition(".")[2] in ("clip_grad_norm_", "clip_grad_norm")


# -- assignments and arguments ----------------------------------------------------------------------------------------


def _assigned(script: Script, node: ast.Assign) -> None:
    target = node.targets[0]
    name = _dotted(target) if isinstance(target, ast.Attribute) else ""
    if name.endswith(("allow_tf32", "fp32_precision")) and isinstance(node.value, ast.Constant):
        on = node.value.value in (True, "tf32")
        means = "fp32 products may run as tf32" if on else "no tf32"
        script.found.append(script.setting(node, name, node.value.value, means))
    if isinstance(target, ast.Subscript) and _dotted(target.value).endswith("environ"):
        _environ(script, node, target)


def _environ(script: Script, node: ast.Assign, target: ast.Subscript) -> None:
    name = target.slice.value if isinstance(target.slice, ast.Constant) else None
    value = _value(script, node.value)[0]
    if name not in VARIABLES or not isinstance(value, str):
        return
    try:
        found = replace(read_variable(str(name), value), place=script.place, line=node.lineno)
    except HalfstepError as error:
        found = FoundSetting(
            "environment", script.place, str(name), value, f"cannot be read: {error.given}", node.lineno
        )
    script.found.append(found)


def _argument(script: Script, node: ast.Call) -> None:
    """Remember the default of an argument of a command line; without one, a switch is False."""
    flags = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = next((flag for flag in flags if flag.startswith("--")), None)
    given = _keywords(node)
    action = given.get("action")
    dest = given.get("dest")
    if long is None:
        return
    name = dest.value if isinstance(dest, ast.Constant) else long.lstrip("-").replace("-", "_")
    default = _value(script, given["default"])[0] if "default" in given else None
    if default is None and isinstance(action, ast.Constant):
        default = {"store_true": False, "store_false": True}.get(str(action.value))
    script.arguments[str(name)] = (default, node.lineno)


def _own_arguments(script: Script) -> Iterator[FoundSetting]:
    """Yield the defaults of a script's own arguments that speak of precision."""
    used = {setting.argument for setting in script.found}
    for name, (default, line) in script.arguments.items():
        if name not in PRECISION_KEYS or default is None or default is _Unknown:
            continue
        claim, means = lightning_claim(name, default) if name == "precision" else safe_claim(name, default)
        # A switch that nobody turned on says nothing by itself: `--fp16` is there to be given. `--amp` that is off, and
        # a word such as "no", are what the script runs with.
        speaks = name in SWITCHES or default not in (True, False)
        where = FoundSetting("code", script.place, f"--{name} default", default, means, line, argument=name)
        if name in used:
            # The setting that takes it says it already, with the line of the call.
            continue
        yield replace(where, claim=claim if speaks else None, tool="script", level="default")


def _without_alternatives(settings: Sequence[FoundSetting]) -> list[FoundSetting]:
    """Take the claims from calls of one kind that name different formats: which part of the run has which is not
    known.
    """
    named: dict[str, set[str]] = {}
    for setting in settings:
        if setting.claim:
            named.setdefault(_call_of(setting), set()).add(setting.claim.meaning)
    return [replace(s, claim=None) if len(named.get(_call_of(s), ())) > 1 else s for s in settings]


def _call_of(setting: FoundSetting) -> str:
    return setting.key.removesuffix("(enabled)")
