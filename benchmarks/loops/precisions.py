"""Precision: what really ran, islands, compiled models, recomputation, and changing it on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from benchmarks.loops.harness import (
    NAN,
    Case,
    HalfstepError,
    adamw,
    ce,
    labelled,
    loop,
    mlp,
    normal,
    poisoned,
    promise,
    refuses,
    require,
    require_close,
    require_same,
    same,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Stepper, Window, island

# -- as the loop by hand ------------------------------------------------------------------------------------------


def plain_case(norm: bool = True) -> Case:
    model = mlp(16, 32, 32, 4, norm=norm)
    return Case(model, adamw(model, 1e-3), ce, options={"clip_norm": 1.0})


@loop
def bf16_as_autocast_by_hand() -> str:
    return promise(plain_case, labelled(6), precision="bf16")


@loop
def fp16_as_grad_scaler_by_hand() -> str:
    return promise(plain_case, labelled(6), precision="fp16")


@loop
def fp32_hundred_steps() -> str:
    return promise(plain_case, labelled(100), precision="fp32")


@loop
def fp16_hundred_steps_as_grad_scaler() -> str:
    """GradScaler by hand, the same skips at the same steps, the same scale at the end."""
    torch.manual_seed(0)
    hand = plain_case(norm=False)  # by hand, BatchNorm's statistics of skipped steps would stay
    torch.manual_seed(0)
    ours = plain_case(norm=False)
    ours.start(precision="fp16", loss_scale=halfstep.DynamicScale(growth_interval=10))
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)
    skipped = 0
    for batch in labelled(100):
        from benchmarks.loops.harness import by_hand

        by_hand(hand, batch, "fp16", scaler)
        skipped += not ours.stepper.step(ce, batch).applied
    require_same(hand.state(), ours.state(), "compared with GradScaler")
    ours_scale = next(iter(ours.stepper.loss_scales.values()))
    require(ours_scale == scaler.get_scale(), f"scale {ours_scale}, GradScaler's {scaler.get_scale()}")
    return f"100 steps, {skipped} skipped, scale {ours_scale:g}: bitwise as GradScaler"


# -- islands ------------------------------------------------------------------------------------------------------


class Seen(nn.Linear):
    """Notes the dtype that its forward gets."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.dtype)
        return super().forward(x)


@loop
def island_inside_the_model() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Seen(64, 64), nn.ReLU(), nn.Linear(64, 4))
    island(model, "2")
    case = Case(model, adamw(model), ce)
    case.start(precision="bf16")
    trains(case, labelled(3, shape=(64,)))
    skips(case, poisoned(labelled(1, shape=(64,))[0]))
    require(model[2].seen == {torch.float32}, f"the island saw {model[2].seen}")
    return f"the island saw fp32 only; {case.stepper.observed}"


def held_beside(make: Callable[[], tuple[Callable[[Tensor], Tensor], nn.Module]]) -> str:
    torch.manual_seed(0)
    encode, held = make()
    model = nn.Linear(64, 8)
    case = Case(model, sgd(model), lambda m, x: m(encode(x)).float().square().mean(), beside=[held])
    case.start(precision="bf16")
    trains(case, [normal(16, 64, seed=i) for i in range(2)])
    skips(case, normal(16, 64) * NAN)
    return f"applied; {case.stepper.observed}"


@loop
def island_beside_the_model() -> str:
    """A frozen encoder held by the loss function is an island, and no stray."""

    def make() -> Any:
        encoder = island(nn.Linear(64, 64).requires_grad_(False))
        return encoder, encoder

    return held_beside(make)


@loop
def island_round_a_function() -> str:
    def make() -> Any:
        encoder = nn.Linear(64, 64).requires_grad_(False)
        return island(lambda x: encoder(x)), encoder

    return held_beside(make)


@loop
def frozen_encoder_beside_without_island() -> str:
    def make() -> Any:
        encoder = nn.Linear(64, 64).requires_grad_(False)
        return encoder, encoder

    return held_beside(make)


@loop
def island_loss_stays_fp32() -> str:
    """A Dice sum cast back to fp16 is inf; as an island it stays in fp32."""
    torch.manual_seed(0)

    class Dice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            require(x.dtype == torch.float32, f"the loss saw {x.dtype}")
            p = x.sigmoid() * 1e3
            return 1 - 2 * (p * y).sum() / (p.square().sum() + y.sum())

    dice, model = island(Dice()), nn.Linear(16, 64)
    case = Case(model, sgd(model), lambda m, b: dice(m(b[0]), b[1]))
    case.start(precision="fp16")
    trains(case, [(normal(64, 16, seed=i), whole(2, 64, 64, seed=i).float()) for i in range(3)])
    return "3 sums above 65504 applied"


def _diffusers() -> Any:
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel

    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=8,
        attention_head_dim=4,
    )
    return vae, unet, DDPMScheduler()


