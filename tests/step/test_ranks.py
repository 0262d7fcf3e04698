"""Two processes: one decision, one small collective, the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import Ema, Stepper, Window, island
from halfstep.errors import HalfstepError, RankFailed, WrongUse
from halfstep.precision.precision import resolve_precision_name
from tests.support.digest import digest_of, digest_of_run
from tests.support.models import Coder, buffered_model, plain_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


class Counted:
    """Collectives that Python calls, by name and bytes. DDP's own reduction of gradients runs below Python."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._reduce = dist.all_reduce
        dist.all_reduce = self._all_reduce  # type: ignore[assignment]

    def stop(self) -> None:
        dist.all_reduce = self._reduce  # type: ignore[assignment]

    def _all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("all_reduce", tensor.numel() * tensor.element_size()))
        return self._reduce(tensor, *args, **kwargs)


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepper_for(model: nn.Module, precision: str = "fp32", **options: Any) -> Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return Stepper(
        model, optimizer, precision=resolve_precision_name(precision), schedule=schedule, ema=Ema(model), **options
    )


# -- a bad loss on one rank ----------------------------------------------------------------------------------------


def nan_on_rank_one(rank: int, precision: str, microbatches: int) -> dict[str, Any]:
    stepper = stepper_for(buffered_model(seed=rank), precision, clip_norm=1.0)
    counted = Counted()
    torch.manual_seed(100 + rank)
    reasons, per_step, unchanged = [], [], []
    for step in range(6):
        before = digest_of_run(stepper)
        calls = len(counted.calls)
        bad = float("nan") if step in (0, 3) and rank == 1 else 1.0
        window = Window(torch.randn(6, 8) * (bad if i == microbatches - 1 else 1.0) for i in range(microbatches))
        report = stepper.step(mse, window)
        reasons.append(report.reason)
        per_step.append(counted.calls[calls:])
        unchanged.append(digest_of_run(stepper) == before)
    counted.stop()
    return {
        "reasons": reasons,
        "collectives": per_step,
        "unchanged": unchanged,
        "weights": digest_of(dict(stepper.model.named_parameters())),
        "counts": stepper.counts.state_dict(),
    }


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_ranks_skip_and_one_small_collective_a_step(on_ranks: Ranks, precision: str, microbatches: int) -> None:
    zero, one = on_ranks(nan_on_rank_one, precision, microbatches)
    assert zero["reasons"] == one["reasons"] == ["loss_not_finite", None, None, "loss_not_finite", None, None]
    assert zero["unchanged"] == one["unchanged"] == [True, False, False, True, False, False]
    assert zero["weights"] == one["weights"]
    assert zero["counts"] == one["counts"]
    for found in (zero, one):
        assert [len(calls) for calls in found["collectives"]] == [1] * 6
        assert all(size <= 128 for calls in found["collectives"] for _, size in calls)


# -- unequal counts ------------------------------------------------------------------------------------------------


def counted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return halfstep.Counted(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)


def given_to_optimizer(stepper: Stepper, loss: Any, batch: Any) -> tuple[Tensor, Any]:
    found: list[Tensor] = []
    stepper.optimizers["loss"].register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in stepper.model.parameters())
    )
    report = stepper.step(loss, batch)
    return torch.cat([g.flatten() for g in found]), report


def unequal(rank: int, sizes: list[list[int]]) -> tuple[list[float], float, float]:
    stepper = stepper_for(plain_model())
    x, y = data()
    start = sum(sizes[0]) * rank
    mine = slice(start, start + sum(sizes[rank]))
    window = Window(zip(x[mine].split(sizes[rank]), y[mine].split(sizes[rank]), strict=True))
    gradients, report = given_to_optimizer(stepper, counted_loss, window)
    return gradients.tolist(), report.loss, report.grad_norm


@pytest.mark.parametrize("sizes", [[[6], [6]], [[10], [2]], [[1, 2, 3], [4, 1, 1]], [[8, 1], [2, 1]]])
def test_ranks_with_unequal_counts_equal_one_batch(on_ranks: Ranks, sizes: list[list[int]]) -> None:
    whole, report = given_to_optimizer(stepper_for(plain_model()), counted_loss, data())
    for gradients, loss, norm in on_ranks(unequal, sizes):
        assert ((torch.tensor(gradients) - whole).norm() / whole.norm()).item() < 1e-6
        assert loss == pytest.approx(report.loss, rel=1e-6)
        assert norm == pytest.approx(report.grad_norm, rel=1e-5)


