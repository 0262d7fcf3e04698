"""Self-supervised learning: target networks, queues, centers and codebooks that a forward pass writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from benchmarks.loops.harness import (
    NAN,
    Case,
    adamw,
    flat,
    frozen_copy,
    limit,
    loop,
    mlp,
    normal,
    promise,
    require,
    require_same,
    sgd,
    skips,
    trains,
)

VIEWS = [(normal(8, 16, seed=i), normal(8, 16, seed=20 + i)) for i in range(4)]


def views_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)


def views_case(make: type[nn.Module], **options: Any) -> Any:
    def build() -> Case:
        model = make()
        return Case(model, sgd(model, 0.05, momentum=0.9), views_loss, options=options)

    return build


class MoCo(nn.Module):
    """As in the released code: keys move through `.data`, the queue and its pointer are buffers."""

    def __init__(self, dim: int = 8, queue: int = 32, m: float = 0.9, t: float = 0.07) -> None:
        super().__init__()
        self.K, self.m, self.T = queue, m, t
        self.encoder_q, self.encoder_k = mlp(16, 16, dim, norm=True), mlp(16, 16, dim, norm=True)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, queue), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    def forward(self, im_q: Tensor, im_k: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(im_q).float(), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k).float(), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / self.T
        loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
        self._dequeue_and_enqueue(k)
        return loss


@loop
def moco() -> str:
    return promise(views_case(MoCo), VIEWS)


@loop
def moco_bf16() -> str:
    return promise(views_case(MoCo), VIEWS, precision="bf16")


@loop
def moco_not_observed() -> str:
    """With `observe=False` a write through `.data = ` has to be found without the first step's watching."""
    return promise(views_case(MoCo), VIEWS, observe=False)


class Byol(nn.Module):
    def __init__(self, how: str = "lerp") -> None:
        super().__init__()
        self.online, self.predictor = mlp(16, 16, 8, norm=True), mlp(8, 8, 8)
        self.target, self.how = frozen_copy(self.online), how

    def move(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            if self.how == "lerp":
                target.lerp_(online, 0.1)
            elif self.how == "data":
                target.data.mul_(0.9).add_(online.data, alpha=0.1)
            else:
                target.copy_(0.9 * target + 0.1 * online)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        with torch.no_grad():
            self.move()
            aim = self.target(two)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(one)), aim).mean()


@loop
def byol() -> str:
    return promise(views_case(Byol), VIEWS)


@loop
def byol_through_data() -> str:
    return promise(views_case(lambda: Byol("data")), VIEWS)  # type: ignore[arg-type]


@loop
def byol_copy_fp16() -> str:
    return promise(views_case(lambda: Byol("copy")), VIEWS, precision="fp16", init_scale=1024.0)  # type: ignore[arg-type]


@loop
def byol_target_moved_after_the_step() -> str:
    """The other way to write it: the loop moves the target once a step was applied."""

    def build() -> Case:
        model = Byol()
        model.how = "none"
        model.move = lambda: None  # type: ignore[method-assign]
        return Case(model, sgd(model), views_loss)

    torch.manual_seed(0)
    case = build()
    stepper = case.start()
    for batch in VIEWS:
        skips(case, (batch[0] * NAN, batch[1]))
        if stepper.step(views_loss, batch).applied:
            with torch.no_grad():
                for target, online in zip(case.model.target.parameters(), case.model.online.parameters(), strict=True):
                    target.lerp_(online, 0.1)
    skips(case, (VIEWS[0][0] * NAN, VIEWS[0][1]))
    return "5 skips bitwise undone between 4 updates of the target by the loop"


class DinoLoss(nn.Module):
    """The center lives in the loss module, and is rebound, as in the released code."""

    def __init__(self, out: int = 8) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        aim = F.softmax((teacher.float() - self.center) / 0.04, dim=-1).detach()
        loss = torch.sum(-aim * F.log_softmax(student.float() / 0.1, dim=-1), dim=-1).mean()
        self.update_center(teacher.float())
        return loss

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        self.center = self.center * 0.9 + teacher.mean(dim=0, keepdim=True) * 0.1


