"""The update by torch's kernel: equal to `optimizer.step()` to the bit, and left to it wherever that may do more."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.step.direct_backward import IS_TESTED_TORCH
from halfstep.step.direct_update import update_directly
from tests.step.direct import have_same_bits, list_functions

Optimizer = torch.optim.Optimizer
CLASSES = [torch.optim.Adam, torch.optim.AdamW]
TORCH_STEP = "torch.optim.adam.Adam.step"
BY_NAME = {name: importlib.import_module(f"torch.optim.{name}") for name in ("adam", "optimizer")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.first(x)))) * self.scale


class Pair:
    """Two equal models and optimizers: one for torch's step, one for the direct update."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        one = Net().to(dtype)
        self.models = [copy.deepcopy(one), copy.deepcopy(one)]  # versions start at 0
        self.optimizers = [make(model) for model in self.models]
        self.direct: list[bool] = []
        """Whether each update was direct."""

    def step(self, frozen: tuple[str, ...] = ()) -> None:
        self.differentiate(frozen)
        self.optimizers[0].step()
        self.direct.append(update_directly(self.optimizers[1]))
        if not self.direct[-1]:
            self.optimizers[1].step()

    def differentiate(self, frozen: tuple[str, ...] = ()) -> None:
        """Give the parameters of both models equal gradients."""
        generator = torch.Generator().manual_seed(len(self.direct))
        for (name, p), twin in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad, twin.grad = (None, None) if name in frozen else (gradient, gradient.clone())

    def check(self) -> None:
        """Compare weights, versions, state, groups, and what else the optimizers hold."""
        ours, theirs = self.models[1].parameters(), self.models[0].parameters()
        for p, twin in zip(ours, theirs, strict=True):
            assert have_same_bits(p, twin)
            assert p._version == twin._version
        first, second = self.optimizers
        assert have_same_bits(second.state_dict(), first.state_dict())
        places = [{p: i for i, p in enumerate(model.parameters())} for model in self.models]
        in_order = [[at[p] for p in o.state if p in at] for at, o in zip(places, self.optimizers, strict=True)]
        assert in_order[0] == in_order[1]
        for held, other in zip(second.state.values(), first.state.values(), strict=True):
            assert [type(v) for v in held.values()] == [type(v) for v in other.values()]
            assert [v._version for v in held.values()] == [v._version for v in other.values()]
        assert getattr(second, "_opt_called", None) == getattr(first, "_opt_called", None)
        assert [list(group) for group in second.param_groups] == [list(group) for group in first.param_groups]
        assert list(vars(second)) == list(vars(first))


def make_adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, **{"fused": True, **options})


