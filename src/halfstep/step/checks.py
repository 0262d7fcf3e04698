"""Refuse or report known mistakes before a step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.errors import StateMismatch, TornUpdate, WrongUse
from halfstep.finding import Finding, format_first_names
from halfstep.formats import FP64, is_narrow
from halfstep.observe.reachable import find_reachable_instances, list_global_names
from halfstep.step.census import list_optimizer_parameters
from halfstep.step.containers import MOST_ARRAY_BYTES, MOST_MEMBERS

if TYPE_CHECKING:
    from halfstep.precision.precision import Precision


def check_model_and_optimizers(
    model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], ranks: int, *, narrow: bool = False
) -> list[Finding]:
    """Refuse what would train nothing, or train it wrongly in silence; return findings about what probably will.

    With `narrow`, trained weights may be stored in bf16. Raises WrongUse.
    """
    _check_model_wrapper(model)
    check_no_lazy_modules(model)
    names = {id(p): name for name, p in model.named_parameters()}
    for name, optimizer in optimizers.items():
        check_steps_once(name, optimizer)
        _check_no_offload(name, optimizer)
        owned = list_optimizer_parameters(optimizer)
        _check_belongs_to_model(name, owned, names)
        _check_meta_and_foreign(owned, names, ranks)
        trained = [p for p in owned if p.requires_grad and not (narrow and p.dtype is torch.bfloat16)]
        if any(is_narrow(p.dtype) for p in trained):
            from halfstep.step.storage.stored_formats import check_trained_weights_wide  # most weights are in fp32

            check_trained_weights_wide(trained, model, names)
    check_no_optimizer_in_backward(model, optimizers)
    _check_distinct_parameters(optimizers, names)
    return _find_stale_optimizer(model, optimizers)


def check_no_list_of_batches(batch: Any, error: TypeError) -> None:
    """Raise WrongUse after a TypeError of the loss function if its batch is a list of batches."""
    if type(batch) not in (list, tuple) or not batch:
        return
    kinds = {(type(each), *map(type, each.values() if isinstance(each, dict) else each)) for each in batch
             if isinstance(each, (list, tuple, dict))}  # fmt: skip
    if len(kinds) == 1 and all(isinstance(each, (list, tuple, dict)) for each in batch):
        raise WrongUse(
            f"step(loss_fn, batch) with a {type(batch).__name__} of {len(batch)} batches, which loss_fn gets as one "
            f"batch: {error}",
            allowed="one batch, or a Window of micro-batches",
            do="did you mean stepper.step(loss_fn, halfstep.Window(batches)), or for batch in "
            "halfstep.windows(loader, 2)?",
        ) from error


def check_trainable(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise WrongUse if no optimizer has a trainable parameter; one of several may be frozen, as in a GAN."""
    owned = [p for optimizer in optimizers.values() for p in list_optimizer_parameters(optimizer)]
    if not any(p.requires_grad for p in owned):
        raise WrongUse(
            f"optimizers {', '.join(map(repr, optimizers))} hold {len(owned)} parameters, all of them frozen",
            allowed="an optimizer over parameters of the model that require a gradient",
            do="call requires_grad_(True) on the parameters to train, before building the Stepper",
        )