def dino_case() -> Case:
    student = mlp(16, 16, 8)
    teacher, criterion = frozen_copy(student), DinoLoss()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return criterion(model(batch[0]), teacher(batch[1]))

    return Case(student, adamw(student), loss, beside=[teacher, criterion])


@loop
def dino() -> str:
    """One NaN batch, and the center must not stay NaN."""
    return promise(dino_case, VIEWS)


@loop
def dino_bf16() -> str:
    return promise(dino_case, VIEWS, precision="bf16")


@loop
def simclr() -> str:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        z = F.normalize(model(torch.cat(batch)).float(), dim=1)
        similar = z @ z.T / 0.5
        similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        labels = (torch.arange(len(z)) + len(z) // 2) % len(z)
        return F.cross_entropy(similar, labels)

    def build() -> Case:
        model = mlp(16, 32, 8, norm=True)
        return Case(model, adamw(model), loss, options={"clip_norm": 1.0})

    return promise(build, VIEWS)


class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(16, 16, 8, norm=True), mlp(8, 4, 8, norm=True)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        z1, z2 = self.encoder(one), self.encoder(two)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return -0.5 * (F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean())


@loop
def simsiam() -> str:
    return promise(views_case(SimSiam), VIEWS)


@loop
def barlow_twins() -> str:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        a, b = model(batch[0]), model(batch[1])
        c = (a - a.mean(0)).T @ (b - b.mean(0)) / len(a)
        return (torch.diagonal(c) - 1).square().sum() + 5e-3 * (c - torch.diag(torch.diagonal(c))).square().sum()

    def build() -> Case:
        model = mlp(16, 32, 8, norm=True)
        return Case(model, sgd(model, 1e-3), loss)

    return promise(build, VIEWS)


class Swav(nn.Module):
    """Prototypes are normalized in place, by `.weight.data`, before every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.prototypes = mlp(16, 16, 8), nn.Linear(8, 5, bias=False)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.data = F.normalize(self.prototypes.weight.data.clone(), dim=1)
        a, b = self.prototypes(self.net(one)), self.prototypes(self.net(two))
        with torch.no_grad():
            aim = torch.softmax(b / 0.05, dim=1)
        return -(aim * F.log_softmax(a / 0.1, dim=1)).sum(1).mean()


@loop
def swav_prototypes_normalised_in_forward() -> str:
    """Trained parameters that the forward pass writes as well."""
    return promise(views_case(Swav), VIEWS)


@loop
def masked_autoencoder_own_generator() -> str:
    """The mask is drawn from a generator of the loss function's own."""

    def build() -> Case:
        model, drawn = mlp(16, 32, 16), torch.Generator().manual_seed(3)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            keep = (torch.rand(batch[0].shape, generator=drawn) > 0.5).float()
            return ((model(batch[0] * keep) - batch[0]).square() * (1 - keep)).mean()

        return Case(model, adamw(model), loss)

    torch.manual_seed(0)
    case = build()
    case.start()
    trains(case, VIEWS)
    skips(case, (VIEWS[0][0] * NAN, VIEWS[0][1]))
    trains(case, VIEWS)
    return "skip bitwise undone, 8 steps applied"


class EmaCodebook(nn.Module):
    """VQ-VAE: cluster sizes and sums as buffers, the codebook a parameter written through `.data`."""

    def __init__(self, codes: int = 12, dim: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)
        self.embedding.weight.requires_grad = False
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.ema_w = nn.Parameter(self.embedding.weight.detach().clone(), requires_grad=False)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.float()
        index = torch.cdist(z, self.embedding.weight).argmin(1)
        quantised = self.embedding(index)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(index, len(self.cluster_size)).float()
                self.cluster_size.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.ema_w.data = self.ema_w.data * 0.9 + 0.1 * (chosen.T @ z)
                self.embedding.weight.data = self.ema_w / (self.cluster_size + 1e-5).unsqueeze(1)
        loss = 0.25 * F.mse_loss(quantised.detach(), z)
        return z + (quantised - z).detach(), loss


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.vq, self.decoder = mlp(16, 16, 8), EmaCodebook(), mlp(8, 16, 16)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        z, commitment = self.vq(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + commitment


@loop
def vq_vae_ema_codebook() -> str:
    return promise(views_case(VqVae), VIEWS)


@loop
def vq_vae_not_observed() -> str:
    return promise(views_case(VqVae), VIEWS, observe=False)


@loop
def vq_vae_bf16() -> str:
    return promise(views_case(VqVae), VIEWS, precision="bf16")


def teacher_case() -> Case:
    """Mean teacher: a deepcopy that the loss function moves."""
    student = mlp(16, 16, 4, norm=True)
    teacher = frozen_copy(student)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(0.9).add_(s.detach(), alpha=0.1)
            aim = teacher(batch[1])
        return F.mse_loss(model(batch[0]), aim)

    return Case(student, sgd(student), loss, beside=[teacher])


@loop
def mean_teacher_moved_by_the_loss_function() -> str:
    return promise(teacher_case, VIEWS)


@loop
def mean_teacher_in_a_dict() -> str:
    """The loss function holds its networks in a dict."""

    def build() -> Case:
        case = teacher_case()
        nets = {"teacher": case.beside[0]}

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                for t, s in zip(nets["teacher"].parameters(), model.parameters(), strict=True):
                    t.data = 0.9 * t.data + 0.1 * s.data
                aim = nets["teacher"](batch[1])
            return F.mse_loss(model(batch[0]), aim)

        case.loss_fn = loss
        return case

    return promise(build, VIEWS)


@loop
def teacher_changed_to_another_one() -> str:
    """After some epochs the teacher is made anew: the loss function holds another module."""
    torch.manual_seed(0)
    model = mlp(16, 16, 4)
    holder = {"teacher": copy.deepcopy(model).requires_grad_(False)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        teacher = holder["teacher"]
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                t.lerp_(s, 0.1)
        return F.mse_loss(model(batch[0]), teacher(batch[1]))

    case = Case(model, sgd(model), loss)
    case.start()
    for _ in range(3):
        case.beside = [holder["teacher"]]
        trains(case, VIEWS)
        skips(case, (VIEWS[0][0] * NAN, VIEWS[0][1]))
        holder["teacher"] = copy.deepcopy(model).requires_grad_(False)
    return "3 teachers in turn, each bitwise undone"


@loop
def distillation_with_a_frozen_teacher() -> str:
    """A teacher in train mode by mistake: its BatchNorm moves, and goes back on a skip."""

    def build() -> Case:
        teacher, student = mlp(16, 64, 4, norm=True).requires_grad_(False), mlp(16, 16, 4)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                soft = F.softmax(teacher(batch[0]).float() / 2, dim=-1)
            return F.kl_div(F.log_softmax(model(batch[0]).float() / 2, dim=-1), soft, reduction="batchmean") * 4

        return Case(student, adamw(student), loss, beside=[teacher])

    return promise(build, VIEWS)


@loop
def diagnose_moves_nothing() -> str:
    """`halfstep.diagnose` replays a step of MoCo, and neither queue nor keys move."""
    torch.manual_seed(0)
    case = views_case(MoCo)()
    stepper = case.start()
    trains(case, VIEWS)
    report = stepper.step(views_loss, (VIEWS[0][0] * NAN, VIEWS[0][1]))
    before = dict(flat(case.model))
    halfstep.diagnose(stepper, report)
    require_same(before, dict(flat(case.model)), "after diagnose()")
    return "queue, pointer and key encoder bitwise as before it"


@loop
def queue_in_a_python_list() -> str:
    """A memory bank that is a Python list of tensors is not torch's to take back."""
    torch.manual_seed(0)
    model, bank = mlp(16, 16, 8), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        bank.append(z.detach())
        return z.square().mean()

    case = Case(model, sgd(model), loss)
    case.start()
    skips(case, (VIEWS[0][0] * NAN, VIEWS[0][1]))
    require(len(bank) == 1, "a Python list was taken back")
    return limit("lists", "Python lists are not taken back; a buffer, or include(), is")
