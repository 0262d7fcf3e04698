"""All planted faults, with what was planted written next to each."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.plants import batches, faults, losses, runs
from benchmarks.plants.faults import Applies, Deep, Recomputed
from benchmarks.plants.models import (
    Amplifies,
    Change,
    Perceptron,
    Pictures,
    Plain,
    Residual,
    Transformer,
    Vae,
    batch_for,
    squares,
    vae_loss,
)
from benchmarks.plants.plant import LOSS, ROOT, Expected, Plant, Scene, plants

ALL = "fp16 bf16 fp32"
_FOLDER = str(Path(__file__).parent)


def _with(model: Callable[[], nn.Module], loss_fn: Callable[..., Any] = squares) -> Callable[[], Scene]:
    def make() -> Scene:
        built = model()
        return Scene(built, loss_fn, batch_for(built))

    return make


def _changed(change: Change) -> Callable[[], Scene]:
    return _with(partial(Perceptron, change=change))


def _faulty(fault: Callable[[], nn.Module], model: Callable[..., nn.Module] = Perceptron) -> Callable[[], Scene]:
    return _with(lambda: model(fault()))


def _again(reentrant: bool) -> Callable[[], Scene]:
    return _faulty(lambda: Recomputed(Applies(faults.root_of_zero), reentrant))


def _sums(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Every output has a gradient of one."""
    return model(batch[0]).float().sum()


def too_large() -> list[Plant]:
    """They fit fp32."""
    cause = "precision"
    return [
        *plants("functional", "fp16", _changed(faults.times_hundred_thousand),
                Expected(cause, "aten.mul", ROOT, mark="functional", words=("halfstep.island(fn)",))),
        *plants("in_place", "fp16", _changed(faults.in_place), Expected(cause, "aten.mul_", ROOT, mark="in place")),
        *plants("in_a_list", "fp16", _changed(faults.in_a_list),
                Expected(cause, "aten._foreach_mul", ROOT, mark="in a list")),
        *plants("through_a_view", "fp16", _changed(faults.through_a_view),
                Expected(cause, "aten.mul_", ROOT, mark="through a view")),
        *plants("mask_in_the_batch", "fp16", batches.mask_in_the_batch,
                Expected(cause, "aten.mul", "second", mark="masked scores")),
        *plants("amplifier", "fp16", _faulty(lambda: Amplifies(1e5)),
                Expected(cause, "aten.mul", "fault", mark="amplifies")),
        *plants("amplifier_deep", "fp16", _faulty(lambda: Deep(Amplifies(1e5))),
                Expected(cause, "aten.mul", "fault.inner", mark="amplifies",
                         words=("an island around fault is finite",))),
        *plants("amplifier_in_attention", "fp16", _faulty(lambda: Amplifies(1e7), Transformer),
                Expected(cause, "aten.mul", "blocks.1.fault", mark="amplifies")),
        *plants("large_linear", "fp16", _faulty(lambda: Deep(faults.LargeLinear(16))),
                Expected(cause, "aten.addmm", "fault.inner", mark="large linear")),
        *plants("exponential", "fp16", _changed(faults.exponential),
                Expected(cause, "aten.exp", ROOT, mark="exponential of 12")),
        *plants("sum", "fp16", _changed(faults.sum_of_large), Expected(cause, "aten.sum", ROOT, mark="sum")),
        *plants("scores", "fp16", _with(partial(Transformer, gain=1e6)),
                Expected(cause, "aten.mul", "blocks.1", mark="scores overflow")),
        *plants("residual", "fp16", _with(partial(Residual, 6, 20.0)),
                # 20^3 times 1 to 2 fits, 19 times that does not.
                Expected(cause, "aten.mul", "blocks.3", mark="residual")),
        *plants("vae_variance", "fp16", _with(partial(Vae, log_variance=13.0), vae_loss),
                Expected(cause, "aten.exp", LOSS, mark="variance")),
        *plants("vae_decoder", "fp16", _with(partial(Vae, gain=1e7), vae_loss),
                Expected(cause, "aten.mul", "decoder.2", mark="amplifies")),
        *plants("loss", "fp16", _with(Perceptron, losses.large_squares),
                Expected(cause, "aten.pow", LOSS, mark="large squares")),
    ]  # fmt: skip


