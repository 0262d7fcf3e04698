"""Functions of others, and graphs that are wrapped, hidden or deep: looked through, and left alone."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.finding import Finding
from halfstep.observe.lint.functions import OwnFunctionLint
from tests.support.functions import Applied, Bare, Layer, between, found, mse


class Again(nn.Module):
    """Computes its layer again in backward, and counts."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant, self.runs = layer, reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.wording
def test_looking_computes_nothing_again() -> None:
    again = Again(Layer(Bare), reentrant=False)
    (finding,) = found(between(again))
    assert "in 1.layer: Bare" in finding.evidence
    assert again.runs == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_itself_is_left_alone(reentrant: bool) -> None:
    assert not found(between(Again(nn.Linear(8, 8), reentrant)))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.wording
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layer", [nn.Linear(8, 8), Layer(Bare)])
def test_a_wrapped_model_is_looked_through(layer: nn.Module) -> None:
    model = nn.parallel.DistributedDataParallel(between(layer), find_unused_parameters=True)
    told: list[Finding] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mse(model, torch.randn(4, 8))
    with OwnFunctionLint(lambda node: "", lambda finding, module, line: told.append(finding)):
        loss.backward()
    assert ["Bare" in finding.evidence for finding in told] == ([True] if isinstance(layer, Layer) else [])


def test_models_of_the_libraries_are_left_alone() -> None:
    diffusers, timm = pytest.importorskip("diffusers"), pytest.importorskip("timm")
    smp = pytest.importorskip("segmentation_models_pytorch")
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), norm_num_groups=4,
        layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    denoise = Applied(lambda x: unet(x, torch.arange(len(x))).sample)
    denoise.unet = unet
    mish = timm.layers.activations_me.HardMishMe
    models = {
        "diffusers": denoise,
        "timm": timm.create_model("resnet10t", num_classes=4, act_layer=mish),
        "smp": smp.Unet("resnet18", encoder_weights=None),
    }
    for name, model in models.items():
        assert not found(model, batch=torch.randn(2, 3, 32, 32)), name


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/home/me/mine.py", True),
        (f"{sysconfig.get_path('purelib')}/fused_layers/norm.py", False),
        (torch.utils.checkpoint.__file__, False),
        ("<eval_with_key>.1", False),
    ],
    ids=["own", "package", "torch", "generated"],
)
def test_whose_function_it_is(file: str, told: bool) -> None:
    """The same function, from a file that may or may not be the person's to change."""
    lines, first = inspect.getsourcelines(Bare)
    place: dict[str, Any] = {"torch": torch, "Any": Any, "Tensor": Tensor}
    exec(compile("\n" * (first - 1) + "".join(lines), file, "exec"), place)
    assert bool(found(between(Layer(place["Bare"])))) is told


def test_a_deep_graph_and_none_at_all() -> None:
    told: list[Finding] = []
    x = weight = torch.ones((), requires_grad=True)
    for _ in range(20_000):
        x = x + 1
    with OwnFunctionLint(lambda node: "", lambda finding, module, line: told.append(finding)):
        x.backward()
        weight.backward()
    assert weight.grad == 2
    assert not told
