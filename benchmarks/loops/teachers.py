"""Teachers and target networks that a step moves, wherever somebody keeps them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    findings,
    frozen_copy,
    limit,
    loop,
    mlp,
    normal,
    poisoned,
    promise,
    promise_in_three_calls,
    require,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Window

VIEWS = [(normal(8, 16, seed=i), normal(8, 16, seed=20 + i)) for i in range(6)]


def lerp(teacher: nn.Module, student: nn.Module, rate: float = 0.1) -> None:
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.lerp_(s, rate)


def distance(student: nn.Module, teacher: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        aim = teacher(batch[1])
    return F.mse_loss(student(batch[0]), aim)


class Student(nn.Module):
    """Moves a teacher in its own forward; `teacher()` says where that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(16, 16, 4, norm=True)
        self.keep(frozen_copy(self.net))

    def keep(self, teacher: nn.Module) -> None:
        raise NotImplementedError

    def teacher(self) -> nn.Module:
        raise NotImplementedError

    def move(self) -> None:
        lerp(self.teacher(), self.net)

    def forward(self, batch: Any) -> Tensor:
        self.move()
        return distance(self.net, self.teacher(), batch)


def student_case(make: Callable[[], Student]) -> Callable[[], Case]:
    def build() -> Case:
        model = make()
        return Case(model, sgd(model, 0.05, momentum=0.9), lambda m, b: m(b), beside=[model.teacher()])

    return build


class InAList(Student):
    """`self._teacher = [teacher]`, so that it is in no `state_dict`."""

    def keep(self, teacher: nn.Module) -> None:
        self._teacher = [teacher]

    def teacher(self) -> nn.Module:
        return self._teacher[0]


@loop
def teacher_in_a_list_of_the_model() -> str:
    return promise(student_case(InAList), VIEWS)


@loop
def teacher_in_a_list_of_the_model_in_three_calls() -> str:
    return promise_in_three_calls(student_case(InAList), VIEWS)


@loop
def teacher_set_past_the_module() -> str:
    """`object.__setattr__`, the other way to keep a teacher out of the parameters."""

    class Hidden(Student):
        def keep(self, teacher: nn.Module) -> None:
            object.__setattr__(self, "_teacher", teacher)

        def teacher(self) -> nn.Module:
            return self._teacher  # type: ignore[return-value]

    return promise(student_case(Hidden), VIEWS)


@loop
def teacher_behind_a_closure_of_the_model() -> str:
    class Closed(Student):
        def keep(self, teacher: nn.Module) -> None:
            self.get = lambda: teacher

        def teacher(self) -> nn.Module:
            return self.get()

    return promise(student_case(Closed), VIEWS)


@loop
def teacher_as_a_class_attribute() -> str:
    class Shared(Student):
        known: ClassVar[dict[str, nn.Module]] = {}

        def keep(self, teacher: nn.Module) -> None:
            type(self).known["teacher"] = teacher

        def teacher(self) -> nn.Module:
            return type(self).known["teacher"]

    def build() -> Case:
        model = Shared()
        return Case(model, sgd(model), lambda m, b: m(b), beside=[model.teacher()])

    torch.manual_seed(0)
    case = build()
    case.start()
    for batch in VIEWS:
        skips(case, poisoned(batch))
        trains(case, [batch])
    return "6 skips bitwise undone between 6 steps"


@loop
def teacher_in_a_dataclass_with_slots() -> str:
    @dataclass(slots=True)
    class Nets:
        teacher: nn.Module
        rate: float

    def build() -> Case:
        student = mlp(16, 16, 4, norm=True)
        nets = Nets(frozen_copy(student), 0.1)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            lerp(nets.teacher, model, nets.rate)
            return distance(model, nets.teacher, batch)

        return Case(student, adamw(student), loss, beside=[nets.teacher])

    return promise(build, VIEWS)


@loop
def teacher_as_an_argument_of_a_partial() -> str:
    def loss(teachers: tuple[nn.Module, ...], model: nn.Module, batch: Any) -> Tensor:
        lerp(teachers[0], model)
        return distance(model, teachers[0], batch)

    def build() -> Case:
        student = mlp(16, 16, 4, norm=True)
        teacher = frozen_copy(student)
        return Case(student, adamw(student), functools.partial(loss, (teacher,)), beside=[teacher])

    return promise(build, VIEWS)


@loop
def shadow_weights_in_a_dict() -> str:
    """No second network: a dict of tensors by name, moved by `mul_` and `add_`, read through functional_call."""

    def build() -> Case:
        student = mlp(16, 16, 4)
        shadow = {name: p.detach().clone() for name, p in student.named_parameters()}

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    shadow[name].mul_(0.9).add_(p, alpha=0.1)
                aim = torch.func.functional_call(model, shadow, (batch[1],))
            return F.mse_loss(model(batch[0]), aim)

        return Case(student, adamw(student), loss, beside=[shadow])

    return promise(build, VIEWS)


