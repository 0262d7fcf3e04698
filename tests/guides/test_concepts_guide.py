"""The concepts guide: formats and their limits, what stays in fp32, its diffusion trainer, and its two exercises."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner, Result

import halfstep
from halfstep.cli.main import build
from halfstep.formats import FORMATS
from halfstep.measure.memory.estimate import mock_gpu
from halfstep.precision.hardware import Device
from halfstep.precision.select import choose_precision
from halfstep.step.loss import DynamicScale, StaticScale

FORMAT_TABLE = {"fp32": (32, 8, 23, 7), "fp16": (16, 5, 10, 3), "bf16": (16, 8, 7, 2)}
"""The guide's: bits, exponent, mantissa, decimal digits."""


def doctor(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(build(), ["doctor", *words], env={"COLUMNS": str(width)}, catch_exceptions=False)


@pytest.mark.parametrize("name", FORMAT_TABLE)
def test_the_format_table(name: str) -> None:
    found = FORMATS[name]
    assert (found.bits, found.exponent_bits, found.fraction_bits, found.decimal_digits) == FORMAT_TABLE[name]


@pytest.mark.parametrize("name", [name for name, found in FORMATS.items() if found.dtype is not None])
def test_the_smallest_number_is_the_last_above_zero(name: str) -> None:
    found = FORMATS[name]
    assert found.dtype is not None
    kept = torch.tensor([found.smallest, found.smallest / 2.01], dtype=torch.float64).to(found.dtype).double()
    assert kept[0] == found.smallest
    assert kept[1] == 0
    assert found.bits == 8 * found.bytes


def test_the_command_prints_the_formats_and_draws_their_bits() -> None:
    done = doctor("--formats")
    assert done.exit_code == 0, done.output
    page = done.output
    assert max(map(len, page.splitlines())) <= 80
    for name, (bits, exponent, fraction, digits) in FORMAT_TABLE.items():
        row = next(line.split() for line in page.splitlines() if line.split()[:1] == [name])
        assert row[1:5] == [str(bits), "1", str(exponent), str(fraction)]
        assert row[7] == str(digits)
        assert f"s{'e' * exponent}{'f' * fraction}\n" in page.replace(" \n", "\n")
    assert "above 65504 is infinity, below 6e-08 is zero" in " ".join(page.split())
    assert "no loss scale" in page
    rows = {row["name"]: row for row in json.loads(doctor("--formats", "--json").stdout)["formats"]}
    assert rows["fp16"]["largest"] == 65504
    assert rows["fp16"]["smallest"] == 2.0**-24


def test_the_command_prints_every_known_gpu_with_what_to_run_in() -> None:
    rows = {row["id"]: row for row in json.loads(doctor("--gpus", "--json").stdout)["gpus"]}
    recommended = {
        **dict.fromkeys(("rtx4090", "rtx4080", "rtx3090", "rtx3080", "a100-80gb", "h100-80gb", "rtxa6000"), "bf16"),
        **dict.fromkeys(("rtx2080ti", "v100-16gb", "t4", "quadrortx6000"), "fp16"),
        **dict.fromkeys(("gtx1080ti", "quadrop6000", "gtx1660ti", "quadrot2000"), "fp32"),
        "mi250x": "bf16",
        "rx7900xtx": "bf16",
        "rx6900xt": "fp16",
        "arca770": "bf16",
    }
    assert {name: rows[name]["precision"] for name in recommended} == recommended
    assert "known to be wrong: convolutions in fp16 give NaN" in rows["gtx1660ti"]["why"]
    assert "tensor cores" in rows["rtx4090"]["why"]
    page = doctor("--gpus").output
    assert max(map(len, page.splitlines())) <= 80
    assert all(name in page for name in rows)


def test_tables_and_settings_do_not_mix() -> None:
    assert doctor("unet", "--formats").exit_code == 78
    assert doctor("--fix", "bf16").exit_code == 78


def test_overflow_and_underflow_of_fp16_and_how_scaling_cures_the_second() -> None:
    assert torch.tensor(65520.0).half().isinf()
    assert torch.tensor(2.0**-24).half() > 0
    gradient = torch.tensor(2.0**-26)
    assert gradient.half() == 0
    scale = 65536.0
    assert (gradient * scale).half().float() / scale == gradient


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_softmax_norms_and_losses_are_fp32(dtype: torch.dtype) -> None:
    """By CUDA's own rules, on tensors that are only described."""
    with warnings.catch_warnings(), mock_gpu(), FakeTensorMode():
        warnings.simplefilter("ignore")
        place = torch.device("cuda")
        with torch.autocast(place.type, dtype=dtype):
            x = torch.empty(4, 8, device=place) @ torch.empty(8, 8, device=place)
            image = torch.empty(2, 4, 4, 4, device=place, dtype=dtype)
            target = torch.empty(4, dtype=torch.long, device=place)
            assert x.dtype == dtype
            assert F.softmax(x, -1).dtype == torch.float32
            assert F.layer_norm(x, (8,)).dtype == torch.float32
            assert F.group_norm(image, 2).dtype == torch.float32
            assert F.cross_entropy(x, target).dtype == torch.float32
            assert F.mse_loss(x, x).dtype == torch.float32
        torch.clear_autocast_cache()


def test_statistics_of_batch_norm_stay_fp32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    assert stepper.step(lambda model, x: model(x).float().square().mean(), torch.randn(2, 3, 8, 8)).applied
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()} == {
        torch.float32
    }


