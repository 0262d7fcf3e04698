"""GANs and other games: several optimizers, several Steppers, gradient penalties, networks switched on and off."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.loops.harness import (
    INF,
    NAN,
    Case,
    HalfstepError,
    adamw,
    differences,
    flat,
    limit,
    loop,
    mlp,
    normal,
    promise,
    refuses,
    require,
    require_same,
    sgd,
    skips,
    trains,
)
from halfstep import Stepper

REAL = [normal(8, 16, seed=i) for i in range(4)]
NOISE = [normal(8, 8, seed=30 + i) for i in range(4)]
BOTH = list(zip(REAL, NOISE, strict=True))


def gan() -> nn.ModuleDict:
    return nn.ModuleDict({"g": mlp(8, 16, 16, norm=True), "d": mlp(16, 16, 1)})


def optimizers(nets: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(nets[name].parameters(), lr=1e-3, betas=(0.5, 0.9)) for name in nets}


def d_loss(m: nn.ModuleDict, batch: Any) -> Tensor:
    real, noise = batch
    return F.softplus(-m["d"](real).float()).mean() + F.softplus(m["d"](m["g"](noise).detach()).float()).mean()


def g_loss(m: nn.ModuleDict, batch: Any) -> Tensor:
    return F.softplus(-m["d"](m["g"](batch[1])).float()).mean()


def set_requires_grad(nets: Any, on: bool) -> None:
    """As CycleGAN writes it."""
    for net in nets if isinstance(nets, list) else [nets]:
        for p in net.parameters():
            p.requires_grad = on


@loop
def gan_in_turns_with_only() -> str:
    """d, then g, each its own transaction, bitwise as by hand; a bad batch of either undoes that one only."""
    torch.manual_seed(0)
    hand = gan()
    by_name = optimizers(hand)
    for batch in BOTH:
        for name, fn in (("d", d_loss), ("g", g_loss)):
            hand.zero_grad()
            fn(hand, batch).backward()
            by_name[name].step()
    torch.manual_seed(0)
    case = Case(model := gan(), optimizers(model), d_loss)
    stepper = case.start()
    for batch in BOTH:
        for name, fn in (("d", d_loss), ("g", g_loss)):
            case.loss_fn = fn
            skips(case, (batch[0] * NAN, batch[1] * NAN), only=name)
            require(stepper.step(fn, batch, only=name).applied, "not applied")
    require_same(Case(hand, by_name, d_loss).state(), case.state(), "compared with the loop by hand")
    return "4 turns bitwise as by hand, 8 skips bitwise undone"


@loop
def gan_toggled_requires_grad() -> str:
    """`G.requires_grad_(False)` while D is trained, and back."""
    torch.manual_seed(0)
    hand = gan()
    by_name = optimizers(hand)
    torch.manual_seed(0)
    case = Case(model := gan(), optimizers(model), d_loss)
    stepper = case.start()
    for batch in BOTH:
        for name, other, fn in (("d", "g", d_loss), ("g", "d", g_loss)):
            for nets in (hand, model):
                set_requires_grad(nets[other], False)
                set_requires_grad(nets[name], True)
            hand.zero_grad()
            fn(hand, batch).backward()
            by_name[name].step()
            require(stepper.step(fn, batch, only=name).applied, "not applied")
    require_same(Case(hand, by_name, d_loss).state(), case.state(), "compared with the loop by hand")
    return "4 turns with toggling bitwise as by hand"


@loop
def gan_dict_of_losses() -> str:
    """Both losses from one forward; each moves its own network only; one bad loss, and none moves."""
    torch.manual_seed(0)

    def both(m: nn.ModuleDict, batch: Any) -> dict[str, Tensor]:
        return {"d": d_loss(m, batch), "g": g_loss(m, batch)}

    case = Case(model := gan(), optimizers(model), both)
    stepper = case.start()
    trains(case, BOTH)
    for spoilt in ("d", "g"):
        before = case.state()

        def bad(m: nn.ModuleDict, batch: Any, spoilt: str = spoilt) -> dict[str, Tensor]:
            return {name: loss * NAN if name == spoilt else loss for name, loss in both(m, batch).items()}

        require(stepper.step(bad, BOTH[0]).reason == "loss_not_finite", "the reason")
        require_same(before, case.state(), f"{spoilt} was spoilt")
    report = stepper.step(both, BOTH[0])
    require(set(report.parts) == {"d", "g"}, f"parts {report.parts}")
    return "a bad loss of either leaves both as they were"


@loop
def gan_dict_moves_each_its_own() -> str:
    """The generator's loss reaches the discriminator, and must not move it."""
    torch.manual_seed(0)
    case = Case(model := gan(), {n: sgd(model[n]) for n in "gd"}, g_loss)
    stepper = case.start()
    before = dict(flat(model["d"]))
    stepper.step(lambda m, b: {"g": g_loss(m, b), "d": 0.0 * d_loss(m, b)}, BOTH[0])
    far = max((p - before[f".{n}"]).abs().max().item() for n, p in model["d"].named_parameters())
    require(far == 0.0, f"the generator's loss moved the discriminator by {far}")
    return "the discriminator did not move"