@loop
def shadow_weights_moved_by_foreach() -> str:
    def build() -> Case:
        student = mlp(16, 16, 4)
        teacher = frozen_copy(student)
        theirs, ours = list(teacher.parameters()), list(student.parameters())

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                torch._foreach_mul_(theirs, 0.9)
                torch._foreach_add_(theirs, ours, alpha=0.1)
            return distance(model, teacher, batch)

        return Case(student, adamw(student), loss, beside=[teacher])

    return promise(build, VIEWS)


@loop
def averaged_model_of_torch_moved_by_the_loss() -> str:
    """`torch.optim.swa_utils.AveragedModel` as the teacher: weights, buffers and `n_averaged`."""

    def build() -> Case:
        student = mlp(16, 16, 4, norm=True)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        teacher = torch.optim.swa_utils.AveragedModel(student, multi_avg_fn=average)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            teacher.update_parameters(model)
            return distance(model, teacher, batch)

        return Case(student, sgd(student), loss, beside=[teacher])

    return promise(build, VIEWS)


class Schedule(nn.Module):
    """DINO's criterion: the momentum of the teacher rises with a counter that is a Python number."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.nets, self.iteration = [teacher], 0
        self.momentum = [0.5 + 0.05 * i for i in range(40)]

    def forward(self, student: nn.Module, batch: Any) -> Tensor:
        lerp(self.nets[0], student, 1 - self.momentum[self.iteration])
        self.iteration += 1
        return distance(student, self.nets[0], batch)


@loop
def momentum_by_a_counter_of_the_criterion() -> str:
    def build() -> Case:
        student = mlp(16, 16, 4)
        criterion = Schedule(frozen_copy(student))
        seen = Seen(lambda: {"iteration": criterion.iteration})
        return Case(student, adamw(student), criterion, beside=[criterion.nets[0], seen])

    return promise(build, VIEWS)


@loop
def target_network_copied_every_third_call() -> str:
    """A hard update by `load_state_dict`, counted by an attribute of a module."""

    class Target(nn.Module):
        def __init__(self, online: nn.Module) -> None:
            super().__init__()
            self.net, self.calls = frozen_copy(online), 0

        def forward(self, x: Tensor, online: nn.Module) -> Tensor:
            if self.calls % 3 == 0:
                self.net.load_state_dict(online.state_dict())
            self.calls += 1
            return self.net(x)

    def build() -> Case:
        online = mlp(16, 16, 4)
        target = Target(online)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            state, after, action = batch
            with torch.no_grad():
                best = target(after, model).amax(1)
            return F.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], 0.1 + 0.9 * best)

        return Case(online, adamw(online), loss, beside=[target, Seen(lambda: {"calls": target.calls})])

    return promise(build, [(*views, whole(4, 8, seed=i)) for i, views in enumerate(VIEWS)], at=(0, 2, 3))


@loop
def target_network_of_a_plain_agent() -> str:
    """Polyak averaging in `agent.loss`, a method of a plain object."""

    class Agent:
        def __init__(self, net: nn.Module) -> None:
            self.net, self.target = net, frozen_copy(net)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            for t, s in zip(self.target.parameters(), self.net.parameters(), strict=True):
                t.data.copy_(0.995 * t.data + 0.005 * s.data)
            return distance(model, self.target, batch)

    def build() -> Case:
        agent = Agent(mlp(16, 16, 4))
        return Case(agent.net, adamw(agent.net), agent.loss, beside=[agent.target])

    return promise(build, VIEWS)


@loop
def teachers_in_nested_containers() -> str:
    def build() -> Case:
        student = mlp(16, 16, 4, norm=True)
        held = {"views": [(frozen_copy(student), 0.1), (frozen_copy(student), 0.5)]}

        def loss(model: nn.Module, batch: Any) -> Tensor:
            total = model(batch[0]).square().mean()
            for teacher, rate in held["views"]:
                lerp(teacher, model, rate)
                total = total + distance(model, teacher, batch)
            return total

        return Case(student, adamw(student), loss, beside=[teacher for teacher, _ in held["views"]])

    return promise(build, VIEWS)


@loop
def teacher_moved_by_a_forward_hook() -> str:
    def build() -> Case:
        student = mlp(16, 16, 4)
        teacher = frozen_copy(student)
        student[2].register_forward_hook(lambda *_: lerp(teacher, student))
        return Case(student, adamw(student), lambda m, b: distance(m, teacher, b), beside=[teacher])

    return promise(build, VIEWS)


@loop
def teacher_moved_in_backward() -> str:
    """A full backward hook moves it: the write comes from autograd's side of the step."""

    def build() -> Case:
        student = mlp(16, 16, 4)
        teacher = frozen_copy(student)
        student[2].register_full_backward_hook(lambda *_: lerp(teacher, student))
        return Case(student, adamw(student), lambda m, b: distance(m, teacher, b), beside=[teacher])

    return promise(build, VIEWS)


