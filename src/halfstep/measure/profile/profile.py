"""The profile: measure where a step's time goes, and end with one cause and one command to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from halfstep.errors import WrongUse
from halfstep.measure.case import Case, LossFunction
from halfstep.measure.conditions import Conditions
from halfstep.measure.profile.causes import choose_cause, find_causes
from halfstep.measure.profile.examined import STAGES, MeasuredFacts, ProfiledCase
from halfstep.measure.profile.facts import ProfileFacts, build_profile_facts
from halfstep.measure.profile.page import Profile
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Measurable, Settings, Subject, resolve_subject
from halfstep.measure.worker_process import CandidateFailed, CandidateProcess
from halfstep.precision.names import AUTO, parse_precision
from halfstep.random_state import preserve_random_state
from halfstep.status_line import OnProgress

_WHOLE = 100


def profile(
    subject: Measurable,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    settings: Settings = (),
    precision: str | None = None,
    seconds: float = 60.0,
    device: str | torch.device | None = None,
    progress: OnProgress | None = None,
) -> Profile:
    """Find out why training is not faster in a lower precision.

    A case or a recipe is measured in a separate process. Ctrl-C returns the results so far.

    Args:
        subject: A model, "module:callable", or a recipe by name or path.
        loss_fn: `loss_fn(model, batch)`, for a model.
        batch: A batch, or a DataLoader that is read as in training, for a model.
        settings: Settings that change the recipe.
        precision: The lower precision.
        seconds: The approximate duration.
        device: The device; by default the best of this machine.
        progress: A callback for the progress.

    Returns:
        The profile: one cause, and the next command.

    Raises:
        WrongUse: The time or the precision is invalid, or the step does not run.
    """
    if not seconds > 0:
        raise WrongUse(f"seconds={seconds}", allowed="a time above 0", do="leave it out, or give it 60")
    if precision is not None:
        parse_precision(precision)  # an unknown name is reported before a process is started for it
    measured = resolve_subject(subject, loss_fn, batch, settings)
    if isinstance(measured, Subject):
        words, own_code = (measured.text, *measured.settings), measured.is_own_code
    else:
        words, own_code = (), True
    skipped: dict[str, str] = {}
    # A model may be built again when it is copied.
    with preserve_random_state(), _open_subject(measured, precision, device) as ask:
        found = _run_stages(ask, precision or AUTO, skipped, seconds, progress)
    asked_on = None if device is None else str(device)
    facts = replace(
        found.facts, subject=words, own_code=own_code, device=asked_on, seconds=seconds, skipped=tuple(skipped)
    )
    cause = choose_cause(facts)
    others = tuple(one for one in find_causes(facts) if one != cause)
    return Profile(facts, cause, others, found.conditions, found.interrupted, skipped)


Ask = Callable[[str, float], MeasuredFacts]


def _run_stages(
    ask: Ask, asked: str, skipped: dict[str, str], seconds: float, progress: OnProgress | None
) -> MeasuredFacts:
    """Run the stages in order, also after one that fails; `skipped` gets those without facts, and why."""
    found = MeasuredFacts(ProfileFacts(asked, format="fp32", kind="other"), Conditions())
    done = 0.0
    left = dict(STAGES)
    try:
        try:
            found = ask("", 0.0)
        except CandidateFailed as error:
            raise _build_not_running_error(error) from None
        # Refused by the device: there is nothing to time.
        left = {} if found.facts.passed_over else left
        # The times of skipped updates mean nothing, so the profile ends.
        while left and not found.facts.idle:
            name = next(iter(left))
            try:
                found = ask(name, seconds * left[name].share)
            except CandidateFailed as error:
                # Nothing can be measured of a case that does not run.
                if name == "warming":
                    raise _build_not_running_error(error) from None
                skipped[name] = str(error)
            done += left.pop(name).share
            if progress is not None:
                progress(round(done * _WHOLE), _WHOLE)
            # A race handles Ctrl-C itself and returns its pairs.
            if found.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        skipped.update(dict.fromkeys(left, "interrupted"))
        return replace(found, interrupted=True)
    return found


def _build_not_running_error(error: CandidateFailed) -> WrongUse:
    return WrongUse(
        str(error), allowed="a model, a loss and a batch with which a step runs", do="run one by itself first"
    )


class _ProfileProcess(CandidateProcess):
    """The same stages in a separate process."""

    module = f"{__package__}.child"

    def __init__(self, subject: Subject, precision: str | None, device: str | None) -> None:
        super().__init__(subject, StepSetting(), device)
        self._begin["precision"] = precision

    def __enter__(self) -> _ProfileProcess:
        return self

    def ask(self, stage: str, seconds: float) -> MeasuredFacts:
        """Run a stage there; the empty name opens the case."""
        found = self._ask({"do": stage, "seconds": seconds} if stage else self._begin)
        return MeasuredFacts(build_profile_facts(found["facts"]), found["conditions"], found["interrupted"])


@contextmanager
def _open_subject(subject: Subject | Case, precision: str | None, device: str | torch.device | None) -> Iterator[Ask]:
    if isinstance(subject, Subject):
        with _ProfileProcess(subject, precision, None if device is None else str(device)) as child:
            yield child.ask
        return
    yield ProfiledCase(subject, precision, device).measure
