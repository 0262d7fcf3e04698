"""A failed step on the disk: what is read is what was written, to the bit, and whatever else is there is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep import Stepper, distributed
from halfstep.checkpoint.commit import NotCommitted
from halfstep.checkpoint.paths import CheckpointDir, Disk
from halfstep.checkpoint.sealed import MANIFEST, add_seal, name_state_file, name_tensors_file
from halfstep.errors import BadData, HalfstepError, StateMismatch, Unsafe
from halfstep.guard.failed_steps.reading import (
    list_failed_steps,
    load_attempt,
    load_recorded_model,
    read_failed_step,
    refuse_earlier_format,
    resolve_run_folder,
)
from halfstep.guard.failed_steps.writing import build_step_recorder, write_failed_step
from halfstep.guard.verdict import Cause, Culprit, FailedStep, ProposedRemedy, StepHistory, Verdict
from halfstep.precision.island import find_islands
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment.rerun import ReplayConfig, rerun_step
from halfstep.step.report import StepReport
from halfstep.step.step_inputs import StepInputs
from halfstep.step.window import Window
from tests.support.ranks import Ranks
from tests.support.room import files_of_at_most

CPU = torch.device("cpu")
RECORD = name_state_file(0)


class Net(nn.Module):
    """Dropout, statistics, and a buffer that is not saved with the weights."""

    grown: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.register_buffer("grown", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.b(F.dropout(self.norm(self.a(x)), 0.5, self.training))
        return hidden


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def bad_batch(seed: int = 0) -> Window:
    draw = torch.Generator().manual_seed(seed)
    batches = [{"x": torch.randn(6, 4, generator=draw), "y": torch.randn(6, 1, generator=draw)} for _ in range(2)]
    batches[1]["x"][2, 1] = math.nan
    return Window(batches)


def verdict_of(cause: Cause = "data") -> Verdict:
    culprit = Culprit("", "", False, None, "fp32", ("nan",), 3.5, None, math.inf, "the batch")
    return Verdict(
        cause, f"{cause}: it holds nan", culprit, ("one line",), (ProposedRemedy("skip", "leave it out", None),)
    )


def troubled(batch: Any = None, model: Net | None = None) -> tuple[Net, FailedStep]:
    """A model, and a step of it that was skipped."""
    torch.manual_seed(3)
    model = model or Net()
    model.grown = torch.arange(5.0)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32", observe=False)
    stepper.step(loss_fn, {"x": torch.randn(6, 4), "y": torch.randn(6, 1)})
    report = stepper.step(loss_fn, bad_batch() if batch is None else batch)
    assert not report.applied
    assert stepper.attempt is not None
    history = StepHistory((1.5, 0.25), (2.0, 1.0), (0.1, 0.1))
    return model, FailedStep(stepper.attempt, report, "fp32", (), history, verdict_of())


def kept(folder: Path, model: nn.Module, trouble: FailedStep, **more: Any) -> CheckpointDir:
    return write_failed_step(folder, trouble, model, party=distributed.RankGroup(), **more)


def without_tensors(place: CheckpointDir) -> bool:
    """Whether no file of the step holds a tensor, and none of its ranks its inputs."""
    files = sorted(place.path.glob("rank-*"))
    inputs = [json.loads(file.read_text())["inputs"] for file in files if file.suffix == ".json"]
    return inputs == [None] * len(inputs) and not any(map(load_file, files[1::2]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("task: none\n")
    return tmp_path


# -- the same again ---------------------------------------------------------------------------------------------------


def test_the_step_comes_back_to_the_bit(run: Path) -> None:
    model, trouble = troubled()
    before = rerun_step(model, trouble.attempt, ReplayConfig(resolve_precision_name("fp32")))
    again = rerun_step(model, trouble.attempt._replace(microbatches=trouble.attempt.microbatches[:1]), before.config)
    record = read_failed_step(kept(run, model, trouble))
    recorded = record.step
    assert (recorded.verdict, recorded.history, recorded.precision) == (trouble.verdict, trouble.history, "fp32")
    assert recorded.report._replace(loss=0.0, grad_norm=0.0, parts={}) == trouble.report._replace(
        loss=0.0, grad_norm=0.0, parts={}
    )
    assert math.isnan(recorded.report.loss)
    assert math.isnan(recorded.report.parts["loss"].grad_norm)

    torch.manual_seed(99)
    other = Net()
    load_recorded_model(record, other)
    for (name, own), found in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(own, found), name
    assert torch.equal(other.grown, torch.arange(5.0))
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)  # type: ignore[arg-type]
    attempt = load_attempt(record, 0, loss_fn, CPU)
    assert type(attempt.microbatches) is Window
    assert attempt.factors == trouble.attempt.factors
    assert torch.equal(attempt.microbatches[1]["x"].isnan(), bad_batch()[1]["x"].isnan())
    assert not rerun_step(other, attempt, before.config).finite
    half = rerun_step(other, attempt._replace(microbatches=attempt.microbatches[:1]), before.config)
    assert (half.loss, half.finite) == (again.loss, True), "dropout drew the same numbers"


def test_formats_layouts_and_islands_come_back(run: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    model, trouble = troubled()
    model.a.weight.requires_grad_(False)
    model.a.weight.data = model.a.weight.data.to(resolve_precision_name("bf16").computes.dtype)
    rest = {"n": 3, "f": math.inf, "a": {1: (), "1": None}}
    attempt = trouble.attempt._replace(microbatches=Window([(image, [torch.tensor([True])], rest)]))
    record = read_failed_step(
        kept(run, model, FailedStep(attempt, trouble.report, "fp16", ("norm",), StepHistory(), verdict_of()))
    )
    other = Net()
    load_recorded_model(record, other)
    assert other.a.weight.dtype == model.a.weight.dtype
    assert torch.equal(other.a.weight, model.a.weight)
    assert list(find_islands(other)) == ["norm"]
    ((found, (flag,), others),) = load_attempt(record, 0, loss_fn, CPU).microbatches
    assert found.stride() == image.stride()
    assert torch.equal(found, image)
    assert (flag.dtype, others) == (torch.bool, rest)
    assert list(others) == list(rest), "in their order"


def test_a_batch_that_was_written_to_is_said_to_be(run: Path) -> None:
    model, trouble = troubled()
    trouble.attempt.microbatches[0]["x"].zero_()
    assert read_failed_step(kept(run, model, trouble)).step.batch_changed


# -- what cannot be kept ----------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_batch_of_other_things_is_recorded_without(run: Path) -> None:
    model, trouble = troubled()
    odd = trouble.attempt._replace(microbatches=[{"x": object()}])
    place = kept(run, model, FailedStep(odd, trouble.report, "fp32", (), StepHistory(), verdict_of()))
    assert without_tensors(place)
    record = read_failed_step(place).step
    assert "contains a object" in record.without
    assert record.verdict == trouble.verdict


@pytest.mark.wording
def test_a_type_that_no_file_knows_is_recorded_without(run: Path) -> None:
    model, trouble = troubled()
    odd = trouble.attempt._replace(microbatches=[torch.ones(2, dtype=torch.complex64)])
    record = read_failed_step(
        kept(run, model, FailedStep(odd, trouble.report, "fp32", (), StepHistory(), verdict_of()))
    )
    assert "complex64" in record.step.without


class Broken(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("a batch that cannot be looked at")


def test_a_batch_that_breaks_when_it_is_looked_at_is_recorded_without(run: Path) -> None:
    model, trouble = troubled()
    odd = trouble.attempt._replace(microbatches=[Broken(x=1)])
    record = read_failed_step(
        kept(run, model, FailedStep(odd, trouble.report, "fp32", (), StepHistory(), verdict_of()))
    )
    assert record.step.without == "a batch that cannot be looked at"


def test_what_is_too_large_is_recorded_without(run: Path) -> None:
    model, trouble = troubled()
    place = kept(run, model, trouble, most=1000)
    assert "at most 1000 B are kept" in read_failed_step(place).step.without
    assert without_tensors(place)


def test_an_empty_batch_is_kept(run: Path) -> None:
    model, trouble = troubled()
    empty = trouble.attempt._replace(microbatches=Window([{"x": torch.empty(0, 4)}]))
    record = read_failed_step(
        kept(run, model, FailedStep(empty, trouble.report, "fp32", (), StepHistory(), verdict_of()))
    )
    assert load_attempt(record, 0, loss_fn, CPU).microbatches[0]["x"].shape == (0, 4)


def test_a_full_disk_costs_the_record_and_not_the_run(run: Path) -> None:
    model, trouble = troubled()
    told: list[tuple[str, str]] = []
    record = build_step_recorder(run, model, lambda text, level: told.append((level, text)))
    with files_of_at_most(100):
        record(trouble)
    assert list((run / "failed_steps").iterdir()) == []
    record(trouble)
    assert [level for level, _ in told] == ["warning", "info"]
    assert "attempt 2 was not recorded: File too large" in told[0][1]
    assert told[1][1].endswith(f"halfstep replay {run}")
    assert read_failed_step(list_failed_steps(run)[0]).step.report.attempt == 2


class Failing(Disk):
    """Fails at its nth operation."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found):
            return found

        def counted(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(5, "made to fail")
            return found(*arguments)

        return counted


def test_wherever_it_stops_what_was_there_is_whole(run: Path) -> None:
    model, trouble = troubled()
    first = kept(run, model, trouble)
    second = FailedStep(trouble.attempt, trouble.report._replace(attempt=7), "fp32", (), StepHistory(), verdict_of())
    for at in range(1, 60):
        disk = Failing(at)
        try:
            place = kept(run, model, second, disk=disk)
        except NotCommitted:
            assert all(
                read_failed_step(one).step.report.attempt == 7 for one in list_failed_steps(run) if one.attempt == 7
            )
        else:
            assert read_failed_step(place).step.report.attempt == 7
            if disk.left > 0:
                break
        load_recorded_model(read_failed_step(first), Net())
    assert at > 15
    assert [path.name for path in (run / "failed_steps").iterdir() if path.name.endswith(".tmp")] == []


# -- how many ---------------------------------------------------------------------------------------------------------


def numbered(run: Path, *causes: Cause) -> list[int]:
    model, trouble = troubled()
    for attempt, cause in enumerate(causes, start=1):
        report = trouble.report._replace(attempt=attempt)
        kept(run, model, FailedStep(trouble.attempt, report, "fp32", (), StepHistory(), verdict_of(cause)))
    return [place.attempt for place in list_failed_steps(run)]


def test_the_oldest_of_a_cause_goes_first(run: Path) -> None:
    assert numbered(run, "precision", "data", "data", "data", "data") == [1, 4, 5]


def test_of_four_causes_the_oldest_goes(run: Path) -> None:
    assert numbered(run, "precision", "data", "divergence", "compiler") == [2, 3, 4]


def test_a_damaged_one_goes_before_any_other(run: Path) -> None:
    assert numbered(run, "precision", "data", "divergence") == [1, 2, 3]
    (list_failed_steps(run)[1].path / RECORD).write_text("{}")
    model, trouble = troubled()
    report = trouble.report._replace(attempt=9)
    kept(run, model, FailedStep(trouble.attempt, report, "fp32", (), StepHistory(), verdict_of("precision")))
    assert [place.attempt for place in list_failed_steps(run)] == [1, 3, 9]


def test_one_of_another_version_does_not_go_as_a_damaged_one_would(run: Path) -> None:
    assert numbered(run, "precision", "data", "divergence") == [1, 2, 3]
    changed(list_failed_steps(run)[1], _set("manifest", "format", 1))
    model, trouble = troubled()
    report = trouble.report._replace(attempt=9)
    kept(run, model, FailedStep(trouble.attempt, report, "fp32", (), StepHistory(), verdict_of("precision")))
    assert [place.attempt for place in list_failed_steps(run)] == [2, 3, 9]


def test_a_step_that_is_attempted_again_replaces_its_record(run: Path) -> None:
    model, trouble = troubled()
    kept(run, model, trouble)
    kept(
        run,
        model,
        FailedStep(trouble.attempt, trouble.report, "bf16", (), StepHistory(), verdict_of("not_reproducible")),
    )
    assert [path.name for path in (run / "failed_steps").iterdir()] == ["step-00000002.0002"]
    assert read_failed_step(list_failed_steps(run)[0]).step.precision == "bf16"


# -- damage and malice ------------------------------------------------------------------------------------------------


@pytest.fixture
def place(run: Path) -> CheckpointDir:
    return kept(run, *troubled())


def used(place: CheckpointDir) -> None:
    record = read_failed_step(place)
    load_recorded_model(record, Net())
    load_attempt(record, 0, loss_fn, CPU)


@pytest.mark.wording
@pytest.mark.parametrize("name", [RECORD, MANIFEST, name_tensors_file(0)])
def test_every_change_is_seen(place: CheckpointDir, name: str) -> None:
    path = place.path / name
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises((BadData, Unsafe)):
            used(place)
    for cut in (b"", whole[:-1], whole + b" "):
        path.write_bytes(cut)
        with pytest.raises(BadData):
            used(place)
    path.unlink()
    with pytest.raises(BadData, match=r"cannot be used(.|\n)*no older one"):
        used(place)
    path.write_bytes(whole)
    used(place)


def changed(place: CheckpointDir, change: Callable[[dict[str, Any]], None]) -> None:
    """As somebody would who knows how the digests and the seal are made."""
    manifest = json.loads((place.path / MANIFEST).read_text())
    content = {**json.loads((place.path / RECORD).read_text()), "manifest": manifest}
    change(content)
    manifest = content.pop("manifest")
    text = json.dumps(content).encode()
    (place.path / RECORD).write_bytes(text)
    if RECORD in manifest["files"]:
        manifest["files"][RECORD] = [len(text), hashlib.sha256(text).hexdigest()]
    manifest.pop("seal")
    (place.path / MANIFEST).write_bytes(add_seal(manifest))


def _set(*way: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = way

    def change(content: Any) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return change


HOSTILE = {
    "a file outside": _set("manifest", "files", "../../secret.safetensors", [1, "0" * 64]),
    "an absolute file": _set("manifest", "files", "/etc/passwd", [1, "0" * 64]),
    "files that are a list": _set("manifest", "files", []),
    "a size that is a text": _set("manifest", "files", name_tensors_file(0), ["1", "0" * 64]),
    "no step": _set("record", None),
    "no report": _set("record", "report", {}),
    "an attempt below zero": _set("record", "report", "attempt", -1),
    "a loss that is a text": _set("record", "report", "loss", "NaN"),
    "parts that are a list": _set("record", "report", "parts", [1]),
    "a cause of its own": _set("record", "verdict", "cause", "rm -rf"),
    "a remedy of its own": _set("record", "verdict", "remedies", [{"kind": "run", "target": "x", "works": True}]),
    "evidence that is a number": _set("record", "verdict", "evidence", [3]),
    "a culprit with more": _set("record", "verdict", "culprit", "more", 1),
    "a limit that is a text": _set("record", "verdict", "culprit", "limit", "much"),
    "a history of texts": _set("record", "history", "losses", ["a"]),
    "a history of its own": _set("record", "history", "x", []),
    "an island that is nowhere": _set("record", "islands", ["nowhere"]),
    "an island that is a number": _set("record", "islands", [3]),
    "an environment that is a text": _set("manifest", "environment", "mine"),
    "no batches": _set("inputs", None),
    "batches that are a text": _set("inputs", "many"),
    "a batch that is a number": _set("inputs", "microbatches", 3),
    "ranks that are not there": _set("manifest", "world_size", 2),
    "an earlier manifest": _set("manifest", "format", 1),
    "a later manifest": _set("manifest", "format", 3),
    "another attempt": _set("record", "report", "attempt", 3),
    "a batch without a tensor": _set("inputs", "microbatches", [{"$tensor": "absent"}]),
    "a batch with wild strides": _set("inputs", "microbatches", 0, "x", "$strides", [2**60, 1]),
    "factors of texts": _set("inputs", "factors", {"loss": ["a", None]}),
    "factors that are too few": _set("inputs", "factors", {"loss": [1.0]}),
    "other random numbers": _set("inputs", "generators", [{"$tensor": "step/microbatches/0/x"}]),
    "no random numbers": _set("inputs", "generators", []),
    "non-persistent buffers that are everything": _set("record", "non_persistent_buffers", {"a": 1}),
    "a key too many": _set("record", "mine", 1),
    "a form of none": _set("record", "format", "1"),
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTILE)
def test_a_record_that_was_made_up_is_refused_in_our_words(place: CheckpointDir, which: str) -> None:
    changed(place, HOSTILE[which])
    with pytest.raises(HalfstepError) as told:
        used(place)
    assert told.value.exit_code in (65, 79)


@pytest.mark.parametrize("name", [RECORD, MANIFEST])
def test_a_record_that_is_no_json_object_is_refused(place: CheckpointDir, name: str) -> None:
    manifest = json.loads((place.path / MANIFEST).read_text())
    for text in (b"[]", b"3", b"{" * 10_000, b'{"format": NaN}', b'{"a":1,"a":2}', b"\xff\xfe"):
        (place.path / name).write_bytes(text)
        if name == RECORD:
            manifest["files"][RECORD] = [len(text), hashlib.sha256(text).hexdigest()]
            manifest.pop("seal", None)
            (place.path / MANIFEST).write_bytes(add_seal(manifest))
        with pytest.raises(BadData):
            read_failed_step(place)


@pytest.mark.wording
@pytest.mark.parametrize(("form", "whose"), [(3, "an earlier"), (5, "a later")])
def test_another_form_says_so(place: CheckpointDir, form: int, whose: str) -> None:
    changed(place, _set("record", "format", form))
    with pytest.raises(StateMismatch, match=f"in form {form} by {whose} halfstep"):
        read_failed_step(place)


@pytest.mark.wording
@pytest.mark.parametrize("form", [1, 2])
def test_an_earlier_form_is_refused_by_name(tmp_path: Path, form: int) -> None:
    old = tmp_path / ("trouble" if form == 1 else "failed_steps") / "000001"
    old.mkdir(parents=True)
    (old / "failed_step.json").write_text("{}")
    places = [tmp_path] if form == 1 else [tmp_path, old]
    for place in places:
        with pytest.raises(StateMismatch, match=rf"{old.parent} contains failed steps of an earlier halfstep"):
            refuse_earlier_format(place)
    kept(tmp_path, *troubled())
    refuse_earlier_format(tmp_path)


@pytest.mark.wording
def test_an_earlier_form_is_refused_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "x" / "trouble").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateMismatch, match="contains failed steps of an earlier halfstep"):
        refuse_earlier_format(Path("runs/x"))