def vanishing() -> list[Plant]:
    """What is rounded away: fp32 keeps it."""
    return [
        *plants("epsilon", "fp16", _changed(faults.vanishing_epsilon),
                Expected("precision", "aten.div", ROOT, mark="epsilon")),
        *plants("log_of_rest", "fp16 bf16", _changed(faults.log_of_rest),
                Expected("precision", "aten.log", ROOT, mark="log of rest")),
        *plants("log_of_rest_in_module", "fp16 bf16", _faulty(lambda: Applies(faults.log_of_rest)),
                Expected("precision", "aten.log", "fault", mark="log of rest",
                         words=("an island around fault is finite",))),
        *plants("root_mean_square", "fp16", _faulty(faults.RootMeanSquare),
                Expected("precision", "aten.rsqrt", "fault", mark="root mean square",
                         words=("an island around fault is finite",))),
    ]  # fmt: skip


def in_any_format() -> list[Plant]:
    """The step fails in fp32 with any weights: the code has no finite result."""
    cause = "code"
    return [
        *plants("exponential_of_hundred", ALL, _changed(faults.exponential_of_hundred),
                Expected(cause, "aten.exp", ROOT, mark="exponential of 100")),
        *plants("by_zero", ALL, _changed(faults.by_zero), Expected(cause, "aten.div", ROOT, mark="by zero")),
        *plants("by_little", "bf16 fp32", _changed(faults.by_little),
                Expected(cause, "aten.div", ROOT, mark="by little", words=("overflows fp32",))),
        *plants("square_of_large", "bf16 fp32", _changed(faults.square_of_large),
                Expected(cause, "aten.pow", ROOT, mark="square of large")),
        *plants("all_hidden", ALL, _with(Perceptron, losses.all_hidden),
                Expected(cause, "aten.logsumexp", LOSS, mark="all hidden", words=("all -inf",))),
        *plants("spread_of_a_sample", ALL, _with(Perceptron, losses.spread_of_a_sample),
                Expected(cause, "aten.std", LOSS, mark="spread of a sample", words=("averages over nothing",))),
        *plants("buffer_in_place", ALL, _faulty(faults.SpoilsItsBuffer),
                Expected(cause, "aten.div_", "fault", mark="buffer in place", words=("divides by zero",))),
        *plants("own_random_numbers", ALL, batches.own_random_numbers,
                Expected(cause, "aten.log", LOSS, mark="own random numbers", words=("negative number",))),
        *plants("by_zero_in_pictures", "bf16 fp32", _faulty(lambda: Applies(faults.by_zero), Pictures),
                Expected(cause, "aten.div", "fault", mark="by zero")),
        *plants("log_of_zero", ALL, _faulty(lambda: Applies(faults.log_of_zero)),
                Expected(cause, "aten.log", "fault", mark="log of zero", words=("in fp32",))),
        *plants("root_of_negative", ALL, _changed(faults.root_of_negative),
                Expected(cause, "aten.sqrt", ROOT, mark="root of negative", words=("root of a negative number",))),
        *plants("full_mask", ALL, _with(partial(Transformer, hide=2)),
                Expected(cause, "aten._softmax", "blocks.1", mark="full mask", words=("all -inf",))),
        *plants("empty_mean", ALL, _with(Perceptron, losses.empty_mean),
                Expected(cause, "aten.mean", LOSS, mark="empty mean")),
        *plants("count_of_nothing", ALL, _with(Perceptron, losses.count_of_nothing),
                Expected(cause, "aten.div", LOSS, mark="count of nothing")),
        *plants("log_of_chance", ALL, _with(Perceptron, losses.log_of_chance),
                Expected(cause, "aten.log", LOSS, mark="log of chance")),
        *plants("hidden_target", ALL, _with(Perceptron, losses.hidden_target),
                Expected(cause, "aten.nll_loss_forward", LOSS, mark="hidden target")),
        *plants("count_of_zero", ALL, batches.count_of_zero,
                Expected(cause, "aten.div", LOSS, mark="count of zero", words=("divides by zero",))),
        *plants("spectrum", "fp32", _changed(faults.spectrum),
                Expected(cause, "aten._fft_r2c", ROOT, mark="spectrum")),
        *plants("buffer", "bf16 fp32", _faulty(lambda: faults.Scales(float("nan"))),
                Expected("state", outside="buffer fault.factor")),
    ]  # fmt: skip


