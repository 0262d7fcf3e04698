"""An unfinished run taken up again, through the whole of `fit`: what was accepted is used, what was measured stays."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfstep
from faults.refit import refit
from halfstep.checkpoint import reading
from halfstep.checkpoint.paths import list_generations
from halfstep.checkpoint.reading import read_rank_state
from halfstep.errors import NoCheckpoint, StateMismatch, Stopped, StorageFailed
from halfstep.journal.jsonl import read_events
from halfstep.train import loaders, resume, setup
from halfstep.train.run import Run
from tests.support.digest import digest_of
from tests.support.tiny_task import Data, Model, Points, Tiny
from tests.train.test_loop import RECIPE, events

STOP = 6


class Stopping(Tiny):
    """Is asked to stop in the middle of its second epoch."""

    batches = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.batches += 1
        # Four steps and one batch of evaluation make an epoch.
        if self.batches == STOP + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


def fit(folder: Path, task: Any = Tiny, accept: bool = False, **settings: Any) -> Run:
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE)
    changed = {"run.dir": str(folder / "run"), **{key.replace("__", "."): value for key, value in settings.items()}}
    return halfstep.fit(recipe, task=task, settings=changed, quiet=True, accept_recipe_change=accept)


def stopped(folder: Path, task: Any = Stopping, **settings: Any) -> int:
    """The step at which a run was stopped."""
    with pytest.raises(Stopped) as caught:
        fit(folder, task, **settings)
    assert caught.value.exit_code == 75
    return len(events(folder / "run", "step"))


@pytest.mark.wording
def test_a_global_batch_of_as_many_samples_is_no_other_recipe(tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.raises(StateMismatch, match=r"train\.global_batch: null -> 32"):
        fit(tmp_path, train__global_batch=32)
    fit(tmp_path, train__global_batch=16, train__batch_size=8)
    again = events(tmp_path / "run", "start")[-1]
    assert again["batch"] == {"per_device": 8, "devices": 1, "microbatches": 2, "total": 16}
    assert again["resumed"]["reasons"] == ["a micro-batch had 16 samples, and has 8"]
    assert [event["attempt"] for event in events(tmp_path / "run", "step")] == list(range(1, 17))


class Failing(Tiny):
    """Fails in its third epoch, long after a checkpoint."""

    batches = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.batches += 1
        if self.batches == 14:
            raise ZeroDivisionError
        return super().loss(model, batch)


def test_a_journal_in_many_files_is_cut_back_to_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.runs.fit.MEGABYTE", 500)
    settings = {"run__journal_mb": 1, "run__prometheus": True, "checkpoint__background": False}
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, Failing, **settings)
    at_the_checkpoint = read_rank_state(list_generations(tmp_path / "run" / "checkpoints")[0], 0)[0]["position"][
        "journal_sizes"
    ]
    newest = max(path.name for path in (tmp_path / "run").glob("journal.0*.jsonl"))
    assert at_the_checkpoint["journal.jsonl"] < int(newest.split(".")[1]), "the cut is in an earlier file"
    fit(tmp_path, **settings)
    assert [event["attempt"] for event in events(tmp_path / "run", "step")] == list(range(1, 17))
    assert [event["resumed"] is None for event in events(tmp_path / "run", "start")] == [True, False]
    written = read_events(tmp_path / "run" / "journal.jsonl")
    assert [event["time"] for event in written] == sorted(event["time"] for event in written)
    metrics = (tmp_path / "run" / "metrics.prom").read_text()
    for line in ("halfstep_running{", "halfstep_step{", "halfstep_last_save_attempt{"):
        [found] = [one for one in metrics.splitlines() if one.startswith(line)]
        assert found.endswith(" 0" if "running" in line else " 16")


def rates(folder: Path) -> list[float]:
    return [event["lr"] for event in events(folder / "run", "step")]


@pytest.mark.wording
def test_a_new_rate_and_a_longer_run_are_used_from_the_next_step_on(tmp_path: Path) -> None:
    at = stopped(tmp_path, schedule__name="cosine")
    with pytest.raises(StateMismatch, match=r"optimizer\.lr: 0\.05 -> 0\.01"):
        fit(tmp_path, schedule__name="cosine", optimizer__lr=0.01)
    run = fit(tmp_path, schedule__name="cosine", optimizer__lr=0.01, train__epochs=8, accept=True)
    assert run.steps == 32
    expected = [0.01 * 0.5 * (1 + np.cos(np.pi * step / 32)) for step in range(at, 32)]
    assert rates(tmp_path)[at:] == pytest.approx(expected)
    told = events(tmp_path / "run", "start")[-1]["resumed"]
    assert not told["exact"]
    assert {line.split(":")[0] for line in told["changed"]} == {"optimizer.lr", "train.epochs"}
    assert told["accepted"] == ["recipe"]


@pytest.mark.wording
def test_a_new_precision_is_used_and_not_the_one_that_was_measured(tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.raises(StateMismatch, match="precision: fp32 -> bf16"):
        fit(tmp_path, precision="bf16")
    run = fit(tmp_path, precision="bf16", accept=True)
    assert run.precision == "bf16"
    assert events(tmp_path / "run", "precision_check")[-1]["expected"] == "bf16"


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*given: Any, **more: Any) -> Any:
        raise AssertionError("measured again")

    stopped(tmp_path, train__num_workers="auto", precision="auto")
    chosen = events(tmp_path / "run", "start")[0]["precision"]["chosen"]
    asked: list[Any] = []
    real = setup.choose_precision
    monkeypatch.setattr(loaders, "choose_workers", other)
    monkeypatch.setattr(setup, "choose_precision", lambda name, **more: asked.append(name) or real(name, **more))
    run = fit(tmp_path, train__num_workers="auto", precision="auto")
    assert asked == [chosen] == [run.precision]


@pytest.mark.wording
def test_a_checkpoint_of_another_recipe_is_refused_though_the_folder_has_this_one(tmp_path: Path) -> None:
    stopped(tmp_path)
    refit(tmp_path / "run", lambda state: state["recipe"]["optimizer"].update(lr=0.5))
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    with pytest.raises(StateMismatch, match=r"the checkpoint .*\n.*optimizer\.lr: 0\.5 -> 0\.05"):
        fit(tmp_path)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before, "a refusal changes nothing"


class Where(Data):
    path: str = ""
    """A file of numbers."""


class Numbers(Points):
    """Points from a file."""

    def __init__(self, path: str, samples: int) -> None:
        super().__init__(samples, 1, [])
        self.path = path
        self.x = torch.from_numpy(np.load(path))


class Filed(Numbers):
    def files_of(self, index: int) -> Any:
        return [("numbers", self.path)]


class FromFile(Tiny):
    schema = halfstep.recipe.schema.Recipe[Model, Where, halfstep.recipe.schema.LossOptions]
    source_class: Any = Numbers

    def source(self, split: Any) -> Any:
        return self.source_class(self.recipe.data.path, 64)


class FromNamedFile(FromFile):
    source_class = Filed


def _stopping(kind: type[Tiny]) -> type[Tiny]:
    return type("Stopped", (Stopping, kind), {})


@pytest.mark.wording
def test_data_that_was_moved_is_the_same_where_its_files_are_known(tmp_path: Path) -> None:
    one, other = tmp_path / "one.npy", tmp_path / "other.npy"
    np.save(one, Points(64, 1, []).x.numpy())
    stopped(tmp_path, _stopping(FromNamedFile), data__path=str(one), train__epochs=20)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    one.rename(other)
    assert fit(tmp_path, FromNamedFile, data__path=str(other), train__epochs=20).steps == 80
    assert events(tmp_path / "run", "start")[-1]["resumed"]["exact"]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "kept").rename(tmp_path / "run")
    np.save(other, Points(64, 2, []).x.numpy())
    with pytest.raises(StateMismatch, match="numbers"):
        fit(tmp_path, FromNamedFile, data__path=str(other), train__epochs=20)


@pytest.mark.wording
def test_data_whose_files_nobody_names_must_stay_where_it_is(tmp_path: Path) -> None:
    """Nothing else would be noticed of it."""
    one, other = tmp_path / "one.npy", tmp_path / "other.npy"
    for seed, path in enumerate((one, other)):
        np.save(path, Points(64, seed, []).x.numpy())
    stopped(tmp_path, _stopping(FromFile), data__path=str(one))
    with pytest.raises(StateMismatch, match=r"data\.path"):
        fit(tmp_path, FromFile, data__path=str(other))


@pytest.mark.parametrize("accept", [False, True])
def test_accepting_what_has_not_changed_changes_no_bit(accept: bool, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    settings = {"schedule.name": "plateau", "schedule.patience": 0, "train.ema": 0.9}
    fit(tmp_path / "whole", **settings)
    stopped(tmp_path, **settings)
    fit(tmp_path, accept=accept, **settings)
    assert events(tmp_path / "run", "start")[-1]["resumed"]["exact"]
    one, other = (
        [(event["loss"].hex(), event["lr"]) for event in events(folder / "run", "step")]
        for folder in (tmp_path, tmp_path / "whole")
    )
    assert digest_of(one) == digest_of(other)


# -- a folder that is not as the run left it --------------------------------------------------------------------------


def test_a_damaged_journal_does_not_hold_up_a_run(tmp_path: Path) -> None:
    stopped(tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    whole, chance = journal.read_bytes(), random.Random(0)
    assert resume._was_saved(tmp_path / "run")
    for _ in range(400):
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        journal.write_bytes(flipped)
        resume._read_last_attempt(tmp_path / "run")
        resume._was_saved(tmp_path / "run")
    lines = [{"event": "step"}, {"event": "step", "attempt": "7"}, {"event": "step", "attempt": True}]
    lines += [{"event": "start", "resumed": "yes"}, {"event": "step", "attempt": 3}]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resume._read_last_attempt(tmp_path / "run") == 3
    assert not resume._was_saved(tmp_path / "run")


@pytest.mark.wording
def test_a_run_with_a_journal_of_an_older_form_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    stopped(tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    older = journal.read_text().replace('"format":3,', "").replace('"repeated_samples"', '"repeats"')
    journal.write_text(older)
    with pytest.raises(StateMismatch, match="written in form 1 by an earlier halfstep"):
        fit(tmp_path)
    assert journal.read_text() == older


def test_steps_that_are_done_again_are_counted_from_the_end_of_the_journal(tmp_path: Path) -> None:
    at, run = stopped(tmp_path), tmp_path / "run"
    size = (run / "journal.jsonl").stat().st_size
    assert resume._read_last_attempt(run) == at
    assert resume._read_last_attempt(run, size) == resume._read_last_attempt(run, 2**80) == 0
    with (run / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({"event": "step", "attempt": at + more}) + "\n" for more in (1, 2, 3))
    fit(tmp_path)
    assert events(run, "start")[-1]["resumed"]["repeated_steps"] == 3


PASSING = ("EMFILE", "ENOMEM", "EIO", "EACCES", "ESTALE")
PLACES = ("MANIFEST.json", "rank-00000.safetensors", "checkpoints")
# Every code in one place, and every place with one code; the others take half a minute.
UNREADABLE = [
    pytest.param(name, code, marks=() if name == PLACES[0] or code == "EIO" else pytest.mark.full)
    for name in PLACES
    for code in PASSING
]


@pytest.mark.wording
@pytest.mark.parametrize(("name", "code"), UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(
    code: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path)
    before, real = sorted((tmp_path / "run" / "checkpoints").iterdir()), os.open
    failure = OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    def failing(path: Any, *given: Any, **more: Any) -> int:
        if str(path).endswith(name):
            raise failure
        return real(path, *given, **more)

    def unlisted(folder: Path) -> Any:
        raise failure

    with monkeypatch.context() as patch:
        if name == "checkpoints":
            patch.setattr(reading, "list_generations", unlisted)
        else:
            patch.setattr(os, "open", failing)
        with pytest.raises(StorageFailed, match=f"cannot be read now: .*{failure.strerror}"):
            resume.find_checkpoint(tmp_path / "run")
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before
    assert fit(tmp_path).steps == 16


def test_a_damaged_checkpoint_is_passed_over_where_it_cannot_be_set_aside(tmp_path: Path) -> None:
    stopped(tmp_path, checkpoint__every_steps=2)
    place = tmp_path / "run" / "checkpoints"
    newest = max(place.iterdir(), key=lambda path: path.name)
    (newest / "rank-00000.json").unlink()
    taken = newest.with_name(newest.name + ".bad")
    taken.mkdir()
    (taken / "kept").touch()
    assert fit(tmp_path, checkpoint__every_steps=2).steps == 16
    assert events(tmp_path / "run", "start")[-1]["resumed"]["rejected_checkpoints"]
    assert (taken / "kept").exists()


def test_drafts_of_a_killed_run_are_removed_and_nothing_else(tmp_path: Path) -> None:
    stopped(tmp_path)
    run = tmp_path / "run"
    (run / "pictures").mkdir(exist_ok=True)
    drafts = [".best.safetensors.20320", ".last-ema.safetensors.1", ".last.safetensors.7", ".recipe.yaml.4242"]
    drafts += [".result.json.3", ".task.json.3", ".status.rank-00001.json.9", ".curves.svg.5"]
    drafts += ["pictures/.epoch-0001.png.77", ".result.json.1.0123456789abcdef"]
    others = [".mine.safetensors.1", ".best.safetensors.old", "best.safetensors.1", "pictures/epoch-0001.png"]
    others += [".result.json.1.0123"]
    for name in (*drafts, *others):
        (run / name).touch()
    (run / ".last.safetensors.8").mkdir()  # which cannot be removed like a file
    fit(tmp_path)
    assert [name for name in (*drafts, *others) if (run / name).exists()] == others


@pytest.mark.wording
def test_a_run_whose_checkpoints_and_journal_are_gone_is_not_begun_anew_in_silence(tmp_path: Path) -> None:
    stopped(tmp_path)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints")
    (run / "journal.jsonl").rename(run / "elsewhere")
    assert (run / "last.safetensors").exists()
    with pytest.raises(NoCheckpoint, match=r"no journal\.jsonl, although last\.safetensors exists"):
        fit(tmp_path)
    # With a journal that tells of none, the weights are older than the first checkpoint.
    (run / "journal.jsonl").touch()
    assert fit(tmp_path).steps == 16
