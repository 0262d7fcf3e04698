"""Run a case on fake tensors, which have shapes, dtypes and devices but no memory."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import WrongUse, format_error_line
from halfstep.formats import FP32
from halfstep.measure.batches import count_samples, list_tensors, map_tensors, resize_batch
from halfstep.measure.batches import move_batch as placed_batch
from halfstep.measure.case import Case
from halfstep.measure.memory.quantized import FakeQuantizedLayer, iterate_quantized_layers
from halfstep.measure.memory.timeline import BACKWARD, FORWARD, UPDATE, Timeline
from halfstep.measure.memory.values import NEEDS_NUMBERS, ValueTracker, attach_real_numbers, attach_same_numbers
from halfstep.measure.setting import StepSetting
from halfstep.observe.recorder import Recorder, has_compiled_code
from halfstep.precision.island import mark_inner_islands
from halfstep.precision.precision import Precision, widen
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.step.loss import ONLY, Counted, split_loss_and_aux
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.small_optimizers import WideGroupsMixin
from halfstep.step.storage.weight_format import NarrowWeights, can_take_bf16_weights
from halfstep.user_code import HALFSTEP, MEASURING, NO_FILE, TORCH, format_line_with_text, list_lines_outside

# -- backward ---------------------------------------------------------------------------------------------------------


Gradients = list[Tensor | None]


@dataclass
class BackwardWalk:
    """A backward in progress."""

    waiting: dict[Any, Gradients] = field(default_factory=dict)
    running: Any = None
    """The node being called; reported instead of `torch._C._current_autograd_node`."""
    number: int = 0
    """The id of this backward."""
    expected: Counter[int] = field(default_factory=Counter)
    """Gradients still to come for each leaf; they are summed before they are accumulated."""

    def run(self, loss: Tensor) -> None:
        """Compute the gradients of all leaves. The loss drops its graph, which is freed as it is walked."""
        first = torch.ones_like(loss)  # alive throughout, as under the engine
        self.waiting = {loss.grad_fn: [first]}
        self.expected = _count_leaf_edges(loss.grad_fn)
        self.number += 1
        loss.detach_()
        try:
            with torch.no_grad():
                while self.waiting:
                    self.running = max(self.waiting, key=self._order)
                    self._call(self.running)
        finally:
            self.running = None

    def _call(self, node: Any) -> None:
        gradients = self.waiting.pop(node)
        if hasattr(node, "variable"):
            _accumulate_gradient(node.variable, gradients[0], self._is_shared(gradients[0]))
            return
        # A node takes one argument for each of its outputs, including those that nothing was computed from.
        gradients += [None] * (len(node._input_metadata) - len(gradients))
        call = node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node
        found = call(*gradients)
        # Dropped before the next nodes run, so that freed gradients leave the timeline as under the engine.
        gradients.clear()
        made: tuple[Tensor | None, ...] = found if isinstance(found, tuple) else (found,)
        for (following, number), gradient in zip(node.next_functions, made, strict=False):
            if hasattr(following, "variable"):
                self.expected[id(following.variable)] -= 1
            if following is not None and gradient is not None:
                self._add(following, number, gradient)

    def _add(self, node: Any, number: int, gradient: Tensor) -> None:
        # The engine passes a gradient on reduced to the tensor's shape, in its dtype.
        wanted = node._input_metadata[number]
        if gradient.shape != wanted.shape:
            gradient = gradient.sum_to_size(wanted.shape)
        if gradient.dtype != wanted.dtype:
            gradient = gradient.to(wanted.dtype)
        slots = self.waiting.setdefault(node, [])
        slots.extend([None] * (number + 1 - len(slots)))
        before = slots[number]
        if before is None:
            slots[number] = gradient
        elif self._is_shared(before, times=2):
            slots[number] = before + gradient
        else:
            before.add_(gradient)

    def _order(self, node: Any) -> int:
        """Return the priority: last created first, but a complete leaf gradient is accumulated at once."""
        if hasattr(node, "variable"):
            return -1 if self.expected[id(node.variable)] > 0 else 2**63
        return int(node._sequence_nr())

    def _is_shared(self, tensor: Tensor | None, times: int = 1) -> bool:
        """Return whether another pending gradient shares this memory; it must then not be stored or changed."""
        if tensor is None:
            return False
        key = tensor.untyped_storage()._cdata
        same = (t for slots in self.waiting.values() for t in slots if t is not None)
        return sum(bool(other.untyped_storage()._cdata == key) for other in same) >= times


def _count_leaf_edges(root: Any) -> Counter[int]:
    """Count the edges to each leaf, by id: a reference to a node would keep its saved tensors alive."""
    found: Counter[int] = Counter()
    seen, left = {root}, [root]
    while left:
        for following, _ in left.pop().next_functions:
            if hasattr(following, "variable"):
                found[id(following.variable)] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


def _accumulate_gradient(leaf: Tensor, gradient: Tensor | None, shared: bool) -> None:
    if gradient is None:
        return
    wanted: torch.dtype = getattr(leaf, "grad_dtype", None) or leaf.dtype
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    # Copied unless it can be stolen, as in AccumulateGrad: its memory is its own and its layout the leaf's.
    elif shared or gradient.stride() != leaf.stride() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        leaf.grad = torch.empty_like(leaf, dtype=wanted).copy_(gradient)
    elif gradient.dtype != wanted:
        leaf.grad = gradient.to(wanted)
    else:
        leaf.grad = gradient.detach()


@contextmanager
def replace_torch_backward() -> Iterator[None]:
    """Replace `loss.backward()` by the walk, and report the node that is running."""
    walk = BackwardWalk()
    torch_backward, torch_node = Tensor.backward, torch._C._current_autograd_node
    torch_task = torch._C._current_graph_task_id  # type: ignore[attr-defined]
    Tensor.backward = lambda loss: walk.run(loss)  # type: ignore[method-assign, assignment, misc]
    torch._C._current_autograd_node = lambda: walk.running  # type: ignore[assignment]
    # Non-reentrant checkpointing stores recomputed activations by the id of the backward that needs them.
    torch._C._current_graph_task_id = lambda: -1 if walk.running is None else walk.number  # type: ignore[attr-defined]
    try:
        yield
    finally:
        Tensor.backward = torch_backward  # type: ignore[method-assign]
        torch._C._current_autograd_node = torch_node
        torch._C._current_graph_task_id = torch_task  # type: ignore[attr-defined]


# -- user error -------------------------------------------------------------------------------------------------------
# Report an error in the user's code with its line instead of a traceback through torch.


_INSTALLED = "site-packages"
_LONGEST = 200


def find_raising_line(error: BaseException) -> str | None:
    """Return the innermost line of the user's code as file:line: text; else one of an installed package."""
    lines = list_lines_outside(error, HALFSTEP, TORCH, NO_FILE)
    own = [line for line in lines if _INSTALLED not in line.filename] or lines
    return format_line_with_text(own[-1]) if own else None


