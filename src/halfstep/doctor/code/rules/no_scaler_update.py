"""Find a scaler that steps and is never updated."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import find_enclosing_loop
from halfstep.doctor.code.scalers import ScalerCall
from halfstep.doctor.code.script import format_variable
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for the last step of every scaler of this file that nothing updates."""
    steps = facts.scalers.of("step")
    updated = {_strip_owner(one.scaler) for one in facts.scalers.of("update")}
    for scaler in sorted({one.scaler for one in steps}):
        last = [one for one in steps if one.scaler == scaler][-1]
        if _strip_owner(scaler) in updated or not _is_reused_scaler(facts, last) or _is_given_away(facts, last):
            continue
        patch = facts.script.patch()
        statement = facts.script.statement(last.call)
        patch.insert_after(statement, f"{scaler}.update()") if isinstance(statement, ast.Expr) else patch.spoil()
        yield facts.script.finding(
            "no_scaler_update",
            "error",
            last.call,
            f"`{scaler}.step({last.optimizer})` is never followed by `{scaler}.update()`: the second step raises, or "
            "the scale never changes, and every step after an overflow is skipped",
            f"call `{scaler}.update()` once after the steps of all optimizers",
            patch,
        )


def _is_reused_scaler(facts: ScriptFacts, step: ScalerCall) -> bool:
    """Return whether the scaler is made in this file, and lives longer than this one step."""
    made = facts.scalers.made_as(step.call)
    scopes = [facts.script.scopes[one.call] for one in made]
    return bool(made) and (
        find_enclosing_loop(facts.script, step.call) is not None or facts.script.scopes[step.call] not in scopes
    )


def _is_given_away(facts: ScriptFacts, step: ScalerCall) -> bool:
    """Return whether a scaler is passed on, returned or kept in a container, and may be updated elsewhere."""
    for node in facts.script.each(ast.Name, ast.Attribute):
        if format_variable(node) != step.scaler or not isinstance(node.ctx, ast.Load):
            continue
        parent = facts.script.parents[node]
        if not isinstance(parent, (ast.Attribute, ast.Compare, ast.If, ast.BoolOp, ast.UnaryOp, ast.IfExp)):
            return True
    # Another file may reach an attribute of an object.
    return "." in step.scaler and not step.scaler.startswith("self.")


def _strip_owner(path: str) -> str:
    return path.rpartition(".")[2]
