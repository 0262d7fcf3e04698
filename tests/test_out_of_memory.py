"""Memory that does not suffice: one error for every way in which torch says it, and a line with smaller pieces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import halfstep
from halfstep.cli._commands import CommandGroup
from halfstep.cli._out_of_memory import _build_ledger_table, _choose_setting_changes, _describe_fitting_batch
from halfstep.errors import OUT_OF_MEMORY, BadRecipe, OutOfMemory
from halfstep.journal.jsonl import read_events
from halfstep.measure.case import Case, build_case
from halfstep.measure.memory.devices import device_named
from halfstep.measure.memory.way_out import MemoryRemedy, compute_usable_memory, find_memory_remedy
from halfstep.out_of_memory import convert_memory_error, is_out_of_memory
from halfstep.train.loop import Loop
from halfstep.train.microbatches import adapt_microbatches, choose_smaller_microbatches, describe_divided_microbatches
from tests.support.commands import Command
from tests.support.forked_python import fork_processes
from tests.support.tiny_task import Tiny

RECIPE = """
task: tiny
precision: fp32
train: {epochs: 2, batch_size: 16, num_workers: 0, seed: 5}
run: {pictures: 0}
"""

EMPTY: dict[str, Any] = {"model": {}, "data": {}, "loss": {}}


def too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def caught(do: Any) -> BaseException:
    with pytest.raises(BaseException) as raised:
        do()
    return raised.value


def test_each_way_of_saying_it_is_recognised_and_no_other() -> None:
    assert type(caught(too_much)) is RuntimeError, "torch has a type for it by now: recognize that"
    assert is_out_of_memory(caught(too_much))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    for other in (RuntimeError("shapes do not match"), ValueError(), KeyboardInterrupt()):
        assert not is_out_of_memory(other)
        assert convert_memory_error(other, "", "") is None


def test_what_the_failed_work_held_is_let_go() -> None:
    held: list[Any] = []

    def work() -> None:
        class Large: ...

        large = Large()
        import weakref

        held.append(weakref.ref(large))
        too_much()

    error = caught(work)
    assert held[0]() is not None
    assert convert_memory_error(error, "here", "less") is not None
    assert held[0]() is None


@pytest.mark.parametrize(
    ("batch", "microbatches", "at_most", "wanted"),
    [(8, 1, 4, (4, 2)), (8, 2, 7, (4, 4)), (7, 1, 3, (1, 7)), (6, 1, 5, (3, 2)), (1, 1, 0, (1, 1))],
)
def test_a_step_in_pieces_has_the_same_samples(
    batch: int, microbatches: int, at_most: int, wanted: tuple[int, int]
) -> None:
    found = choose_smaller_microbatches(batch, microbatches, at_most)
    assert tuple(found.values()) == wanted
    assert found["train.batch_size"] * found["train.microbatches"] == batch * microbatches


@pytest.mark.parametrize("batchnorm", [False, True])
def test_a_step_in_pieces_says_what_it_changes(batchnorm: bool) -> None:
    recipe = Tiny.schema.model_validate({"task": "tiny", "train": {"batch_size": 8, "microbatches": 3}, **EMPTY})
    model = torch.nn.BatchNorm2d(3) if batchnorm else torch.nn.GroupNorm(1, 3)
    halves = adapt_microbatches(recipe, 1, 4)
    assert (halves.train.batch_size, halves.train.microbatches) == (2, 12)
    [said] = describe_divided_microbatches(halves, 4, model)
    assert "a step takes the same samples, 2 at a time" in said
    assert ("batch statistics" in said) == batchnorm
    assert describe_divided_microbatches(recipe, 1, model) == []


@pytest.mark.parametrize(
    ("ranks", "parts", "expected"), [(1, 1, (8, 3)), (2, 1, (6, 2)), (3, 1, (8, 1)), (6, 1, (4, 1)), (2, 4, (2, 6))]
)
def test_a_global_batch_is_divided_by_the_ranks_and_by_what_fits(
    ranks: int, parts: int, expected: tuple[int, int]
) -> None:
    train = {"batch_size": 8, "global_batch": 24}
    found = adapt_microbatches(
        Tiny.schema.model_validate({"task": "tiny", "train": train, **EMPTY}), ranks, parts
    ).train
    assert (found.batch_size, found.microbatches) == expected
    assert found.batch_size * found.microbatches * ranks == 24


@pytest.mark.wording
def test_a_global_batch_that_ranks_cannot_share_is_refused() -> None:
    recipe = Tiny.schema.model_validate({"task": "tiny", "train": {"global_batch": 24}, **EMPTY})
    with pytest.raises(BadRecipe, match="24 on 5 ranks") as caught:
        adapt_microbatches(recipe, 5, 1)
    assert caught.value.do == "use 4 ranks, or train.global_batch=25"


class Greedy(Tiny):
    """Takes too much in training after three steps, or in evaluation."""

    where = "train"
    steps = 0

    def loss(self, model: torch.nn.Module, batch: Any, metrics: Any = None) -> Any:
        self.steps += model.training
        if (self.where == "train") == model.training and (self.steps > 3 or not model.training):
            too_much()
        return super().loss(model, batch, metrics)


class GreedyEvaluation(Greedy):
    where = "val"


@pytest.mark.wording
@pytest.mark.parametrize(("task", "word"), [(Greedy, "in a step with"), (GreedyEvaluation, "evaluating")])
def test_a_run_that_does_not_fit_says_what_to_type(tmp_path: Path, task: type[Tiny], word: str) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(OutOfMemory) as raised:
        halfstep.fit(recipe, task=task, settings={"run.dir": str(tmp_path / "run")}, quiet=True)
    error = raised.value
    assert error.exit_code == OUT_OF_MEMORY == 81
    assert f"out of memory {word} micro-batches of 16 samples in fp32" in error.given
    settings = "{'train.batch_size': 8, 'train.microbatches': 2}"
    assert error.do == f"halfstep.fit('{recipe}', settings={settings}, accept_recipe_change=True)"
    end = read_events(tmp_path / "run" / "journal.jsonl")[-1]
    assert (end["event"], end["reason"], end["error"]) == ("end", "out_of_memory", error.given)
    assert "Out of memory after" in (tmp_path / "run" / "train.log").read_text()
    again = halfstep.fit(
        recipe,
        task=Tiny,
        settings={"run.dir": str(tmp_path / "run"), "train.batch_size": 8, "train.microbatches": 2},
        accept_recipe_change=True,
        quiet=True,
    )
    assert again.reason == "finished"


@pytest.mark.wording
def test_any_command_ends_with_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    app = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False)
    app.callback()(lambda debug=False: None)
    app.command("greedy")(too_much)
    with pytest.raises(SystemExit) as ended:
        app(["greedy"])
    assert ended.value.code == 81
    assert "out of memory: RuntimeError" in capsys.readouterr().err


def case() -> Case:
    model = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(8)))
    return build_case(model, lambda model, batch: model(batch).square().mean(), torch.randn(32, 3, 32, 32))


@pytest.mark.parametrize("share", [0.0, 0.4, 2.0])
def test_the_largest_batch_that_fits_is_found_by_ledgers(share: float) -> None:
    here = device_named("here")
    whole = find_memory_remedy(case, "fp32", 32, here, 2**40)
    assert whole.batch > 32
    assert whole.peak == sum(whole.at_peak.values()) > 2**20
    found = find_memory_remedy(case, "fp32", 32, here, int(whole.peak * share))
    assert (found.batch == 0, found.batch >= 32) == (share == 0.0, share > 1.0)
    if share == 0.4:
        assert 8 <= found.batch <= 14, "activations are nearly all of it"


def test_what_is_within_reach_is_no_more_than_there_is() -> None:
    here = device_named("here")
    assert 0 < compute_usable_memory(here) <= here.usable


AT_PEAK = {"weights": 100, "activations": 2**30, "batch": 0}


@pytest.mark.parametrize(
    ("found", "said", "sizes"),
    [
        (
            {"batch": 5, "recomputed": 0},
            "largest batch that fits is 5",
            {"train.batch_size": 4, "train.microbatches": 4},
        ),
        ({"batch": 90, "recomputed": 0}, "90 fits, but 8 did not", {"train.batch_size": 4, "train.microbatches": 4}),
        (
            {"batch": 0, "recomputed": 1},
            "except with activation checkpointing",
            {"train.batch_size": 1, "train.microbatches": 16, "train.checkpoint_activations": "true"},
        ),
        ({"batch": 0, "recomputed": 0}, "not even one", {}),
    ],
)
def test_the_line_to_type_has_what_fits(found: dict[str, int], said: str, sizes: dict[str, Any]) -> None:
    failed = OutOfMemory("out of memory")
    failed.batch, failed.microbatches = 8, 2
    everything = MemoryRemedy(AT_PEAK, "the update", 2**29, **found)
    assert said in _describe_fitting_batch(failed, everything)
    assert _choose_setting_changes(failed, everything) == sizes
    parts = [part for part, _ in _build_ledger_table(everything).rows]
    assert "activations" in parts
    assert "batch" not in parts


def with_little_memory() -> None:
    """Let the steps of a run have 200 MB; the estimate is made in a process that has more, as after a run's end."""
    import resource

    fork_processes()

    steps = Loop.steps

    def limited(loop: Loop) -> Any:
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 200 * 2**20, before[1]))
        try:
            yield from steps(loop)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    Loop.steps = limited  # type: ignore[method-assign]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.slow
@pytest.mark.wording
def test_the_command_ends_with_the_ledger_and_the_line_to_type(tmp_path: Path) -> None:
    words = ["segmentation_tiny", "--fp32", "--size", "64", "--crop", "64", "--width", "32", "--samples", "120"]
    more = ("--batch_size", "80", f"run.dir={tmp_path / 'run'}")
    command = Command("train", *words, *more, environment={"COLUMNS": "80"}, before=with_little_memory)
    code, _, err = command.ended()
    assert code == 81, err
    assert "out of memory in a step with micro-batches of 80 samples in fp32" in err
    assert "by the estimate, at its peak" in err
    last = err.strip().splitlines()[-1].split()
    assert last[:4] == ["do:", "halfstep", "train", "segmentation_tiny"]
    assert last[-3:] == ["train.batch_size=40", "train.microbatches=2", "--accept-recipe-change"]
    assert "--batch_size" not in last
