"""Less usual models: torch.func, second derivatives, graphs, complex numbers, parametrizations, control."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from benchmarks.loops.harness import (
    NAN,
    SPOIL,
    Case,
    HalfstepError,
    adamw,
    frozen_copy,
    loop,
    mlp,
    mse,
    normal,
    pairs,
    poisoned,
    promise,
    refuses,
    require,
    same,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Ema, Stepper


def case_of(make: Any, loss: Any, **options: Any) -> Any:
    def build() -> Case:
        model = make()
        return Case(model, adamw(model), loss, options=options)

    return build


@loop
def functional_call_of_the_own_weights() -> str:
    def loss(m: nn.Module, b: Any) -> Tensor:
        return (functional_call(m, dict(m.named_parameters()), (b[0],)) - b[1]).square().mean()

    return promise(case_of(mlp, loss), pairs())


@loop
def maml_inner_loop() -> str:
    """One inner step with `torch.func.grad`, differentiated through."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        weights = dict(m.named_parameters())

        def inner(w: dict[str, Tensor]) -> Tensor:
            return (functional_call(m, w, (b[0],)) - b[1]).square().mean()

        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grad(inner)(weights).values(), strict=True)}
        return inner(moved)

    return promise(case_of(mlp, loss), pairs())


@loop
def ensemble_by_vmap() -> str:
    def loss(m: nn.Module, b: Any) -> Tensor:
        stacked = {n: torch.stack([p, p * 1.1]) for n, p in m.named_parameters()}
        outs = vmap(lambda w: functional_call(m, w, (b[0],)))(stacked)
        return (outs - b[1]).square().mean()

    return promise(case_of(mlp, loss), pairs())


@loop
def per_sample_gradients() -> str:
    """Norms of per-sample gradients as a penalty, vmap over grad."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        weights = {n: p.detach() for n, p in m.named_parameters()}

        def one(w: Any, x: Tensor, y: Tensor) -> Tensor:
            return (functional_call(m, w, (x.unsqueeze(0),)) - y).square().mean()

        each = vmap(grad(one), in_dims=(None, 0, 0))(weights, b[0], b[1])
        weight = 1 / (1 + sum(g.flatten(1).square().sum(1) for g in each.values()))
        return ((m(b[0]) - b[1]).square().mean(1) * weight).mean()

    return promise(case_of(mlp, loss), pairs())


@loop
def jvp_regulariser() -> str:
    def loss(m: nn.Module, b: Any) -> Tensor:
        out, tangent = jvp(m, (b[0],), (torch.ones_like(b[0]),))
        return (out - b[1]).square().mean() + 0.1 * tangent.square().mean()

    return promise(case_of(mlp, loss), pairs())


@loop
def physics_informed_second_derivative() -> str:
    def loss(m: nn.Module, b: Any) -> Tensor:
        x = b[0].clone().requires_grad_()
        u = m(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + u).square().mean()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    return promise(case_of(make, loss), [(normal(16, 1, seed=i),) for i in range(3)])


@loop
def energy_based_with_langevin() -> str:
    """Negatives come from an inner loop of gradients with respect to the input."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        x = torch.randn_like(b[0]).requires_grad_()
        for _ in range(3):
            (g,) = torch.autograd.grad(m(x).sum(), x)
            x = (x - 0.1 * g + 0.01 * torch.randn_like(x)).detach().requires_grad_()
        return m(b[0]).mean() - m(x.detach()).mean()

    def make() -> nn.Module:
        return mlp(16, 16, 1)

    return promise(case_of(make, loss), pairs())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@loop
def straight_through_binary_weights() -> str:
    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, Straight.apply(self.weight), self.bias)

    return promise(case_of(lambda: nn.Sequential(Binary(16, 16), nn.Tanh(), Binary(16, 4)), mse), pairs())


@loop
def deep_equilibrium_with_a_backward_hook() -> str:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(5):
                    z = torch.tanh(self.cell(z) * 0.3 + x)
            z = torch.tanh(self.cell(z) * 0.3 + x)
            z.register_hook(lambda g: g * 1.1)
            return self.head(z)

    return promise(case_of(Equilibrium, mse), pairs())


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        x = torch.relu(torch.sparse.mm(adjacency, self.one(x).float()))
        return torch.sparse.mm(adjacency, self.two(x).float())