@loop
def latent_diffusion_with_an_fp32_vae() -> str:
    """diffusers: AutoencoderKL as an island next to a UNet2DConditionModel in bf16."""
    torch.manual_seed(0)
    vae, unet, schedule = _diffusers()
    vae = island(vae.requires_grad_(False))

    def loss(unet: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            latent = vae.encode(batch[0]).latent_dist.sample() * 0.18215
        require(latent.dtype == torch.float32, f"latents in {latent.dtype}")
        noise, t = torch.randn_like(latent), torch.randint(0, 1000, (len(latent),))
        return F.mse_loss(unet(schedule.add_noise(latent, noise, t), t, batch[1]).sample.float(), noise)

    case = Case(unet, adamw(unet, 1e-4), loss, beside=[vae], options={"clip_norm": 1.0})
    case.start(precision="bf16")
    batch = normal(2, 3, 16, 16), normal(2, 5, 16)
    trains(case, [batch])
    skips(case, (batch[0] * NAN, batch[1]))
    return f"latents in fp32, {case.stepper.observed}"


# -- asked for and refused ----------------------------------------------------------------------------------------


@loop
def model_that_computes_in_fp32_is_refused() -> str:
    """Somebody's `with autocast(enabled=False)` round the whole model: not what was asked for."""

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(64, 64, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.inner(x.float())

    torch.manual_seed(0)
    model = Stubborn()
    case = Case(model, adamw(model), ce)
    case.start(precision="bf16")
    before = case.state()
    with refuses(HalfstepError, "inner"):
        case.stepper.step(ce, labelled(1, shape=(64,))[0])
    require_same(before, case.state(), "after the refusal")
    return "refused, the modules named, nothing moved"


@loop
def weights_in_half_are_refused() -> str:
    """`model.half()` before training."""
    model = mlp().half()
    with refuses(HalfstepError, "16"):
        Stepper(model, sgd(model), precision="fp16")
    return "refused at construction"


@loop
def own_autocast_round_the_step() -> str:
    """A loop that already has `with torch.autocast(...)` round everything: bitwise the same or refused."""
    torch.manual_seed(0)
    case = plain_case()
    case.start(precision="bf16")
    torch.manual_seed(0)
    other = plain_case()
    other.start(precision="bf16")
    for batch in labelled(3):
        case.stepper.step(ce, batch)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                other.stepper.step(ce, batch)
        except HalfstepError as refusal:
            return f"refused: {str(refusal).splitlines()[0][:80]}"
    require_same(case.state(), other.state(), "inside an outer autocast")
    return "bitwise as without it"


@loop
def unknown_precision_names_the_nearest() -> str:
    model = mlp()
    with refuses(HalfstepError, "bf16"):
        Stepper(model, sgd(model), precision="bf61")
    return "refused, the nearest named"


@loop
def global_switches_stay() -> str:
    from halfstep.precision.flags import read_fp32_flags

    before = read_fp32_flags()
    for precision in ("fp32", "bf16", "fp16"):
        torch.manual_seed(0)
        case = plain_case()
        case.start(precision=precision)
        trains(case, labelled(2))
        skips(case, poisoned(labelled(1)[0]))
        require(read_fp32_flags() == before, f"{precision} left switches changed")
        require(not torch.is_autocast_enabled("cpu"), "autocast was left on")
    return "TF32, mkldnn, autocast as before in 3 precisions"


# -- changed on the way -------------------------------------------------------------------------------------------


@loop
def change_precision_to_fp32_and_back() -> str:
    """From the change on the loop by hand in fp32, bitwise; and then bf16 again."""
    from benchmarks.loops.harness import by_hand

    torch.manual_seed(0)
    hand = plain_case()
    torch.manual_seed(0)
    ours = plain_case()
    stepper = ours.start(precision="bf16")
    for i, batch in enumerate(labelled(9)):
        if i in (3, 6):
            stepper.change_precision("fp32" if i == 3 else "bf16")
        by_hand(hand, batch, "fp32" if 3 <= i < 6 else "bf16")
        trains(ours, [batch])
    require_same(hand.state(), ours.state(), "compared with the loop by hand")
    return "bf16, fp32, bf16: 9 steps bitwise as by hand"


@loop
def change_precision_in_a_window_is_refused() -> str:
    case = plain_case()
    stepper = case.start(precision="bf16")
    with stepper.forward(last=False):
        loss = ce(case.model, labelled(1)[0])
    stepper.backward(loss)
    with refuses(HalfstepError):
        stepper.change_precision("fp32")
    stepper.discard()
    return "refused in the middle of a window"


@loop
def change_precision_fp16_begins_a_scale() -> str:
    torch.manual_seed(0)
    case = plain_case(norm=False)
    stepper = case.start(precision="fp32")
    trains(case, labelled(2))
    stepper.change_precision("fp16")
    report = stepper.step(ce, labelled(1)[0])
    require(report.loss_scale > 1, str(report))
    return f"loss scale {report.loss_scale:g} from the change on"


@loop
def micro_batches_in_bf16_equal_one_batch() -> str:
    torch.manual_seed(0)
    one = plain_case(norm=False)
    torch.manual_seed(0)
    many = plain_case(norm=False)
    x, y = labelled(1, n=16)[0]
    one.optimizer, many.optimizer = sgd(one.model), sgd(many.model)
    one.start(precision="bf16").step(ce, (x, y))
    many.start(precision="bf16").step(ce, Window([(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]))
    require_close(one.model, many.model, "4 micro-batches", rtol=1e-2, atol=2e-3)
    require(not same(one.model[0].weight, normal(32, 16)), "nothing moved")
    return "4 micro-batches of 4 as one of 16, to bf16's last digits"