# -- any method of the person's own module synchronizes ------------------------------------------------------------


def through_methods(rank: int) -> tuple[str, bool]:
    torch.manual_seed(rank)
    model = Coder()
    island(model, "decoder")
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("bf16"))
    own: list[bool] = []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        own.append(m is model)
        return m.decode(m.encode(x)).float().square().mean()

    torch.manual_seed(50 + rank)
    for window in [Window([torch.randn(3, 4), torch.randn(3, 4)]), Window([torch.randn(3, 4)])]:
        assert stepper.step(loss, window).applied
    return digest_of(model.state_dict()), all(own)


def test_methods_synchronise_and_a_short_window_does_too(on_ranks: Ranks) -> None:
    (zero, own), (one, _) = on_ranks(through_methods)
    assert zero == one
    assert own


# -- the context form with the person's own wrapper ----------------------------------------------------------------


def context_form(rank: int) -> tuple[str, str, list[bool]]:
    torch.manual_seed(rank)
    wrapped = DistributedDataParallel(plain_model(seed=rank))
    stepper = Stepper(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), precision=resolve_precision_name("bf16"))
    applied = []
    for step in range(3):
        for last in (False, True):
            with stepper.forward(last=last):
                loss = mse(wrapped, torch.randn(4, 8)) * (float("inf") if step == 1 and rank == 0 else 1.0)
            stepper.backward(loss)
        applied.append(stepper.apply().applied)
    words = ""
    try:
        stepper.step(mse, torch.randn(4, 8))
    except WrongUse as error:
        words = str(error)
    return digest_of(wrapped.state_dict()), words, applied


@pytest.mark.wording
def test_context_form_under_ddp(on_ranks: Ranks) -> None:
    zero, one = on_ranks(context_form)
    assert zero[0] == one[0]
    assert zero[2] == one[2] == [True, False, True]
    assert "Stepper(model.module, ...)" in zero[1]


def plain_in_context_form(rank: int) -> str:
    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    try:
        with stepper.forward():
            pass
    except WrongUse as error:
        return str(error)
    return ""


@pytest.mark.wording
def test_context_form_with_a_plain_model_on_two_ranks_is_refused(on_ranks: Ranks) -> None:
    assert all("DistributedDataParallel" in words for words in on_ranks(plain_in_context_form))


# -- several losses, and sharded models ----------------------------------------------------------------------------


def several(rank: int) -> tuple[str, list[str | None], int]:
    torch.manual_seed(rank)
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in ("g", "d")}
    stepper = Stepper(model, optimizers, precision=resolve_precision_name("bf16"), clip_norm=1.0)
    counted = Counted()

    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        fake = m["g"](x)
        bad = float("nan") if m.spoil and rank == 1 else 1.0
        return {"g": m["d"](fake).float().mean(), "d": m["d"](fake.detach()).float().square().mean() * bad}

    reasons = []
    torch.manual_seed(9 + rank)
    for step in range(3):
        model.spoil = step == 1
        reasons.append(stepper.step(losses, torch.randn(5, 4)).reason)
    counted.stop()
    small = sum(size == 128 for _, size in counted.calls)
    return digest_of(model.state_dict()), reasons, small


def test_several_losses_on_two_ranks(on_ranks: Ranks) -> None:
    zero, one = on_ranks(several)
    assert zero == one
    assert zero[1] == [None, "loss_not_finite", None]
    assert zero[2] == 3


def sharded(rank: int, shape: tuple[int, ...]) -> tuple[list[float], list[float], list[str | None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain_model()
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("fp32"), clip_norm=0.2
    )
    x, y = data()
    mine = x[rank * 6 : rank * 6 + 6], y[rank * 6 : rank * 6 + 6]
    reports = []
    for step in range(4):
        bad = float("nan") if step == 2 and rank == 1 else 1.0
        reports.append(stepper.step(lambda m, b, bad=bad: F.cross_entropy(m(b[0]), b[1]) * bad, mine))
    return [r.loss for r in reports], [r.grad_norm for r in reports], [r.reason for r in reports]


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)], ids=["sharded", "replicated", "both"])
def test_a_sharded_model_equals_one_process(on_ranks: Ranks, shape: tuple[int, ...]) -> None:
    model = plain_model()
    single = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", clip_norm=0.2)
    expected = [single.step(lambda m, b: F.cross_entropy(m(b[0]), b[1]), data()) for _ in range(3)]
    zero, one = on_ranks(sharded, shape)
    assert zero[2] == one[2] == [None, None, "loss_not_finite", None]
    for found in (zero, one):
        losses, norms = [found[0][i] for i in (0, 1, 3)], [found[1][i] for i in (0, 1, 3)]
        assert losses == pytest.approx([r.loss for r in expected], rel=1e-5)
        assert norms == pytest.approx([r.grad_norm for r in expected], rel=1e-4)


