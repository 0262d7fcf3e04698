"""Backward by torch's engine: the same gradients and hooks as `loss.backward()`, which runs wherever it may do more."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.observe.backward_calls import listen_to_backward, stop_listening
from halfstep.step.direct_backward import run_backward
from tests.step.direct import have_same_bits, list_functions

TORCH_BACKWARD = "torch._tensor.Tensor.backward"


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def compute_loss(model: nn.Module) -> Tensor:
    first = next(model.parameters())
    x = torch.linspace(-1, 1, 24, dtype=first.dtype).view(4, 6)
    result: Tensor = model(x).square().mean()
    return result


def is_direct(loss: Tensor) -> bool:
    return TORCH_BACKWARD not in list_functions(lambda: run_backward(loss))


def list_gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


# -- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_equal_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = make_model(dtype), make_model(dtype)
    for _ in range(3):  # they add up
        assert is_direct(compute_loss(ours))
        compute_loss(theirs).backward()
    assert have_same_bits(list_gradients(ours), list_gradients(theirs))
    assert [g._version for g in list_gradients(ours) if g is not None] == [
        g._version for g in list_gradients(theirs) if g is not None
    ]


def test_a_parameter_without_dimensions_does_not_share_memory_with_the_next_pass() -> None:
    """Its gradient gets the memory of the gradient of the loss, whose version does not show a write to `.data`."""
    found = []
    for backward in (Tensor.backward, run_backward):
        model, bias = make_model(), nn.Parameter(torch.zeros(()))
        for _ in range(4):
            backward(bias.sum() + compute_loss(model))
            bias.grad.data.mul_(0.5)  # type: ignore[union-attr]
        found.append([bias.grad, *list_gradients(model)])
    assert have_same_bits(*found)


def test_a_loss_that_is_a_parameter() -> None:
    bias = nn.Parameter(torch.zeros(()))
    run_backward(bias)
    run_backward(bias)
    assert bias.grad == 2


def write(gradient: Tensor) -> None:
    gradient.mul_(3)


def write_data(gradient: Tensor) -> None:
    gradient.data.mul_(3)


def write_numpy(gradient: Tensor) -> None:
    gradient.numpy()[...] = 3


@pytest.mark.parametrize("hook", [write, write_data, write_numpy])
def test_a_hook_that_writes_the_gradient_of_the_loss(hook: Callable[[Tensor], None]) -> None:
    """It has an effect on its own pass only."""
    model, other = make_model(), make_model()
    loss = compute_loss(model)
    loss.register_hook(hook)
    assert is_direct(loss)
    compute_loss(other).backward()
    for p, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert twin.grad is not None
        torch.testing.assert_close(p.grad, twin.grad * 3)
    model.zero_grad()
    run_backward(compute_loss(model))
    assert have_same_bits(list_gradients(model), list_gradients(other))


class _Doubled(torch.autograd.Function):
    """Writes into the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].data.mul_(2)


def _with_doubled(model: nn.Module, _: list[Any]) -> Tensor:
    result: Tensor = _Doubled.apply(compute_loss(model))  # type: ignore[no-untyped-call]
    return result


def _with_hooks(model: nn.Module, seen: list[Any]) -> Tensor:
    loss = compute_loss(model)
    loss.retain_grad()
    loss.register_hook(lambda g: seen.append(("loss", float(g))))
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda g: seen.append(("before", float(g[0]))))  # type: ignore[arg-type,func-returns-value]
    loss.grad_fn.register_hook(lambda g, o: seen.append(("after", len(g))))  # type: ignore[arg-type,func-returns-value]
    for i, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(i))  # type: ignore[misc]
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda g: seen.append(("all", [t is not None for t in g]))
    )
    return loss


def _with_module_hooks(model: nn.Module, seen: list[Any]) -> Tensor:
    model.register_full_backward_hook(lambda m, i, o: seen.append(("module", len(o))))
    return compute_loss(model)


def _with_saved_tensor_hooks(model: nn.Module, seen: list[Any]) -> Tensor:
    def unpack(kept: Tensor) -> Tensor:
        seen.append("unpacked")
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
        return compute_loss(model)


def _with_checkpoint(model: nn.Module, seen: list[Any]) -> Tensor:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    result: Tensor = checkpoint(model, x, use_reentrant=False).square().mean()
    return result


def _with_reentrant_checkpoint(model: nn.Module, seen: list[Any]) -> Tensor:
    x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    result: Tensor = checkpoint(model, x, use_reentrant=True).square().mean()
    return result


def _with_penalty(model: nn.Module, seen: list[Any]) -> Tensor:
    loss = compute_loss(model)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in gradients)


def _as_a_view(model: nn.Module, seen: list[Any]) -> Tensor:
    return compute_loss(model).view(1)[0]


def _as_one_element(model: nn.Module, seen: list[Any]) -> Tensor:
    return compute_loss(model).view(1, 1)


SITUATIONS = [
    _with_doubled,
    _with_hooks,
    _with_module_hooks,
    _with_saved_tensor_hooks,
    _with_checkpoint,
    _with_reentrant_checkpoint,
    _with_penalty,
    _as_a_view,
    _as_one_element,
]


