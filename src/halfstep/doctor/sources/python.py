"""Settings in Python scripts, read from the syntax tree; nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from halfstep.doctor.code.autocasts import Autocast, can_open_autocast
from halfstep.doctor.code.facts import ScriptFacts, build_script_facts
from halfstep.doctor.code.formats import DTYPES, find_named_format
from halfstep.doctor.code.order import iterate_ancestors
from halfstep.doctor.code.script import FUNCTIONS, Script, find_argument, format_variable
from halfstep.doctor.code.values import find_lookup_key, find_passed_argument, list_possible_values
from halfstep.doctor.code.words import collect_words
from halfstep.doctor.settings import (
    UNRESOLVED,
    FoundSetting,
    SettingSource,
    WordReading,
    build_unknown_reading,
    format_possible_values,
    remove_ambiguous_claims,
)
from halfstep.doctor.sources.accelerate import WORDS, build_accelerate_claim
from halfstep.doctor.sources.environment import TOOLS, VARIABLES, read_variable
from halfstep.doctor.sources.reading import (
    CLIPPING,
    LEARNING_RATE,
    Claims,
    read_lightning_word,
    read_own_word,
    read_precision_word,
)
from halfstep.errors import HalfstepError
from halfstep.precision.names import FP64, PRECISION_KEYS, SWITCHES, NamedPrecision, PrecisionClaim

_CALLED = ("Accelerator(", "Trainer(", "Fabric(", "GradScaler(")
_NAMED = ("TrainingArguments", "LightningCLI", "SFTConfig", "DPOConfig", "GRPOConfig", "hydra.main")
_SWITCHED = ("allow_tf32", "fp32_precision", "float32_matmul_precision", *VARIABLES)
_OPENED = tuple(f"{ending}{quote}" for ending in (".yaml", ".yml", ".json") for quote in "\"'")
_SPEAKS = (*_CALLED, *_NAMED, *_SWITCHED)
_DEFINES = re.compile(
    r"add_argument\(\s*(\"-\w\"\s*,\s*)?[\"']--(no-)?(" + "|".join(map(re.escape, PRECISION_KEYS)) + ")"
)
_AT_TOP = re.compile(r"^with .*autocast\(", re.MULTILINE)
_FILE = re.compile(r"[\w./-]{1,200}\.(ya?ml|json)", re.IGNORECASE)
_FULL_NAMES = re.compile(r"(lightning\.|lightning_fabric\.)")
_ARGUMENT_CLASSES = re.compile(r"(\w*TrainingArguments|SFTConfig|DPOConfig|GRPOConfig)")
_OF_TRANSFORMERS = ("transformers.", "trl.", "optimum.", "sentence_transformers.", "setfit.", "?", ".")
_ACCELERATOR = frozenset({"accelerate.Accelerator", "accelerate.accelerator.Accelerator"})
_MAIN = "main"


@dataclass
class ScriptContents:
    """The contents of a script: settings, the defaults of its arguments, the files that it names, its words."""

    facts: ScriptFacts
    arguments: dict[str, tuple[object, int]] = field(default_factory=dict)
    """The default of each argument of an ArgumentParser, with its line."""
    settings: list[FoundSetting] = field(default_factory=list)
    training: list[FoundSetting] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tools: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)

    @property
    def script(self) -> Script:
        return self.facts.script

    def setting(
        self, node: ast.AST, key: str, value: object, means: str, claim: PrecisionClaim | None = None
    ) -> FoundSetting:
        """Return a setting at a node of the tree."""
        return FoundSetting("code", self.script.file, key, value, means, getattr(node, "lineno", None), claim, "script")


def has_possible_settings(text: str) -> bool:
    """Return whether a script may have a setting; others are not parsed."""
    words = collect_words(text)
    if words.has_any(*_SPEAKS) or ("add_argument(" in words and _DEFINES.search(text)):
        return True
    if "autocast(" not in words:
        return False
    # Only what the script itself runs speaks for a run.
    own = words.has_any("__main__", "backward") or _AT_TOP.search(text)
    return bool(own) and can_open_autocast(text)


def find_named_files(place: str, text: str) -> SettingSource | None:
    """Return the files and modules that a script names, without parsing it; None if it names no configuration."""
    if not collect_words(text).has_any(*_OPENED):
        return None
    # Line by line: a search at every quotation mark of a file takes long.
    lines = (line for line in text.splitlines() if ".json" in line or ".y" in line)
    files = [file for line in lines for file in _QUOTED.findall(line)]
    if not files:
        return None
    modules = [(found[1] or found[2]).replace(".", "/") for found in _IMPORTED.finditer(text)]
    return SettingSource("code", place, [], names=[*files, *(f"{module}.py" for module in modules)])


_QUOTED = re.compile(r"[\"']([\w./-]{1,200}\.(?:ya?ml|json))[\"']")
_IMPORTED = re.compile(r"^(?:from\s+(\w[\w.]*)\s+import|import\s+(\w[\w.]*))", re.MULTILINE)


def from_python(place: str, text: str) -> SettingSource:
    """Return the settings of a script, the files and modules that it names, and the libraries that it uses.

    Raise `SyntaxError` for invalid Python, and `ValueError` or `RecursionError` for text that cannot be parsed.
    """
    found = ScriptContents(build_script_facts(place, text))
    calls = list(found.script.calls())
    for call in calls:
        if _find_called_last_name(call) == "add_argument":
            _read_script_argument(found, call)
    for call in calls:
        last = _find_called_last_name(call)
        reader = _CALLS.get(last) or (_read_training_arguments if _ARGUMENT_CLASSES.fullmatch(last) else None)
        if reader:
            reader(found, call, found.script.names(call.func))
        _collect_rates_and_clipping(found, call, last)
    for opened in found.facts.autocasts.on:
        # One in fp32 is an island, and `accelerator.autocast()` follows the precision of its library.
        if opened.format != "fp32" and "accelerator" not in (format_variable(opened.call.func) or "").lower():
            found.settings.append(_build_autocast_setting(found, opened))
    for made in found.facts.scalers.made:
        known = {True: "scales the loss, which fp16 needs", False: "off: no loss is scaled", None: UNRESOLVED}
        value = "..." if made.enabled is None else made.enabled
        found.settings.append(found.setting(made.call, "GradScaler(enabled)", value, known[made.enabled]))
    for assign in found.script.every(ast.Assign):
        _read_assignment(found, assign)
    _read_names(found)
    _collect_own_words(found)
    settings = remove_ambiguous_claims([*found.settings, *_list_own_arguments(found)])
    settings.sort(key=lambda setting: setting.line or 0)
    return SettingSource(
        "code", place, settings, found.training, names=found.names, tools=frozenset(found.tools),
        words=frozenset(found.words),
    )  # fmt: skip


def _read_names(found: ScriptContents) -> None:
    """Add the files that a script opens and the modules that it imports."""
    for text in found.script.every(ast.Constant):
        if isinstance(text.value, str) and len(text.value) < 200 and _FILE.fullmatch(text.value):
            found.names.append(text.value)
    for node in found.script.every(ast.Import):
        found.names += [f"{alias.name.replace('.', '/')}.py" for alias in node.names]
    for source in found.script.every(ast.ImportFrom):
        start = "./" + "../" * (source.level - 1) if source.level else ""
        module = start + (source.module or "").replace(".", "/")
        found.names += [f"{module}.py"] if source.module else []
        found.names += [f"{module}/{alias.name}.py".replace("//", "/") for alias in source.names]


def _collect_own_words(found: ScriptContents) -> None:
    """Add the words that a script defines for itself."""
    for node in found.script.every(ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        if any(_find_last_name(value) in _DTYPE_NAMES for _, value in pairs):
            found.words |= {str(key.value) for key, _ in pairs if isinstance(key, ast.Constant)}
    for owner in found.script.every(ast.ClassDef):
        if any("Enum" in _find_last_name(base) for base in owner.bases):
            values = [one.value for one in owner.body if isinstance(one, ast.Assign)]
            found.words |= {str(one.value) for one in values if isinstance(one, ast.Constant)}


_DTYPE_NAMES = frozenset(name.rpartition(".")[2] for name in DTYPES)


def _find_last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _find_called_last_name(call: ast.Call) -> str:
    return _find_last_name(call.func)


class _UnknownValue:
    """The value of an expression that only the run itself computes."""


def _resolve_value(found: ScriptContents, node: ast.expr) -> tuple[object, str]:
    """Return the value of an expression and the script's argument that it comes from, if it does."""
    if (named := find_named_format(found.script, node)) is not None:
        return named, ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in found.arguments:
        return found.arguments[node.attr][0], node.attr
    constant = found.script.constant(node)
    return (_UnknownValue if constant is ... else constant), ""


