"""Observe the calls of `torch.autograd.backward`, which every `loss.backward()` makes: its roots, before it runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class BackwardListener(Protocol):
    """An object that is called around each backward pass of the program."""

    def backward_starts(self, roots: Sequence[Tensor]) -> None:
        """See the roots of a pass, in the thread and below the frames of the code that calls it."""

    def backward_ended(self) -> None:
        """See that the pass has ended without an error."""


_plain: Callable[..., None] = torch.autograd.backward
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_replacements: list[Callable[[Sequence[Tensor]], None]] = []
"""The functions that replace a backward pass; only the last one is called."""


@functools.wraps(_plain)
def _backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
    if torch.compiler.is_compiling():
        _plain(tensors, *arguments, **keywords)
        return
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if _replacements:
        _replacements[-1](roots)
        return
    listeners = [] if _is_quiet else list(_listeners)
    for listener in listeners:
        listener.backward_starts(roots)
    _plain(tensors, *arguments, **keywords)
    for listener in listeners:
        listener.backward_ended()


_is_quiet = False


def _install(function: Callable[..., None]) -> None:
    # torch.Tensor.backward looks this name up in each call, so one replacement sees all of them.
    vars(torch.autograd)["backward"] = function


def listen_to_backward(listener: BackwardListener) -> None:
    """Call the listener around each backward pass, as long as it lives."""
    _listeners.add(listener)
    # A listener that is dropped without `stop_listening` must not leave the replacement behind.
    weakref.finalize(listener, _restore_if_unused).atexit = False
    _install(_backward)


def stop_listening(listener: BackwardListener) -> None:
    """Call the listener no longer; after the last one, torch's own function is back."""
    _listeners.discard(listener)
    _restore_if_unused()


def _restore_if_unused() -> None:
    # The set may still count a listener that is gone; to go through it does not.
    if not list(_listeners) and torch.autograd.backward is _backward:
        _install(_plain)


def are_backward_calls_hidden() -> bool:
    """Return whether a step is run again now, so that what runs belongs to no step of the loop."""
    return _is_quiet


@contextmanager
def hide_backward_calls() -> Iterator[None]:
    """Call no listener inside: backward passes of a rerun belong to no step of the loop."""
    global _is_quiet
    before, _is_quiet = _is_quiet, True
    try:
        yield
    finally:
        _is_quiet = before


@contextmanager
def replace_backward_calls(replacement: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """Call `replacement` with the roots instead of running a backward pass, inside."""
    before = torch.autograd.backward
    _install(_backward)
    _replacements.append(replacement)
    try:
        yield
    finally:
        _replacements.pop()
        _install(before)
