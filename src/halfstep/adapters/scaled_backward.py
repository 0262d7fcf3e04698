"""Watch the backward passes that start from a scaled loss, in a loop that calls `backward()` itself.

A hook on the scaled loss marks the start of a pass; a callback of autograd's engine marks its end. Both record version
counters, so no tensor is read: a gradient whose version differs later was written by other code, such as
`clip_grad_norm_` before `unscale_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.autograd import Variable

from halfstep import distributed
from halfstep.errors import WrongUse

Version = tuple[int, int]


class ScaledBackward:
    """The scaled backward passes of one window: their losses, and the gradients as they left them."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._unscaled: dict[int, list[Tensor]] = {}
        self.end()

    def end(self) -> None:
        """Reset after the window was closed."""
        self.total: Tensor | None = None
        """The sum of the losses since the last decision whose backward wrote gradients, on their device."""
        self.asked = False
        """Whether a loss was scaled in this window, even if it was never used."""
        self._left: dict[int, Version] = {}
        self._decided_on = False

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients of these parameters after each pass from now on."""
        # FSDP2 writes the gradients of shards itself, after the pass; their versions say nothing.
        self._parameters = [p for p in parameters if not distributed.is_dtensor_shard(p)]

    def follow(self, scaled: Tensor, loss: Tensor) -> None:
        """See the beginning and the end of the backward pass of a scaled loss."""
        self.asked = True
        if not scaled.requires_grad:
            return
        if not self._parameters:
            # The optimizers are known from their first unscale_() or step() on; before that, the graph is asked.
            self.watch(find_leaf_parameters(scaled))
        seen = loss.detach()
        scaled.register_hook(lambda _gradient: self._begin(seen))

    def _begin(self, loss: Tensor) -> None:
        before = collect_gradient_versions(self._parameters)
        true_size = {id(p) for parameters in self._unscaled.values() for p in parameters if _has_nonzero_gradient(p)}
        # Two callbacks, one queued by the other: DDP and FSDP2 finish the gradients in callbacks of their own, which
        # are queued during the pass, after the first of these and before the second.
        _queue_backward_callback(lambda: _queue_backward_callback(lambda: self._over(loss, before, true_size)))

    def _over(self, loss: Tensor, before: dict[int, Version], true_size: set[int]) -> None:
        written = collect_gradient_versions(self._parameters)
        if before:
            written = {key: now for key, now in written.items() if before.get(key) != now}
        if true_size & written.keys():
            raise WrongUse(
                "a backward pass into gradients that unscale_() has already unscaled",
                allowed="unscale_() once, after the last backward pass of an update",
                do="call unscale_() only if step() follows, or optimizer.zero_grad() before the next window",
            )
        self._left.update(written)
        # torch.autograd.grad() writes no gradient: its loss is no loss of the step.
        if written or not self._parameters:
            value = loss if loss.ndim == 0 else loss.sum()
            known = None if self._decided_on else self.total
            self.total = value if known is None else known + value.to(known.device, non_blocking=True)
            self._decided_on = False

    def decided(self) -> None:
        """Start a new sum of losses at the next pass; until then, other optimizers of the same pass can be decided."""
        self._decided_on = True

    # -- what others did ----------------------------------------------------------------------------------------

    def written(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients were written since the last pass, by other code."""
        left = self._left
        return [p for p in parameters if id(p) in left and _find_gradient_version(p) not in (None, left[id(p)])]

    def still_scaled(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any of these gradients is as a scaled pass left it."""
        left = self._left
        return any(id(p) in left and _find_gradient_version(p) == left[id(p)] for p in parameters)

    def accept(self, parameters: Sequence[Tensor]) -> None:
        """Take the gradients as they are now for those that the last pass left."""
        self._left.update(collect_gradient_versions([p for p in parameters if id(p) in self._left]))

    def unscaled(self, key: int, parameters: Sequence[Tensor]) -> None:
        """Note that these gradients have their true size: another scaled pass into them would mix the two."""
        self._unscaled[key] = list(parameters)

    def stepped(self, key: int) -> None:
        """Forget an optimizer's unscaled gradients: they were applied, or judged."""
        self._unscaled.pop(key, None)


def collect_gradient_versions(parameters: Iterable[Tensor]) -> dict[int, Version]:
    """Return identity and version of each gradient, by the id of its parameter."""
    # Both: a gradient may be written, and it may be replaced.
    return {id(p): (id(g), g._version) for p in parameters if (g := p.grad) is not None}


def _find_gradient_version(parameter: Tensor) -> Version | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _has_nonzero_gradient(parameter: Tensor) -> bool:
    # Reads the device, only where gradients were unscaled and not applied: zero_grad(set_to_none=False) leaves zeros.
    return parameter.grad is not None and bool(parameter.grad.any())


def _queue_backward_callback(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)


def find_leaf_parameters(loss: Tensor) -> list[Tensor]:
    """Return the parameters that backward from a loss will reach."""
    found: list[Tensor] = []
    seen: set[object] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return found
