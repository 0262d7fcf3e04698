"""Slots: both decoders in every precision, evaluations that can be compared, and clips of any size."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from halfstep import Stepper
from halfstep.data.dataset import Sample
from halfstep.errors import BadRecipe
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.tasks.models.slots.model import COOLING
from halfstep.tasks.slots import find_owning_slots
from halfstep.train.task import Task
from tests.support.combinations import one_per_value
from tests.support.digest import digest_of_run
from tests.tasks.made import batch_of, made

CPU = torch.device("cpu")
DECODERS = ["broadcast", "autoregressive"]
PRECISIONS = ["fp32", "bf16", "fp16"]


def of(decoder: str, **model: Any) -> Task:
    return made("slots", model={"decoder": decoder, **model})


def seeded(task: Task, decoder_batch: Sample | None = None) -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    return task.model(), decoder_batch or batch_of(task, "train")


def loss_of(task: Task, model: nn.Module, batch: Sample, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    loss: torch.Tensor = task.loss(model, batch)
    return loss


@pytest.mark.parametrize(*one_per_value(decoder=DECODERS, precision=PRECISIONS))
def test_it_trains_in_every_precision(decoder: str, precision: str) -> None:
    """The stepper itself refuses a step that did not run in the precision asked for."""
    task = of(decoder)
    model, batch = seeded(task)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 3e-3), precision=resolve_precision_name(precision))
    reports = [stepper.step(task.loss, batch) for _ in range(24)]
    # The loss scale of fp16 may have to find its place first.
    assert {report.reason for report in reports[:4]} <= {None, "gradient_overflow"}
    applied = [report for report in reports if report.applied]
    assert len(applied) >= 20
    assert stepper.observed is None or stepper.observed.as_asked
    first, last = (sum(float(r.loss) for r in part) for part in (applied[:4], applied[-4:]))
    assert last < first


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_loss_reaches_every_parameter(decoder: str) -> None:
    task = of(decoder)
    model, batch = seeded(task)
    loss_of(task, model, batch).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_seen_in_16_bits_is_wide_and_close(decoder: str, precision: str) -> None:
    task = of(decoder)
    model, batch = seeded(task)
    model.eval()
    with torch.no_grad():
        wide = model(batch["image"])
        with resolve_precision_name(precision).autocast(CPU):
            narrow = model(batch["image"])
    for name in ("slots", "shares", "reconstruction"):
        assert getattr(narrow, name).dtype is torch.float32
        torch.testing.assert_close(getattr(narrow, name), getattr(wide, name), atol=0.05, rtol=0.05)
    assert narrow.tokens.dtype is torch.float32
    assert narrow.tokens.item() == pytest.approx(wide.tokens.item(), rel=0.05)


@pytest.mark.parametrize("decoder", DECODERS)
def test_evaluations_are_the_same_and_draw_nothing(decoder: str) -> None:
    task = of(decoder)
    model, batch = seeded(task)
    model.eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        losses = [task.loss(model, batch).item() for _ in range(2)]
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), before)


@torch.no_grad()
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_clip_is_judged_alike_in_any_batch(decoder: str) -> None:
    task = of(decoder)
    model, batch = seeded(task)
    model.eval()
    alone = [task.loss(model, {name: part[n : n + 1] for name, part in batch.items()}) for n in range(4)]
    torch.testing.assert_close(task.loss(model, batch), torch.stack(alone).mean())


@torch.no_grad()
def test_in_training_a_slot_is_told_from_those_of_other_clips_too() -> None:
    task = of("broadcast")
    model, batch = seeded(task)
    among_all = task.loss(model, batch)
    assert among_all > task.loss(model.eval(), batch) + 0.01


@torch.no_grad()
def test_slots_know_the_frames_before_and_not_those_to_come() -> None:
    task = of("broadcast")
    model, batch = seeded(task)
    model.eval()
    clip = batch["image"][:1]
    later = clip.clone()
    later[:, 2] = -later[:, 2]
    one, other = model(clip).slots, model(later).slots
    assert torch.equal(one[:, :2], other[:, :2])
    assert not torch.equal(one[:, 2], other[:, 2])
    earlier = clip.clone()
    earlier[:, 0] = -earlier[:, 0]
    assert not torch.equal(model(earlier).slots[:, 2], one[:, 2])


@torch.no_grad()
def test_clips_of_a_batch_do_not_see_one_another() -> None:
    task = of("autoregressive")
    model, batch = seeded(task)
    model.eval()
    alone, together = model(batch["image"][1:2]), model(batch["image"])
    torch.testing.assert_close(alone.slots[0], together.slots[1])
    torch.testing.assert_close(alone.shares[0], together.shares[1])


@pytest.mark.parametrize("decoder", DECODERS)
def test_clips_of_one_frame_have_nothing_to_predict(decoder: str) -> None:
    task = made("slots", model={"decoder": decoder}, data={"frames": 1})
    model, batch = seeded(task)
    assert not list(model.predictor.parameters())
    loss_of(task, model, batch).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("decoder", DECODERS)
def test_no_predictor_and_a_single_slot(decoder: str) -> None:
    task = of(decoder, predictor_layers=0, slots=1)
    model, batch = seeded(task)
    seen = model(batch["image"])
    assert torch.allclose(seen.shares, torch.ones_like(seen.shares))
    assert torch.isfinite(loss_of(task, model, batch))


@pytest.mark.parametrize("decoder", DECODERS)
def test_activations_computed_again_give_the_same_gradients(decoder: str) -> None:
    task = of(decoder)
    model, batch = seeded(task)
    again = copy.deepcopy(model)
    assert checkpoint_activations(again) >= 4
    for each in (model, again):
        loss_of(task, each, batch).backward()
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for one, other in zip(model.buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_temperature_falls_with_training_and_not_with_a_skipped_step() -> None:
    task = of("autoregressive")
    model, batch = seeded(task)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision=resolve_precision_name("bf16"))
    assert stepper.step(task.loss, batch).applied
    assert model.temperature.item() == pytest.approx(COOLING)
    before = digest_of_run(stepper)
    spoiled = {**batch, "image": batch["image"] * math.nan}
    assert not stepper.step(task.loss, spoiled).applied
    assert digest_of_run(stepper) == before
    model.eval()
    task.loss(model, batch)
    assert model.temperature.item() == pytest.approx(COOLING)


def test_the_temperature_has_an_end() -> None:
    model = of("autoregressive").model()
    model.temperature.fill_(0.1)
    model._cool()
    assert model.temperature.item() == pytest.approx(0.1)


def test_the_autoencoder_and_the_slots_do_not_pull_at_each_other() -> None:
    task = of("autoregressive")
    model, batch = seeded(task)
    seen = model(batch["image"])
    seen.tokens.backward(retain_graph=True)
    assert all(p.grad is None for p in model.autoencoder.parameters())
    assert model.first.slots.grad is not None
    model.zero_grad()
    seen.reconstruction.backward()
    assert all(p.grad is None for p in (*model.attention.parameters(), *model.decoder.parameters()))


def test_owners_are_found_in_the_frames_own_size() -> None:
    shares = torch.zeros(1, 1, 2, 2, 2)
    shares[0, 0, 0, :, 0] = shares[0, 0, 1, :, 1] = 1.0
    assert find_owning_slots(shares, torch.Size((2, 2))).tolist() == [[[[0, 1], [0, 1]]]]
    assert find_owning_slots(shares, torch.Size((4, 8)))[0, 0].tolist() == [[0] * 4 + [1] * 4] * 4


def test_frames_and_masks_are_squeezed_and_mirrored_together() -> None:
    task = of("broadcast")
    bright = torch.zeros(3, 40, 24, dtype=torch.uint8)
    bright[:, :20, :12] = 1
    sample = {"image": (bright * 255)[:, None].expand(3, 3, 40, 24), "mask": bright}
    sides = set()
    for seed in range(8):
        torch.manual_seed(seed)
        ready = task.transform("train", sample)
        assert ready["image"].shape == (3, 3, 16, 16)
        assert ready["image"].dtype is torch.float32
        assert ready["mask"].dtype is torch.uint8
        assert ready["image"].amin().item() == pytest.approx(-1.0)
        assert ready["image"].amax().item() == pytest.approx(1.0)
        assert torch.equal(ready["image"][:, 0] > 0, ready["mask"] == 1)
        sides.add(bool(ready["mask"][0, 0, 0]))
    assert sides == {True, False}
    assert task.transform("val", sample)["mask"][0, 0, 0] == 1


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_film_of_any_size_and_length_is_predicted_in_its_own(decoder: str) -> None:
    task = of(decoder)
    model = task.model().eval()
    film = torch.randint(0, 256, (5, 3, 22, 41), dtype=torch.uint8)
    found = task.predict(model, film)
    assert found.mask is not None
    assert found.overlay is not None
    assert found.mask.shape == (22, 41)
    assert found.mask.dtype == np.uint8
    assert found.mask.max() < 3
    assert found.overlay.shape == (22, 41, 3)
    assert len(found.frames) == found.values["frames"] == 5
    assert sum(found.values[f"pixels_slot_{n}"] for n in range(3)) == pytest.approx(1.0)
    assert 1 <= found.values["slots_used"] <= 3
    still = task.predict(model, film[0])
    assert np.array_equal(still.mask, found.mask)
    assert still.frames == ()


def test_samples_are_the_first_clips_of_validation() -> None:
    task, heard = of("broadcast"), []
    model = task.model().eval()
    count = len(task.source("val"))
    drawn = task.sample(model, 2, lambda done, of: heard.append((done, of)))
    assert heard == [(1, 2), (2, 2)]
    with torch.no_grad():
        for picture, expected in zip(drawn, task.pictures(model, batch_of(task, "val", 2)), strict=True):
            assert np.array_equal(picture, expected)
    assert len(task.sample(model, 1000, lambda done, of: None)) == count


def test_films_without_truth_are_judged_by_their_loss(tmp_path: Path) -> None:
    for clip in range(4):
        (tmp_path / f"film{clip}").mkdir()
        for number in range(3):
            pixels = np.random.default_rng([clip, number]).integers(0, 256, (20, 30, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"film{clip}" / f"{number}.png")
    task = made("slots", data={"name": "frames", "path": str(tmp_path), "val": 0.5})
    assert (task.metric, task.higher_is_better) == ("loss", False)
    assert len(task.metrics()) == 0
    with torch.no_grad():
        assert torch.isfinite(task.loss(task.model().eval(), batch_of(task, "val", 2), task.metrics()))
    known = of("broadcast")
    assert (known.metric, known.higher_is_better) == ("fg_ari", True)
    assert set(known.metrics()) == {"fg_ari", "mbo"}
    known.remember({"truth": False})
    assert known.metric == "loss"


@pytest.mark.wording
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"weights": "pretrained"}}, "weights=pretrained"),
        ({"model": {"encoder_stride": 4}, "data": {"size": 18}}, "multiples of 4"),
        ({"model": {"decoder": "autoregressive", "token_stride": 8}, "data": {"size": 20}}, "write data.size=24"),
        ({"model": {"decoder": "autoregressive", "heads": 3}}, "write model.decoder_width=9"),
    ],
)
def test_impossible_recipes(sections: dict[str, dict[str, Any]], words: str) -> None:
    with pytest.raises(BadRecipe, match=words):
        made("slots", **sections)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decoder", [pytest.param("broadcast", marks=pytest.mark.full), "autoregressive"])
def test_it_is_compiled_in_one_piece(decoder: str) -> None:
    """Traced, and run as it was traced: what a kernel makes of it is torch's."""
    task = of(decoder)
    model, batch = seeded(task)
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fast = copy.deepcopy(model)
    fast.compile(backend=kept)
    with resolve_precision_name("bf16").autocast(CPU):
        expected, found = loss_of(task, model, batch), loss_of(task, fast, batch)
    found.backward()
    torch._dynamo.reset()
    assert len(graphs) == 1
    torch.testing.assert_close(found, expected)
    assert all(p.grad is not None for p in fast.parameters())