def is_direct(optimizer: Optimizer) -> bool:
    """Update directly, and see that nothing has changed if that was refused."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = copy.deepcopy((parameters, optimizer.state_dict(), sorted(vars(optimizer))))
    known = list(optimizer.state)
    done = update_directly(optimizer)
    if not done:
        assert have_same_bits((parameters, optimizer.state_dict(), sorted(vars(optimizer))), before)
        assert len(known) == len(optimizer.state)
    return done


@pytest.fixture
def stepped() -> Optimizer:
    """An optimizer after two steps, with gradients, whose next update is direct."""
    pair = Pair(make_adamw)
    pair.step()
    pair.step()
    assert pair.direct == [False, True]
    pair.differentiate()
    return pair.optimizers[1]


def test_this_torch_is_one_of_those_that_were_compared() -> None:
    """Red for a newer torch: compare its Adam with `direct_update`, run these tests, and raise `_TESTED`."""
    assert IS_TESTED_TORCH


# -- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", CLASSES)
def test_50_updates_are_equal_to_the_bit(kind: type[Any], dtype: torch.dtype) -> None:
    pair = Pair(lambda model: kind(model.parameters(), 1e-2, weight_decay=0.1, fused=True), dtype)
    for _ in range(50):
        pair.step()
        pair.check()
    assert pair.direct == [False] + [True] * 49


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"betas": (0.5, 0.7), "eps": 1e-3},
        {"weight_decay": 0.0},
        {"lr": 0},
        {"lr": 1},
        {"foreach": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", CLASSES)
def test_options_that_the_kernel_takes(kind: type[Any], options: dict[str, Any]) -> None:
    pair = Pair(lambda model: kind(model.parameters(), **{"lr": 1e-2, "fused": True, **options}))
    for _ in range(8):
        pair.step()
    pair.check()
    assert pair.direct == [False] + [True] * 7


def test_adam_with_decoupled_decay() -> None:
    pair = Pair(
        lambda model: torch.optim.Adam(
            model.parameters(), 1e-2, weight_decay=0.5, decoupled_weight_decay=True, fused=True
        )
    )
    for _ in range(8):
        pair.step()
    pair.check()
    assert pair.direct[-1]


def test_several_formats_in_one_group() -> None:
    def make(model: nn.Module) -> Optimizer:
        model.get_submodule("first").to(torch.bfloat16)
        model.get_submodule("last").to(torch.float64)
        return make_adamw(model)

    pair = Pair(make)
    for _ in range(8):
        pair.step()
    pair.check()
    assert pair.direct[-1]


def test_several_groups() -> None:
    def make(model: nn.Module) -> Optimizer:
        weights = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 0.3}, {"params": rest, "lr": 1e-4, "betas": (0.5, 0.6)}]
        return torch.optim.AdamW(groups, 1e-2, weight_decay=0.0, fused=True)

    pair = Pair(make)
    for _ in range(8):
        pair.step()
    pair.check()
    assert pair.direct[-1]


def test_one_group_of_several_may_be_empty() -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}], 1e-2, fused=True)

    pair = Pair(make)
    for _ in range(4):
        pair.step()
    pair.check()


def test_one_group_that_is_not_fused_leaves_all_to_torch() -> None:
    def make(model: nn.Module) -> Optimizer:
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": rest}, {"params": [first], "fused": False}], 1e-2, fused=True)

    pair = Pair(make)
    for _ in range(4):
        pair.step()
    pair.check()
    assert not any(pair.direct)


def test_parameters_in_other_layouts_of_memory() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(4, 6).t())
            self.none = nn.Parameter(torch.randn(0, 3))

    pair = Pair(make_adamw)
    torch.manual_seed(0)
    one = Images()
    pair.models = [copy.deepcopy(one), copy.deepcopy(one)]
    pair.optimizers = [make_adamw(model) for model in pair.models]
    for _ in range(8):
        pair.step()
    pair.check()
    assert pair.direct[-1]


# -- schedules --------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "numpy": lambda o: schedules.LambdaLR(o, lambda step: __import__("numpy").float64(0.9) ** step),
    "one_cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=40),  # writes betas, too
    "cosine": lambda o: schedules.CosineAnnealingWarmRestarts(o, 5),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-4, 1e-2, step_size_up=4, cycle_momentum=False),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], milestones=[6]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.StepLR(o, 3)], o),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_counts_the_calls_of_step(name: str) -> None:
    pair = Pair(make_adamw)
    both = [SCHEDULES[name](optimizer) for optimizer in pair.optimizers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            pair.step()
            for schedule in both:
                schedule.step()
            pair.check()
    assert pair.direct == [False] + [True] * 11
    assert [s.get_last_lr() for s in both[:1]] == [s.get_last_lr() for s in both[1:]]


def test_a_schedule_built_later_does_not_warn_after_a_direct_update() -> None:
    """torch warns if the optimizer was not called before the schedule's first step."""
    pair = Pair(make_adamw)
    pair.step()
    pair.step()
    both = [schedules.StepLR(optimizer, 2) for optimizer in pair.optimizers]
    pair.step()
    assert pair.direct[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in both:
            schedule.step()
    pair.check()


def test_a_schedule_still_warns_without_an_update(stepped: Optimizer) -> None:
    schedule = schedules.StepLR(stepped, 2)
    with pytest.warns(UserWarning, match="optimizer.step"):
        schedule.step()


def test_a_schedule_around_a_patched_step_is_left_to_torch(stepped: Any) -> None:
    calls = []
    plain = stepped.step

    def patched(self: Any, closure: Any = None) -> None:
        calls.append(1)
        plain()

    stepped.step = MethodType(patched, stepped)
    schedules.StepLR(stepped, 2)
    assert not is_direct(stepped)
    stepped.step()
    assert calls == [1]


def test_the_step_of_another_optimizers_schedule_is_left_to_torch(stepped: Any) -> None:
    other = make_adamw(Net())
    schedules.StepLR(other, 2)
    stepped.step = vars(other)["step"]
    assert not is_direct(stepped)


# -- left to torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"fused": False},
        {"fused": None},
        {"fused": None, "foreach": True},
        {"fused": None, "capturable": False, "differentiable": True},
        {"lr": torch.tensor(1e-2)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", CLASSES)
def test_options_that_are_left_to_torch(kind: type[Any], options: dict[str, Any]) -> None:
    made = kind(Net().parameters(), **{"lr": 1e-2, "fused": True, **options})
    with torch.no_grad():
        for _ in range(2):
            for p in made.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            assert not is_direct(made)
            if not options.get("differentiable"):
                made.step()


@pytest.mark.parametrize(
    ("key", "value"), [("amsgrad", True), ("capturable", True), ("differentiable", True), ("fused", 1)]
)
def test_options_that_are_set_later(stepped: Optimizer, key: str, value: Any) -> None:
    stepped.param_groups[0][key] = value
    assert not is_direct(stepped)


@pytest.mark.parametrize(
    "key",
    [
        "fused",
        "amsgrad",
        "capturable",
        "differentiable",
        "lr",
        "betas",
        "weight_decay",
        "eps",
        "maximize",
        "foreach",
        "decoupled_weight_decay",
    ],
)
def test_a_missing_option_is_torchs_error(stepped: Optimizer, key: str) -> None:
    del stepped.param_groups[0][key]
    assert not update_directly(stepped)
    with pytest.raises(KeyError, match=key):
        stepped.step()


def test_defaults_of_a_differentiable_step(stepped: Optimizer) -> None:
    stepped.defaults["differentiable"] = True
    assert not is_direct(stepped)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RAdam, torch.optim.NAdam])
