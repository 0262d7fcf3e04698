"""Work that torch does in fp32 alone: it is seen, it lowers the confidence, and it is not held against a precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import Stepper
from halfstep.errors import PrecisionNotObserved
from halfstep.observe.flops import Observation, estimate_unknown_flops, is_uncounted_operation
from halfstep.observe.recorder import Operation, Recorder
from halfstep.precision.precision import resolve_precision_name

N = 64
EYE = torch.eye(N)
COMPLEX = torch.complex64
linalg = torch.linalg


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


class Uses(nn.Module):
    """One operation on a matrix of weights in fp32, and a layer that autocast casts."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], head: int = N) -> None:
        super().__init__()
        self.operation, self.head = operation, nn.Linear(head, 4)
        self.weight = nn.Parameter(0.1 * torch.randn(N, N) + EYE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.operation(x, self.weight.float()).float())


def observed(operation: Callable[[Tensor, Tensor], Tensor], precision: str = "bf16", head: int = N) -> Observation:
    torch.manual_seed(0)
    model = Uses(operation, head)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=resolve_precision_name(precision))
    assert stepper.step(mse, torch.randn(N, N)).applied
    assert stepper.observed is not None
    return stepper.observed


def positive(w: Tensor) -> Tensor:
    """Without a product of matrices, which would be work as well."""
    return EYE * (2 + w.square())


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x[None].to(COMPLEX), w[:, :, None].to(COMPLEX)).abs()[0].mT


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "complex product": (lambda x, w: (x.to(COMPLEX) @ w.to(COMPLEX)).abs(), "aten.mm"),
    "complex batch": (lambda x, w: (x.to(COMPLEX)[None] @ w.to(COMPLEX)[None]).abs()[0], "aten.bmm"),
    "complex einsum": (lambda x, w: torch.einsum("bi,ij->bj", x.to(COMPLEX), w.to(COMPLEX)).abs(), "aten.bmm"),
    "complex linear": (lambda x, w: F.linear(x.to(COMPLEX), w.to(COMPLEX)).abs(), "aten.mm"),
    "complex vector": (lambda x, w: x + torch.mv(w.to(COMPLEX), x[0].to(COMPLEX)).abs(), "aten.mv"),
    "complex convolution": (convolved, "aten.convolution"),
    "fft": (lambda x, w: torch.fft.fft(x * w).abs(), "aten._fft_r2c"),
    "irfft2": (lambda x, w: torch.fft.irfft2(torch.fft.rfft2(x * w)), "aten._fft_c2r"),
    "matrix_exp": (lambda x, w: x * linalg.matrix_exp(w), "aten.linalg_matrix_exp"),
    "svd": (lambda x, w: x * linalg.svd(w)[1], "aten._linalg_svd"),
    "svdvals": (lambda x, w: x * linalg.svdvals(w), "aten._linalg_svd"),
    "nuclear norm": (lambda x, w: x * linalg.matrix_norm(w, "nuc"), "aten._linalg_svd"),
    "solve": (lambda x, w: linalg.solve(w, x.float()), "aten._linalg_solve_ex"),
    "solve_triangular": (lambda x, w: linalg.solve_triangular(w.triu(), x.float(), upper=True),
                         "aten.linalg_solve_triangular"),
    "inv": (lambda x, w: x * linalg.inv(w), "aten.linalg_inv_ex"),
    "pinv": (lambda x, w: x * linalg.pinv(w), "aten.linalg_pinv"),
    "cholesky": (lambda x, w: x * linalg.cholesky(positive(w)), "aten.linalg_cholesky_ex"),
    "cholesky_solve": (lambda x, w: torch.cholesky_solve(x.float() * w, EYE), "aten.cholesky_solve"),
    "cholesky_inverse": (lambda x, w: x * torch.cholesky_inverse(positive(w)), "aten.cholesky_inverse"),
    "eigh": (lambda x, w: x * linalg.eigh(w + w.mT)[0], "aten._linalg_eigh"),
    "eigvalsh": (lambda x, w: x * linalg.eigvalsh(w + w.mT), "aten._linalg_eigh"),
    "eig": (lambda x, w: x * linalg.eig(w)[0].abs(), "aten.linalg_eig"),
    "qr": (lambda x, w: x * linalg.qr(w)[1], "aten.linalg_qr"),
    "lstsq": (lambda x, w: linalg.lstsq(w, x.float())[0], "aten.linalg_lstsq"),
    "lu": (lambda x, w: x * linalg.lu(w)[2], "aten.linalg_lu"),
    "lu_solve": (lambda x, w: linalg.lu_solve(*linalg.lu_factor(w), x.float()), "aten.linalg_lu_solve"),
    "det": (lambda x, w: x * linalg.det(w).tanh(), "aten._linalg_det"),
    "slogdet": (lambda x, w: x * linalg.slogdet(w)[1], "aten._linalg_slogdet"),
    "householder": (lambda x, w: x * linalg.householder_product(w, 0.1 * w[0]), "aten.linalg_householder_product"),
    "cdist": (lambda x, w: torch.cdist(x.float(), w), "aten._euclidean_dist"),
    "cdist in L1": (lambda x, w: torch.cdist(x.float(), w, p=1.0), "aten._cdist_forward"),
    "pdist": (lambda x, w: x * torch.pdist(w).mean(), "aten._pdist_forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_seen_and_not_refused(name: str) -> None:
    operation, word = OPERATIONS[name]
    with pytest.warns(UserWarning, match=r"precision\.unknown"):
        seen = observed(operation)
    assert any(found.startswith(f"{word} in the model itself [fp32") for found in seen.unknown), seen.unknown
    assert seen.as_asked
    assert seen.confidence < 0.9
    assert seen.share is not None
    assert seen.share == 1.0 or name == "complex convolution"  # one of its three real ones looks like any other


@pytest.mark.parametrize("name", OPERATIONS)
def test_in_fp32_it_is_as_asked_without_a_word(name: str) -> None:
    seen = observed(OPERATIONS[name][0], "fp32")
    assert seen.as_asked
    assert not seen.in_doubt
    assert seen.unknown


@pytest.mark.wording
def test_a_product_in_fp32_beside_a_decomposition_is_still_refused() -> None:
    def both(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            for _ in range(2000):
                x = x.float() @ w
                x = x / x.norm()
        return x * linalg.svdvals(w)

    with pytest.raises(PrecisionNotObserved, match=r"the model itself\) \[fp32\]"):
        observed(both)


def test_a_small_decomposition_beside_large_layers_is_no_finding() -> None:
    def small(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(60):
            x = x @ w
            x = x / x.norm()
        return x * linalg.cholesky(positive(w))[:1]

    seen = observed(small)  # a warning would be an error
    assert not seen.in_doubt
    assert seen.confidence > 0.9


# -- how much ------------------------------------------------------------------------------------------------------


def work_of(run: Callable[[], Any]) -> list[tuple[str, int, str]]:
    seen: list[Operation] = []
    with Recorder(nn.Identity(), seen.append):
        run()
    return [
        (str(op.function._overloadpacket), *estimate_unknown_flops(op)) for op in seen if is_uncounted_operation(op)
    ]


def test_a_complex_product_is_four_real_ones() -> None:
    a, b = torch.randn(6, 8, dtype=COMPLEX), torch.randn(8, 10, dtype=COMPLEX)
    assert work_of(lambda: a @ b) == [("aten.mm", 8 * 6 * 8 * 10, "fp32")]
    assert work_of(lambda: a.to(torch.complex128) @ b.to(torch.complex128)) == [("aten.mm", 8 * 6 * 8 * 10, "fp64")]


@pytest.mark.parametrize(
    ("run", "work"),
    [
        (lambda: linalg.cholesky(EYE), N**3 / 3),
        (lambda: linalg.inv(EYE), 2 * N**3),
        (lambda: linalg.lu(EYE), 2 * N**3 / 3),
        (lambda: linalg.svdvals(torch.ones(100, 8)), 20 * 100 * 8 * 8),
        (lambda: linalg.svdvals(torch.ones(8, 100)), 20 * 100 * 8 * 8),
        (lambda: linalg.eigvalsh(torch.ones(3, 8, 8)), 9 * 3 * 8**3),
        (lambda: torch.cdist(torch.ones(5, 7), torch.ones(6, 7)), 3 * 5 * 6 * 7),
        (lambda: torch.cdist(torch.ones(50, 7), torch.ones(60, 7)), 3 * 50 * 60 * 7),
        (lambda: torch.pdist(torch.ones(5, 7)), 3 * 10 * 7),
        (lambda: torch.fft.fft(torch.ones(3, 16, dtype=COMPLEX)), 5 * 3 * 16 * 4),
        (lambda: torch.fft.fft2(torch.ones(3, 4, 4, dtype=COMPLEX)), 5 * 3 * 16 * 4),
    ],
)
def test_the_usual_counts(run: Callable[[], Any], work: float) -> None:
    assert [found for _, found, _ in work_of(run)] == [round(work)]


@pytest.mark.parametrize(
    "run",
    [
        lambda: linalg.svdvals(torch.ones(0, 0)),
        lambda: linalg.svdvals(torch.ones(3, 0)),
        lambda: torch.cdist(torch.ones(0, 7), torch.ones(6, 7)),
        lambda: linalg.inv(torch.ones(0, 8, 8)),
    ],
)
def test_nothing_is_no_work(run: Callable[[], Any]) -> None:
    assert all(work == 0 for _, work, _ in work_of(run))


def test_norms_and_vectors_are_not_matrix_work() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    run = lambda: (linalg.vector_norm(x) + linalg.norm(x) + linalg.cross(x, x.detach()).sum()).backward()  # noqa: E731
    assert work_of(run) == []
