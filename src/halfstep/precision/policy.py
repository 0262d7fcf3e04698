"""Policies: a precision for each module by patterns, such as fp8 for the blocks and fp32 for the norms.

A pattern matches a module by its path, as file names are matched, and everything inside of it. Of several matching
patterns the last one counts. A pattern that matches nothing, or never counts, is refused: it would change nothing, and
its author believes that it does.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from halfstep.errors import PrecisionRefused
from halfstep.precision.conversion import MULTIPLES, NEEDS_TORCHAO, convert_layers, eligible_layers, has_torchao
from halfstep.precision.converted import MARK
from halfstep.precision.island import PLACED, is_inside, is_island, island, undo_policy
from halfstep.precision.names import DEFAULT, PolicyRule

WIDE = "fp32"


def apply_policy(model: nn.Module, default: str, rules: tuple[PolicyRule, ...]) -> None:
    """Convert the layers of a model and make islands, as a precision asks for; undo those of the precision before.

    Nothing is changed where it is refused, or where the model is as it should be.
    """
    placed = resolve_policy(model, default, rules) if default or rules else PolicyPlacement({}, ())
    if (placed.kinds, sorted(placed.islands)) == list_applied_policy(model):
        return
    if placed.kinds and not has_torchao():
        raise PrecisionRefused(
            f"fp8 without torchao: {NEEDS_TORCHAO}", allowed="fp8 by torchao", do="pip install 'halfstep[narrow]'"
        )
    undo_policy(model)
    convert_layers(model, placed.kinds)
    for path in placed.islands:
        if not is_island(module := model.get_submodule(path)):
            island(model, path)
            vars(module)[PLACED] = True


def list_applied_policy(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Return the kinds of the layers that were converted for their device, and the islands that a policy has made."""
    named = list(model.named_modules())
    marks = {path: vars(module)[MARK] for path, module in named if MARK in vars(module)}
    kinds = {path: mark.kind for path, mark in marks.items() if model.get_submodule(path).weight.device == mark.device}
    return kinds, sorted(path for path, module in named if PLACED in vars(module) and is_island(module))


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and checkpointing put into paths."""


class PolicyPlacement(NamedTuple):
    """What a policy means for one model."""

    kinds: dict[str, str]
    """The layers to convert by path, each with its kind."""
    islands: tuple[str, ...]


def resolve_policy(model: nn.Module, default: str, rules: tuple[PolicyRule, ...]) -> PolicyPlacement:
    """Return which layers of a model a precision converts, and which modules it keeps in fp32.

    `default` is the conversion of layers without a rule; empty for none. Raises PrecisionRefused for a pattern without
    effect, and where nothing can be converted.
    """
    paths = [path for path, _ in model.named_modules()]
    chosen = {path: _find_last_rule(path, rules) for path in paths}
    _check_patterns_match(model, rules, chosen)
    named = {path: DEFAULT if at is None else rules[at].name for path, at in chosen.items()}
    names = {path: default if name == DEFAULT else name for path, name in named.items()}
    table = eligible_layers(model, {path: name for path, name in names.items() if name in MULTIPLES})
    wide = [path for path in paths if names[path] == WIDE and rules]
    outermost = [path for path in wide if path == "" or names[path.rpartition(".")[0]] != WIDE]
    for path in outermost:
        inner = next((p for p in paths if p.startswith(f"{path}.") and names[p] != WIDE), None)
        if inner is not None:
            raise PrecisionRefused(
                f"the policy keeps {path} in fp32, and asks for {names[inner]} in {inner}, inside of it",
                allowed="modules in fp32 with everything that they contain",
                do=f"name the parts of {path} that are to stay in fp32, without {inner}",
            )
    kinds = {
        row.path: row.kind for row in table if row.kind and not any(is_inside(row.path, each) for each in outermost)
    }
    asked = [name for name in (default, *names.values()) if name in MULTIPLES]
    if asked and not kinds:
        why = "; ".join(f"{row.path}: {row.reason}" for row in table[:5]) or "the model has no weight matrix"
        raise PrecisionRefused(
            f"no layer can be converted to {asked[0]}: {why}",
            allowed="plain nn.Linear layers whose dimensions are multiples of 16, or of 32 for mxfp8",
            do="precision='bf16'",
        )
    return PolicyPlacement(kinds, tuple(outermost))


def _find_last_rule(path: str, rules: tuple[PolicyRule, ...]) -> int | None:
    """Return the number of the last rule whose pattern matches a module, or one that contains it."""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    found = [at for at, rule in enumerate(rules) if any(fnmatchcase(each, rule.pattern) for each in around)]
    return found[-1] if found else None


def _check_patterns_match(model: nn.Module, rules: tuple[PolicyRule, ...], chosen: Mapping[str, int | None]) -> None:
    modules = dict(model.named_modules())  # those of torch.jit have no get_submodule()
    counts = {at for path, at in chosen.items() if _is_layer(modules[path])}
    for at, rule in enumerate(rules):
        matched = [path for path in chosen if path and _find_last_rule(path, (rule,)) is not None]
        if matched and at in counts:
            continue
        near = difflib.get_close_matches(rule.pattern.strip("*."), [path for path in chosen if path], 3, 0.3)
        given = (
            f"the pattern {rule.pattern!r} of the policy has no effect: later ones match the same modules"
            if matched
            else f"the pattern {rule.pattern!r} of the policy matches no module"
        )
        raise PrecisionRefused(
            given,
            allowed=f"the paths of modules, such as {', '.join(near or [path for path in chosen if path][:3])}",
            do="delete it" if matched else "print(dict(model.named_modules()).keys()) shows all paths",
        )


def _is_layer(module: Any) -> bool:
    return any(p is not None for p in module._parameters.values()) or next(module.children(), None) is None