@loop
def gnn_with_sparse_adjacency() -> str:
    """A GCN over a sparse COO matrix, few labeled nodes."""
    index = torch.stack([whole(20, 60), whole(20, 60, seed=1)])
    adjacency = torch.sparse_coo_tensor(index, torch.full((60,), 0.3), (20, 20)).coalesce()

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(adjacency, b[0])[:6], b[1])

    return promise(case_of(Graph, loss), [(normal(20, 8, seed=i), whole(3, 6, seed=i)) for i in range(3)])


@loop
def gnn_scatter_messages_bf16() -> str:
    index = whole(20, 60), whole(20, 60, seed=1)

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            sent = self.one(x)[index[0]]
            return self.two(torch.zeros(20, 32, dtype=sent.dtype).index_add(0, index[1], sent).relu())

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]).float(), b[1])

    return promise(
        case_of(Messages, loss),
        [(normal(20, 32, seed=i), whole(3, 20, seed=i)) for i in range(3)],
        precision="bf16",
    )


@loop
def complex_parameters() -> str:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64) * 0.3)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16))

    return promise(case_of(Fourier, mse, clip_norm=1.0), pairs())


@loop
def double_precision_model() -> str:
    """fp64 is not what `precision="fp32"` asks for: refused by name; not watched, it stays fp64, bitwise as by hand."""
    batches = [(x.double(), y.double()) for x, y in pairs()]
    build = case_of(lambda: mlp().double(), mse)
    with refuses(HalfstepError, "fp64"):
        build().start().step(mse, batches[0])
    return promise(build, batches, observe=False)


@loop
def weight_norm_parametrization() -> str:
    def make() -> nn.Module:
        return nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 4)))

    return promise(case_of(make, mse), pairs())


@loop
def orthogonal_parametrization() -> str:
    def make() -> nn.Module:
        return nn.Sequential(orthogonal(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4))

    return promise(case_of(make, mse), pairs())


@loop
def own_parametrization_with_a_buffer() -> str:
    """Fake quantization whose range is a buffer that every use of the weight writes."""

    class Range(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, w: Tensor) -> Tensor:
            self.largest.copy_(torch.maximum(self.largest * 0.99, w.detach().abs().max()))
            step = self.largest / 127
            return w + ((w / step).round() * step - w).detach()

    def make() -> nn.Module:
        model = mlp()
        parametrize.register_parametrization(model[0], "weight", Range())
        return model

    return promise(case_of(make, mse), pairs())


@loop
def lazy_modules_after_a_dry_run() -> str:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
        model(normal(2, 16))
        return model

    return promise(case_of(make, mse), pairs())


@loop
def lazy_modules_not_yet_there() -> str:
    """Refused by name, or made by the first step; never a raw error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
    try:
        stepper = Stepper(model, sgd(model), precision="fp32", ema=Ema(model, 0.9))
        report = stepper.step(mse, pairs(1)[0])
    except HalfstepError as refusal:
        require("shape" in str(refusal) and "0.weight" in str(refusal), str(refusal).splitlines()[0])
        return f"refused: {str(refusal).splitlines()[0][:80]}"
    require(report.applied, str(report))
    return "made by the first step"


@loop
def hypernetwork() -> str:
    """One network writes the weights of another, which is called functionally."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hyper, self.code = nn.Linear(4, 16 * 4), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.hyper(self.code).view(4, 16))

    return promise(case_of(Hyper, mse), pairs())