# -- what must not go on in silence --------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)


def with_unused_parameters(rank: int, options: dict[str, Any]) -> tuple[str, str]:
    torch.manual_seed(0)
    model = Branches()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("fp32"), ddp=options
    )
    before = digest_of(model.state_dict())
    torch.manual_seed(rank)
    try:
        stepper.step(lambda m, x: m.used(x).square().mean(), torch.randn(3, 4))
    except HalfstepError as error:
        assert digest_of(model.state_dict()) == before
        return str(error), before
    return "", digest_of(model.state_dict())


@pytest.mark.wording
def test_parameters_that_the_loss_does_not_use(on_ranks: Ranks) -> None:
    found = on_ranks(with_unused_parameters, {})
    assert all("gradients differ between ranks" in words for words, _ in found)
    found = on_ranks(with_unused_parameters, {"find_unused_parameters": True})
    assert [words for words, _ in found] == ["", ""]
    assert found[0][1] == found[1][1]


def unfreezes(rank: int) -> str:
    torch.manual_seed(0)
    model = plain_model()
    model[2].requires_grad_(False)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("fp32"))
    torch.manual_seed(rank)
    stepper.step(mse, torch.randn(3, 8))
    model[2].requires_grad_(True)
    for _ in range(3):
        assert stepper.step(mse, torch.randn(3, 8)).applied
    return digest_of(model.state_dict())


def test_unfreezing_on_two_ranks(on_ranks: Ranks) -> None:
    zero, one = on_ranks(unfreezes)
    assert zero == one


def caught_on_one_rank(rank: int) -> list[str]:
    stepper = Stepper(
        m := plain_model(), torch.optim.SGD(m.parameters(), 0.1), precision=resolve_precision_name("fp32")
    )
    seen = []
    for step in range(3):
        try:
            loss = (lambda m, x: 1 / 0) if rank == 1 and step == 0 else mse
            seen.append(stepper.step(loss, torch.randn(3, 8)).reason or "applied")
        except (ZeroDivisionError, RankFailed) as error:
            seen.append(type(error).__name__)
    return seen


def test_an_error_that_is_caught_on_every_rank_parts_nobody(on_ranks: Ranks) -> None:
    zero, one = on_ranks(caught_on_one_rank)
    assert zero == ["RankFailed", "applied", "applied"]
    assert one == ["ZeroDivisionError", "applied", "applied"]