def in_backward() -> list[Plant]:
    return [
        *plants("root_of_zero", ALL, _changed(faults.root_of_zero),
                Expected("code", "aten.div", ROOT, backward=True, mark="root of zero")),
        *plants("root_of_zero_in_attention", "bf16 fp32", _faulty(lambda: Applies(faults.root_of_zero), Transformer),
                Expected("code", "aten.div", "blocks.1.fault", backward=True, mark="root of zero")),
        *plants("where_trap", ALL, _faulty(lambda: Applies(faults.where_trap)),
                Expected("code", "aten.div", "fault", backward=True, mark="where trap")),
        *plants("steep_back", "fp16", _steep(faults.SteepBack),
                Expected("precision", "aten.mul", "fault", backward=True, mark="steep back")),
        *plants("custom_backward", "fp16", _steep(faults.CustomBackward),
                Expected("precision", "aten.mul", "fault", backward=True, mark="custom backward")),
    ]  # fmt: skip


def _steep(fault: Callable[[], nn.Module]) -> Callable[[], Scene]:
    """The fault comes last, so that gradients of one arrive in 16 bits."""

    def make() -> Scene:
        model = nn.Sequential()
        model.add_module("body", nn.Linear(8, 16))
        model.add_module("fault", fault())
        return Scene(model, _sums, batch_for(model))

    return make


def hidden() -> list[Plant]:
    """Inside code that torch runs in its own way."""
    return [
        *plants("custom_forward", "fp16", _faulty(faults.CustomForward),
                Expected("precision", "aten.exp", "fault", mark="custom forward")),
        *plants("recomputed", "fp16", _faulty(lambda: Recomputed(Amplifies(1e5), False)),
                Expected("precision", "aten.mul", "fault.inner", mark="amplifies")),
        *plants("recomputed_reentrant", "fp16", _faulty(lambda: Recomputed(Amplifies(1e5), True)),
                Expected("precision", "aten.mul", "fault.inner", mark="amplifies")),
        *plants("recomputed_back", "fp16 fp32", _again(False),
                Expected("code", "aten.div", "fault.inner", backward=True, mark="root of zero")),
        *plants("recomputed_back_reentrant", "fp16 fp32", _again(True),
                Expected("code", "aten.div", "fault.inner", backward=True, mark="root of zero")),
        *plants("recomputed_function", "fp16 fp32", _changed(partial(faults.recomputed, reentrant=False)),
                Expected("code", "aten.div", ROOT, backward=True, mark="root of zero")),
        *plants("recomputed_function_reentrant", "fp16 fp32", _changed(partial(faults.recomputed, reentrant=True)),
                Expected("code", "aten.div", ROOT, backward=True, mark="root of zero")),
        *plants("compiled_function", "fp16",
                runs.compiled(partial(Perceptron, change=faults.times_hundred_thousand), "aot_eager"),
                Expected("precision", "aten.mul", ROOT, mark="functional")),
        *plants("compiled", "fp16", runs.compiled(lambda: Perceptron(Amplifies(1e5)), "eager"),
                Expected("precision", "aten.mul", "fault", mark="amplifies")),
        *plants("compiled_aot", "fp16", runs.compiled(lambda: Perceptron(Amplifies(1e5)), "aot_eager"),
                Expected("precision", "aten.mul", "fault", mark="amplifies")),
        *plants("compiled_part", "bf16 fp32", runs.compiled_part,
                Expected("code", "aten.div", "fault", mark="by zero")),
        *plants("wrong_compiler", "bf16 fp32", runs.wrong_compiler, Expected("compiler")),
        *plants("once", ALL, _faulty(faults.Once), Expected("not_reproducible")),
    ]  # fmt: skip