@loop
def learnt_loss_weights() -> str:
    """Uncertainty weighting: the loss has parameters, in the same optimizer and in the same module tree."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_var = mlp(), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    def loss(m: Any, b: Any) -> Tensor:
        out = m(b[0])
        terms = torch.stack([(out - b[1]).square().mean(), out.abs().mean()])
        return (terms * torch.exp(-m.log_var) + m.log_var).sum()

    return promise(case_of(Weighted, loss), pairs())


@loop
def criterion_with_parameters_of_its_own() -> str:
    """Center loss, ArcFace: the criterion is trained by an optimizer that also holds the model."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.centres = mlp(16, 16, 8), nn.Parameter(torch.randn(4, 8))

    def loss(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(-torch.cdist(m.model(b[0]), m.centres), b[1])

    return promise(case_of(Both, loss), [(normal(8, 16, seed=i), whole(4, 8, seed=i)) for i in range(3)])


@loop
def triplet_loss() -> str:
    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.triplet_margin_loss(m(b[0]), m(b[1]), m(b[2]), margin=0.2)

    return promise(case_of(mlp, loss), [tuple(normal(8, 16, seed=10 * i + j) for j in range(3)) for i in range(3)])


# -- control ------------------------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(8, 16, 3), mlp(8, 16, 1)


@loop
def ppo_epochs_over_one_rollout() -> str:
    def loss(m: Any, b: Any) -> Tensor:
        states, actions, old, advantages, returns = b
        policy = torch.distributions.Categorical(logits=m.actor(states))
        ratio = (policy.log_prob(actions) - old).exp()
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return -clipped + 0.5 * (m.critic(states).squeeze(1) - returns).square().mean() - 0.01 * policy.entropy().mean()

    rollout = normal(16, 8), whole(3, 16), -normal(16).abs(), normal(16, seed=1), normal(16, seed=2)
    bad = (rollout[0], rollout[1], rollout[2] * float("inf"), rollout[3], rollout[4])
    return promise(case_of(ActorCritic, loss, clip_norm=0.5), [rollout] * 4, bad)


@loop
def dqn_with_a_target_network() -> str:
    """The target is copied with load_state_dict inside the loss function, every second call."""

    def build() -> Case:
        model = mlp(8, 16, 3)
        target = frozen_copy(model)

        def loss(m: nn.Module, b: Any) -> Tensor:
            state, action, reward, after, copy_now = b
            if copy_now:
                target.load_state_dict(m.state_dict())
            with torch.no_grad():
                aim = reward + 0.99 * target(after).max(1).values
            return F.smooth_l1_loss(m(state).gather(1, action[:, None]).squeeze(1), aim)

        return Case(model, adamw(model), loss, beside=[target])

    batches = [
        (normal(8, 8, seed=i), whole(3, 8, seed=i), normal(8, seed=i), normal(8, 8, seed=9 + i), i % 2 == 0)
        for i in range(4)
    ]
    return promise(build, batches)


@loop
def soft_actor_critic_three_optimizers() -> str:
    """Actor, critic and temperature, each by its own loss, polyak target in the loss function."""
    torch.manual_seed(0)

    class Sac(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = mlp(8, 16, 2), mlp(10, 16, 1)
            self.log_alpha, self.target = nn.Parameter(torch.zeros(())), None
            self.target = frozen_copy(self.critic)

    def losses(m: Any, b: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            for t, c in zip(m.target.parameters(), m.critic.parameters(), strict=True):
                t.lerp_(c, 0.05)
        action = torch.tanh(m.actor(b[0]))
        aim = b[1] + 0.9 * m.target(torch.cat([b[0], action.detach()], 1)).squeeze(1)
        return {
            "critic": (m.critic(torch.cat([b[0], action.detach()], 1)).squeeze(1) - aim).square().mean(),
            "actor": -m.critic(torch.cat([b[0], action], 1)).mean(),
            "alpha": m.log_alpha.exp() * action.detach().square().mean(),
        }

    model = Sac()
    optimizers = {
        "actor": adamw(model.actor),
        "critic": adamw(model.critic),
        "alpha": torch.optim.Adam([model.log_alpha], 1e-2),
    }
    case = Case(model, optimizers, losses)
    case.start()
    batches = [(normal(8, 8, seed=i), normal(8, seed=i)) for i in range(3)]
    trains(case, batches)
    skips(case, poisoned(batches[0]))
    trains(case, batches)
    skips(case, SPOIL, batch=batches[0])
    return "three losses, target network taken back with a skip"


@loop
def model_copied_inside_the_loss() -> str:
    """A deepcopy of the model in each call (unrolled GAN, meta-learning): copies leave no trace."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        trial = copy.deepcopy(m)
        with torch.no_grad():
            for p in trial.parameters():
                p.mul_(0.9)
        return mse(m, b) + 0.1 * (m(b[0]) - trial(b[0]).detach()).square().mean()

    return promise(case_of(lambda: mlp(norm=True), loss), pairs())


@loop
def gradients_left_by_somebody_else() -> str:
    """A saliency map left `.grad` on the weights before the step: it must not be part of the update."""
    torch.manual_seed(0)
    hand = mlp()
    torch.manual_seed(0)
    case = Case(mlp(), None, mse)
    case.optimizer = sgd(case.model)
    case.start()
    other = sgd(hand)
    for batch in pairs():
        (case.model(batch[0]).sum() * 100).backward()
        trains(case, [batch])
        other.zero_grad()
        mse(hand, batch).backward()
        other.step()
    require(all(same(a, b) for a, b in zip(hand.parameters(), case.model.parameters(), strict=True)), "they leaked in")
    skips(case, (pairs(1)[0][0] * NAN, pairs(1)[0][1]))
    return "3 steps bitwise as by hand"
