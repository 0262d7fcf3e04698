"""The one recorder of what torch really runs: every operation, with the module that called it.

Observed precision, audits, replays and estimates are listeners of it, not further recorders.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.formats import is_narrow
from halfstep.observe.identities import identify_storage, strip_compile_wrappers
from halfstep.observe.reachable import iterate_reachable
from halfstep.precision import island
from halfstep.user_code import ASKS, HALFSTEP, TORCH, find_running_line

# Run operators that take functions, such as torch.cond, scan and flex_attention, without compilation.
# torch hands their functions to Dynamo, which turns everything they close over into inputs. While operations are
# recorded Dynamo is off, and weights that a branch closes over would get no gradient. So a recorder runs an equivalent
# function instead, above autograd: every operation inside is seen, and every gradient arrives.


Meaning = Callable[..., Any]
NAMESPACE = "higher_order"


def find_plain_implementation(operator: HigherOrderOperator, arguments: Any, keywords: Any) -> Meaning | None:
    """Return a function that does the same, operation by operation; None if torch has to run the operator itself."""
    if torch.compiler.is_compiling() or any(
        isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((arguments, keywords))
    ):
        return None
    found: Meaning | None = _MEANINGS.get(operator.name())
    if found is None and operator.name() in _AS_TORCH_DOES:
        found = operator.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    return found


def _run_cond(predicate: Any, if_true: Meaning, if_false: Meaning, operands: Any) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _run_scan(combine: Meaning, init: Any, xs: Any, more: Any) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=tuple(more))


_MEANINGS: dict[str, Meaning] = {"cond": _run_cond, "scan": _run_scan}
_AS_TORCH_DOES = frozenset({"map_impl", "while_loop", "flex_attention"})
"""Operators whose own kernels only call their functions and ordinary operations."""


class OpaqueOperator:
    """A stand-in for a higher-order operator that ran unseen, with everything that listeners read of a function."""

    namespace = NAMESPACE
    is_view = False
    tags: tuple[Any, ...] = ()
    _schema = SimpleNamespace(arguments=(), returns=())

    def __init__(self, operator: HigherOrderOperator) -> None:
        self.operator = operator
        self.__name__ = operator.name()
        self._overloadpacket = self.overloadpacket = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.operator(*arguments, **keywords)

    def __str__(self) -> str:
        return f"{NAMESPACE}.{self.__name__}"

    def __hash__(self) -> int:
        return hash(self.operator)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueOperator) and other.operator is self.operator


def replace_function_arguments(arguments: tuple[Any, ...], change: Callable[[Meaning], Meaning]) -> tuple[Any, ...]:
    """Return the same arguments with their functions changed."""
    return tuple(change(given) if callable(given) and not isinstance(given, Tensor) else given for given in arguments)


_STATISTICS = ("running_mean", "running_var")
# These read running statistics, or return new ones.
_READS = ("backward", "no_update", "no_training", "functional", "elemt")
_IN_TRAINING = ("training", "use_input_stats")
# c10d's schemas mark no writes. The first argument receives; the second may share its memory.
_SILENT = "c10d"
_SENDS = ("send", "barrier", "monitored_barrier_", "check_for_nan")


def predict_written_tensors(
    function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]
) -> list[Tensor]:
    """Return the tensors among the arguments that an operation is about to write into."""
    places, statistics = _find_written_positions(function)
    if not places and not statistics:
        return []
    found = [_select_argument(place, name, arguments, keywords) for place, name in places]
    if statistics and _updates_statistics(function, arguments, keywords):
        found += [_select_argument(place, name, arguments, keywords) for place, name in statistics]
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


Places = tuple[tuple[int, str], ...]


@cache
def _find_written_positions(function: OpOverload) -> tuple[Places, Places]:
    """Return the positions and names of written arguments, and of running statistics that are written in training."""
    taken = list(enumerate(function._schema.arguments))
    name = function._schema.name.rpartition("::")[2]
    if function.namespace == _SILENT:
        return ((0, taken[0][1].name),) if taken and name not in _SENDS else (), ()
    marked = tuple((i, a.name) for i, a in taken if a.alias_info is not None and a.alias_info.is_write)
    if any(word in name for word in _READS):
        return marked, ()
    names = {name for _, name in marked}
    return marked, tuple((i, a.name) for i, a in taken if a.name in _STATISTICS and a.name not in names)


def _updates_statistics(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> bool:
    for place, taken in enumerate(function._schema.arguments):
        if taken.name in _IN_TRAINING:
            return bool(_select_argument(place, taken.name, arguments, keywords))
    return True


def _select_argument(place: int, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
    return arguments[place] if place < len(arguments) else keywords.get(name)


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class _FunctionCallMode(TorchFunctionMode):
    """A function mode that notices attention with narrow inputs, and replaces torch.cond and similar operators."""

    inside = False

    def __init__(self, replaces: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._replaces = replaces

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:
            self._replaces(args[0])
        if (
            isinstance(func, HigherOrderOperator)
            and (meaning := find_plain_implementation(func, args, kwargs)) is not None
        ):
            with self:
                # torch disables a mode inside its own handler; entered again, it sees the calls of the branches.
                return meaning(*args, **kwargs)
        if func not in (functional.scaled_dot_product_attention, functional.multi_head_attention_forward):
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        # multi_head_attention_forward projects its inputs first, so they may be wide; its inner calls are hidden from
        # here.
        self.inside = is_narrow(query.dtype) or torch.is_autocast_enabled(query.device.type)
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = False


class Operation(NamedTuple):
    """One call that reached a kernel."""

    function: OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, object]
    result: Any
    module: str
    """Path of the innermost running module; for backward, of the module whose forward made this node."""
    backward: bool
    widened: bool
    """Whether it is part of a narrow attention, which torch itself computes in fp32 if it has no narrow kernel."""
    node: int | None = None
    """The number of the autograd node that a forward operation made, or that a backward operation is part of."""
    islands: tuple[object, ...] = ()
    """The islands in which it ran, outermost first; for backward, those whose forward made this node."""


Listener = Callable[[Operation], None]
Run = Callable[[OpOverload, tuple[Any, ...], Mapping[str, object]], Any]


class MemoryListener(Protocol):
    """Learns which memory from before the recording is used, by operations that user code asks for."""

    def module_runs(self, module: nn.Module) -> None:
        """Called before the forward pass of any module, inside the model or not."""

    def before_use(self, written: Sequence[Tensor], read: Sequence[Tensor], line: str | None) -> None:
        """Called before an operation in this line of user code writes into tensors, or reads storages.

        `read` has a tensor of each storage that no recorded operation has used before.
        """

    def before_replace(self, tensor: Tensor, line: str | None) -> None:
        """Called before `tensor.data = ...` in this line of user code."""


class ModelPlace(NamedTuple):
    """The place in a model that an operation belongs to."""

    module: str
    widened: bool
    islands: tuple[object, ...]


def run_unchanged(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
    """Run an operation as torch would without a recorder."""
    return function(*arguments, **keywords)


_EQUAL = torch.ops.aten.equal.default
OUTSIDE = "(outside the model)"
_NOWHERE = ModelPlace(OUTSIDE, False, ())
_CHECKPOINT = torch.utils.checkpoint.__file__


class Recorder(TorchDispatchMode):
    """A dispatch mode that calls a listener with every operation. Never use it on a compiled function's first call.

    `run` computes the result in another way, as an emulation does; operations that it calls are not recorded.
    `memory` learns which modules run, and which memory from before the recording is used.
    """

    # Otherwise torch refuses to run torch.cond and similar operators under a dispatch mode.
    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        listener: Listener,
        run: Run = run_unchanged,
        *,
        memory: MemoryListener | None = None,
    ) -> None:
        super().__init__()
        self._modules = [(strip_compile_wrappers(path), module) for path, module in model.named_modules()]
        self._listener, self._run, self._memory = listener, run, memory
        self._made: set[int] = set()
        """Storages that were made since the recording began."""
        self._used: set[int] = set()
        self._running: list[str] = []
        self._islands_of: dict[str, tuple[object, ...]] = {}
        self._makers: dict[int, ModelPlace] = {}
        self._numbered = 0
        self._recorded = 0
        self._opened = 0
        self._hooks: list[Any] = []
        self._calls = _FunctionCallMode(self._replaces)

    def __deepcopy__(self, _memo: object) -> Recorder:
        """Return the recorder itself: a loss function may copy a model whose hooks hold it."""
        return self

    @property
    def module(self) -> str:
        """Path of the innermost module whose forward is running."""
        return self._running[-1] if self._running else OUTSIDE

    def maker(self, node: Any) -> str:
        """Return the path of the module whose forward made a node of the graph."""
        return self._makers.get(node._sequence_nr(), _NOWHERE).module

    def __enter__(self) -> Recorder:
        for path, module in self._modules:
            # Scripted modules accept no hooks; their operations count as their parent's.
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._begins(path)))
                # always_call: an exception must not leave the module on the stack.
                self._hooks.append(module.register_forward_hook(self._ends, always_call=True))
        if self._memory is not None:
            self._thread = threading.get_ident()
            self._hooks.append(register_module_forward_pre_hook(self._runs))
            # It warns that the hook is called twice, for the compiled module and for the one inside it.
            self._quiet = warnings.catch_warnings()
            self._quiet.__enter__()
            warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        island.start_watching_islands()
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)
        island.stop_watching_islands()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._memory is not None:
            self._quiet.__exit__(*error)
        self._running.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_operator(func, args, kwargs)
        if func is _EQUAL and not isinstance(args[0], Tensor):
            # The second run of a traced module under autocast compares numbers, which torch unwraps for a mode.
            return args[0] == args[1]
        if self._opened or torch.is_inference_mode_enabled():
            # Below autograd some composite operations arrive undecomposed.
            with self._record_nested():
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        old = set() if self._memory is None else self._announce(self._memory, func, args, kwargs)
        (place, backward, node), self._recorded = self._place(), self._recorded + 1
        result = self._run(func, args, kwargs)
        if self._memory is not None:
            self._made |= set(map(identify_storage, _list_tensors(result))) - old
        self._listener(Operation(func, args, kwargs, result, *_list_place_fields(place, backward, node)))
        return result

    def _announce(self, memory: MemoryListener, function: OpOverload, arguments: Any, keywords: Any) -> set[int]:
        """Announce the memory from before the recording that an operation uses; return its storages."""
        used = _list_tensors((arguments, keywords))
        if function is torch.ops.aten.lift_fresh.default:  # torch.tensor(...), which no operation has made
            self._made |= set(map(identify_storage, used))
        old = {
            storage: tensor for tensor in used if (storage := identify_storage(tensor)) not in self._made and storage
        }
        if old and not _is_torch_internal():
            written = [t for t in predict_written_tensors(function, arguments, keywords) if identify_storage(t) in old]
            first = old.keys() - self._used
            if written or first:
                memory.before_use(written, [old[storage] for storage in first], find_running_line())
                self._used |= first
        return set(old)

    def _replaces(self, tensor: Tensor) -> None:
        """Announce that a tensor from before the recording gets other memory, which no operation shows."""
        if self._memory is not None and identify_storage(tensor) not in self._made and not _is_torch_internal():
            self._memory.before_replace(tensor, find_running_line())

    def _runs(self, module: nn.Module, _inputs: Any) -> None:
        assert self._memory is not None, "the hook is registered for a listener"
        # The hook is global: another thread may train another model.
        if threading.get_ident() == self._thread or torch._C._current_autograd_node() is not None:
            self._memory.module_runs(module)

    def _run_operator(self, operator: HigherOrderOperator, arguments: tuple[Any, ...], keywords: Any) -> Any:
        """Record the operations of its functions, or, if none was seen, the operator itself as one operation."""
        (place, backward, node), before = self._place(), self._recorded
        result = operator(*replace_function_arguments(arguments, self._seen), **keywords)
        if self._recorded == before:
            function: Any = OpaqueOperator(operator)
            self._listener(Operation(function, arguments, keywords, result, *_list_place_fields(place, backward, node)))
        return result

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*arguments: Any, **keywords: Any) -> Any:
            self._opened += 1
            try:
                with self._record_nested():
                    return function(*arguments, **keywords)
            finally:
                self._opened -= 1

        return seen

    @contextmanager
    def _record_nested(self) -> Iterator[None]:
        """Record operations inside the one that is running: torch disables a dispatch mode within itself."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _place(self) -> tuple[ModelPlace, bool, int | None]:
        """Return where an operation belongs; a running autograd node tells which forward operation made it."""
        running, islands = torch._C._current_autograd_node(), island.running.islands
        if running is not None and self._running and not islands:
            # Checkpointing recomputes a part of an island without entering the island again.
            islands = self._islands_of.get(self.module, ())
        place = ModelPlace(self.module, self._calls.inside, islands)
        if running is not None and not self._running:
            made_by = running._sequence_nr()
            place = self._makers.get(made_by, _NOWHERE)
            if not (torch.is_grad_enabled() and _is_recomputing()):
                return place, True, made_by
            if islands:
                place = place._replace(islands=islands)
        number = torch._C._autograd._get_sequence_nr()
        # An operation without an autograd node, such as counting batches, is not the maker of the last node.
        if number == self._numbered:
            return place, False, None
        # Autograd is above this mode: it has already made the operation's node, with the last number.
        self._makers[number - 1] = place
        self._numbered = number
        return place, False, number - 1

    def _begins(self, path: str) -> Callable[[nn.Module, Any], None]:
        def begins(_module: nn.Module, _inputs: Any) -> None:
            # A recomputation in backward does not enter the island, and must not overwrite what forward recorded.
            if torch._C._current_autograd_node() is None:
                self._islands_of[path] = island.running.islands
            self._running.append(path)

        return begins

    def _ends(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()


def _list_place_fields(place: ModelPlace, backward: bool, node: int | None) -> tuple[Any, ...]:
    return place.module, backward, place.widened, node, place.islands


def _is_recomputing() -> bool:
    """Return whether backward recomputes a part of forward, as with activation checkpointing."""
    # A frame of torch.utils.checkpoint between here and the autograd engine is the sign of it.
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


_SHARES_MEMORY = (os.path.join(TORCH, "distributed", "fsdp"), os.path.join(TORCH, "nn", "parallel", "distributed.py"))


def _is_torch_internal() -> bool:
    """Return whether torch itself runs an operation: accumulated gradients, buckets of DDP, gathers of FSDP."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        file = frame.f_code.co_filename
        if file.startswith((*_SHARES_MEMORY, *ASKS)):
            return True
        if not file.startswith((TORCH, HALFSTEP)) or frame.f_code is nn.Module._call_impl.__code__:
            return False
        frame = frame.f_back
    return True


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled code eagerly: it shows none of its operations otherwise."""
    # Nothing can be compiled before Dynamo is loaded, and importing it takes a second.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def list_compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules that were given to torch.compile."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []  # before Dynamo is loaded nothing can have been compiled
    return [
        strip_compile_wrappers(path)
        for path, module in model.named_modules()
        if isinstance(module, dynamo.OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(_find_forward(module), "_torchdynamo_orig_callable")
    ]


def _find_forward(module: nn.Module) -> Any:
    """Return a module's own forward, or that of its class, as it is stored there."""
    own = vars(module).get("forward")
    # Not an attribute of the class: those of torch.jit have a descriptor that raises if it is read from the class.
    return inspect.getattr_static(type(module), "forward", None) if own is None else own


def has_compiled_code(model: nn.Module, loss_fn: Any = None) -> bool:
    """Return whether a part of the model, or a function that the loss function reaches, was given to torch.compile."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    return bool(list_compiled_modules(model)) or any(
        callable(thing) and "_torchdynamo_orig_callable" in getattr(thing, "__dict__", {})
        for _, thing in iterate_reachable(loss_fn, model)
    )