def describe_error_with_line(error: BaseException) -> str:
    """Return an error in one line, after the line of code that raised it."""
    place, what = find_raising_line(error), format_error_line(error)[:_LONGEST]
    return f"{place} raised {what}" if place else what


def convert_user_error(error: Exception, samples: Sequence[str], do: str) -> WrongUse | None:
    """Return the error as `WrongUse`; None if no line of it is the user's, so that it is halfstep's own."""
    return build_wrong_use(error, samples, do) if find_raising_line(error) is not None else None


def build_wrong_use(error: Exception, samples: Sequence[str], do: str) -> WrongUse:
    """Return any error of a model, a loss or torch in them as `WrongUse`."""
    taken = f"; {', '.join(samples)} were taken as samples" if samples else ""
    return WrongUse(
        f"{describe_error_with_line(error)}{taken}",
        allowed="a model, a loss and a batch that run together",
        do=do or "run the loss once by itself: loss_fn(model, batch)",
    )


# -- refusal ----------------------------------------------------------------------------------------------------------
# Report code that needs tensor values if there are none, as an error that names its line.


# A plain RuntimeError: its text is the only way to recognize it.
_NUMPY = ".numpy() is not supported for tensor subclasses"
_KINDS = {
    "_local_scalar_dense": "reads a number out of a tensor, as item(), float() and `if` do,",
    "equal": "compares two tensors by their numbers",
    "nonzero": "makes a tensor whose size depends on numbers, as a boolean mask in brackets does,",
}