def in_the_batch() -> list[Plant]:
    pixel = "the batch[0], sample 3"
    return [
        *plants("nan_pixel", ALL, batches.pixel(Perceptron, float("nan")),
                Expected("data", words=(f"{pixel} contains nan",))),
        *plants("inf_pixel", ALL, batches.pixel(Perceptron, float("inf")),
                Expected("data", words=(f"{pixel} contains inf",))),
        *plants("minus_inf_pixel", "fp16 fp32", batches.pixel(Transformer, -float("inf")),
                Expected("data", words=(f"{pixel} contains -inf",))),
        *plants("nan_pixel_in_picture", "bf16 fp32", batches.pixel(Pictures, float("nan")),
                Expected("data", words=(f"{pixel} contains nan",))),
        *plants("nan_in_attention", ALL, batches.pixel(Transformer, float("nan")),
                Expected("data", words=(f"{pixel} contains nan",))),
        *plants("nan_target", ALL, batches.nan_target,
                Expected("data", words=("micro-batch 1['target'], sample 2 contains nan",))),
        *plants("label_weight", ALL, batches.label_weight,
                Expected("data", words=("the batch['weight'], sample 4 contains inf",))),
        *plants("outlier", "fp16", batches.pixel(Perceptron, 1e6), Expected("data", words=(f"{pixel} reaches",))),
        *plants("far_outlier", ALL, batches.pixel(Plain, 1e38), Expected("data", words=(f"{pixel} reaches",))),
        *plants("written_in_place", "bf16 fp32", batches.written_in_place,
                Expected("data", words=("written to in place",))),
        *plants("written_in_an_object", "bf16 fp32", batches.written_in_an_object,
                Expected("data", words=("written to in place",))),
        *plants("read_once", "fp32", batches.read_once, Expected("data", words=("could not be run again",))),
    ]  # fmt: skip


def in_the_weights() -> list[Plant]:
    return [
        *plants("nan_weight", ALL, runs.nan_weight, Expected("state", outside="weight head.weight")),
        # The weights, up to 0.35 before, still fit fp16; what they make of the batch does not.
        *plants("blown_up_weight", "fp16", partial(runs.blown_up_weight, 1.5e5),
                Expected("divergence", "aten.addmm", "body")),
        # These do not fit any more when they are cast for the layer that has them.
        *plants("weight_too_large", "fp16", partial(runs.blown_up_weight, 1e7),
                Expected("divergence", "aten._to_copy", "body")),
        *plants("blown_up_to_the_end", "bf16 fp32", partial(runs.blown_up_weight, 1e39),
                Expected("state", outside="weight body.weight")),
        *plants("learning_rate", ALL, runs.high_rate, Expected("divergence")),
    ]  # fmt: skip


def all_plants() -> list[Plant]:
    groups = [too_large, vanishing, in_any_format, in_backward, hidden, in_the_batch, in_the_weights]
    # Every other file of the folder that has plants, by name.
    modules = (importlib.import_module(f"benchmarks.plants.{found.name}") for found in pkgutil.iter_modules([_FOLDER])
               if found.name != "catalogue")  # fmt: skip
    groups += [module.all_of_them for module in modules if hasattr(module, "all_of_them")]
    return [plant for group in groups for plant in group()]
