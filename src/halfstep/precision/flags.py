"""Read and report torch's global switches that change what fp32 means; set them only inside a scope."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

# -- fp32 switches ----------------------------------------------------------------------------------------------------
# Read, set and restore torch's switches for fp32 matrix products, old and new. Since torch 2.9 there are two interfaces
# to the same thing: `allow_tf32` with `set_float32_matmul_precision`, and `fp32_precision` per backend and operation.
# Each has separate state, and torch raises wherever the two contradict each other: in
# `torch.backends.cudnn.flags(...)`, on reading `allow_tf32`, and in guards of compiled code. So all of them are set
# together, through the old interface first, because it sets both.


Fp32Mode = Literal["ieee", "tf32"]
Switch = tuple[str, str]
"""A backend and an operation, in torch's notation."""

MATMUL: tuple[Switch, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))
CUDNN: tuple[Switch, ...] = (("cuda", "conv"), ("cuda", "rnn"))
ONEDNN: tuple[Switch, ...] = (("mkldnn", "conv"), ("mkldnn", "rnn"))
ONEDNN_GPU: Switch = ("onednn", "gpu")
"""`torch.backends.mkldnn.allow_tf32`, which Intel GPUs follow: a switch by itself, and only in builds for them."""
_ALL = "all"
_GENERIC: Switch = ("generic", _ALL)
# `torch.backends.cudnn.flags(...)` resets cuDNN's switches on exit so that they follow this one.
_ABOVE: tuple[Switch, ...] = (("cuda", _ALL), ("mkldnn", _ALL))
_MOVED: tuple[Switch, ...] = (*_ABOVE, *MATMUL, *CUDNN, *ONEDNN)
_NONE = "none"
"""A switch with this value follows the one above it."""
_OF_MODE = {"ieee": "highest", "tf32": "high"}


def read_switch(switch: Switch) -> str:
    """Return the effective value of a switch, which may come from a switch above it."""
    if switch == ONEDNN_GPU:
        return "tf32" if torch._C._get_onednn_allow_tf32() else "ieee"
    return str(torch._C._get_fp32_precision_getter(*switch))


def _set_switch(switch: Switch, value: str) -> None:
    if switch == ONEDNN_GPU:
        torch._C._set_onednn_allow_tf32(value == "tf32")
        return
    torch._C._set_fp32_precision_setter(*switch, value)


def _read_own_value(switch: Switch) -> str:
    """Return the value of a switch itself: `none` where it follows the one above it."""
    now, above = read_switch(switch), _GENERIC if switch[1] == _ALL else (switch[0], _ALL)
    if switch == ONEDNN_GPU:
        return now
    if now == _NONE or read_switch(above) != now:
        return now
    # torch returns effective values only. So the switch above is flipped for a moment, to see whether this one follows.
    before = _read_own_value(above) if above != _GENERIC else now
    _set_switch(above, "ieee" if now == "tf32" else "tf32")
    followed = read_switch(switch) != now
    _set_switch(above, before)
    return _NONE if followed else now


def is_tf32_state_consistent() -> bool:
    """Return whether the two interfaces agree, so that neither raises when it is read."""
    try:
        torch._C._get_cublas_allow_tf32()
        torch._C._get_cudnn_allow_tf32()
        torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return False
    return True


class SavedFlags(NamedTuple):
    """The values of all switches that a scope may set."""

    switches: tuple[tuple[Switch, str], ...]
    matmul: str
    cudnn: bool

    def put_back(self) -> None:
        """Restore all switches."""
        # The old interface also sets some of the new switches, so those are restored last.
        torch._C._set_float32_matmul_precision(self.matmul)
        torch._C._set_cudnn_allow_tf32(self.cudnn)
        for switch, value in self.switches:
            _set_switch(switch, value)


def save_flags() -> SavedFlags:
    """Return the current values, also where the two interfaces contradict each other already."""
    switches = tuple((switch, _read_own_value(switch)) for switch in _list_switches())
    return SavedFlags(switches, _read_old_matmul(switches), _read_old_cudnn(switches))


