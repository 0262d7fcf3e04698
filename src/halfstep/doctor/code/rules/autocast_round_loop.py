"""Find autocast around a whole training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.doctor.code.autocasts import Autocast
from halfstep.doctor.code.facts import ScriptFacts
from halfstep.doctor.code.order import LOOPS, is_earlier_node, iterate_ancestors
from halfstep.doctor.code.patch import Patch
from halfstep.doctor.located import LocatedFinding


def look(facts: ScriptFacts) -> Iterator[LocatedFinding]:
    """Yield a finding for every autocast that stays open while a loop in it updates weights."""
    for autocast in facts.autocasts.on:
        loop = find_updating_loop(facts, autocast) if autocast.cached else None
        if loop is None:
            continue
        yield facts.script.finding(
            "autocast_round_loop",
            "error",
            autocast.call,
            f"autocast encloses the training loop of line {loop.lineno} and caches its 16-bit copies of the weights "
            "until its context ends: every step computes with the initial weights",
            "open autocast inside the loop, around the forward pass and the loss only",
            _move_autocast_inside(facts, autocast, loop),
        )


def find_updating_loop(facts: ScriptFacts, autocast: Autocast) -> ast.For | ast.AsyncFor | ast.While | None:
    """Return the loop inside an autocast in which an optimizer steps after a backward pass."""
    script = facts.script
    scaled = [one.call for one in facts.scalers.of("step")]
    for step in [*scaled, *(call for _, call in facts.optimizer_steps)]:
        inside = [one for one in iterate_ancestors(script, step) if isinstance(one, (*LOOPS, ast.With, ast.AsyncWith))]
        for loop in inside:
            is_inside = isinstance(loop, LOOPS) and facts.autocasts.around(loop) is autocast
            has_backward = is_inside and any(loop in iterate_ancestors(script, call) for call in facts.backwards)
            if has_backward and facts.autocasts.around(step) is autocast:
                assert isinstance(loop, LOOPS)
                return loop
    return None


def _move_autocast_inside(facts: ScriptFacts, autocast: Autocast, loop: ast.For | ast.AsyncFor | ast.While) -> Patch:
    """Return the patch for a loop that is alone in its autocast: the forward pass stays inside, the rest moves out."""
    script, patch = facts.script, facts.script.patch()
    outer = script.parents[loop]
    backward = next((call for call in facts.backwards if loop in iterate_ancestors(script, call)), None)
    at = script.statement(backward) if backward is not None else None
    is_plain = isinstance(outer, ast.With) and outer.body == [loop] and len(outer.items) == 1 and not loop.orelse
    if not is_plain or at not in loop.body or at is loop.body[0] or not isinstance(outer, ast.With):
        patch.spoil()
        return patch
    one_line = outer.lineno == outer.items[0].context_expr.end_lineno and loop.body[0].lineno == loop.lineno + 1
    if not one_line or outer.items[0].optional_vars is not None or loop.lineno != outer.lineno + 1:
        patch.spoil()
    inner, margin = patch.indent(loop), patch.indent(outer)
    patch.line(outer.lineno, margin + script.lines[loop.lineno - 1].strip())
    patch.line(loop.lineno, inner + script.lines[outer.lineno - 1].strip())
    for statement in loop.body:
        if not is_earlier_node(statement, at):
            patch.reindent(statement, inner)
    return patch
