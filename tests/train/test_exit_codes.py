"""Ends of a run that had a traceback: each has a code of its own, and says what to type."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from halfstep.data import loader
from halfstep.errors import BadData, BadRecipe, FolderTaken, OutOfMemory, StateMismatch, WorkerLost, WrongUse
from halfstep.journal.listeners import create_listeners
from halfstep.journal.prometheus import Prometheus
from halfstep.out_of_memory import (
    MORE_SHARED,
    MORE_THREADS,
    convert_memory_error,
    convert_worker_error,
    is_out_of_memory,
)
from halfstep.recipe.sources import read_recipe
from halfstep.report.run_charts import compute_moving_mean
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.process_group import resolve_device
from halfstep.train.run_folder import check_run, open_run
from halfstep.train.state import COMPONENTS, check_state_components
from halfstep.train.weights import load_weights

# -- shared memory and threads ----------------------------------------------------------------------------------------

SHARED = RuntimeError(
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  ...\n"
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)\n"
)
BUS = RuntimeError(
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
THREAD = RuntimeError("can't start new thread")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("error", "more"),
    [
        (SHARED, MORE_SHARED),
        (BUS, MORE_SHARED),
        (OSError(errno.ENOSPC, "No space left on device"), MORE_SHARED),
        (THREAD, MORE_THREADS),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), MORE_THREADS),
    ],
)
def test_workers_without_room_say_what_to_raise(error: Exception, more: str) -> None:
    def failing() -> Iterator[Any]:
        raise error
        yield

    with pytest.raises(OutOfMemory) as caught:
        list(loader._replace_worker_errors(failing()))
    assert caught.value.exit_code == 81
    assert more in caught.value.do
    assert "train.num_workers=0" in caught.value.do
    assert caught.value.settings == {"train.num_workers": 0}
    assert "\n" not in caught.value.given


def test_other_errors_of_workers_stay_what_they_are() -> None:
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    files = RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)")
    for error, kind in ((killed, WorkerLost), (files, RuntimeError), (OSError(errno.EIO, "I/O error"), OSError)):

        def failing(error: Exception = error) -> Iterator[Any]:
            raise error
            yield

        with pytest.raises(kind) as caught:
            list(loader._replace_worker_errors(failing()))
        assert not isinstance(caught.value, OutOfMemory)
        assert convert_worker_error(error) is None


@pytest.mark.wording
def test_a_thread_that_cannot_start_anywhere_is_a_lack_of_memory() -> None:
    assert is_out_of_memory(THREAD)
    failed = convert_memory_error(THREAD, "", "a smaller batch")
    assert failed is not None
    assert failed.do == MORE_THREADS


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize(
    "word",
    [
        *("world.timeout=1e308", "world.timeout=1e12", "world.start_timeout=1e300", "data.timeout=1e300"),
        "data.samples=1000000000001",
    ],
)
def test_numbers_without_an_end_are_refused(word: str) -> None:
    with pytest.raises(BadRecipe, match=word.partition("=")[0].replace(".", r"\.")):
        resolve_run_recipe(read_recipe("segmentation_tiny"), [word])


def own_recipe(folder: Path, metrics: object) -> Any:
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump({**read_recipe("segmentation_tiny").raw, "run": {"prometheus": metrics}}))
    return read_recipe(str(file))


@pytest.mark.wording
@pytest.mark.parametrize("path", ["/etc/x.prom", "../x.prom", "a/../../x.prom"])
def test_a_recipe_writes_no_metrics_outside_of_its_run(tmp_path: Path, path: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        resolve_run_recipe(own_recipe(tmp_path, path))
    assert f"run.prometheus={path}" in caught.value.do
    typed = resolve_run_recipe(own_recipe(tmp_path, path), [f"run.prometheus={path}"])
    assert typed.recipe.run.prometheus == path
    assert resolve_run_recipe(own_recipe(tmp_path, "in.prom")).recipe.run.prometheus == "in.prom"


def test_a_metrics_file_of_a_recipe_is_in_the_run_s_folder(tmp_path: Path) -> None:
    for asked, place in (("a.prom", tmp_path / "a.prom"), ("/x/a.prom", Path("/x/a.prom"))):
        every = create_listeners(tmp_path, tracker="none", console=None, prometheus=asked)
        (metrics,) = [one for one in every if isinstance(one, Prometheus)]
        assert metrics._path == place
        for one in every:
            one.close()


@pytest.mark.wording
@pytest.mark.parametrize("name", ["x" * 300, "y/" * 2500])
def test_a_path_that_is_too_long_is_said(tmp_path: Path, name: str) -> None:
    recipe = resolve_run_recipe(read_recipe("segmentation_tiny"), [f"run.dir={tmp_path}/{name}"]).recipe
    for use in (check_run, open_run):
        with pytest.raises(FolderTaken, match="File name too long"):
            use(recipe, "long")
    with pytest.raises(FolderTaken):
        open_run(recipe, "long", accepted=["extend"])
    assert not any(tmp_path.iterdir())


@pytest.mark.wording
def test_a_device_that_computes_nothing_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"train\.device=meta"):
        resolve_device("meta")
    assert resolve_device("cpu").type == "cpu"


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize("partial", [False, True])
def test_weights_of_no_tensor_are_refused(tmp_path: Path, partial: bool) -> None:
    file, model = tmp_path / "empty.safetensors", nn.Linear(2, 2)
    before = model.weight.detach().clone()
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(StateMismatch, match="0 tensors"):
        load_weights(model, file, partial=partial)
    assert torch.equal(model.weight, before)


@pytest.mark.wording
@pytest.mark.parametrize(
    "recipe",
    [{}, {"train": []}, {"train": {"batch_size": 4}}, {"train": {"batch_size": True, "microbatches": 1}}],
)
def test_a_checkpoint_whose_recipe_lacks_what_is_read_is_refused(recipe: dict[str, Any]) -> None:
    plain: dict[str, Any] = {name: {} for name in COMPONENTS}
    good = {"train": {"batch_size": 4, "microbatches": 1}}
    assert check_state_components({**plain, "recipe": good}, "here")["recipe"] == good
    with pytest.raises(BadData, match="here is not the state of a run: its recipe has no"):
        check_state_components({**plain, "recipe": recipe}, "here")


def test_a_curve_of_no_finite_number_is_empty() -> None:
    assert compute_moving_mean([]) == []
    assert compute_moving_mean([1.0]) == [1.0]