def _read_old_matmul(switches: tuple[tuple[Switch, str], ...]) -> str:
    try:
        return str(torch._C._get_float32_matmul_precision())
    except RuntimeError:  # torch refuses to return it while the new switches contradict it
        for switch in MATMUL:
            _set_switch(switch, "ieee")
        before = str(torch._C._get_float32_matmul_precision())
        for switch, value in switches:
            _set_switch(switch, value)
        return before


def _read_old_cudnn(switches: tuple[tuple[Switch, str], ...]) -> bool:
    try:
        return bool(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:
        # The old value cannot be read during a contradiction. With the new switches on ieee, torch raises exactly if
        # the old one is on.
        for switch in CUDNN:
            _set_switch(switch, "ieee")
        try:
            torch._C._get_cudnn_allow_tf32()
            return False
        except RuntimeError:
            return True
        finally:
            for switch, value in switches:
                _set_switch(switch, value)


def set_fp32_mode(mode: Fp32Mode) -> None:
    """Set every switch of both interfaces, so that none contradicts another."""
    torch._C._set_float32_matmul_precision(_OF_MODE[mode])
    torch._C._set_cudnn_allow_tf32(mode == "tf32")
    for switch in _list_switches():
        _set_switch(switch, mode)


def _list_switches() -> tuple[Switch, ...]:
    return (*_MOVED, ONEDNN_GPU) if torch.xpu._is_compiled() else _MOVED


# -- flags ------------------------------------------------------------------------------------------------------------


_SWITCHES: dict[str, tuple[Switch, ...]] = {
    "cuda": (("cuda", "matmul"), *CUDNN),
    # conv and rnn of oneDNN do not follow matmul's switch; all three are set together.
    "cpu": (("mkldnn", "matmul"), *ONEDNN),
    "xpu": (("mkldnn", "matmul"), *ONEDNN, ONEDNN_GPU),
}
_STRICT = ("ieee", "none")


def read_fp32_flags() -> dict[str, str]:
    """Return the current switches, to be reported next to any result that is called fp32."""
    matmul = torch.backends.cuda.matmul
    reduced = {
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
        "bf16": matmul.allow_bf16_reduced_precision_reduction,
    }
    return {
        "cuda.matmul": read_switch(("cuda", "matmul")),
        "cudnn.conv": read_switch(("cuda", "conv")),
        "mkldnn.matmul": read_switch(("mkldnn", "matmul")),
        "mkldnn.enabled": str(torch.backends.mkldnn.enabled),
        **({"onednn.allow_tf32": read_switch(ONEDNN_GPU)} if torch.xpu._is_compiled() else {}),
        # Of products in 16 bits: sums in 16 bits, or parts of them.
        "fp16_accumulation": str(matmul.allow_fp16_accumulation),
        "reduced_sums": " and ".join(name for name, allowed in reduced.items() if allowed) or "none",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


def is_tf32_enabled(device: torch.device) -> bool:
    """Return whether fp32 values on this device are multiplied as tf32 at the moment."""
    return any(read_switch(switch) == "tf32" for switch in _SWITCHES.get(device.type, ()))


def create_fp32_scope(mode: Fp32Mode, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which fp32 values are multiplied in `mode`; the switches are restored on exit."""
    switches = _SWITCHES.get(device.type, ())
    if not switches:
        return nullcontext()
    return _Fp32Scope(mode, switches)


class _Fp32Scope:
    """A reusable scope that does nothing if the switches already have the wanted values."""

    def __init__(self, mode: Fp32Mode, switches: tuple[Switch, ...]) -> None:
        self._mode, self._switches = mode, switches
        self._good = _STRICT if mode == "ieee" else (mode,)
        self._plain = [switch for switch in switches if switch != ONEDNN_GPU]
        self._before: list[SavedFlags | None] = []

    def __enter__(self) -> None:
        # The usual case, at the cost of a few reads: a step enters this scope every time.
        if self._has_wanted_values():
            self._before.append(None)
            return
        self._before.append(save_flags())
        set_fp32_mode(self._mode)

    def _has_wanted_values(self) -> bool:
        read, good = torch._C._get_fp32_precision_getter, self._good
        for backend, operation in self._plain:
            if read(backend, operation) not in good:
                return False
        if len(self._plain) < len(self._switches) and read_switch(ONEDNN_GPU) not in good:
            return False
        return is_tf32_state_consistent()

    def __exit__(self, *_: object) -> None:
        before = self._before.pop()
        if before is not None:
            before.put_back()


_UNCHANGED = object()


class _SharedSwitch:
    """A global switch that steps in several threads share: the last scope to close restores it."""

    def __init__(self) -> None:
        self._lock, self._open, self._before = threading.Lock(), 0, _UNCHANGED

    def is_needed(self) -> bool:
        """Return whether a scope has anything to remember or to set; without a lock."""
        return True

    def open(self) -> None:
        """Remember the switch's value, and set it, unless an open scope has done so or there is nothing to set."""
        with self._lock:
            self._open += 1
            if self._before is _UNCHANGED:
                self._before = self.enter()

    def close(self) -> None:
        """Restore the switch if this was the last open scope."""
        with self._lock:
            self._open -= 1
            if not self._open and self._before is not _UNCHANGED:
                before, self._before = self._before, _UNCHANGED
                self.restore(before)

    def before(self) -> Any:
        """Return the value as the user set it, ignoring what an open scope has set."""
        with self._lock:
            return self.read() if self._before is _UNCHANGED else self._before

    def enter(self) -> Any:
        """Return the value to restore, after setting another one where a scope needs it."""
        return self.read()

    def read(self) -> Any:
        """Return the value."""
        raise NotImplementedError

    def restore(self, value: Any) -> None:
        """Set the value."""
        raise NotImplementedError


class _MkldnnSwitch(_SharedSwitch):
    """oneDNN's switch, which backward hooks of fp16 convolutions turn off and on."""

    def read(self) -> bool:
        return bool(torch.backends.mkldnn.enabled)

    def restore(self, value: Any) -> None:
        torch.backends.mkldnn.enabled = value


class _BackwardAutocastSwitch(_SharedSwitch):
    """The autocast under which torch.compile traces a backward: off, as eager code runs it.

    By default it is that of the forward, so that the backward of an fp32 island is computed in 16 bits when compiled,
    where it rounds, or overflows (pytorch#179804).
    """

    _compiles = False

    def is_needed(self) -> bool:
        # Setting costs 10 us, so nothing is set in a process that has given nothing to torch.compile. torch's own
        # `disable` leaves a backend of None there.
        if self._compiles:
            return True
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        return dynamo is not None and any(map(callable, getattr(dynamo, "cached_backends", {}).values()))

    def enter(self) -> Any:
        if not self._compiles:
            import torch._functorch.config as config

            self._compiles = hasattr(config, "backward_pass_autocast")  # not public: another torch may lack it
        if not self._compiles:
            return _UNCHANGED
        before = self.read()
        self.restore("off")
        return before

    def read(self) -> Any:
        import torch._functorch.config as config

        return config.backward_pass_autocast

    def restore(self, value: Any) -> None:
        import torch._functorch.config as config

        config.backward_pass_autocast = value


_mkldnn, _compiled_backward = _MkldnnSwitch(), _BackwardAutocastSwitch()


class _SharedSwitchScope:
    """A scope around `inner` that opens a shared switch, and closes it also after an error."""

    def __init__(self, inner: AbstractContextManager[None], switch: _SharedSwitch) -> None:
        self._inner, self._switch = inner, switch
        self._opened: list[bool] = []

    def __enter__(self) -> None:
        self._inner.__enter__()
        needed = self._switch.is_needed()
        self._opened.append(needed)
        if needed:
            self._switch.open()

    def __exit__(self, *error: Any) -> None:
        if self._opened.pop():
            self._switch.close()
        self._inner.__exit__(*error)


def wrap_keeping_mkldnn(inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
    """Return a scope around `inner` that restores oneDNN's switch on exit."""
    return _SharedSwitchScope(inner, _mkldnn)


def wrap_backward_outside_autocast(inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
    """Return a scope around `inner` in which torch.compile traces backwards outside autocast."""
    return _SharedSwitchScope(inner, _compiled_backward)


def read_user_mkldnn() -> bool:
    """Return oneDNN's switch as the user set it, ignoring what an open scope has set."""
    return bool(_mkldnn.before())