@pytest.mark.wording
def test_a_pickle_beside_it_is_never_read(place: CheckpointDir) -> None:
    (place.path / "helper.bin").write_bytes(pickle.dumps([print] * 20))
    with pytest.raises(Unsafe, match="can run code"):
        read_failed_step(place)


@pytest.mark.wording
def test_links_lead_nowhere(run: Path, place: CheckpointDir, tmp_path: Path) -> None:
    elsewhere = place.path.rename(tmp_path / "elsewhere")
    place.path.symlink_to(elsewhere)
    assert list_failed_steps(run) == []
    with pytest.raises(BadData, match="a link"):
        read_failed_step(place)
    place.path.unlink()
    elsewhere.rename(place.path)
    (place.path / name_tensors_file(0)).rename(tmp_path / "weights")
    (place.path / name_tensors_file(0)).symlink_to(tmp_path / "weights")
    with pytest.raises(BadData):
        used(place)


@pytest.mark.wording
def test_another_model_is_refused_and_not_touched(place: CheckpointDir) -> None:
    model = Net(width=9)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateMismatch, match="another model"):
        load_recorded_model(read_failed_step(place), model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model = Net()
    model.register_buffer("extra", torch.ones(1))
    with pytest.raises(StateMismatch, match=r"1 of its tensors are missing(.|\n)*extra"):
        load_recorded_model(read_failed_step(place), model)


def test_the_run_of_a_failed_step_is_found(place: CheckpointDir, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_run_folder(place.path) == run
    assert resolve_run_folder(run) == run
    monkeypatch.chdir(run / "failed_steps")
    assert resolve_run_folder(Path(place.name)) == run


# -- several processes ------------------------------------------------------------------------------------------------


def _record_on(rank: int, folder: str, odd: int | None) -> list[str]:
    torch.manual_seed(5)
    model = Net()
    batch = bad_batch(rank)
    draws = [torch.get_rng_state()]
    microbatches = [{"x": object()}] if rank == odd else batch
    attempt = StepInputs(loss_fn, microbatches, None, draws, {}, ())
    report = StepReport(1, 2, False, "loss_not_finite", False, math.nan, math.nan, 1.0, {})
    trouble = FailedStep(attempt, report, "fp32", (), StepHistory(), verdict_of())
    told: list[str] = []
    build_step_recorder(Path(folder), model, lambda text, level: told.append(level))(trouble)
    return told


def test_each_process_keeps_its_own_batch(run: Path, on_ranks: Ranks) -> None:
    assert on_ranks(_record_on, str(run), None) == [["info"], ["info"]]
    record = read_failed_step(list_failed_steps(run)[0])
    assert record.ranks == 2
    for rank in (0, 1):
        found = load_attempt(record, rank, loss_fn, CPU).microbatches
        assert torch.equal(found[0]["x"], bad_batch(rank)[0]["x"])


@pytest.mark.wording
def test_a_batch_of_one_process_that_cannot_be_kept_is_everyones(run: Path, on_ranks: Ranks) -> None:
    assert on_ranks(_record_on, str(run), 1) == [["info"], ["info"]]
    assert without_tensors(list_failed_steps(run)[0])
    assert "contains a object" in read_failed_step(list_failed_steps(run)[0]).step.without


def test_a_failure_of_one_process_is_told_by_all(run: Path, on_ranks: Ranks) -> None:
    (run / "failed_steps").write_text("in the way")
    assert on_ranks(_record_on, str(run), None) == [["warning"], ["warning"]]
