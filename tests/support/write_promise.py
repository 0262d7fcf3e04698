"""The table of docs/step.md, "What a skip restores", as a function of a program; and a program held against it.

Where the page leaves open what happens, or promises less than equality, more is accepted: a tensor that may stay
changed may also be restored.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import Tensor, contiguous_format

from halfstep import Finding, Stepper
from tests.support.write_programs import (
    BACKWARD,
    THROUGH_DATA,
    Action,
    Item,
    Program,
    is_side,
    script_of,
)


class Outcome(Enum):
    """What a bad step may leave of its writes to an item."""

    RESTORED = "restored"
    FIRST_WRITE = "restored, or reported by name in the same step; reported in a good step, too"
    IN_STEP = "restored, or reported by name in the same step"
    UNNOTICED = "restored, or reported by name when its turn to be checked comes"
    LATER = "restored, or reported by the next observed step"
    REBOUND = "reported as rebound"
    OPEN = "not covered"


# -- the promise -------------------------------------------------------------------------------------------------------


def performed(program: Program, item: Item, number: int) -> list[Action]:
    """The writes that run in an attempt: an error ends it, in the loss function or in backward."""
    bad, last = program.attempts[number], program.bad_micro

    def runs(action: Action) -> bool:
        first = action.micro or 0
        if bad == "error":
            return first < last if action.place in BACKWARD else first <= last
        if bad == "error in backward":
            return first < last if action.place == "accumulated hook" else first <= last
        return True

    return [action for action in item.actions if action.active[number] and runs(action)]


def is_known(program: Program, item: Item) -> bool:
    """Whether a module holds the item that halfstep knows: of the model, of the loss function, run, or included."""
    if item.target == "tensor":
        return False
    return item.holder == "model" or (
        is_side(item) and (item.runs or item.holder == "included" or _loss_holds(program, item))
    )


def _loss_holds(program: Program, item: Item) -> bool:
    """Whether the loss function surely holds the item, or the module around it: a variable that it closes over."""
    in_loss = item.reads or any(action.place in ("before forward", "after forward") for action in item.actions)
    return program.form != "context" and item.holder == "closure" and in_loss


def _is_replacing(action: Action) -> bool:
    return action.how in ("set_", ".data =", "resize_", "rebind")


@dataclass
class Coverage:
    """What halfstep has seen of one item's writes in the attempts so far."""

    program: Program
    item: Item
    steps_to_check: int
    in_place: bool = False
    replaced: bool = False
    written: bool = False
    used: bool = False
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        applied = 0
        for number, bad in enumerate(self.program.attempts):
            actions = performed(self.program, self.item, number)
            self.outcomes.append(self.judge(actions, number))
            self.see(actions, number, applied)
            applied += not bad

    def judge(self, actions: list[Action], number: int) -> Outcome:
        item, rebinds = self.item, any(action.how == "rebind" for action in actions)
        if not actions or item.target in ("metric", "meter", "count"):
            return Outcome.RESTORED
        if item.target == "batch":
            return Outcome.OPEN
        if item.is_value or (rebinds and item.target == "attribute"):
            return self.judge_attribute(actions, number)
        if rebinds and item.target == "tensor":
            return self.judge_rebound(actions)
        if rebinds and item.target == "buffer" and not is_known(self.program, item):
            return Outcome.OPEN  # of a module that halfstep does not know
        return self.judge_memory(actions, number)

    def judge_attribute(self, actions: list[Action], number: int) -> Outcome:
        """The table's last row; what is written in place before or after is a row of its own."""
        item = self.item
        if not (item.holder in ("model", "included") or item.runs):
            return Outcome.OPEN
        in_place = [action for action in actions if not (item.is_value or action.how == "rebind")]
        return self.judge_memory(in_place, number) if in_place else Outcome.RESTORED

    def judge_rebound(self, actions: list[Action]) -> Outcome:
        """Rebinding outside of modules. In hooks the loss function need not hold what is rebound."""
        in_loss = any(
            action.how == "rebind" and action.place in ("before forward", "after forward") for action in actions
        )
        named = self.item.holder in ("closure", "global", "object", "slots")
        return Outcome.REBOUND if named and in_loss and self.program.form != "context" else Outcome.OPEN

    def judge_memory(self, actions: list[Action], number: int) -> Outcome:
        """The first four rows of the table."""
        item, known = self.item, is_known(self.program, self.item)
        whole = item.holder == "included" and item.target != "parameter"
        if known and (whole or (item.target not in ("parameter", "trained") and not item.large)):
            return Outcome.RESTORED
        if number == 0 or all(self.replaced if _is_replacing(action) else self.in_place for action in actions):
            return Outcome.RESTORED
        if not known and not self.used:
            return Outcome.LATER
        through_data = any(action.how in THROUGH_DATA for action in actions)
        if through_data and self.steps_to_check > 1:
            return Outcome.UNNOTICED
        uncopied = item.target in ("parameter", "trained") and known and item.holder != "included"
        plain = uncopied and not any(map(_is_replacing, actions))
        return Outcome.FIRST_WRITE if plain and not self.written else Outcome.IN_STEP

    def see(self, actions: list[Action], number: int, applied: int) -> None:
        """
        The first step is observed, and one around update 10: which one exactly is left open. Other steps see what they
        check. Memory that was replaced is other memory: its first write in place is a first write.
        """
        item, outcome = self.item, self.outcomes[-1]
        self.used |= number == 0 and (item.reads or bool(actions))
        if applied >= 12 and all(self.written_at_update(update) for update in range(9, 13)):
            self.used = self.in_place = self.replaced = True
        if not actions:
            return
        self.written = True
        noticed = outcome in (Outcome.RESTORED, Outcome.FIRST_WRITE, Outcome.IN_STEP)
        replaces = any(_is_replacing(action) for action in actions)
        self.replaced |= replaces and noticed
        if item.target == "tensor" and any(action.how == "rebind" for action in actions):  # to another tensor
            self.in_place = self.replaced = self.used = self.written = False
        elif replaces:
            self.in_place = False
        elif noticed:
            self.in_place = True

    def written_at_update(self, update: int) -> bool:
        good = [number for number, bad in enumerate(self.program.attempts) if not bad]
        return len(good) >= update and bool(performed(self.program, self.item, good[update - 1]))


