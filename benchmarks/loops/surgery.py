"""Models that change between steps: blocks that are added, frozen, replaced or compiled, next to hidden state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    by_hand,
    frozen_copy,
    loop,
    mlp,
    mse,
    pairs,
    poisoned,
    promise,
    require,
    require_same,
    sgd,
    skips,
    trains,
)

BATCHES = pairs(8)


class Follower(nn.Module):
    """A layer with a shadow of its weight in a list, a running mean and a counter as plain attributes."""

    def __init__(self, width: int = 16, out: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.shadow, self.mean, self.calls = [self.linear.weight.detach().clone()], torch.zeros(out), 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        with torch.no_grad():
            self.shadow[0].lerp_(self.linear.weight, 0.1)
            self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
        self.calls += 1
        return out - self.mean + 0.01 * F.linear(x, self.shadow[0].clone())


def followers(model: nn.Module) -> Seen:
    def read() -> dict[str, Any]:
        found = {n: m for n, m in model.named_modules() if isinstance(m, Follower)}
        return {n: {"shadow": m.shadow[0], "mean": m.mean, "calls": m.calls} for n, m in found.items()}

    return Seen(read)


def stack() -> nn.Module:
    return nn.Sequential(Follower(), nn.ReLU(), Follower(16, 4))


def changed(change: Callable[[Case], None], make: Callable[[], nn.Module] = stack, at: int = 3) -> str:
    """Change the model before step `at`; skips before and right after it, and bitwise as by hand."""
    ends = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = make()
        case = Case(model, sgd(model, 0.05, momentum=0.9), mse, beside=[followers(model)])
        if ours:
            case.start()
        for i, batch in enumerate(BATCHES):
            if i == at:
                torch.manual_seed(1)
                change(case)
            if ours:
                if i in (1, at, at + 2):
                    skips(case, poisoned(batch))
                trains(case, [batch])
            else:
                by_hand(case, batch)
        ends.append(case.state())
    require_same(ends[0], ends[1], "compared with the loop by hand")
    return "3 skips undone, one of them in the first step after the change; 8 steps bitwise as by hand"


@loop
def block_appended_in_the_middle() -> str:
    def change(case: Case) -> None:
        block = Follower(4, 4)
        case.model.append(block)
        case.optimizer.add_param_group({"params": list(block.parameters())})

    return changed(change)


@loop
def module_list_that_grows_every_few_steps() -> str:
    """Progressive stacking: each new block begins as a copy of the last."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Follower()]), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x).tanh()
            return self.head(x)

    def change(case: Case) -> None:
        for _ in range(2):
            block = copy.deepcopy(case.model.blocks[-1])
            case.model.blocks.append(block)
            case.optimizer.add_param_group({"params": list(block.parameters())})

    return changed(change, Growing)


@loop
def block_replaced_by_a_frozen_one() -> str:
    def change(case: Case) -> None:
        case.model[0] = Follower().requires_grad_(False)

    return changed(change)


@loop
def block_removed() -> str:
    def make() -> nn.Module:
        return nn.Sequential(Follower(), Follower(), Follower(16, 4))

    def change(case: Case) -> None:
        del case.model[1]

    return changed(change, make)


@loop
def blocks_frozen_and_unfrozen() -> str:
    def change(case: Case) -> None:
        first, last = case.model[0], case.model[2]
        first.requires_grad_(not first.linear.weight.requires_grad)
        last.linear.bias.requires_grad_(False)

    return changed(change)


@loop
def first_layer_in_eval_mode_from_now_on() -> str:
    def make() -> nn.Module:
        return nn.Sequential(Follower(), nn.BatchNorm1d(16), nn.Dropout(0.0), Follower(16, 4))

    return changed(lambda case: case.model[1].eval() and None, make)


@loop
def forward_replaced_on_the_instance() -> str:
    """Monkey-patching: `model[0].forward = patched`, which writes a tensor that nothing wrote before."""

    def change(case: Case) -> None:
        block = case.model[0]
        inner, extra = block.forward, torch.zeros(16)

        def patched(x: Tensor) -> Tensor:
            out = inner(x)
            block.extra = 0.5 * getattr(block, "extra", extra) + 0.5 * out.detach().mean(0)
            return out + block.extra

        block.forward = patched

    return changed(change)


@loop
def hook_added_in_the_middle() -> str:
    """A forward hook from step 3 on that writes a small buffer which was constant before."""

    class Buffered(Follower):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.register_buffer("peak", torch.zeros(4))

    def hook(module: Any, _: Any, out: Tensor) -> None:
        module.peak.copy_(torch.maximum(module.peak, out.detach().amax(0)))

    def make() -> nn.Module:
        return nn.Sequential(Follower(), nn.ReLU(), Buffered())

    return changed(lambda case: case.model[2].register_forward_hook(hook) and None, make)


@loop
def weights_replaced_by_new_parameters() -> str:
    """`layer.weight = nn.Parameter(...)` between steps, and the optimizer gets the new list."""

    def change(case: Case) -> None:
        layer = case.model[2].linear
        case.optimizer.state.pop(layer.weight, None)
        with torch.no_grad():
            layer.weight = nn.Parameter(layer.weight * 0.5)
        case.optimizer.param_groups[0]["params"] = list(case.model.parameters())

    return changed(change)