@loop
def gradient_statistics_of_a_parameter_hook() -> str:
    """`register_post_accumulate_grad_hook` that keeps a running mean of |gradient| outside of the model."""

    def build() -> Case:
        model = mlp(16, 16, 4)
        means = [torch.zeros(()) for _ in model.parameters()]

        def follow(mean: Tensor, p: Tensor) -> None:
            mean.lerp_(p.grad.abs().mean(), 0.1)  # type: ignore[union-attr]

        for mean, p in zip(means, model.parameters(), strict=True):
            p.register_post_accumulate_grad_hook(functools.partial(follow, mean))
        return Case(model, adamw(model), lambda m, b: m(b[0]).square().mean(), beside=means)

    return promise(build, VIEWS)


@loop
def teacher_kept_in_bf16() -> str:
    """Half the memory, computed with in fp32."""

    def build() -> Case:
        student = mlp(16, 16, 4)
        teacher = frozen_copy(student).bfloat16()

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                    t.mul_(0.9).add_(s.bfloat16(), alpha=0.1)
                wide = {name: p.float() for name, p in teacher.named_parameters()}
                aim = torch.func.functional_call(model, wide, (batch[1],))
            return F.mse_loss(model(batch[0]), aim)

        return Case(student, adamw(student), loss, beside=[teacher])

    return promise(build, VIEWS)


@loop
def teacher_over_a_window_of_micro_batches() -> str:
    """Three moves in each window; the second micro-batch of a window is bad."""
    window = [Window(VIEWS[:3]), Window(VIEWS[3:]), Window(VIEWS[1:4])]
    bad = Window([VIEWS[0], poisoned(VIEWS[1]), VIEWS[2]])
    return promise(student_case(InAList), window, bad)


_TEACHERS: dict[str, nn.Module] = {}


def _global_loss(model: nn.Module, batch: Any) -> Tensor:
    lerp(_TEACHERS["teacher"], model)
    return distance(model, _TEACHERS["teacher"], batch)


@loop
def teacher_in_a_global_registry() -> str:
    torch.manual_seed(0)
    student = mlp(16, 16, 4, norm=True)
    _TEACHERS["teacher"] = frozen_copy(student)
    case = Case(student, adamw(student), _global_loss, beside=[_TEACHERS["teacher"]])
    case.start()
    for batch in VIEWS:
        skips(case, poisoned(batch))
        trains(case, [batch])
    return "6 skips bitwise undone between 6 steps"


@loop
def teacher_made_anew_each_epoch() -> str:
    """Born-again networks: another deepcopy, rebound in a closure between steps."""
    torch.manual_seed(0)
    student = mlp(16, 16, 4)
    teacher = frozen_copy(student)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        lerp(teacher, model)
        return distance(model, teacher, batch)

    case = Case(student, adamw(student), loss)
    case.start()
    for epoch in range(3):
        case.beside = [teacher]
        trains(case, VIEWS[epoch : epoch + 1])
        skips(case, poisoned(VIEWS[3]))
        trains(case, VIEWS[4:])
        teacher = copy.deepcopy(teacher)
    return "3 teachers in turn, a skip of each bitwise undone"


def _begins_late(first: int) -> Callable[[], Case]:
    """The teacher is read from the first step on, and moved from the step `first` on."""

    def build() -> Case:
        student = mlp(16, 16, 4)
        teacher = frozen_copy(student)

        class Warm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, model: nn.Module, batch: Any) -> Tensor:
                self.calls += 1
                if self.calls > first:
                    lerp(teacher, model)
                return distance(model, teacher, batch)

        criterion = Warm()
        return Case(student, adamw(student), criterion, beside=[teacher, Seen(lambda: {"calls": criterion.calls})])

    return build


@loop
def teacher_that_begins_to_move_at_step_3() -> str:
    """Reported at its first move; every skip after that is undone."""
    return promise(_begins_late(3), VIEWS * 2, at=(0, 2, 5, 8))


@loop
def teacher_that_begins_to_move_at_step_12() -> str:
    """After the observation at update 10."""
    return promise(_begins_late(12), VIEWS * 3, at=(0, 11, 14))


@loop
def teacher_whose_first_move_is_the_skipped_step() -> str:
    """The one step that is not covered, as documented: reported by name, the next skip is undone."""
    torch.manual_seed(0)
    case = _begins_late(3)()
    stepper = case.start()
    trains(case, VIEWS[:3])
    require(not stepper.step(case.loss_fn, poisoned(VIEWS[3])).applied, "a bad batch was applied")
    require("rollback.first_write" in findings(stepper), f"not reported: {findings(stepper)}")
    trains(case, VIEWS[3:5])
    skips(case, poisoned(VIEWS[3]))
    return limit("restored from the next step on", "the first move stayed and was reported; the next skip was undone")