def check_fp64_storage(precision: Precision, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise WrongUse for fp64 with trainable weights in fewer bits: no autocast widens them."""
    if precision.stores is not FP64:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    owned = [p for optimizer in optimizers.values() for p in list_optimizer_parameters(optimizer) if p.requires_grad]
    narrow = [names.get(id(p), "(not of the model)") for p in owned if p.is_floating_point() and p.dtype.itemsize < 8]
    if narrow:
        raise WrongUse(
            f"precision={precision.name!r} with trainable weights in fewer than 64 bits: {format_first_names(narrow)}",
            allowed="a model in float64, and batches in float64",
            do="model.double() before the optimizer is built, or precision='fp32'",
        )


def check_same_conversion(ours: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raise StateMismatch if the saved run computed other layers in fp8, or in another kind of it."""
    if ours == saved:
        return
    other = sorted(path for path in {**ours, **saved} if ours.get(path) != saved.get(path))
    path = other[0]
    raise StateMismatch(
        f"{path} was trained in {saved.get(path, 'no fp8')}, and computes in {ours.get(path, 'no fp8')} here"
        f"{f'; {len(other) - 1} more layers differ' if len(other) > 1 else ''}",
        allowed="the same layers in the same kinds of fp8",
        do="the precision, or the policy, that the run was saved with",
    )


def build_idle_island_finding(path: str) -> Finding:
    """Return the finding for an island in which nothing ran."""
    evidence = f"nothing ran in the island {path!r}: its weights are used elsewhere, in the precision of the run"
    return Finding("island.idle", "warning", evidence, "make the module that uses them an island")


def build_batch_written_finding(paths: Sequence[str]) -> Finding:
    """Return the finding for a step that changes its batch in place."""
    return Finding(
        "batch.written",
        "note",
        f"the step changes its batch in place: {', '.join(f'batch{path}' for path in dict.fromkeys(paths))}",
        "x = x * 2 instead of x.mul_(2): a skipped step does not restore the batch, and a rerun would change it again",
    )


def build_rebound_tensors_finding(names: Sequence[str]) -> Finding:
    """Return the finding for tensors outside of modules that a skipped step has bound anew."""
    return Finding(
        "rollback.rebound",
        "warning",
        f"the step was not applied, but rebound {', '.join(dict.fromkeys(names))}, outside of any module",
        "keep it as an attribute of a module, write it in place, or stepper.include() an object with state_dict()",
    )


def build_changed_containers_finding(names: Sequence[str]) -> Finding:
    """Return the finding for contents of modules that a skipped step has changed and that are not restored."""
    return Finding(
        "rollback.rebound",
        "warning",
        f"the step was not applied, but changed the contents of {format_first_names(list(dict.fromkeys(names)))}, "
        f"which {'is' if len(set(names)) == 1 else 'are'} not restored: a container of more than {MOST_MEMBERS} "
        f"members, an array of more than {MOST_ARRAY_BYTES // 2**10} KiB, or an object of another class",
        "stepper.include(model) for containers and arrays of any size; keep the tensors of the object as attributes of "
        "the module, or stepper.include() an object with state_dict()",
    )


def check_grad_and_autocast(device: torch.device) -> None:
    """Raise WrongUse if a step could not learn: inside autocast, no_grad or inference_mode."""
    # Casts of weights are cached until the outermost autocast ends, so later steps would compute with old weights.
    if torch.is_autocast_enabled(device.type):
        raise WrongUse(
            "a step inside torch.autocast, which keeps using the weights that it cast first",
            allowed="autocast around the forward pass only, which halfstep opens by itself",
            do="move the loop out of `with torch.autocast(...)`",
        )
    if not torch.is_grad_enabled():
        raise WrongUse(
            "a step under torch.no_grad() or inference_mode()",
            allowed="a step with recorded gradients",
            do="move the training loop out of it",
        )


def check_window_can_start(*, torn: bool, in_one: bool, empty: bool) -> None:
    """Raise TornUpdate or WrongUse if a window cannot start, or its settings cannot change, in this state."""
    if torn:
        raise TornUpdate(
            "an optimizer, schedule or average was interrupted in the last update: the weights are neither old nor new",
            do="load the last checkpoint into a new Stepper",
        )
    if in_one or empty:
        raise WrongUse(
            "step() in the middle of an open window" if in_one else "a Window without micro-batches",
            allowed="one window at a time, of one micro-batch or more",
            do="stepper.apply() or stepper.discard() first" if in_one else "skip empty windows",
        )


def check_optimizer_name(name: str, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise WrongUse if no optimizer has this name."""
    if name not in optimizers:
        names = ", ".join(map(repr, optimizers))
        raise WrongUse(f"only={name!r}", allowed=names, do="name one of this Stepper's optimizers")


def build_missing_loss_error(names: Sequence[str], losses: Mapping[str, object]) -> WrongUse:
    """Return the error for optimizers that the loss function returned no loss for."""
    missing = [name for name in names if name not in losses]
    return WrongUse(
        f"no loss for {missing}; got {sorted(map(str, losses))}",
        allowed=f"one loss for all, or a dict with {list(names)}",
        do="return one loss for each optimizer, or step(..., only=name)",
    )


def check_no_foreign_calls(weights_moved: bool, gradients_moved: bool, *, before: str) -> None:
    """Raise WrongUse if other code stepped, or changed gradients, between `backward()` and what comes after it."""
    if weights_moved:
        raise WrongUse(
            f"weights changed between backward() and {before}: optimizer.step() was called directly",
            allowed="updates by stepper.apply() only; this window is dropped, but that update has happened",
            do="remove optimizer.step() and scaler.step() from the loop",
        )
    if gradients_moved:
        raise WrongUse(
            f"gradients that changed between backward() and {before}, where they still carry the loss scale",
            allowed="gradients as backward left them; this window is dropped",
            do="stepper.discard() instead of optimizer.zero_grad(), Stepper(..., clip_norm=1.0) instead of "
            "clip_grad_norm_, or on_gradients=fn for other edits",
        )


def _check_model_wrapper(model: nn.Module) -> None:
    """Refuse wrappers that keep gradients, or whole parameters, where a step does not see them."""
    if isinstance(model, nn.DataParallel):
        raise WrongUse(
            "a model in torch.nn.DataParallel, which copies it to every device in each forward",
            allowed="a plain model under torchrun, a model in DistributedDataParallel, or fully_shard(model)",
            do="Stepper(model.module, ...), started with torchrun --nproc-per-node",
        )
    # Not imported here: that takes most of a second, and without the import FSDP1 cannot be in use.
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp1 is not None and any(isinstance(module, fsdp1) for module in model.modules()):
        raise WrongUse(
            "a model in FullyShardedDataParallel (FSDP1), which keeps its shards in flat parameters",
            allowed="FSDP2: torch.distributed.fsdp.fully_shard",
            do="for block in model.blocks: fully_shard(block); fully_shard(model); Stepper(model, ...)",
        )


def check_no_lazy_modules(model: nn.Module) -> None:
    """Refuse lazy modules, whose first batch makes their weights and sets a shape that a rollback cannot undo."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise WrongUse(
            f"{format_first_names(lazy)} of lazy modules, which have no shape before the first batch",
            allowed="initialized parameters and buffers",
            do="model(batch) once under torch.no_grad(), then build the optimizer and the Stepper",
        )


def check_steps_once(name: str, optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    # SAM and its variants come from many packages; all of them have these two methods.
    two_steps = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    if needed or two_steps or isinstance(optimizer, torch.optim.LBFGS):
        raise WrongUse(
            f"optimizer {name!r} is {type(optimizer).__name__}, which evaluates the loss several times an update",
            allowed="optimizers that step once from given gradients",
            do="use AdamW, SGD or another first-order optimizer",
        )


_OFFLOADING = (("torchao", "CPUOffloadOptimizer"), ("bitsandbytes", "Paged"))
"""Packages, and how the names of their optimizers start that move state or gradients on their own."""


def _check_no_offload(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that take gradients during backward, or keep state where no checkpoint sees it."""
    for kind in type(optimizer).__mro__:
        if any(kind.__module__.startswith(package) and kind.__name__.startswith(own) for package, own in _OFFLOADING):
            raise WrongUse(
                f"optimizer {name!r} is {kind.__name__}, which moves gradients or state to the host by itself: they "
                "are not unscaled, not clipped and not restored",
                allowed="optimizers that step once from the gradients of the parameters",
                do="torchao.optim.AdamW8bit, or optimizer: {name: adamw, state: int8} in a recipe, takes a quarter of "
                "the memory",
            )


def check_no_optimizer_in_backward(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse an optimizer in backward: it updates before it is known whether the gradients are finite."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners = {id(p): name for name, optimizer in optimizers.items() for p in list_optimizer_parameters(optimizer)}
    owned = [p for optimizer in optimizers.values() for p in list_optimizer_parameters(optimizer)]
    for p in (*owned, *model.parameters()):
        hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        if hasattr(p, "_in_backward_optimizers") or any(map(_steps_an_optimizer, hooks.values())):
            owner = f"optimizer {owners[id(p)]!r}" if id(p) in owners else "the model"
            raise WrongUse(
                f"{names.get(id(p), 'a parameter')} of {owner} has an optimizer in backward",
                allowed="an optimizer that is stepped once, after all gradients were judged",
                do="remove the hook of register_post_accumulate_grad_hook that calls optimizer.step(), and step this "
                "optimizer like the others; Stepper takes several: {'muon': muon, 'adamw': adamw}",
            )


def _steps_an_optimizer(hook: Any) -> bool:
    """Return whether a hook calls `step` of an optimizer; one that only reads gradients may lead to one as well."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return (
        code is not None
        and "step" in list_global_names(code)
        and bool(find_reachable_instances(hook, torch.optim.Optimizer))
    )


def _check_belongs_to_model(name: str, owned: list[torch.Tensor], names: Mapping[int, str]) -> None:
    if not any(id(p) in names for p in owned):
        raise WrongUse(
            f"optimizer {name!r} has {len(owned)} parameters, none of them of this model",
            allowed="an optimizer over parameters of the model that require a gradient",
            do="build the optimizer after the model is final: optim.AdamW(model.parameters())",
        )


def _check_meta_and_foreign(trained: list[torch.Tensor], names: Mapping[int, str], ranks: int) -> None:
    meta = [names.get(id(p), "?") for p in trained if p.is_meta]
    if meta:
        raise WrongUse(
            f"{', '.join(meta[:5])} on the meta device, which stores no numbers",
            allowed="parameters on a device that computes",
            do="model.to_empty(device=...) and load the weights, then build the optimizer",
        )
    # Their gradients would not be synchronized, and the ranks would drift apart silently.
    foreign = sum(id(p) not in names for p in trained)
    if foreign and ranks > 1:
        raise WrongUse(
            f"{foreign} parameters in the optimizer that are not the model's, on several processes",
            allowed="parameters of the model, whose gradients are synchronized",
            do="make the module that contains them (a loss with weights, say) a part of the model",
        )


def _find_stale_optimizer(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Finding]:
    """Find an optimizer with parameters of another model while some of this one are in none: a part was replaced."""
    held = {id(p) for optimizer in optimizers.values() for p in list_optimizer_parameters(optimizer)}
    own = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    left_out = [name for key, name in own.items() if key not in held]
    foreign = len(held - {id(p) for p in model.parameters()})
    if not (left_out and foreign):
        return []
    evidence = f"the optimizer has {foreign} parameters of another model and leaves out {', '.join(left_out[:5])}"
    return [Finding("optimizer.stale", "warning", evidence, "build the optimizer after the model is final")]


def _check_distinct_parameters(optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    owner: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for p in list_optimizer_parameters(optimizer):
            if owner.setdefault(id(p), name) != name:
                raise WrongUse(
                    f"{names.get(id(p), 'a parameter')} belongs to optimizers {owner[id(p)]!r} and {name!r}",
                    allowed="each parameter in one optimizer",
                    do="split the parameters",
                )


def refuse_strict(where: str, strict: object) -> None:
    """Raise WrongUse for the option `strict`, which `Stepper` and the adapters had."""
    if strict is not None:
        raise WrongUse(
            f"{where} with strict={strict!r}",
            allowed="a precision by name, which runs as requested or is refused; auto, which chooses",
            do="leave strict out; for a fallback: precision=halfstep.choose_precision('bf16', fallback=True)",
        )


def check_schedule_has_steps(schedule: Any, window: Sequence[Any]) -> None:
    """Raise WrongUse if a schedule for a number of steps, such as OneCycleLR, has made all of them."""
    total, made = schedule.total_steps, schedule.last_epoch
    if made < total:
        return
    epoch = getattr(window, "of", None)
    try:
        updates = f"{len(epoch)} updates" if epoch is not None else "len(loader) updates"
    except TypeError:
        updates = "as many updates as it has windows"
    raise WrongUse(
        f"an update after the {total} steps of {type(schedule).__name__}(total_steps={total})",
        allowed=f"{total} updates; an epoch makes {updates}: a short last window is an update, too",
        do="total_steps = epochs * len(halfstep.windows(loader, microbatches)), or windows(..., drop_last=True)"
        if epoch is not None
        else "total_steps = epochs * len(loader), or epochs * len(halfstep.windows(loader, microbatches))",
    )


def check_keep_gradients(keep: bool, weight_format: str | None) -> bool:
    """Return `keep`; raise WrongUse for weights stored in bf16, whose gradients are unscaled within the update."""
    if keep and weight_format not in (None, "fp32"):
        raise WrongUse(
            f"keep_gradients=True with weight_format={weight_format!r}, whose gradients stay scaled and unclipped",
            allowed="keep_gradients=True with weights in fp32",
            do="read the gradients in on_gradients=fn, which gets them unscaled",
        )
    return keep


def refuse_weight_format(where: str, options: Mapping[str, object]) -> None:
    """Raise WrongUse for weights stored in bf16 in a loop whose library saves and loads the weights itself."""
    if options.get("weight_format") not in (None, "fp32"):
        raise WrongUse(
            f"{where} with weight_format={options['weight_format']!r}: the library's checkpoints would not have the "
            "low bits of the weights, and would round the optimizer's state",
            allowed="weights in fp32 here; bf16-split and bf16-stochastic in halfstep.Stepper and in recipes",
            do="leave weight_format out, or train with halfstep.Stepper(..., weight_format=...)",
        )