@loop
def lora_merged_and_taken_off() -> str:
    """Adapters are merged into the base weight by the loop, and new ones begin."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.uses = nn.Linear(16, 4).requires_grad_(False), 0
            self.a, self.b = nn.Parameter(torch.randn(2, 16) * 0.1), nn.Parameter(torch.zeros(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            self.uses += 1
            return self.base(x) + x @ self.a.T @ self.b.T

    def change(case: Case) -> None:
        with torch.no_grad():
            case.model.base.weight += case.model.b @ case.model.a
            case.model.b.zero_()

    return changed(change, Lora)


# -- compiled -----------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """BatchNorm and a buffer that is written in place: what a compiled step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(norm=True)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.mean.lerp_(out.detach().mean(0), 0.1)
        return out - self.mean.clone()


def compiled_case(backend: str, hidden: bool) -> Callable[[], Case]:
    def build() -> Case:
        torch._dynamo.reset()
        model = Counted()
        teacher = frozen_copy(mlp(norm=True))

        def loss(m: nn.Module, b: Any) -> Tensor:
            if hidden:
                with torch.no_grad():
                    for t, s in zip(teacher.parameters(), model.net.parameters(), strict=True):
                        t.lerp_(s, 0.1)
            return F.mse_loss(m(b[0]), teacher(b[0]))

        return Case(torch.compile(model, backend=backend), sgd(model), loss, beside=[teacher])  # type: ignore[arg-type]

    return build


@loop
def compiled_model_that_writes_a_buffer() -> str:
    return promise(compiled_case("eager", hidden=False), BATCHES[:4])


@loop
def compiled_model_with_a_teacher_outside() -> str:
    """The teacher is seen in the one step that is observed, and copied before every later one."""
    return promise(compiled_case("eager", hidden=True), BATCHES[:5], at=(0, 1, 3))


@loop
def compiled_block_inside_an_eager_model() -> str:
    def build() -> Case:
        torch._dynamo.reset()
        model = nn.Sequential(Follower(), Counted())
        model[1].compile(backend="eager")
        return Case(model, sgd(model), mse, beside=[followers(model)])

    return promise(build, BATCHES[:4])


# -- several optimizers -------------------------------------------------------------------------------------------


class Gan(nn.Module):
    """Generator and discriminator; a history of fakes and a counter as plain attributes of the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = mlp(16, 16, 4, norm=True), Follower(4, 1)
        self.fakes, self.turn = torch.zeros(16, 4), 0

    def remember(self, fake: Tensor) -> Tensor:
        self.fakes[self.turn % 16] = fake.detach()[0]
        self.turn += 1
        return self.fakes.clone()


def gan_d(m: Any, b: Any) -> Tensor:
    fake = m.g(b[0]).detach()
    past = m.remember(fake)
    return F.softplus(m.d(torch.cat([fake, past]))).mean() + F.softplus(-m.d(b[1])).mean()


def gan_g(m: Any, b: Any) -> Tensor:
    return F.softplus(-m.d(m.g(b[0]))).mean()


def gan_case() -> Case:
    model = Gan()
    optimizers = {
        "g": torch.optim.Adam(model.g.parameters(), 1e-3, betas=(0.0, 0.9)),
        "d": torch.optim.Adam(model.d.parameters(), 1e-3, betas=(0.0, 0.9)),
    }
    seen = Seen(lambda: {"fakes": model.fakes, "turn": model.turn})
    return Case(model, optimizers, None, beside=[followers(model), seen])  # type: ignore[arg-type]


@loop
def gan_in_turns_with_a_history_of_fakes() -> str:
    """A bad batch in either turn leaves the history, both BatchNorms and the discriminator's shadow alone."""
    ends = []
    for bad_steps in (False, True):
        torch.manual_seed(0)
        case = gan_case()
        case.start()
        for i, batch in enumerate(BATCHES):
            for name, fn in (("d", gan_d), ("g", gan_g)):
                case.loss_fn = fn
                if bad_steps and i in (0, 1, 4):
                    skips(case, poisoned(batch), only=name)
                trains(case, [batch], only=name)
        ends.append(case.state())
    require_same(ends[0], ends[1], "compared with the run without bad batches")
    return "6 skips undone, 16 steps bitwise as without bad batches"


@loop
def gan_of_a_dict_of_losses_with_a_history() -> str:
    ends = []
    for bad_steps in (False, True):
        torch.manual_seed(0)
        case = gan_case()
        case.loss_fn = lambda m, b: {"d": gan_d(m, b), "g": gan_g(m, b)}
        case.start()
        for i, batch in enumerate(BATCHES):
            if bad_steps and i in (0, 1, 4):
                skips(case, poisoned(batch))
            trains(case, [batch])
        ends.append(case.state())
    require_same(ends[0], ends[1], "compared with the run without bad batches")
    return "3 skips undone, 8 steps bitwise as without bad batches"


@loop
def two_steppers_that_share_a_bank() -> str:
    """Each Stepper's skip takes back its own writes, and none that the other has applied."""
    torch.manual_seed(0)
    bank = torch.zeros(2)
    cases = []
    for place in range(2):
        model = mlp()

        def loss(m: nn.Module, b: Any, place: int = place) -> Tensor:
            bank[place] += 1
            return mse(m, b)

        cases.append(Case(model, adamw(model), loss, beside=[bank]))
    for case in cases:
        case.start()
    for batch in BATCHES[:4]:
        for case in cases:
            skips(case, poisoned(batch))
            trains(case, [batch])
    require(bank.tolist() == [4.0, 4.0], f"{bank.tolist()}")
    return "8 skips undone, 4 steps of each counted"
