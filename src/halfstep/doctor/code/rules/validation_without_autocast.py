"""Find an evaluation that runs the model in fp32, where training runs it under autocast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.formats import find_function_definition
from halfstep.doctor.code.script import Function, find_method_name, find_receiver, format_variable
from halfstep.doctor.located import LocatedFinding

_EVALUATION = re.compile(r"(run_|do_|_)?(eval|valid|val(_|$|idate))", re.IGNORECASE)


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every evaluation of this file that is called outside of autocast and opens none."""
    script = facts.script
    evaluations = [one for one in script.functions() if _EVALUATION.match(one.name) and _is_evaluation(facts, one)]
    trained = _find_autocast_models(facts) if evaluations else {}
    for function in evaluations:
        bare = [call for call in _iterate_function_calls(facts, function) if format_variable(call.func) in trained]
        if bare and not _has_autocast(facts, function) and _is_called_outside(facts, function):
            model = format_variable(bare[0].func)
            yield script.finding(
                "validation_without_autocast",
                "note",
                function,
                f"`{function.name}` runs `{model}` in fp32 (line {bare[0].lineno}), and training runs it under the "
                f"{trained[model or '']}: the evaluated computation differs from the trained one",
                "open the same autocast around the model there",
            )


def _find_autocast_models(facts: ScriptFacts) -> dict[str, object]:
    """Return the models called under autocast in functions with a backward pass, with the autocast."""
    script = facts.script
    training = {script.scopes[call] for call in facts.backwards}
    found: dict[str, object] = {}
    for call in script.calls():
        near = facts.autocasts.around(call) if script.scopes[call] in training else None
        path = format_variable(call.func)
        if near is not None and near.may_be_on and near.format != "fp32" and path and _is_model(path):
            found.setdefault(path, near)
    return found


def _is_model(path: str) -> bool:
    last = path.rpartition(".")[2].lower()
    return last in ("model", "net", "network", "unet", "backbone") and path.count(".") <= 1


def _is_evaluation(facts: ScriptFacts, function: Function) -> bool:
    calls = list(_iterate_function_calls(facts, function))
    evaluates = any(
        find_method_name(call) == "eval" and not call.args and _is_model(find_receiver(call) or "") for call in calls
    )
    return evaluates and not any(facts.script.scopes[call] is function for call in facts.backwards)


def _iterate_function_calls(facts: ScriptFacts, function: Function) -> Iterator[ast.Call]:
    return facts.script.calls(function)


def _has_autocast(facts: ScriptFacts, function: Function) -> bool:
    """Return whether anything in or on a function speaks of autocast or of a format."""
    words = re.compile(r"autocast|\bamp\b|_amp\b|\bamp_|half|precision|float16|fp16|bf16|suppress|context|ctx")
    return any(words.search(ast.unparse(node)) for node in (*function.body, *function.decorator_list, function.args))


def _is_called_outside(facts: ScriptFacts, function: Function) -> bool:
    """Return whether it is called in this file, and nowhere under autocast."""
    script = facts.script
    calls = [call for call in script.calls() if _is_call_of(facts, call, function)]
    return bool(calls) and not any(facts.autocasts.over(call) for call in calls)


def _is_call_of(facts: ScriptFacts, call: ast.Call, function: Function) -> bool:
    if find_function_definition(facts.script, call.func) is function:
        return True
    owner = facts.script.parents.get(function)
    return isinstance(owner, ast.ClassDef) and format_variable(call.func) == f"self.{function.name}"
