"""One recipe, or a person's own case, in several precisions over the same seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.errors import FolderTaken, WrongUse
from halfstep.measure.bench import case_runs
from halfstep.measure.bench.case_runs import CaseArm, race_of
from halfstep.measure.bench.comparing import compare
from halfstep.measure.bench.memory import MemoryOf
from halfstep.measure.bench.recipe_runs import Patience, RecipeArm
from halfstep.measure.bench.report import Bench
from halfstep.measure.bench.results import Metric
from halfstep.measure.case import Subject
from halfstep.measure.conditions import conditions
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Progress
from halfstep.precision.names import read_precision

BASELINE = "fp32"
"""Strict: nothing of it is computed in fewer bits."""
_SAME = ("device", "place", "driver", "halfstep", "torch", "python", "threads", "cores")
"""Of the conditions, those under which a finished run may stand for another one."""
_OURS = ("train.seed", "run.dir")


def bench(
    subject: str | Subject,
    *,
    precisions: Sequence[str] = (BASELINE, "bf16"),
    seeds: int = 3,
    settings: Sequence[str] = (),
    arms: Mapping[str, Sequence[str]] | None = None,
    folder: Path | None = None,
    price_per_hour: float | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Train a RECIPE, or step a case, in each precision with each seed, beside strict fp32.

    `arms` are settings by name, for what else than the precision should differ; fp32 without more settings is always
    the first arm. Runs lie in `folder`, and those that are finished there are not done again; without one they are
    gone afterwards. Ctrl-C ends it with what there is.
    """
    given = subject if isinstance(subject, Subject) else Subject(subject, tuple(settings))
    changes = _arms(precisions, arms)
    _check(seeds, price_per_hour)
    told: dict[str, Any] = {
        "name": given.text,
        "settings": given.settings,
        "seeds": range(1, seeds + 1),
        "conditions": conditions(),
        "price_per_hour": price_per_hour,
        "progress": progress,
    }
    if given.is_own_code:
        return _of_case(given, changes, arms, told)
    if folder is not None:
        return _of_recipe(given, changes, folder.absolute(), told)
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as place:
        return _of_recipe(given, changes, Path(place), told)


def _arms(precisions: Sequence[str], arms: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Settings by the name of the arm, fp32's first."""
    found = {BASELINE: (f"precision={BASELINE}",)}
    if arms is not None:
        return {**found, **{name: tuple(changed) for name, changed in arms.items()}}
    names = [read_precision(word).name for word in precisions]
    return {**found, **{name: (f"precision={name}",) for name in names}}


def _check(seeds: int, price_per_hour: float | None) -> None:
    if seeds < 1:
        raise WrongUse(f"{seeds} seeds", allowed="1 or more; 3 or more for a verdict on accuracy", do="--seeds 3")
    if price_per_hour is not None and not 0.0 <= price_per_hour < float("inf"):
        raise WrongUse(f"a price of {price_per_hour} an hour", allowed="0 or more", do="--price-per-hour 2.5")


def _of_case(
    subject: Subject, changes: Mapping[str, object], arms: Mapping[str, Sequence[str]] | None, told: dict[str, Any]
) -> Bench:
    if arms is not None:
        raise WrongUse(
            f"arms with settings for the case {subject.text}",
            allowed="settings change a RECIPE; the arms of a case are precisions",
            do="give precisions=(...), or a recipe",
        )
    subject.open()  # wrong words are found before anything is measured
    found = {name: CaseArm(subject, Setting(name)) for name in changes}
    return compare(
        found,
        metric=case_runs.METRIC,
        memories={name: MemoryOf(arm.subject, arm.setting) for name, arm in found.items()},
        race=partial(race_of, found),
        **told,
    )


def _of_recipe(subject: Subject, changes: Mapping[str, tuple[str, ...]], folder: Path, told: dict[str, Any]) -> Bench:
    from halfstep.tasks._folder import task_class

    recipes = {name: _recipe(subject, changed) for name, changed in changes.items()}
    task = task_class(recipes[BASELINE].task)(recipes[BASELINE])  # what it is judged by may depend on its data
    same = {key: told["conditions"][key] for key in _SAME}
    patience = Patience()
    runs, memories = {}, {}
    for name, changed in changes.items():
        words = (*subject.settings, *changed)
        identity = {"recipe": recipes[name].model_dump(mode="json"), **same}
        runs[name] = RecipeArm(subject.text, words, folder, name, identity, patience)
        memories[name] = MemoryOf(Subject(subject.text, words), None, runs[name].beside("memory"), identity)
    _check_kept(runs.values(), told["seeds"], folder)
    return compare(runs, metric=Metric(task.metric, task.higher_is_better), memories=memories, **told)


def _check_kept(arms: Iterable[RecipeArm], seeds: Sequence[int], folder: Path) -> None:
    """What another bench has found out is not overwritten."""
    taken = next((found for arm in arms if (found := arm.others(seeds))), None)
    if taken is not None:
        raise FolderTaken(
            f"{folder}, which has runs of another recipe, setting, device or version ({taken.name})",
            allowed="a folder for each bench; the same command goes on in its own",
            do="--out NEW",
        )


def _recipe(subject: Subject, changed: tuple[str, ...]) -> Any:
    """The complete recipe of an arm, but for what differs from seed to seed."""
    from halfstep.tasks._folder import task_schema
    from halfstep.tasks._resolving import resolved_recipe
    from halfstep.train.recipe.overrides import read_flags
    from halfstep.train.recipe.sources import read_recipe
    from halfstep.train.recipe.words import PRECISION_WORDS

    found = read_recipe(subject.text)
    schema = task_schema(str(found.raw.get("task")))
    for key, _ in read_flags(list(subject.settings), schema):
        if key in _OURS or key in PRECISION_WORDS or key == "precision":
            raise WrongUse(
                f"{key} among the settings of a bench",
                allowed="precisions by --precisions, seeds by --seeds, a folder by --out; any other setting as it is",
                do=f"leave out {key}",
            )
    return resolved_recipe(found, [*subject.settings, *changed, "train.seed=0", "run.dir=bench"]).recipe