@loop
def gan_two_steppers() -> str:
    """Two models, two Steppers; each loss function holds the other's network."""
    torch.manual_seed(0)
    g, d = mlp(8, 16, 16, norm=True), mlp(16, 16, 1, norm=True)

    def train_d(d: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-d(batch[0])).mean() + F.softplus(d(g(batch[1]).detach())).mean()

    def train_g(g: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-d(g(batch[1]))).mean()

    dis, gen = Case(d, adamw(d), train_d, beside=[g]), Case(g, adamw(g), train_g, beside=[d])
    dis.start()
    gen.start()
    for batch in BOTH:
        for case in (dis, gen):
            skips(case, (batch[0] * NAN, batch[1] * NAN))
            trains(case, [batch])
    return "8 steps; 8 skips left both networks, BatchNorm included, bitwise as they were"


def cycle_gan() -> tuple[nn.ModuleDict, Any, Any]:
    nets = nn.ModuleDict({"a2b": mlp(16, 16, 16), "b2a": mlp(16, 16, 16), "d_a": mlp(16, 8, 1), "d_b": mlp(16, 8, 1)})
    g = torch.optim.Adam(itertools.chain(nets["a2b"].parameters(), nets["b2a"].parameters()), lr=2e-4)
    d = torch.optim.Adam(itertools.chain(nets["d_a"].parameters(), nets["d_b"].parameters()), lr=2e-4)
    return nets, g, d


def cycle_g(n: nn.ModuleDict, batch: Any) -> Tensor:
    a, b = batch
    fake_b, fake_a = n["a2b"](a), n["b2a"](b)
    fooled = (n["d_b"](fake_b) - 1).square().mean() + (n["d_a"](fake_a) - 1).square().mean()
    return fooled + 10 * ((n["b2a"](fake_b) - a).abs().mean() + (n["a2b"](fake_a) - b).abs().mean())


def cycle_d(n: nn.ModuleDict, batch: Any) -> Tensor:
    a, b = batch
    with torch.no_grad():
        fake_b, fake_a = n["a2b"](a), n["b2a"](b)
    of_a = (n["d_a"](a) - 1).square().mean() + n["d_a"](fake_a).square().mean()
    return 0.5 * (of_a + (n["d_b"](b) - 1).square().mean() + n["d_b"](fake_b).square().mean())


@loop
def cycle_gan_chain_and_toggle() -> str:
    """itertools.chain, set_requires_grad([D_A, D_B], False), one Stepper with two optimizers."""
    pairs = [(REAL[i], REAL[(i + 1) % 4]) for i in range(4)]
    torch.manual_seed(0)
    hand, hg, hd = cycle_gan()
    torch.manual_seed(0)
    nets, g, d = cycle_gan()
    case = Case(nets, {"g": g, "d": d}, cycle_g)
    stepper = case.start(clip_norm={"g": 1e6, "d": 1e6})
    for batch in pairs:
        for name, fn, optimizer in (("g", cycle_g, hg), ("d", cycle_d, hd)):
            for n in (hand, nets):
                set_requires_grad([n["d_a"], n["d_b"]], name == "d")
            optimizer.zero_grad()
            fn(hand, batch).backward()
            optimizer.step()
            case.loss_fn = fn
            skips(case, (batch[0] * NAN, batch[1]), only=name)
            require(stepper.step(fn, batch, only=name).applied, "not applied")
    require_same(Case(hand, {"g": hg, "d": hd}, cycle_g).state(), case.state(), "compared with the loop by hand")
    return "4 turns bitwise as by hand, 8 skips bitwise undone"