def different_branches(rank: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"e0": nn.Linear(4, 4), "e1": nn.Linear(4, 4), "e2": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    experts = [p for n in ("e0", "e1", "e2") for p in model[n].parameters()]
    optimizers = {"e": torch.optim.SGD(experts, 0.1), "d": torch.optim.SGD(model["d"].parameters(), 0.1)}
    stepper = Stepper(model, optimizers, precision=resolve_precision_name("fp32"))

    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        out = m["d"](m[f"e{rank}"](x))
        return {"e": out.square().mean(), "d": -out.mean()}

    still = model["e2"].weight.detach().clone()
    for _ in range(3):
        assert stepper.step(losses, torch.randn(3, 4)).applied
    return digest_of(model.state_dict()), torch.equal(still, model["e2"].weight)


def test_ranks_that_use_different_parts_with_several_losses(on_ranks: Ranks) -> None:
    (zero, still), (one, _) = on_ranks(different_branches)
    assert zero == one
    assert still


def foreign_parameters(rank: int) -> str:
    model, sigma = plain_model(), nn.Parameter(torch.zeros(2))
    try:
        Stepper(model, torch.optim.SGD([*model.parameters(), sigma], 0.1), precision=resolve_precision_name("fp32"))
    except HalfstepError as error:
        return str(error)
    return ""


@pytest.mark.wording
def test_parameters_that_nobody_synchronises_are_refused(on_ranks: Ranks) -> None:
    assert all("a part of the model" in words for words in on_ranks(foreign_parameters))


def synchronised_on_the_last(rank: int) -> list[int]:
    stepper = Stepper(
        m := plain_model(), torch.optim.SGD(m.parameters(), 0.1), precision=resolve_precision_name("fp32")
    )
    calls: list[int] = []

    def counted(_state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations of a hook
        calls[-1] += 1
        flat = bucket.buffer().div_(2)
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda future: future.value()[0])

    stepper._synchronizer._job.register_comm_hook(None, counted)  # type: ignore[attr-defined]
    for microbatches in (1, 4, 2):
        calls.append(0)
        stepper.step(mse, Window(torch.randn(3, 8) for _ in range(microbatches)))
    return calls


def test_gradients_meet_once_a_window(on_ranks: Ranks) -> None:
    assert on_ranks(synchronised_on_the_last) == [[1, 1, 1], [1, 1, 1]]


def expanded_buffer_and_new_head(rank: int) -> tuple[str, str]:
    torch.manual_seed(rank)
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1), "norm": nn.BatchNorm1d(4, affine=False)})
    model.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
    model.register_buffer("turned", torch.full((4, 3), float(rank)).t())
    optimizers = {n: torch.optim.SGD(model[n].parameters(), 0.1) for n in ("g", "d")}
    stepper = Stepper(model, optimizers, precision=resolve_precision_name("fp32"))

    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        out = m["d"](m["norm"](m["g"](x)))
        return {"g": out.mean(), "d": out.square().mean()}

    digests = []
    for _ in range(2):
        for _ in range(3):
            assert stepper.step(losses, torch.randn(5, 4)).applied
        digests.append(digest_of(model.state_dict()))
        torch.manual_seed(10 + rank)
        model["d"] = nn.Linear(4, 1)
        optimizers["d"].param_groups[0]["params"][:] = list(model["d"].parameters())
    return digests[0], digests[1]


def test_several_losses_with_buffers_and_a_new_head(on_ranks: Ranks) -> None:
    zero, one = on_ranks(expanded_buffer_and_new_head)
    assert zero == one


def other_only(rank: int, how: str) -> list[str]:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    optimizers = {n: torch.optim.SGD(model[n].parameters(), 0.1) for n in ("g", "d")}

    class OnRankOne:
        name = "local"

        def passes(self, report: Any) -> bool:
            return not (how == "guard" and rank == 1)

    stepper = Stepper(model, optimizers, precision=resolve_precision_name("fp32"), guards=[OnRankOne()])
    seen = []
    for _ in range(3):
        only = "d" if how == "only" and rank == 1 else "g"
        try:
            seen.append(
                str(stepper.step(lambda m, x, n=only: m[n](x).square().mean(), torch.ones(3, 4), only=only).reason)
            )
        except HalfstepError as error:
            return [*seen, type(error).__name__]
    return seen


def test_ranks_that_do_different_things_are_told(on_ranks: Ranks) -> None:
    assert on_ranks(other_only, "only") == [["RanksDisagree"], ["RanksDisagree"]]
    assert on_ranks(other_only, "guard") == [["guard:local"] * 3] * 2


def badly_sharded(rank: int, how: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain_model()
    mesh = init_device_mesh("cpu", (2,))
    if how == "a part":
        fully_shard(model[0], mesh=mesh)
    else:
        fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()) if how == "ignored" else None)
    optimizers: Any = torch.optim.SGD(model.parameters(), 0.1)
    if how == "several":
        optimizers = {str(i): torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)}
    try:
        stepper = Stepper(model, optimizers, precision=resolve_precision_name("fp32"))
        stepper.step(lambda m, x: {"0": mse(m, x), "2": mse(m, x)} if how == "several" else mse(m, x), torch.ones(3, 8))
    except HalfstepError as error:
        return error.given
    return ""


@pytest.mark.wording
def test_sharding_that_cannot_be_synchronised_is_refused(on_ranks: Ranks) -> None:
    assert "only parts are sharded" in on_ranks(badly_sharded, "a part")[0]
    assert "does not hold: 2.weight, 2.bias" in on_ranks(badly_sharded, "ignored")[0]
    assert "several losses in one step of a model under fully_shard" in on_ranks(badly_sharded, "several")[0]