class Vae(nn.Module):
    """As diffusers' AutoencoderKL: one enters by `encode`, not by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, 2, 1)

    def encode(self, images: Tensor) -> Tensor:
        encoded: Tensor = self.layer(images)
        return encoded


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Conv2d(4, 32, 3, 1, 1), nn.Conv2d(32, 4, 3, 1, 1)

    def forward(self, noisy: Tensor, timesteps: Tensor, conditioning: Tensor) -> Tensor:
        told: Tensor = self.outward(F.silu(self.inward(noisy) + conditioning[:, :, None, None]))
        return told


class MixedPrecisionDiffusionTrainer:
    """The guide's, with its scaler, unscaling and clipping in one call."""

    def __init__(self, unet: nn.Module, vae: nn.Module, precision: str) -> None:
        self.vae = halfstep.island(vae.requires_grad_(False))
        optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
        self.stepper = halfstep.Stepper(unet, optimizer, precision=precision, clip_norm=1.0)

    def training_step(self, images: Tensor, conditioning: Tensor) -> halfstep.StepReport:
        return self.stepper.step(self._loss, (images, conditioning))

    def _loss(self, unet: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, conditioning = batch
        with torch.no_grad():
            latents = self.vae.encode(images) * 0.18215  # type: ignore[operator]
        assert latents.dtype == torch.float32
        noise, timesteps = torch.randn_like(latents), torch.randint(0, 1000, (len(latents),))
        kept = (1 - timesteps / 1000).view(-1, 1, 1, 1)
        return F.mse_loss(unet(kept.sqrt() * latents + (1 - kept).sqrt() * noise, timesteps, conditioning), noise)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_guides_diffusion_trainer(precision: str) -> None:
    """A Stepper on the U-Net alone; the autoencoder beside it is an island and computes in fp32."""
    trainer = MixedPrecisionDiffusionTrainer(Unet(), Vae(), precision)
    before = [p.clone() for p in trainer.vae.parameters()]
    report = trainer.training_step(torch.randn(2, 3, 16, 16), torch.randn(2, 32))
    assert report.applied
    assert math.isfinite(report.loss)
    assert trainer.stepper.observed is not None
    assert f"{precision}: 100 %" in str(trainer.stepper.observed)
    assert "in islands" in str(trainer.stepper.observed)
    assert all(torch.equal(was, now) for was, now in zip(before, trainer.vae.parameters(), strict=True))


def overflowing(scale: Any) -> tuple[halfstep.Stepper, list[halfstep.StepReport]]:
    """The second exercise: gradients of a large loss, which fp16 cannot hold at the first scale."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    stepper = halfstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), precision="fp16", loss_scale=scale
    )  # fmt: skip
    x = torch.randn(4, 8)
    reports = [stepper.step(lambda model, x: (model(x).float() * 30).square().mean(), x) for _ in range(24)]
    return stepper, reports


def test_the_exercise_overflows_with_a_fixed_scale_and_trains_with_a_dynamic_one() -> None:
    stepper, fixed = overflowing(StaticScale(65536.0))
    assert not any(report.applied for report in fixed)
    assert {report.reason for report in fixed} <= {"gradient_overflow", "gradient_not_finite"}
    assert all(parameter.isfinite().all() for parameter in stepper.model.parameters())
    stepper, moving = overflowing(DynamicScale(init_scale=65536.0))
    skipped = [report.reason for report in moving if not report.applied]
    assert skipped == ["gradient_overflow"] * len(skipped)
    assert 1 <= len(skipped) < 20
    assert moving[-1].applied
    assert moving[-1].loss < next(report.loss for report in moving if report.applied)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        (Device(kind="cuda", name="NVIDIA A100", capability=(8, 0)), "bf16"),
        (Device(kind="cuda", name="NVIDIA GeForce RTX 3080", capability=(8, 6)), "bf16"),
        (Device(kind="cuda", name="Tesla V100", capability=(7, 0)), "fp16"),
        (Device(kind="cuda", name="NVIDIA GeForce RTX 2080", capability=(7, 5)), "fp16"),
    ],
)
def test_which_to_choose(device: Device, precision: str) -> None:
    assert choose_precision(device=device).precision.name == precision