def _add_keyword_setting(found: ScriptContents, call: ast.Call, keyword: str, tool: str, claim_for: Claims) -> None:
    """Add the setting of a keyword, if it is given and is not None."""
    given = find_passed_argument(found.script, call, keyword)
    found.tools.add(tool)
    if given is not None:
        _add_setting_of_value(found, given, f"{_find_called_last_name(call)}({keyword})", tool, claim_for)


def _add_setting_of_value(
    found: ScriptContents, given: ast.expr, key: str, tool: str, claim_for: Claims, level: str = ""
) -> None:
    value, name = _resolve_value(found, given)
    if value is _UnknownValue:
        setting = _build_computed_setting(found, given, key, claim_for)
    elif value is None:
        return
    else:
        reading = claim_for(key, value)
        setting = found.setting(given, key, value, reading.means).read_as(reading)
    found.settings.append(replace(setting, tool=tool, argument=name, level=level))


def _build_computed_setting(found: ScriptContents, given: ast.expr, key: str, claim_for: Claims) -> FoundSetting:
    """Return the setting of an expression, with all values that it can have, as far as the source has them."""
    # Not a number of words: the expression itself is shown.
    setting = found.setting(given, key, ast.unparse(given)[:80], UNRESOLVED)
    values = list_possible_values(found.script, given)
    # A switch is on or off.
    values = (True, False) if values is None and claim_for is _read_flag_claim else values
    if values is None:
        return replace(setting, is_computed=True, lookup=find_lookup_key(found.script, given))
    readings = [claim_for(key, value) for value in values if value is not None]
    unknown = next((reading for reading in readings if reading.status == "unknown"), None)
    if unknown is not None:
        # An error wherever this branch is taken.
        return replace(setting.read_as(unknown), is_computed=True)
    # A word without a claim is Lightning's for 64 bits, or a switch that is neither on nor off.
    wide = PrecisionClaim(key, setting.value, says=NamedPrecision(FP64)) if claim_for is read_lightning_word else None
    claims = [reading.claim or wide for reading in readings]
    if None not in (*values, *claims) and len({claim.meaning for claim in claims if claim}) == 1:
        return setting.read_as(readings[0])
    outcomes = tuple([*claims, None] if None in values else claims)
    means = f"{format_possible_values(outcomes)}, decided at run time"
    lookup = find_lookup_key(found.script, given)
    return replace(setting, is_computed=True, outcomes=outcomes, means=means, lookup=lookup)


