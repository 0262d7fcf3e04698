"""Restore what a step wrote, if it is not applied: to the bit, whoever holds it.

Coverage comes from observation. While a step is observed, every operation that writes into memory from before the
window is announced here first, and that memory is copied. It is copied before each window from then on. Small buffers
and tensor attributes of modules are copied in any case. Other tensors of modules, and tensors outside of modules that
an observed step has read, are checked for writes (`unseen_writes`). What modules bind is restored by `census`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding, format_first_names
from halfstep.observe.identities import identify_storage
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.step.census import OUTSIDE_MODEL, Census, Names, are_same, list_tensor_attributes, read_places, read_views
from halfstep.step.containers import ContainerContents
from halfstep.step.memory import (
    SMALL,
    CopiedTensor,
    MemoryCopies,
    WeakStorageCopy,
    copy_tensors,
    have_same_sparse_values,
    restore_tensor_memory,
    unwrap_strided_tensors,
    view_bytes_as_integers,
)
from halfstep.step.optimizer_slot import stack_numbers
from halfstep.step.unseen_writes import UnseenWriteDetector

FEW_BYTES = 2**20
"""Large buffers are copied before each window as well if all of them together are no larger: checksums cost more."""
_NO_MEMBERS: list[Any] = [object()]
"""A list that equals no list of tensors."""


class _HeldTensor(NamedTuple):
    """A tensor that a module holds."""

    name: str
    tensor: Tensor
    holder: Names
    key: str
    is_parameter: bool
    is_buffer: bool
    included: bool


class _OutsideTensor:
    """A tensor outside of modules that an observed step has used; somebody else holds it."""

    def __init__(self, name: str, tensor: Tensor, went: Callable[[object], None], *, written: bool) -> None:
        self.name, self.tensor = name, weakref.ref(tensor, went)
        self.written = written
        self.copied = written or tensor.numel() <= SMALL or tensor.is_inference()
        """Whether its memory is copied before each window; otherwise it is checked for writes."""


class Rollback:
    """Everything that a step may write: saved before the window, restored if it is not applied."""

    def __init__(self, emit: Callable[[Sequence[Finding]], None], census: Census) -> None:
        self._emit, self._census = emit, census
        self.with_state: list[Any] = []
        self._states: list[Any] = []
        self._unseen, self._containers = UnseenWriteDetector(), ContainerContents()
        self._version = -1
        """The version of the census that the lists were made from."""
        self._members: list[Any] = _NO_MEMBERS
        self._copied: list[CopiedTensor] = []
        """The tensors that are copied before each window."""
        self._copied_tensors: list[Tensor] = []
        self._copied_places: list[Any] = []
        self._copies, self._copied_storages, self._partly_copied = MemoryCopies(), set[int](), set[int]()
        self._unseen_by_storage: dict[int, list[tuple[str, Tensor]]] = {}
        self._sparse: list[tuple[_HeldTensor, Tensor]] = []
        self._finite: list[CopiedTensor] = []
        """Buffers of floating point numbers that were finite when they were first seen."""
        self._list_finite_rows()
        self._never_finite: dict[str, bool] = {}
        self._not_finite: list[str] = []
        """Buffers that were not finite before the window, to be reported."""
        self._written: set[str] = set()
        """Names of tensors of modules that a step was seen to write, or that are copied on request."""
        self._blocks: dict[int, WeakStorageCopy] = {}
        """By storage: memory outside of modules that is copied before each window."""
        self._outside, self._places = MemoryCopies(), list[tuple[Tensor, Tensor]]()
        self._loose: dict[int, _OutsideTensor] = {}
        """By tensor: those outside of modules that an observed step has used."""
        self._batch: dict[int, str] = {}
        self._included_storages: set[int] = set()
        self._name_of: Callable[[Tensor], str | None] = lambda _tensor: None
        self._observations = 0
        self._begin()

    def _begin(self) -> None:
        self._first: list[str] = []
        """Tensors that this window wrote without a copy from before it."""
        self._seen: list[str] = []
        """Memory that this window was seen to write, and no window before it."""
        self._new_blocks: set[int] = set()
        """Storages outside of modules that no window before this one has covered."""
        self._changed = False
        """Whether this window has found more to cover."""
        self.batch_written: list[str] = []
        """Paths of the batch's tensors that this window was seen to write."""

    # -- scope --------------------------------------------------------------------------------------------------

    def include(self, thing: Any) -> None:
        """Cover one more module as a whole, or an object with `state_dict`; raise WrongUse for anything else.

        The state of such an object is copied before each window.
        """
        if isinstance(thing, nn.Module):
            self._census.include(thing)
        elif has_state_dict(thing):
            self.with_state.append(thing)
        else:
            raise WrongUse(
                f"include({type(thing).__name__}), which has no state to restore",
                allowed="a module, or an object with state_dict() and load_state_dict()",
                do="give the object these two methods, or make its tensors buffers of a module",
            )

    @property
    def included(self) -> list[Any]:
        """The modules and objects that were included."""
        return [*self._census.included, *self.with_state]

    def copy_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Copy parameters of covered modules before each window, without waiting until one is written."""
        own = set(map(id, parameters))
        self._census.update()
        self._written |= {held.name for held in self._tensors() if id(held.tensor) in own}
        self._members = _NO_MEMBERS

    def _tensors(self) -> Iterator[_HeldTensor]:
        """Yield each tensor of the covered modules once, by the first of its names."""
        included = {id(part) for module in self._census.included for part in module.modules()}
        seen: set[int] = set()
        for path, module in self._census.modules:
            for holder in (module._parameters, module._buffers, list_tensor_attributes(module)):
                for key, tensor in holder.items():
                    if isinstance(tensor, Tensor) and id(tensor) not in seen and tensor.grad_fn is None:
                        seen.add(id(tensor))
                        kinds = holder is module._parameters, holder is module._buffers
                        name = f"{path}.{key}" if path else key
                        yield _HeldTensor(name, tensor, holder, key, *kinds, included=id(module) in included)

    @property
    def steps_to_check(self) -> int:
        """The number of steps after which a tensor that every step writes through `.data` is found at the latest."""
        return self._unseen.steps

    # -- before the window --------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Save everything, before the first micro-batch; the census is up to date."""
        self._begin()
        if self._version != self._census.version:
            self._version = self._census.version
            self._containers.follow(self._census.modules, self._census.included)
            self._members = _NO_MEMBERS
        members = self._census.remember()
        self._containers.remember()
        # By identity: a name may get another tensor.
        if are_same(members, self._members) and read_views(self._copied_tensors) == self._copied_places:
            self._copies.renew()
        else:
            self._members = members
            self._sort_tensors()
        if self._sparse:
            self._sparse = [(held, held.tensor.detach().clone()) for held, _ in self._sparse]
        if self._loose or self._blocks:
            self._copy_outside()
        self._unseen.remember()
        if self._not_finite:
            names, self._not_finite = self._not_finite, []
            self._emit([_build_not_finite_finding(names)])
        if self.with_state:
            self._states = [copy.deepcopy(thing.state_dict()) for thing in self.with_state]

    def _sort_tensors(self) -> None:
        """Decide which tensors are copied before each window, and which are checked for writes; copy the first."""
        every = list(self._tensors())
        tensors = list(zip(every, unwrap_strided_tensors(held.tensor for held in every), strict=True))
        self._take_over([(held.name, key, part) for held, parts in tensors for key, part in parts])
        large = sum(held.tensor.nbytes for held, parts in tensors if parts and _is_large(held))
        self._sparse, self._finite = [], []
        copied: list[tuple[_HeldTensor, int, Tensor]] = []
        unseen: list[tuple[_HeldTensor, int, Tensor]] = []
        for held, parts in tensors:
            if held.is_parameter and parts and parts[0][1] is not held.tensor:
                continue  # a shard: FSDP2 exchanges it for whole parameters by itself
            if not parts and held.tensor.layout is not torch.strided and not held.is_parameter:
                self._sparse.append((held, held.tensor))
            always = held.name in self._written
            if not held.is_parameter:
                always = always or held.included or large <= FEW_BYTES or not _is_large(held)
            for key, part in parts:
                (copied if always or part.is_inference() else unseen).append((held, key, part))
        self._copied = copy_tensors(((held.name, part) for held, _, part in copied), self._copied)
        self._copies = MemoryCopies(self._copied)
        for (held, _, part), entry in zip(copied, self._copied, strict=True):
            if held.is_buffer and part is held.tensor:
                self._look_for_finite(entry)
        self._list_finite_rows()
        self._copied_tensors = [entry.tensor for entry in self._copied]
        self._copied_places = read_views(self._copied_tensors)
        self._copies.renew()
        loose = [(entry.name, entry.tensor) for entry in self._loose.values() if not entry.copied]
        self._unseen.follow([(held.name, part) for held, _, part in unseen], loose)
        self._unseen_by_storage = {}
        for held, key, part in unseen:
            self._unseen_by_storage.setdefault(key, []).append((held.name, part))
        self._copied_storages = {key for _, key, _ in copied}
        self._partly_copied = {
            key
            for (_, key, part), entry in zip(copied, self._copied, strict=True)
            if entry.row.nbytes != part.untyped_storage().nbytes()
        }

    def _look_for_finite(self, copied: CopiedTensor) -> None:
        buffer = copied.tensor
        if buffer.dtype in _JUDGED and buffer.numel() and buffer.numel() <= SMALL and not buffer.is_inference():
            if copied.name not in self._never_finite:  # once per name: some buffers are replaced in every step
                self._never_finite[copied.name] = not bool(buffer.isfinite().all())
                if self._never_finite[copied.name]:
                    self._report_not_finite(copied.name)
            if not self._never_finite[copied.name]:
                self._finite.append(copied)

    def _report_not_finite(self, name: str) -> None:
        """Report a running statistic that was bad before the window; other buffers hold such numbers on purpose."""
        if name.rpartition(".")[2] in _STATISTICS:
            self._not_finite.append(name)

    def _take_over(self, tensors: Sequence[tuple[str, int, Tensor]]) -> None:
        """Cover memory as that of modules, which was nobody's until the modules ran in an observed step."""
        for name, key, part in tensors:
            loose, block = self._loose.pop(id(part), None), self._blocks.pop(key, None)
            if (loose is not None and loose.written) or (block is not None and block.written):
                self._written.add(name)

    def _copy_outside(self) -> None:
        """Copy the memory outside of modules that is still alive, and hold it during the window."""
        for key, loose in list(self._loose.items()):
            tensor = loose.tensor()
            if tensor is None:
                del self._loose[key]
            elif loose.copied:
                self._places.append((tensor, tensor.detach()))
                # `.data =` and `set_` give a tensor other memory.
                if (storage := identify_storage(tensor)) not in self._blocks:
                    self._blocks[storage] = WeakStorageCopy(tensor.untyped_storage(), written=loose.written)
        for key, block in list(self._blocks.items()):
            held = block.storage()
            if held is None:
                del self._blocks[key]
                continue
            row = view_bytes_as_integers(held, 0, held.nbytes())
            fits = block.copy is not None and (block.copy.shape, block.copy.dtype) == (row.shape, row.dtype)
            block.copy = self._outside.add(row, block.copy if fits else None)
        self._outside.renew()

    # -- in an observed window ----------------------------------------------------------------------------------

    def observe(self, batch: Mapping[int, str], name_of: Callable[[Tensor], str | None]) -> None:
        """Start an observed window.

        `batch` has the storages of the batch with their paths; `name_of` finds a name for a tensor outside of modules.
        """
        self._batch, self._name_of = dict(batch), name_of
        self._observations += 1
        self._containers.search_again()
        states = (leaf for thing in self.with_state for _, leaf in iterate_tensor_leaves(thing.state_dict()))
        self._included_storages = {key for key, _ in chain(*unwrap_strided_tensors(states))}

    def module_runs(self, module: nn.Module) -> None:
        """Cover a module that is about to run."""
        for part in self._census.add(module):
            self._containers.add(OUTSIDE_MODEL + type(part).__name__, part)
            self._changed = True

    def before_use(self, written: Sequence[Tensor], read: Sequence[Tensor], line: str | None) -> None:
        """Cover memory from before the window that an operation in this line of code is about to write or to read."""
        for key, part in chain(*unwrap_strided_tensors(written)):
            self._copy_before_write(key, part, line)
        for key, part in chain(*unwrap_strided_tensors(read)):
            if not self._is_covered(key) and key not in self._unseen_by_storage:
                loose = self._add_loose(part, line, written=False)
                if loose.copied:
                    self._copy_block(key, part, written=False)

    def _copy_before_write(self, key: int, part: Tensor, line: str | None) -> None:
        if key in self._batch:
            self.batch_written.append(self._batch[key])
        elif key in self._partly_copied:
            # Views of the rest of the memory may be written, too.
            self._partly_copied.remove(key)
            self._copy_block(key, part, written=True)
        elif key in self._blocks:
            loose, block = self._add_loose(part, line, written=True), self._blocks[key]
            if key in self._new_blocks and not block.written:
                self._seen.append(loose.name)
            block.written = True
        elif key in self._unseen_by_storage:
            self._copied_storages.add(key)
            named = self._unseen_by_storage.pop(key)
            # It holds what it held when the window began: the first write is this one.
            for entry in copy_tensors(named):
                self._copied.append(entry)
                self._copies.add(entry.row, entry.copy)
            self._written |= {name for name, _ in named}
            self._seen += [name for name, _ in named]
        elif not self._is_covered(key) and not self._is_gradient(key):
            self._copy_block(key, part, written=True)
            self._seen.append(self._add_loose(part, line, written=True).name)

    def before_replace(self, tensor: Tensor, line: str | None) -> None:
        """Cover a tensor that is about to get other memory; that of modules is restored in any case."""
        for key, part in chain(*unwrap_strided_tensors([tensor])):
            if key in self._blocks or not (self._is_covered(key) or key in self._unseen_by_storage):
                self._copy_before_write(key, part, line)

    def _is_covered(self, key: int) -> bool:
        return any(
            key in covered for covered in (self._copied_storages, self._blocks, self._batch, self._included_storages)
        )

    def _is_gradient(self, key: int) -> bool:
        if torch._C._current_autograd_node() is None:
            return False
        gradients = (held.tensor.grad for held in self._tensors() if held.tensor.is_leaf)
        return any(own == key for own, _ in chain(*unwrap_strided_tensors(g for g in gradients if g is not None)))

    def _went(self, _reference: object) -> None:
        self._version = -1

    def _add_loose(self, part: Tensor, line: str | None, *, written: bool) -> _OutsideTensor:
        loose = self._loose.get(id(part))
        if loose is None or loose.tensor() is not part:
            name = self._name_of(part) or f"a tensor of shape {list(part.shape)}" + (f" used in {line}" if line else "")
            loose = self._loose[id(part)] = _OutsideTensor(name, part, self._went, written=written)
            self._changed = True
        if written:
            loose.written = loose.copied = True
        return loose

    def _copy_block(self, key: int, part: Tensor, *, written: bool) -> None:
        """Copy all memory that a tensor shares with its views."""
        storage = part.untyped_storage()
        block = self._blocks[key] = WeakStorageCopy(storage, written=written)
        self._new_blocks.add(key)
        block.copy = self._outside.add(view_bytes_as_integers(storage, 0, storage.nbytes()))
        self._places.append((part, part.detach()))

    # -- the end of the window ----------------------------------------------------------------------------------

    def not_finite(self) -> Tensor | None:
        """Return a flag on the device: whether a buffer that once was finite is not; None if there is no candidate."""
        if not self._finite:
            return None
        found = self.zeros_if_finite()
        return (found[0] if len(found) == 1 else stack_numbers(found).sum()) != 0

    def zeros_if_finite(self) -> list[Tensor]:
        """Return numbers on the device, zero if all buffers that once were finite still are; else one is NaN."""
        if read_places(self._finite_tensors) != self._finite_places:
            # `.data =` has given one of them other memory in this window.
            return [number * 0.0 for number in torch._foreach_max(torch._foreach_abs(self._finite_tensors))]
        # One copy of all: a model can have hundreds of small buffers.
        found = [torch.cat(rows).mul_(0.0).sum() for rows in self._finite_rows]
        return found + [buffer.mul(0.0).sum() for buffer in self._finite_apart]

    def _list_finite_rows(self) -> None:
        """Divide the buffers to check by format."""
        self._finite_tensors = [entry.tensor for entry in self._finite]
        self._finite_places = read_places(self._finite_tensors)
        self._finite_apart = [tensor for tensor in self._finite_tensors if not tensor.is_contiguous()]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self._finite_tensors:
            if tensor.is_contiguous():
                kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().view(-1))
        self._finite_rows = list(kinds.values())

    def first_not_finite(self) -> str | None:
        """Return the name of a buffer that this window made non-finite, or None; reads the device.

        A buffer that was non-finite before is not checked again.
        """
        for entry in [entry for entry in self._finite if not bool(entry.tensor.isfinite().all())]:
            if bool(entry.before().isfinite().all()):
                return entry.name
            self._never_finite[entry.name] = True
            self._report_not_finite(entry.name)
        self._finite = [entry for entry in self._finite if not self._never_finite[entry.name]]
        self._list_finite_rows()
        return None

    def unseen_writes(self) -> list[Tensor]:
        """Return flags on the device for `look`."""
        return self._unseen.changed()

    def look(self, flags: Sequence[float]) -> None:
        """Look for writes without a copy, after the last backward; `flags` are those of `unseen_writes`, as read."""
        for name, tensor in self._unseen.written(flags):
            # Copied just before this window wrote it, if the window was observed.
            if name not in self._seen and name not in self._first and identify_storage(tensor) not in self._blocks:
                self._first.append(name)
                if id(tensor) in self._loose:
                    self._add_loose(tensor, None, written=True)
                else:
                    self._written.add(name)

    def changed_containers(self) -> list[str]:
        """Return the names of containers of modules that this window has changed and `restore` does not restore."""
        return self._containers.changed()

    def accept_updates(self) -> None:
        """Treat all writes so far as an update by other code, which no skip restores."""
        self._unseen.remember()

    def look_after_error(self) -> None:
        """Look for writes without a copy in a window that ended before its agreement; reads the device."""
        try:
            self.look([float(flag) for flag in self.unseen_writes()])
        except RuntimeError:  # a device that has failed
            self.look([])

    def remembered(self) -> dict[str, Tensor | None]:
        """Return the model's buffers at the last `remember` by name; the tensors are reused, so copy them to keep them.

        A large buffer that no step was seen to write has no copy: it is what it was.
        """
        copies = {id(copied.tensor): copied for copied in self._copied}
        return {
            name: buffer if (copied := copies.get(id(buffer))) is None else copied.before()
            for name, buffer in self._census.buffers_before().items()
        }

    def keep(self) -> None:
        """Accept what forward wrote: the window was applied."""
        names = self._first
        if self._seen and self._observations > 1:
            names = names + self._seen
        if names:
            self._emit([_build_first_write_finding(names, restored=True)])
        self._end()

    def restore(self) -> None:
        """Restore the state before the window's first micro-batch, after a skip or an error."""
        self._census.restore()
        self._containers.restore()
        self._containers.search_again()
        # Places first: contents belong into the memory that the window began with.
        restore_tensor_memory((copied.tensor, copied.alias) for copied in self._copied)
        restore_tensor_memory(self._places)
        self._unseen.restore()
        self._copies.write_back()
        self._outside.write_back()
        for held, before in self._sparse:
            if not have_same_sparse_values(held.tensor, before):
                held.holder[held.key] = before.clone()
        for thing, state in zip(self.with_state, self._states, strict=True):
            # A copy, because an object may keep the state that it is given, and this one may be needed again.
            thing.load_state_dict(copy.deepcopy(state))
        if self._first:
            self._emit([_build_first_write_finding(self._first, restored=False)])
        self._end()
        self._first = []

    def _end(self) -> None:
        if self._changed or self._seen or self._first:
            self._version = -1
        self._unseen.release()
        self._containers.release()
        if self._places or self._outside.rows:
            self._outside, self._places = MemoryCopies(), []
        self._batch = {}


def has_state_dict(thing: Any) -> bool:
    """Return whether an object can be saved and restored by `state_dict` and `load_state_dict`."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


_JUDGED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Formats that torch can judge: it has no isfinite() for fp8."""


def _is_large(held: _HeldTensor) -> bool:
    return held.tensor.numel() > SMALL and not held.is_parameter


_STATISTICS = ("running_mean", "running_var")


def _build_not_finite_finding(names: Sequence[str]) -> Finding:
    return Finding(
        "buffer.not_finite",
        "warning",
        f"{format_first_names(names)} {'was' if len(names) == 1 else 'were'} not finite before the step, so evaluation "
        "is not finite either, and no step is skipped for it",
        "load a checkpoint from before that, or module.reset_running_stats() for BatchNorm",
    )


def _build_first_write_finding(names: Sequence[str], *, restored: bool) -> Finding:
    some = format_first_names(names)
    end = "" if restored else "; the step was not applied, and this write could not be restored"
    return Finding(
        "rollback.first_write",
        "note" if restored else "warning",
        f"a step wrote {some} for the first time{end}",
        "nothing: it is copied before each step from now on; include() covers a module from the first step",
    )