def test_other_optimizers(kind: type[Any]) -> None:
    made = kind(Net().parameters(), lr=1e-2)
    for p in made.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    made.step()
    assert not is_direct(made)


def test_a_subclass() -> None:
    class Mine(torch.optim.AdamW):
        pass

    pair = Pair(lambda model: Mine(model.parameters(), 1e-2, fused=True))
    pair.step()
    pair.step()
    assert pair.direct == [False, False]


def test_an_optimizer_whose_class_is_replaced(stepped: Any) -> None:
    stepped.__class__ = type("Wrapped", (torch.optim.AdamW,), {})
    assert not is_direct(stepped)


def test_hooks_of_the_step(stepped: Any) -> None:
    seen: list[str] = []
    for register in (stepped.register_step_pre_hook, stepped.register_step_post_hook):
        handle = register(lambda *_: seen.append("called"))
        assert not is_direct(stepped)
        stepped.step()
        handle.remove()
        assert is_direct(stepped)
    assert seen == ["called", "called"]


def test_hooks_of_all_optimizers(stepped: Any) -> None:
    for register in (
        BY_NAME["optimizer"].register_optimizer_step_pre_hook,
        BY_NAME["optimizer"].register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        try:
            assert not is_direct(stepped)
        finally:
            handle.remove()
        assert is_direct(stepped)


def _patch_method(optimizer: Any, _: pytest.MonkeyPatch) -> None:
    plain = optimizer.step
    optimizer.step = lambda *a, **k: plain(*a, **k)


def _patch_bound_method(optimizer: Any, _: pytest.MonkeyPatch) -> None:
    optimizer.step = optimizer.step  # e.g. `with patch.object(optimizer, "step", wraps=...)` afterwards


def _compile_step(optimizer: Any, _: pytest.MonkeyPatch) -> None:
    optimizer.step = torch.compile(optimizer.step, backend="eager")


def _patch_class(owner: Any, name: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def patch(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: plain(*a, **k))

    return patch


def _patch_init_group(optimizer: Any, _: pytest.MonkeyPatch) -> None:
    optimizer._init_group = optimizer._init_group


def _scale(name: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def patch(optimizer: Any, _: pytest.MonkeyPatch) -> None:
        setattr(optimizer, name, torch.ones(()))

    return patch


PATCHES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "step of the object": _patch_method,
    "bound step of the object": _patch_bound_method,
    "compiled step": _compile_step,
    "step of the class": _patch_class(torch.optim.AdamW, "step"),
    "_init_group of the class": _patch_class(torch.optim.AdamW, "_init_group"),
    "_init_group of the object": _patch_init_group,
    "_optimizer_step_code": _patch_class(Optimizer, "_optimizer_step_code"),
    "grouping": _patch_class(Optimizer, "_group_tensors_by_device_and_dtype"),
    "adam": _patch_class(BY_NAME["adam"], "adam"),
    "_fused_adam": _patch_class(BY_NAME["adam"], "_fused_adam"),
    "record_function": _patch_class(torch.autograd.profiler.record_function, "__enter__"),
    "grad_scale": _scale("grad_scale"),
    "found_inf": _scale("found_inf"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches(stepped: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_direct(stepped)
    PATCHES[name](stepped, monkeypatch)
    assert not is_direct(stepped)


def test_an_update_is_direct_next_to_a_compiled_model(stepped: Any) -> None:
    """The first `torch.compile` of a process replaces functions of optimizers."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert is_direct(stepped)


def test_a_patched_class_is_direct_again_without_the_patch(stepped: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _patch_class(torch.optim.AdamW, "step")(stepped, monkeypatch)
        assert not is_direct(stepped)
    assert is_direct(stepped)


def test_a_patched_kernel_is_called(stepped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`step()` looks the kernel up in each call, and so does the direct update."""
    calls = []
    plain = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **k: (calls.append(1), plain(*a, **k))[1])
    update_directly(stepped)
    assert calls == [1]


class _SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _SeesOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        _SeesFunctions,
        _SeesOperations,
        lambda: torch.device("cpu"),
        torch.autograd.profiler.profile,
        torch.profiler.profile,
        lambda: torch.profiler.profile(record_shapes=True, with_stack=True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_modes_and_profilers(stepped: Any, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    with mode():
        assert not is_direct(stepped)
    assert is_direct(stepped)


def test_a_profile_of_a_step_has_the_optimizers_region() -> None:
    torch.manual_seed(0)
    model = Net()
    stepper = halfstep.Stepper(model, make_adamw(model), precision="fp32")
    x = torch.randn(4, 6)
    for _ in range(3):
        stepper.step(lambda m, x: m(x).square().mean(), x)
    with torch.profiler.profile() as profile:
        stepper.step(lambda m, x: m(x).square().mean(), x)
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


# -- gradients, parameters and state ----------------------------------------------------------------------------------


def test_a_missing_gradient() -> None:
    pair = Pair(make_adamw)
    for i in range(10):
        pair.step(frozen=("first.weight", "scale") if i in (0, 4, 5) else ())
        pair.check()
    # At i = 1 some have no state yet.
    assert [i for i, direct in enumerate(pair.direct) if not direct] == [0, 1, 4, 5]


def test_parameters_are_frozen_and_unfrozen() -> None:
    pair = Pair(make_adamw)
    for i in range(9):
        for model in pair.models:
            model.get_submodule("first").requires_grad_(not 3 <= i < 6)
        pair.step(frozen=("first.weight", "first.bias") if 3 <= i < 6 else ())
    pair.check()
    assert pair.direct == [False, True, True, False, False, False, True, True, True]


def test_groups_are_added() -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.get_submodule("first").parameters(), 1e-2, fused=True))
    for i in range(6):
        if i == 3:
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                optimizer.add_param_group({"params": model.get_submodule("last").parameters(), "lr": 1e-3})
        pair.step()
        pair.check()
    assert pair.direct == [False, True, True, False, True, True]


def test_parameters_that_leave_the_groups_keep_their_state() -> None:
    pair = Pair(make_adamw)
    for i in range(6):
        if i == 3:
            for optimizer in pair.optimizers:
                optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:3]
        pair.step()
    for p, twin in zip(pair.models[1].parameters(), pair.models[0].parameters(), strict=True):
        assert have_same_bits(p, twin)
        assert have_same_bits(pair.optimizers[1].state[p], pair.optimizers[0].state[twin])
    assert pair.direct[-1]


def test_states_are_loaded() -> None:
    pair = Pair(make_adamw)
    for i in range(9):
        if i == 4:
            for optimizer in pair.optimizers:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                optimizer.load_state_dict(torch.load(file))
        pair.step()
        pair.check()
    assert pair.direct == [False] + [True] * 8


@pytest.mark.parametrize("options", [{"fused": False}, {"fused": None, "foreach": True}, {"amsgrad": True}])
def test_a_state_of_other_options_is_loaded(options: dict[str, Any]) -> None:
    """The options come with the state, and a step count may come in other places and formats."""
    pair = Pair(make_adamw)
    others = [make_adamw(model, **options) for model in pair.models]
    pair.differentiate()
    for other, optimizer in zip(others, pair.optimizers, strict=True):
        other.step()
        optimizer.load_state_dict(other.state_dict())
    for _ in range(3):
        pair.step()
        pair.check()
    assert not any(pair.direct)


def test_a_state_in_another_order_is_read_by_parameter() -> None:
    pair = Pair(make_adamw)
    for i in range(6):
        if i == 3:
            for optimizer in pair.optimizers:
                for p in list(optimizer.state)[:3]:
                    optimizer.state[p] = optimizer.state.pop(p)
        pair.step()
        pair.check()
    assert pair.direct == [False] + [True] * 5


def test_copies_of_an_optimizer() -> None:
    pair = Pair(make_adamw)
    for i in range(9):
        if i == 4:
            for optimizer in pair.optimizers:
                schedules.StepLR(optimizer, 2)
            both = copy.deepcopy([(m, o) for m, o in zip(pair.models, pair.optimizers, strict=True)])
            pair.models, pair.optimizers = [m for m, _ in both], [o for _, o in both]
        pair.step()
        pair.check()
    assert pair.direct == [False] + [True] * 8


def test_states_that_are_not_torchs(stepped: Any) -> None:
    held = stepped.state[stepped.param_groups[0]["params"][2]]
    for key, value in [("step", 3.0), ("exp_avg", None), ("exp_avg_sq", nn.Parameter(torch.ones(16)))]:
        before = held[key]
        held[key] = value
        assert not update_directly(stepped)
        held[key] = before
        assert is_direct(stepped)
        del held[key]
        assert not update_directly(stepped)
        held[key] = before


def test_a_state_that_is_no_dictionary(stepped: Any) -> None:
    class Paged(UserDict[Tensor, Any]):
        pass

    stepped.state = Paged(stepped.state)
    assert not update_directly(stepped)


def test_a_sparse_gradient_is_torchs_error(stepped: Any) -> None:
    first = stepped.param_groups[0]["params"][0]
    first.grad = first.grad.to_sparse()
    assert not is_direct(stepped)
    with pytest.raises(RuntimeError, match="sparse"):
        stepped.step()


def test_a_gradient_of_a_subclass(stepped: Any) -> None:
    first = stepped.param_groups[0]["params"][0]
    first.grad = nn.Parameter(first.grad)
    assert not is_direct(stepped)


def test_a_parameter_of_a_subclass(stepped: Any) -> None:
    class Mine(nn.Parameter):
        pass

    first = stepped.param_groups[0]["params"][0]
    first.__class__ = Mine
    assert not is_direct(stepped)


def _to(dtype_or_device: Any) -> Callable[[nn.Module, Any], None]:
    return lambda model, _: model.to(dtype_or_device)  # type: ignore[return-value]


def _half_of_the_state(_: nn.Module, optimizer: Any) -> None:
    for held in list(optimizer.state.values())[:2]:
        held["exp_avg"] = held["exp_avg"].half()


def _state_elsewhere(_: nn.Module, optimizer: Any) -> None:
    next(iter(optimizer.state.values()))["exp_avg"] = torch.zeros(16, 6, device="meta")


@pytest.mark.parametrize("change", [_to(torch.bfloat16), _to(torch.float64), _half_of_the_state, _state_elsewhere])
def test_states_that_do_not_fit_fail_as_in_torch(change: Callable[[nn.Module, Any], None]) -> None:
    """Either torch's error, with what torch has changed until then, or torch's result."""
    pair = Pair(make_adamw)
    pair.step()
    pair.step()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        change(model, optimizer)
    pair.differentiate()
    messages = []
    for optimizer, direct in zip(pair.optimizers, (False, True), strict=True):
        try:
            if not (direct and update_directly(optimizer)):
                optimizer.step()
        except RuntimeError as error:
            messages.append((type(error), str(error).splitlines()[0]))
    assert messages[1:] == messages[:1]
    if change is not _state_elsewhere:
        pair.check()


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu")])
def test_grad_modes_and_autocast(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    pair = Pair(make_adamw)
    with mode():
        enabled = torch.is_grad_enabled()
        for _ in range(4):
            pair.step()
            assert torch.is_grad_enabled() is enabled
    pair.check()
    assert pair.direct[-1]


def test_grad_mode_after_an_error(stepped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert not torch.is_grad_enabled()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        update_directly(stepped)
    assert torch.is_grad_enabled()


def test_gradients_that_are_not_finite() -> None:
    pair = Pair(make_adamw)
    for i in range(4):
        pair.differentiate()
        if i == 2:
            for model in pair.models:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.fill_(float("inf"))
        pair.optimizers[0].step()
        if not update_directly(pair.optimizers[1]):
            assert i == 0
            pair.optimizers[1].step()
    pair.check()


def test_torchs_own_scaler_calls_the_ordinary_step(stepped: Any) -> None:
    """It sets `grad_scale` and `found_inf` while it calls `step()`, and removes both."""
    seen = []
    handle = stepped.register_step_pre_hook(lambda o, *_: seen.append(update_directly(o)))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(stepped)
    handle.remove()
    assert seen == [False]
    assert is_direct(stepped)


def test_wrappers_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(make_adamw(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    wrapped.step()
    assert not update_directly(wrapped)


# -- in a step --------------------------------------------------------------------------------------------------------


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(50)]


def _compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


@pytest.mark.parametrize("kind", CLASSES)
def test_50_steps_equal_the_plain_loop(kind: type[Any], batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    plain = Net()
    held = copy.deepcopy(plain)
    optimizers = [kind(model.parameters(), 1e-2, fused=True) for model in (plain, held)]
    both = [schedules.CosineAnnealingLR(optimizer, 50) for optimizer in optimizers]
    stepper = halfstep.Stepper(held, optimizers[1], precision="fp32", clip_norm=1.0, schedule=both[1])
    called: set[str] = set()
    for i, x in enumerate(batches):
        _compute_loss(plain, x).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizers[0].step()
        both[0].step()
        optimizers[0].zero_grad()
        if i in (30, 31):
            called = list_functions(lambda x=x: stepper.step(_compute_loss, x))  # type: ignore[misc]
        else:
            stepper.step(_compute_loss, x)
    assert TORCH_STEP not in called
    assert "torch.optim.lr_scheduler.LRScheduler.step" in called
    assert have_same_bits(list(held.parameters()), list(plain.parameters()))
    assert have_same_bits(optimizers[1].state_dict(), optimizers[0].state_dict())
    assert both[1].state_dict() == both[0].state_dict()


def test_a_hook_in_a_step_is_called(batches: list[Tensor]) -> None:
    model = Net()
    optimizer = make_adamw(model)
    stepper = halfstep.Stepper(model, optimizer, precision="fp32")
    calls: list[int] = []
    for i, x in enumerate(batches[:6]):
        if i == 3:
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
        stepper.step(_compute_loss, x)
    assert len(calls) == 3


def test_a_skipped_step_leaves_the_state(batches: list[Tensor]) -> None:
    model = Net()
    optimizer = make_adamw(model)
    stepper = halfstep.Stepper(model, optimizer, precision="fp32")
    for x in batches[:4]:
        stepper.step(_compute_loss, x)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
    assert not stepper.step(_compute_loss, batches[5] * float("nan")).applied
    assert have_same_bits((list(model.parameters()), optimizer.state_dict()), before)