@loop
def cycle_gan_image_pool() -> str:
    """The pool of old fakes is a Python list."""
    torch.manual_seed(0)
    nets, _, d = cycle_gan()
    pool: list[Tensor] = []

    def loss(n: nn.ModuleDict, batch: Any) -> Tensor:
        with torch.no_grad():
            pool.append(n["a2b"](batch[0]))
        return n["d_b"](pool[-1]).square().mean()

    case = Case(nets, d, loss)
    set_requires_grad([nets["a2b"], nets["b2a"]], False)
    case.start()
    skips(case, (REAL[0] * NAN, REAL[1]))
    require(len(pool) == 1, "a list was taken back")
    return limit("lists", "the pool keeps the bad fake: Python lists are not taken back")


def wgan_gp(stepper_of: Any) -> Any:
    """torch's documented recipe for gradient penalties with a loss scale."""

    def loss(d: nn.Module, batch: Any) -> Tensor:
        real, fake = batch
        at = real.lerp(fake, 0.5).requires_grad_()
        out = d(at)
        scale = stepper_of().scale_in_use
        (scaled,) = torch.autograd.grad(out.float().mean() * scale, at, create_graph=True)
        penalty = ((scaled.float() / scale).norm(dim=1) - 1).square().mean()
        return d(fake).float().mean() - d(real).float().mean() + 10.0 * penalty

    return loss


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1))


def critic_case() -> Case:
    holder: list[Case] = []
    model = critic()
    case = Case(model, adamw(model, 1e-3), wgan_gp(lambda: holder[0].stepper))
    holder.append(case)
    return case


def _wgan(precision: str) -> str:
    torch.manual_seed(0)
    case = critic_case()
    case.start(precision=precision)
    exact = critic()
    exact.load_state_dict(case.model.state_dict())
    batches = [(REAL[i], REAL[(i + 1) % 4]) for i in range(4)]
    optimizer = adamw(exact, 1e-3)

    class One:
        scale_in_use = 1.0

    for batch in batches:
        while case.stepper.step(case.loss_fn, batch).reason == "gradient_overflow":  # until the scale fits
            require(case.stepper.counts.skipped_in_a_row < 20, "the scale never fits")
        skips(case, (batch[0] * INF, batch[1]))
        optimizer.zero_grad()
        wgan_gp(lambda: One)(exact, batch).backward()
        optimizer.step()
    far = max((a - b).abs().max().item() for a, b in zip(exact.parameters(), case.model.parameters(), strict=True))
    limit = 0.0 if precision == "fp32" else 5e-3
    require(far <= limit, f"{far} away from the loop in fp32")
    return f"{far:.1e} away from the loop by hand in fp32; skips bitwise undone"


@loop
def wgan_gp_fp32() -> str:
    return _wgan("fp32")


@loop
def wgan_gp_fp16_scale_in_use() -> str:
    return _wgan("fp16")


@loop
def wgan_gp_fp16_inner_gradients_survive() -> str:
    """With the scale, small inner gradients are what they are in fp32; without, they are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    with torch.no_grad():
        model[2].weight.mul_(3e-4)
    seen: list[float] = []
    holder: list[Stepper] = []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        at = x.clone().requires_grad_()
        out = m(at).float().mean() * 1e-2
        scale = holder[0].scale_in_use if holder else 1.0
        (scaled,) = torch.autograd.grad(out * scale, at, create_graph=True)
        norm = (scaled.float() / scale).norm(dim=1).mean()
        seen.append(norm.item())
        return out + norm

    loss(model, normal(32, 64))
    holder.append(Stepper(model, sgd(model, 0.0), precision="fp16"))
    report = holder[0].step(loss, normal(32, 64))
    require(report.applied, str(report))
    require(abs(seen[1] / seen[0] - 1) < 0.05, f"inner gradients {seen[1]:.2e}, in fp32 {seen[0]:.2e}")
    return f"inner gradient norm {seen[1]:.3e}, in fp32 {seen[0]:.3e}"


@loop
def wgan_weight_clipping_in_the_loss() -> str:
    """`p.data.clamp_` on the critic's trained parameters, as the first WGAN did, before its loss."""

    def loss(d: nn.Module, batch: Any) -> Tensor:
        for p in d.parameters():
            p.data.clamp_(-0.05, 0.05)
        return d(batch[1]).mean() - d(batch[0]).mean()

    def build() -> Case:
        model = critic()
        return Case(model, torch.optim.RMSprop(model.parameters(), lr=5e-3), loss)

    return promise(build, [(REAL[i], REAL[(i + 1) % 4]) for i in range(4)])