@pytest.mark.parametrize("build", SITUATIONS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_graphs_and_hooks(build: Callable[[nn.Module, list[Any]], Tensor]) -> None:
    ours, theirs = make_model(), make_model()
    seen: tuple[list[Any], list[Any]] = ([], [])
    first, second = build(ours, seen[0]), build(theirs, seen[1])
    for _ in range(2):
        run_backward(first)
        second.backward()
        if first.retains_grad:
            assert have_same_bits(first.grad, second.grad)
        first, second = compute_loss(ours), compute_loss(theirs)
    assert have_same_bits(list_gradients(ours), list_gradients(theirs))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_autograd(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    ours, theirs = make_model(), make_model()
    losses = compute_loss(ours), compute_loss(theirs)
    with mode():
        run_backward(losses[0])
        losses[1].backward()
    assert have_same_bits(list_gradients(ours), list_gradients(theirs))


def test_threads() -> None:
    models = [make_model() for _ in range(4)]
    threads = [threading.Thread(target=run_backward, args=(compute_loss(model),)) for model in models[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compute_loss(models[0]).backward()
    for model in models[1:]:
        assert have_same_bits(list_gradients(model), list_gradients(models[0]))


# -- errors -----------------------------------------------------------------------------------------------------------


def _freed() -> Tensor:
    loss = compute_loss(make_model())
    loss.backward()
    return loss


def _written() -> Tensor:
    model = make_model()
    loss = compute_loss(model)
    with torch.no_grad():
        next(iter(model[2].parameters())).add_(1)  # type: ignore[index]
    return loss


LOSSES: list[Callable[[], Tensor]] = [
    _freed,
    _written,
    lambda: torch.ones(()),
    lambda: compute_loss(make_model()).to(torch.complex64),
    lambda: torch.stack([compute_loss(make_model())] * 2),
    lambda: compute_loss(make_model()).detach(),
]


@pytest.mark.parametrize("build", LOSSES)
def test_errors_are_torchs(build: Callable[[], Tensor]) -> None:
    messages = []
    for backward in (Tensor.backward, run_backward):
        with pytest.raises(RuntimeError) as raised:
            backward(build())
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


# -- left to torch ----------------------------------------------------------------------------------------------------


def test_a_patched_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.autograd, "_make_grads"),
        (torch.autograd, "_engine_run_backward"),
    ):
        calls = []
        plain = getattr(owner, name)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *a, c=calls, f=plain, **k: (c.append(1), f(*a, **k))[1])
            run_backward(compute_loss(make_model()))
        assert calls == [1]
        assert is_direct(compute_loss(make_model()))


def test_a_patched_backward_of_the_loss_is_called() -> None:
    loss: Any = compute_loss(make_model())
    calls = []
    loss.backward = lambda: calls.append(1)
    run_backward(loss)
    assert calls == [1]


def test_a_subclass_gets_its_own_backward() -> None:
    calls = []

    class Loss(Tensor):
        def backward(self, *a: Any, **k: Any) -> None:
            calls.append(1)
            super().backward(*a, **k)

    run_backward(compute_loss(make_model()).as_subclass(Loss))
    assert calls == [1]


def test_an_object_with_backward_is_called() -> None:
    class Loss:
        calls = 0

        def backward(self) -> None:
            self.calls += 1

    loss = Loss()
    run_backward(loss)
    assert loss.calls == 1


class _SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class _SeesOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_backward() -> None:
    loss = compute_loss(make_model())
    with _SeesFunctions() as mode:
        run_backward(loss)
    assert mode.names[0] == "backward"


@pytest.mark.parametrize(
    "mode",
    [
        _SeesOperations,
        lambda: torch.device("cpu"),
        torch.profiler.profile,
        torch.autograd.detect_anomaly,
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_and_profilers(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    model, other = make_model(), make_model()
    loss = compute_loss(model)
    with mode():
        assert not is_direct(loss)
    compute_loss(other).backward()
    assert have_same_bits(list_gradients(model), list_gradients(other))
    assert is_direct(compute_loss(model))


def test_inside_a_transform_it_is_torchs_error() -> None:
    loss = compute_loss(make_model())

    def inner(x: Tensor) -> Tensor:
        run_backward(loss)
        return x

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.vmap(inner)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    ours, theirs = make_model(), make_model()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        run_backward(compute_loss(ours))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        compute_loss(theirs).backward()
    assert have_same_bits(list_gradients(ours), list_gradients(theirs))


def test_a_listener_hears_of_the_pass() -> None:
    class Listener:
        roots: tuple[Any, ...] = ()
        ended = 0

        def backward_starts(self, roots: Any) -> None:
            self.roots = tuple(roots)

        def backward_ended(self) -> None:
            self.ended += 1

    listener, loss = Listener(), compute_loss(make_model())
    listen_to_backward(listener)
    try:
        run_backward(loss)
    finally:
        stop_listening(listener)
    assert listener.roots[0] is loss
    assert listener.ended == 1
    assert is_direct(compute_loss(make_model()))


# -- in a step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_equal_those_with_torchs_backward(accumulate: int, precision: str) -> None:
    found = []
    for direct in (True, False):
        model = make_model()
        model.register_parameter("bias", nn.Parameter(torch.zeros(())))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        stepper = halfstep.Stepper(model, optimizer, precision=precision, clip_norm=0.5)

        def loss_fn(m: Any, x: Tensor) -> Tensor:
            return m.bias.sum() + m(x).square().mean()

        batches = [torch.linspace(-1, i + 1, 24).view(4, 6) for i in range(accumulate)]
        with pytest.MonkeyPatch.context() as patched:
            if not direct:
                plain = Tensor.backward
                patched.setattr(Tensor, "backward", lambda *a, plain=plain, **k: plain(*a, **k))
            window = batches[0] if accumulate == 1 else next(iter(halfstep.windows(batches, accumulate)))
            for _ in range(3):
                stepper.step(loss_fn, window)
            called = list_functions(lambda s=stepper, w=window: s.step(loss_fn, w))  # type: ignore[misc]
        assert (TORCH_BACKWARD in called) is not direct
        found.append(copy.deepcopy(list(model.parameters())))
    assert have_same_bits(*found)
