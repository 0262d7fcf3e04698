"""A model that is tried on a CPU in bf16 and then sent to a GPU: a BCELoss, and an autograd function of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.outcome import Outcome


class Product(torch.autograd.Function):
    """A matrix product with a backward of its own, as found beside custom kernels."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Classifier(nn.Module):
    def __init__(self, *, own_function: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.weight = nn.Parameter(torch.full((1, 16), 0.1))
        self.product = Product.apply if own_function else nn.functional.linear
        self.loss = nn.BCELoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(torch.sigmoid(self.product(self.body(x), self.weight)).float(), labels)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.ones(8, 1)


def run() -> Outcome:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tried = Classifier(own_function=False)(*batch())
        own = Classifier(own_function=True)(*batch())
    tried.backward()
    try:
        own.backward()
        told = "fine"
    except RuntimeError as error:
        told = str(error)
    refusal = _on_a_gpu()
    return Outcome(
        good=not refusal and told == "fine",
        seen=f"BCELoss on a CPU: a loss of {tried.item():.2f}; on a GPU: {refusal}; the autograd function: {told}",
        word="refused on the GPU",
    )


def _on_a_gpu() -> str:
    """Return what CUDA's autocast says to BCELoss: its rules on tensors without memory, which need no GPU."""
    with FakeTensorMode():
        probabilities, labels = torch.rand(8, 1, device="cuda"), torch.ones(8, 1, device="cuda")
        # `with torch.autocast("cuda")` switches itself off where there is no GPU.
        torch.set_autocast_enabled("cuda", True)
        try:
            nn.BCELoss()(probabilities, labels)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.set_autocast_enabled("cuda", False)
    return ""