@contextmanager
def refuse_number_reads(why: str = "memory is estimated without computing any") -> Iterator[None]:
    """Run the user's code on fake tensors; raise `WrongUse` with the line that needs a value."""
    try:
        yield
    except NEEDS_NUMBERS as error:
        raise _build_number_refusal(error, str(error.func), why) from error
    except RuntimeError as error:
        if _NUMPY not in str(error):
            raise
        raise _build_number_refusal(error, "numpy", why) from error


def _build_number_refusal(error: BaseException, function: str, why: str) -> WrongUse:
    name = function.removeprefix("aten.").partition(".")[0]
    what = _KINDS.get(name, f"asks for numbers ({name})")
    return WrongUse(
        f"{find_calling_line(error)} {what} but {why}",
        allowed="code whose sizes and branches do not depend on the numbers in tensors",
        do="use torch.where, or multiply by the mask; read a tensor after the step; or remove that line",
    )


def find_calling_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code as file:line: text."""
    lines = list_lines_outside(error, *MEASURING)
    return format_line_with_text(lines[-1]) if lines else "code outside any file"


# -- building ---------------------------------------------------------------------------------------------------------


_COPIED = "Accessing the data pointer of FakeTensor"
"""torch's warning when a module on fake tensors is deep-copied, as nn.TransformerEncoder does with its layer."""


def create_fake_mode() -> FakeTensorMode:
    """Return a mode in which real tensors of the user's loss become fake when they are used."""
    return FakeTensorMode(allow_non_fake_inputs=True)


MakeCase = Callable[[], Case]


def build_fake_case(make: MakeCase, mode: FakeTensorMode, tracker: ValueTracker | None = None) -> Case:
    """Return the case on fake tensors, with the numbers that `tracker` can follow.

    A model that can be built on them costs no memory, however large; others are built for real and converted.
    """
    try:
        with mode, tracker or nullcontext(), warnings.catch_warnings(), silence_torch_log():
            warnings.filterwarnings("ignore", _COPIED)
            case = make()
    except Exception:  # it needs a value while being built, or has an error, which is raised again now
        case = make()
    return convert_case_to_fake(case, mode)


def build_case_factory(make_case: MakeCase) -> tuple[MakeCase, Case]:
    """Return a factory and a case on fake tensors.

    Building on fake tensors is fast, so the factory repeats it; a case that needs real values is built once and reused.
    """
    try:
        mode = create_fake_mode()
        with mode:
            case = make_case()
        return make_case, convert_case_to_fake(case, mode)
    except Exception:  # it needs a value while being built, or has an error, which is raised again now
        real = make_case()
        return lambda: real, real


def format_fake(tensor: Tensor, form: str) -> str:
    """Format a fake tensor as torch formats a real one: a scalar as a number, and any number serves in a text."""
    kind = complex if tensor.dtype.is_complex else float if tensor.dtype.is_floating_point else int
    return format(kind(1), form) if form and not tensor.dim() else object.__format__(tensor, form)


@contextmanager
def silence_torch_log() -> Iterator[None]:
    """Silence torch's log of tracebacks for unsupported operations, such as loading weights from a file."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def convert_case_to_fake(case: Case, mode: FakeTensorMode) -> Case:
    """Return the same case on fake tensors; the user's model is neither changed nor copied."""
    # A deep copy loses what `model.compile()` has set.
    compiled = case.compiled or has_compiled_code(case.model, case.loss_fn)

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else attach_real_numbers(mode.from_tensor(tensor), tensor)

    return replace(
        case, model=_convert_model_to_fake(case.model, mode), batch=map_tensors(case.batch, fake), compiled=compiled
    )


def _convert_model_to_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    real = {id(tensor): tensor for tensor in _iterate_model_tensors(model) if not isinstance(tensor, FakeTensor)}
    if not real:
        return model
    # deepcopy does not copy objects in its memo; one twin for each tensor keeps tied weights tied.
    memo: dict[int, Any] = {id(layer): FakeQuantizedLayer(layer, mode) for layer in iterate_quantized_layers(model)}
    for layer in iterate_quantized_layers(model):
        real.pop(id(layer.weight))
    for key, tensor in real.items():
        memo[key] = twin = attach_real_numbers(mode.from_tensor(tensor), tensor)
        # from_tensor also converts a gradient, but an update starts without one.
        twin.grad = None
    return copy.deepcopy(model, memo)