# -- a program held against it -----------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a run with bad steps left: before and after each bad step, the findings after it, and the end."""

    before: dict[int, dict[str, Any]]
    after: dict[int, dict[str, Any]]
    findings: dict[int, list[Finding]]
    end: dict[str, Any]
    steps_to_check: int


def frozen(value: Any) -> Any:
    """A value that compares by bits."""
    if isinstance(value, Tensor):
        # A copy: torch does not resize memory that NumPy has seen.
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().clone(memory_format=contiguous_format).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: frozen(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [frozen(held) for held in value]
    return repr(value)


def trace(program: Program, run: Callable[[bool], Any], with_bad: bool) -> Trace:
    before, after, findings = {}, {}, {}
    steps_to_check, bad_number = 1, None
    for number, stepper, look in run(with_bad):
        if bad_number is not None or number == len(program.attempts) or program.attempts[number]:
            state = state_of(stepper, look)
        if bad_number is not None:
            after[bad_number], findings[bad_number] = state, list(stepper.findings)
        bad_number = number if number < len(program.attempts) and program.attempts[number] else None
        if bad_number is not None:
            before[number] = state
        steps_to_check = max(steps_to_check, getattr(stepper, "steps_to_check", 1))
    findings[len(program.attempts)] = list(stepper.findings)
    return Trace(before, after, findings, state, steps_to_check)


def state_of(stepper: Stepper, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Parameters and buffers of the model, the items, the optimizer's state and the count of updates, by name."""
    state = {**dict(stepper.model.named_parameters()), **dict(stepper.model.named_buffers()), **look()}
    state["the optimizer's state"] = [own["optimizer"] for own in stepper.state_dict()["optimizers"].values()]
    state["the count of updates"] = stepper.counts.applied
    return {name: frozen(value) for name, value in state.items()}


def says(findings: list[Finding], identity: str, *words: str) -> bool:
    """Whether a finding of that kind contains one of the words."""
    texts = [f"{finding.evidence} {finding.fix}" for finding in findings if finding.id == identity]
    return any(word in text for text in texts for word in words)


def words_for(program: Program, item: Item) -> tuple[str, ...]:
    """How a report may name an item: tensors outside of known modules have no path, but a shape."""
    if is_known(program, item):
        return (item.name,)
    resized = any(action.how == "resize_" for action in item.actions)
    return item.name, "a tensor of shape" if resized else str(list(item.shape))


def broken_promises(program: Program) -> list[str]:
    """What a program shows that the page rules out, a sentence each."""
    space: dict[str, Any] = {"__name__": f"write_program_{program.seed}"}
    exec(compile(script_of(program), f"<write program {program.seed}>", "exec"), space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clean, seen = trace(program, space["run"], False), trace(program, space["run"], True)
    assert clean.end["the count of updates"] == repr(program.attempts.count("")), "a good step was skipped"
    coverage = {item.name: Coverage(program, item, seen.steps_to_check) for item in program.items}
    broken: list[str] = []
    moved: set[str] = set()
    for number, before in seen.before.items():
        after, step = seen.after[number], f"step {number} ({program.attempts[number]})"
        stays = {name for name in before if before[name] != after[name]}
        broken += [f"{step}: {name} is not restored" for name in stays - coverage.keys()]
        for name in before.keys() & coverage.keys():
            broken += _broken_by(coverage[name], number, name in stays, seen.findings[number], step)
        moved |= stays
        if any(coverage[name].item.target == "trained" for name in stays & coverage.keys()):
            return broken  # other weights from here on, or NaN: nothing to compare
    different = [name for name in clean.end if name not in moved and clean.end[name] != seen.end[name]]
    broken += [f"{name} ends different from the run without bad steps" for name in different]
    return broken + _broken_reports(program, coverage, seen.findings[len(program.attempts)])


def _broken_by(coverage: Coverage, number: int, stays: bool, findings: list[Finding], step: str) -> list[str]:
    outcome, item = coverage.outcomes[number], coverage.item
    words = words_for(coverage.program, item)
    if outcome is Outcome.RESTORED and stays:
        return [f"{step}: {item.name} is not restored"]
    in_step = outcome in (Outcome.FIRST_WRITE, Outcome.IN_STEP)
    if in_step and stays and not says(findings, "rollback.first_write", *words):
        return [f"{step}: {item.name} stays changed, and no rollback.first_write names it"]
    if outcome is Outcome.REBOUND and "error" not in step and not says(findings, "rollback.rebound", *words):
        return [f"{step}: {item.name} was rebound, and no rollback.rebound names it"]
    return []


def _broken_reports(program: Program, coverage: dict[str, Coverage], findings: list[Finding]) -> list[str]:
    """First writes in good steps are reported too, batches that were written, and nothing else."""
    broken = []
    rows = {
        "rollback.first_write": set(Outcome) - {Outcome.RESTORED, Outcome.REBOUND},
        "rollback.rebound": {Outcome.REBOUND, Outcome.OPEN},
    }
    for item in program.items:
        outcomes, words = coverage[item.name].outcomes, words_for(program, item)
        good = [number for number, bad in enumerate(program.attempts) if not bad]
        first_writes = [number for number in good[:8] if outcomes[number] is Outcome.FIRST_WRITE]
        if first_writes and not says(findings, "rollback.first_write", *words):
            broken.append(
                f"{item.name} was first written in step {first_writes[0]}, and no rollback.first_write names it"
            )
        written = [action for number in good for action in performed(program, item, number) if item.target == "batch"]
        given = program.form != "context"  # where the Stepper gets no batch
        noticeable = given and any(action.how != "x.data.mul_" or action.active[0] for action in written)
        if noticeable and not says(findings, "batch.written", ""):
            broken.append("a batch was written, and no batch.written says so")
        if _seen_late(program, coverage[item.name], good) and not says(findings, "rollback.first_write", *words):
            broken.append(f"{item.name} is written in steps 9 to 12, and no rollback.first_write names it")
        for identity, reasons in rows.items():
            if item.target != "batch" and not reasons & set(outcomes) and says(findings, identity, item.name):
                broken.append(f"{item.name} is named by {identity}, and nothing was lost")
    if not any(item.target == "batch" for item in program.items) and says(findings, "batch.written", ""):
        broken.append("batch.written, and no batch was written")
    return broken


def _seen_late(program: Program, coverage: Coverage, good: list[int]) -> bool:
    """Whether a step that is observed later must see it, after steps that could not."""
    return (
        len(good) >= 12
        and any(coverage.outcomes[number] is Outcome.LATER for number in good[:8])
        and all(coverage.written_at_update(update) for update in range(9, 13))
    )


# -- the smallest program that still shows it --------------------------------------------------------------------------


def smallest(program: Program) -> Program:
    """Leaves out items, writes, options and steps while the same promise stays broken."""
    kind = _kind_of(broken_promises(program)[0])
    found: Program | None = program
    while found:
        program = found
        found = next((less for less in _simpler(program) if kind in map(_kind_of, broken_promises(less))), None)
    return program


def _kind_of(sentence: str) -> str:
    """A broken promise without the step and the item that it names."""
    return re.sub(r"step \d+( \([a-z ]+\))?|held\d+", "", sentence)


def _simpler(program: Program) -> Iterator[Program]:
    for item in program.items:
        yield replace(program, items=tuple(other for other in program.items if other is not item))
        for action in item.actions if len(item.actions) > 1 else ():
            fewer = replace(item, actions=tuple(other for other in item.actions if other is not action))
            yield replace(program, items=tuple(fewer if other is item else other for other in program.items))
    for name, plain in {"precision": '"fp32"', "dropout": False, "batch_norm": False, "wide": False}.items():
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})
    for number in reversed(range(len(program.attempts))):
        if len(program.attempts) > 1:
            yield _without(program, number)


def _without(program: Program, number: int) -> Program:
    def cut(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values[:number] + values[number + 1 :]

    items = tuple(
        replace(item, actions=tuple(replace(action, active=cut(action.active)) for action in item.actions))
        for item in program.items
    )
    return replace(program, attempts=cut(program.attempts), items=items)