def _read_accelerate_claim(key: str, value: object) -> WordReading:
    word = str(value).lower()
    if word not in WORDS:
        return build_unknown_reading(f"accelerate knows {', '.join(WORDS)}")
    means = "accelerate opens no autocast: fp32" if word == "no" else f"accelerate runs prepared models in {word}"
    return WordReading(build_accelerate_claim(key, value, word), means)


def _read_accelerator_call(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    if names and names <= _ACCELERATOR:
        _add_keyword_setting(found, call, "mixed_precision", "accelerate", _read_accelerate_claim)


def _read_trainer_call(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    # Composer and many projects have a Trainer, too: its import tells whose it is.
    if names and all(name.startswith("transformers.") for name in names):
        found.tools.add("transformers")
    elif names and all(map(_FULL_NAMES.match, names)):
        _add_keyword_setting(found, call, "precision", "lightning", read_lightning_word)


def _read_fabric_call(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    if names and all(map(_FULL_NAMES.match, names)):
        _add_keyword_setting(found, call, "precision", "fabric", read_lightning_word)


def _read_lightning_cli(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    if not names or not all(map(_FULL_NAMES.match, names)):
        return
    found.tools.add("lightning cli")
    defaults = find_argument(call, "trainer_defaults")
    for key, value in zip(defaults.keys, defaults.values, strict=True) if isinstance(defaults, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == "precision":
            name = "trainer_defaults(precision)"
            _add_setting_of_value(found, value, name, "lightning cli", read_lightning_word, level="default")


def _read_training_arguments(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    if not names or not all(name.startswith(_OF_TRANSFORMERS) for name in names):
        return
    for key in ("fp16", "bf16"):
        _add_keyword_setting(found, call, key, "transformers", _read_flag_claim)
    given = find_argument(call, "logging_nan_inf_filter")
    if given is not None and found.script.constant(given) is True:
        key = f"{_find_called_last_name(call)}(logging_nan_inf_filter)"
        setting = found.setting(given, key, True, "losses that are not finite are left out of the logs")
        found.settings.append(replace(setting, tool="transformers"))


def _read_flag_claim(key: str, value: object) -> WordReading:
    reading = read_precision_word(key.partition("(")[2].rstrip(")"), value)
    return reading._replace(claim=replace(reading.claim, key=key, value=value) if reading.claim else None)


def _read_argument_parser(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    text = ast.dump(call)
    if "TrainingArguments" in text or "SFTConfig" in text:
        found.tools.add("transformers")


def _read_matmul_precision(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    value = _resolve_value(found, call.args[0])[0] if call.args else _UnknownValue
    if isinstance(value, str):
        means = "strict fp32 products" if value == "highest" else "fp32 products may run as tf32 or less"
        found.settings.append(found.setting(call, "set_float32_matmul_precision", value, means))


def _read_hydra_main(found: ScriptContents, call: ast.Call, names: frozenset[str]) -> None:
    given = {
        key: _resolve_value(found, value)[0]
        for key in ("config_path", "config_name")
        if (value := find_argument(call, key))
    }
    folder, name = given.get("config_path"), given.get("config_name")
    if isinstance(name, str):
        file = name.removesuffix(".yaml") + ".yaml"
        found.names.append(f"{folder}/{file}" if isinstance(folder, str) else file)


_CALLS: dict[str, Callable[[ScriptContents, ast.Call, frozenset[str]], None]] = {
    "Accelerator": _read_accelerator_call,
    "Trainer": _read_trainer_call,
    "Fabric": _read_fabric_call,
    "LightningCLI": _read_lightning_cli,
    "HfArgumentParser": _read_argument_parser,
    "set_float32_matmul_precision": _read_matmul_precision,
    "main": _read_hydra_main,
}


def _collect_rates_and_clipping(found: ScriptContents, call: ast.Call, last: str) -> None:
    clips = last in ("clip_grad_norm_", "clip_grad_norm")
    for keyword in call.keywords:
        if keyword.arg not in LEARNING_RATE | CLIPPING or (keyword.arg == "max_norm" and not clips):
            continue
        value = _resolve_value(found, keyword.value)[0]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            what = "learning rate" if keyword.arg in LEARNING_RATE else "gradient clipping"
            found.training.append(found.setting(keyword.value, keyword.arg, value, what))
    if clips and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
        found.training.append(found.setting(call, "max_norm", call.args[1].value, "gradient clipping"))


def _build_autocast_setting(found: ScriptContents, autocast: Autocast) -> FoundSetting:
    """Return an autocast that may be on, and is no island in fp32.

    It speaks for the run only where nothing chooses whether it is opened: at the top of the script, or in `main`.
    """
    call, script = autocast.call, found.script
    given = find_argument(call, "enabled")
    name = _resolve_value(found, given)[1] if given is not None else ""
    enabled = found.arguments[name][0] if name else autocast.enabled
    scope = script.scopes[call]
    at_top = not isinstance(scope, (*FUNCTIONS, ast.Lambda)) or getattr(scope, "name", "") == _MAIN
    is_plain = at_top and not any(_is_choice(one) for one in iterate_ancestors(script, call))
    reading = WordReading(None, UNRESOLVED)
    # Off by a default of the script's own, the flag is there to be given.
    if is_plain and enabled is True and autocast.format is not None:
        reading = read_lightning_word("autocast", autocast.format)
    setting = found.setting(call, "autocast(enabled)" if name else "autocast", autocast.format or "...", reading.means)
    claim = replace(reading.claim, key=setting.key, value=setting.value) if reading.claim else None
    return replace(setting, claim=claim, argument=name if is_plain else "", tool="torch")


def _is_choice(node: ast.AST) -> bool:
    is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
    return isinstance(node, (ast.If, ast.IfExp, ast.Match, ast.ExceptHandler)) and not is_main


def _read_assignment(found: ScriptContents, node: ast.Assign) -> None:
    target = node.targets[0]
    if isinstance(target, ast.Attribute) and target.attr in ("allow_tf32", "fp32_precision"):
        if isinstance(node.value, ast.Constant):
            on = node.value.value in (True, "tf32")
            means = "fp32 products may run as tf32" if on else "no tf32"
            found.settings.append(found.setting(node, format_variable(target) or target.attr, node.value.value, means))
    elif isinstance(target, ast.Subscript) and _find_last_name(target.value) == "environ":
        _read_environ_assignment(found, node, target)


def _read_environ_assignment(found: ScriptContents, node: ast.Assign, target: ast.Subscript) -> None:
    name = target.slice.value if isinstance(target.slice, ast.Constant) else None
    value = _resolve_value(found, node.value)[0]
    place = found.script.file
    if name in TOOLS and value is _UnknownValue:
        shown = ast.unparse(node.value)[:80]
        setting = FoundSetting("environment", place, str(name), shown, UNRESOLVED, node.lineno, tool=TOOLS[str(name)])
        found.settings.append(replace(setting, is_computed=True))
    if name not in VARIABLES or not isinstance(value, str):
        return
    try:
        setting = replace(read_variable(str(name), value), place=place, line=node.lineno)
    except HalfstepError as error:
        unread = FoundSetting("environment", place, str(name), value, "", node.lineno, tool="accelerate")
        setting = unread.read_as(build_unknown_reading(error.given))
    found.settings.append(setting)


def _read_script_argument(found: ScriptContents, call: ast.Call) -> None:
    """Remember the default of an argument of a command line, and its choices; without a default, a switch is False."""
    flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = next((flag for flag in flags if flag.startswith("--")), None)
    if long is None:
        return
    dest, action, default = (find_argument(call, name) for name in ("dest", "action", "default"))
    name = dest.value if isinstance(dest, ast.Constant) else long.lstrip("-").replace("-", "_")
    value = _resolve_value(found, default)[0] if default is not None else None
    if value is None and isinstance(action, ast.Constant):
        value = {"store_true": False, "store_false": True}.get(str(action.value))
    found.arguments[str(name)] = (value, call.lineno)
    choices = find_argument(call, "choices")
    if isinstance(choices, (ast.List, ast.Tuple, ast.Set)):
        found.words |= {str(one.value) for one in choices.elts if isinstance(one, ast.Constant)}


def _list_own_arguments(found: ScriptContents) -> Iterator[FoundSetting]:
    """Yield the defaults of a script's own arguments that speak of precision; none of them decides."""
    used = {setting.argument for setting in found.settings}
    for name, (default, line) in found.arguments.items():
        # The setting that takes an argument has its default already, with the line of the call.
        if name not in PRECISION_KEYS or default is None or default is _UnknownValue or name in used:
            continue
        reading = read_own_word(name, default)
        speaks = name in SWITCHES or default not in (True, False)
        where = FoundSetting("code", found.script.file, f"--{name} default", default, "", line, argument=name)
        where = where.read_as(reading if speaks else reading._replace(claim=None))
        yield replace(where, tool="script", level="default", decides=False)