def _iterate_model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers, and tensors that modules have as plain attributes."""
    for module in model.modules():
        for value in (module._parameters, module._buffers, *vars(module).values()):
            if not isinstance(value, nn.Module):
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


# -- placing ----------------------------------------------------------------------------------------------------------
# Move a fake model to a device and layout: `Module.to` swaps tensors, which fake tensors do not support.


def move_fake_model(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """Return the model itself, with its tensors replaced by ones on the device; tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = moved.setdefault(id(tensor), _move_tensor(tensor, device, channels_last))  # type: ignore[assignment]
    return model


def _move_tensor(tensor: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    kernel = channels_last and tensor.dim() == 4 and isinstance(tensor, nn.Parameter)
    plain = tensor.detach()
    if tensor.device == device and not kernel:
        if plain.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            return tensor
        there = plain  # A deep-copied fake has another storage than its views, and would count twice.
    else:
        layout = torch.channels_last if kernel else torch.preserve_format
        there = attach_same_numbers(torch.empty_like(tensor, device=device, memory_format=layout), tensor)
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


# -- updates ----------------------------------------------------------------------------------------------------------
# Run updates of a case on fake tensors as a run does: forward, backward, update, gradients freed.


_LATER = 1000
"""The step that optimizers read. RAdam uses less memory in its first steps."""
_SCALE = 2.0**16
"""Any loss scale: its value changes no memory."""


class FakeCandidate:
    """A candidate on fake tensors, ready to step. Create and use it inside the mode of its fake tensors."""

    def __init__(
        self,
        case: Case,
        setting: StepSetting,
        precision: Precision,
        device: torch.device,
        tracker: ValueTracker | None = None,
    ) -> None:
        self.precision, self.device, self.microbatches, self._tracker = precision, device, setting.microbatches, tracker
        self.model = move_fake_model(case.model, device, setting.channels_last)
        if setting.recompute:
            checkpoint_activations(self.model)
        batch = placed_batch(case.batch, device, setting.channels_last)
        self.batch = resize_batch(batch, setting.batch or count_samples(batch))
        self.loss_fn = case.loss_fn
        precision.prepare(self.model, device)
        mark_inner_islands(self.model)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.optimizer = _resolve_foreach(case.optimizer(self.model), device)
        self.weights: NarrowWeights | None = None
        if setting.weight_format != FP32.name and can_take_bf16_weights(precision):
            slot, sums = OptimizerSlot(ONLY, self.optimizer), setting.gradient_sums
            self.weights = _NoiselessNarrowWeights(self.model, [slot], setting.weight_format, sums=sums)
        self.timeline = Timeline()
        if self.weights is not None:
            self.timeline.hold(self.weights.state_dict()["low_bits"].values(), "weights")
        self.timeline.hold(self.model.parameters(), "weights")
        self.timeline.hold(self.model.buffers(), "buffers")
        self.timeline.hold(list_tensors(self.batch), "batch")

    def recorder(self) -> Recorder:
        """Return a recorder that adds the operations in its scope to the timeline."""
        return _SubclassRecorder(self.model, self.timeline, has_compiled_update(self.optimizer, self.device))

    def step(self) -> None:
        """Take one whole update."""
        # Casts cached by the last update would be missing from this one's timeline.
        torch.clear_autocast_cache()
        if self.weights is not None:
            self.weights.begin(adds_up=self.microbatches > 1)
        for _ in range(self.microbatches):
            with self.precision.scope(self.device):
                loss = self._forward()
                self.timeline.begin(BACKWARD)
                loss.backward()
                del loss  # frees the rest of its graph
            gradients = (p.grad for p in self.model.parameters())
            self.timeline.hold((gradient for gradient in gradients if gradient is not None), "gradients")
        self.timeline.begin(UPDATE)
        # Only around the optimizer: in the user's code a value that is read must raise an error.
        with OptimizerNumberMode(self._read_known_number), _disable_compilation(self.optimizer):
            if self.weights is None:
                self.optimizer.step()
            else:
                self.weights.step(self.optimizer, factor=1.0, limit=None)
        # After the step, because an optimizer creates its state in the first one.
        self.timeline.hold(list_tensors(list(self.optimizer.state.values())), "optimizer")
        for parameter in self.model.parameters():
            parameter.grad = None

    def _read_known_number(self, tensor: Tensor) -> float | None:
        """Return a number of the optimizer's state that decides what it computes, as ASGD's `mu` does; not the step."""
        if self._tracker is None or any(state.get("step") is tensor for state in self.optimizer.state.values()):
            return None
        return self._tracker.number(tensor)

    def _forward(self) -> Tensor:
        """Return the loss of a micro-batch, as backward runs on it."""
        self.timeline.begin(FORWARD)
        with self.precision.autocast(self.device):
            loss = self.loss_fn(self.model, self.batch)
        loss = resolve_fake_loss(loss)
        if self.microbatches > 1:
            loss = loss / self.microbatches
        return loss * _SCALE if self.precision.scaled else loss


class _SubclassRecorder(Recorder):
    """A recorder of the operations that torchao's tensors compute with: casts and copies take memory, too."""

    def __init__(self, model: nn.Module, timeline: Timeline, compiled: bool) -> None:
        super().__init__(model, timeline)
        moments = () if compiled else ("torchao.optim.",)
        self._inside = ("torchao.float8.", "torchao.prototype.", *moments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith(self._inside) for kind in types):
            return NotImplemented  # then the tensor's own method runs, in this mode
        return super().__torch_dispatch__(func, types, args, kwargs)


def is_torchao_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of torchao's."""
    return any(kind.__module__.startswith("torchao") for kind in type(optimizer).__mro__)


def has_compiled_update(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer compiles its update: what the kernels take inside themselves is not known."""
    return is_torchao_optimizer(optimizer) and not (isinstance(optimizer, WideGroupsMixin) and device.type == "cpu")


@contextmanager
def _disable_compilation(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run the step of torchao's optimizers eagerly: they compile it, which fails inside a dispatch mode."""
    if not is_torchao_optimizer(optimizer):
        yield
        return
    compiled = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


class _NoiselessNarrowWeights(NarrowWeights):
    """Weights in bf16 on fake tensors, for which there is no generator."""

    def _generator(self, name: str, device: torch.device) -> torch.Generator | None:
        return None


def _resolve_foreach(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Apply choices that torch makes by looking at real parameters: on a GPU, foreach updates.

    Raises `WrongUse` for an optimizer that needs a closure, such as LBFGS.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise WrongUse(
            f"{type(optimizer).__name__}, whose step runs the model any number of times",
            allowed="optimizers that step from existing gradients: step()",
            do="estimate with the optimizer left out, and add its state by hand",
        )
    for group in optimizer.param_groups:
        alone = group.get("fused") or group.get("differentiable") or isinstance(group.get("lr"), Tensor)
        if device.type == "cuda" and not alone and group.get("foreach", False) is None:
            group["foreach"] = True
    return optimizer


def resolve_fake_loss(loss: Any) -> Tensor:
    """Return one scalar to differentiate from any supported return value; raise `WrongUse` for others."""
    loss, _ = split_loss_and_aux(loss)
    if isinstance(loss, dict) and ONLY in loss:
        loss = loss[ONLY]
    counted = isinstance(loss, Counted)
    value = loss.sum if isinstance(loss, Counted) else loss
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise WrongUse(
            f"{what} as the loss"
            if not isinstance(value, Tensor) or value.ndim
            else "a loss that depends on no parameter",
            allowed="a scalar tensor with a graph behind it, or Counted(sum, count)",
            do="return loss.mean(), and call the model outside torch.no_grad()",
        )
    # A Counted loss is divided by its count in a run; the division allocates a tensor.
    return widen(value) / 1.0 if counted else widen(value)


class OptimizerNumberMode(TorchDispatchMode):
    """A mode for optimizers that read numbers: those that are known, and a late step for all others."""

    def __init__(self, known: Callable[[Tensor], float | None] = lambda _: None) -> None:
        super().__init__()
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        known = self._known(args[0])
        number = _LATER if known is None else known
        return float(number) if args[0].is_floating_point() else int(number)