@loop
def wgan_weight_clipping_after_the_step() -> str:
    def loss(d: nn.Module, batch: Any) -> Tensor:
        return d(batch[1]).mean() - d(batch[0]).mean()

    torch.manual_seed(0)
    model = critic()
    case = Case(model, torch.optim.RMSprop(model.parameters(), lr=5e-3), loss)
    case.start()
    for i in range(4):
        trains(case, [(REAL[i], REAL[(i + 1) % 4])])
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)
        skips(case, (REAL[i] * NAN, REAL[0]))
    return "4 steps, 4 skips bitwise undone"


@loop
def stylegan_lazy_r1() -> str:
    """A regulariser in every second step only: another graph, the same optimizer."""

    def build() -> Case:
        model = critic()

        def loss(d: nn.Module, batch: Any) -> Tensor:
            real = batch[0].requires_grad_()
            out = d(real)
            total = F.softplus(-out).mean() + F.softplus(d(batch[1])).mean()
            if batch[2]:
                (g,) = torch.autograd.grad(out.sum(), real, create_graph=True)
                total = total + 5.0 * g.square().sum(1).mean()
            return total

        return Case(model, adamw(model, 1e-3), loss)

    return promise(build, [(REAL[i].clone(), REAL[(i + 1) % 4], i % 2 == 0) for i in range(4)])


@loop
def spectral_norm_discriminator() -> str:
    """The power iteration's vectors are buffers that every forward writes."""

    def build() -> Case:
        d = nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(16, 1)))
        return Case(d, adamw(d), lambda d, b: F.relu(1 - d(b[0])).mean() + F.relu(1 + d(b[1])).mean())

    return promise(build, [(REAL[i], REAL[(i + 1) % 4]) for i in range(4)])


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


@loop
def domain_adversarial_gradient_reversal() -> str:
    def loss(m: nn.ModuleDict, batch: Any) -> Tensor:
        source, target = m["f"](batch[0]), m["f"](batch[1])
        told = m["d"](Reverse.apply(torch.cat([source, target])))
        domain = torch.cat([torch.zeros(8, 1), torch.ones(8, 1)])
        return m["c"](source).square().mean() + F.binary_cross_entropy_with_logits(told, domain)

    def build() -> Case:
        m = nn.ModuleDict({"f": mlp(16, 16, 8), "c": mlp(8, 4), "d": mlp(8, 8, 1)})
        return Case(m, adamw(m), loss)

    return promise(build, [(REAL[i], REAL[(i + 1) % 4]) for i in range(4)])


@loop
def only_of_an_unknown_name_is_refused() -> str:
    case = Case(model := gan(), optimizers(model), d_loss)
    case.start()
    before = case.state()
    with refuses(HalfstepError, "critic"):
        case.stepper.step(d_loss, BOTH[0], only="critic")
    require(not differences(before, case.state()), "something moved")
    return "refused by name, nothing moved"


@loop
def five_critic_steps_then_one() -> str:
    """n_critic = 5, the schedule of each moves with its own steps."""
    torch.manual_seed(0)
    model = gan()
    by_name = optimizers(model)
    rates = {name: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for name, o in by_name.items()}
    case = Case(model, by_name, d_loss, schedule=rates)
    stepper = case.start()
    for _ in range(5):
        stepper.step(d_loss, BOTH[0], only="d")
    stepper.step(g_loss, BOTH[0], only="g")
    seen = {name: rate.last_epoch for name, rate in rates.items()}
    require(seen == {"g": 1, "d": 5}, f"schedules moved {seen}")
    return f"schedules moved {seen}"
