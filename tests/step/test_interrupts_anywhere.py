"""Ctrl-C at the bytecodes of halfstep in a step: the state before it or after it, and the run ends in the same bits."""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import Ema, Stepper, Window
from halfstep.step import interrupts
from tests.support.digest import digest_of, digest_of_run

pytestmark = pytest.mark.filterwarnings("ignore:note", "ignore:warning")

_TRACED = (os.path.dirname(halfstep.__file__), contextlib.__file__)
_UPDATES = 8
"""A run with more would come to the tenth update, which is observed again."""
_CALLS = ("Stepper.forward", "Stepper.backward", "Stepper.apply", "_WindowCall", "_ForwardPass", "MemoryCopies.add")
"""Functions in which every place is tried: the way in and out of calls, and two lists that belong together."""


class Stateful(nn.Module):
    """State of every kind: buffers in place and bound anew, a number, a tensor attribute, a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("large", torch.zeros(70_000))
        self.register_buffer("seen", torch.zeros(4))
        self.hidden, self.calls = torch.zeros(4), 0

    def forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, self.last(self.norm(self.first(x)).relu()))
        self.calls += 1
        self.hidden = 0.9 * self.hidden + 0.1 * y.detach().float().mean(0)
        self.seen = y.detach().float().amax(0)
        cast(Tensor, self.large)[self.calls] += 1.0
        return y + self.hidden


def build_loss(outside: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x).float()
        return cast(Tensor, outside(y.detach()).square().mean() + y.square().mean())

    return loss


class Run:
    """A run with a module outside of the model, and its state after each update."""

    def __init__(self, form: str) -> None:
        torch.manual_seed(0)
        self.form, self.model, self.outside = form, Stateful(), nn.BatchNorm1d(4, affine=False)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        ema = Ema(self.model, 0.9)
        self.stepper = Stepper(self.model, optimizer, precision="bf16", clip_norm=1.0, schedule=schedule, ema=ema)
        self.loss = build_loss(self.outside)

    def step(self) -> None:
        batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        if self.form == "function":
            self.stepper.step(self.loss, Window(batches))
            return
        for place, x in enumerate(batches, 1):
            with self.stepper.forward(last=place == len(batches)):
                loss = self.loss(self.model, x)
            self.stepper.backward(loss)
        self.stepper.apply()

    def state(self) -> str:
        own = self.model.hidden, self.model.calls, self.stepper.counts.attempted
        return digest_of(digest_of_run(self.stepper), own, dict(self.outside.named_buffers()))

    def trajectory(self) -> list[str]:
        states = [self.state()]
        for _ in range(_UPDATES + 1):
            self.step()
            states.append(self.state())
        return states


class Place(NamedTuple):
    """A bytecode that a step runs."""

    code: CodeType
    offset: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename)}, {self.code.co_name}, bytecode {self.offset}"

    @property
    def is_delicate(self) -> bool:
        """Whether it is on the way in or out of a call or of a context, and tried in any case."""
        qualified: str = getattr(self.code, "co_qualname", self.code.co_name)  # from Python 3.11 on
        switches = self.code.co_name in ("__enter__", "__exit__")
        return switches or self.code.co_filename == interrupts.__file__ or qualified.startswith(_CALLS)


class Traced:
    """Calls `visit` before each bytecode of halfstep, or only of the code `only`."""

    def __init__(self, visit: Callable[[Place], object], only: CodeType | None = None) -> None:
        self._visit, self._only = visit, only

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code is not self._only if self._only is not None else not code.co_filename.startswith(_TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._visit(Place(code, frame.f_lasti))
        return self

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def places_of(run: Run) -> list[Place]:
    """Every bytecode that a step runs, once."""
    found: dict[Place, None] = {}
    with Traced(lambda place: found.setdefault(place, None)).active():
        run.step()
    return list(found)


def where_python_looks_for_signals(code: CodeType) -> set[int]:
    """The bytecodes before which a signal is handled: at the start of a function, after a call and in a loop."""
    found, after = set(), True
    for instruction in dis.get_instructions(code):
        if after or sys.version_info < (3, 11):
            found.add(instruction.offset)
        after = instruction.opname.startswith(("RESUME", "CALL", "JUMP_BACKWARD"))
    return found


def select(places: list[Place], sampled: int) -> list[Place]:
    """The delicate ones, and a sample of the others."""
    looked = {code: where_python_looks_for_signals(code) for code in {place.code for place in places}}
    real = [place for place in places if place.offset in looked[place.code]]
    others = [place for place in real if not place.is_delicate]
    return [place for place in real if place.is_delicate] + others[:: max(1, len(others) // sampled)]


def presses_ctrl_c(run: Run, wanted: Place) -> bool:
    """Make a step with a Ctrl-C before this bytecode; return whether halfstep's own handler was installed."""
    pressed: list[bool] = []
    interrupted = False

    def press(place: Place) -> None:
        if not pressed and place == wanted:
            pressed.append(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)

    try:
        with Traced(press, wanted.code).active():
            run.step()
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted == bool(pressed), f"{wanted}: a Ctrl-C was lost"
    return pressed == [True]


def nothing_is_left(where: Place) -> None:
    """Of handlers and of modes of torch."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, str(where)
    assert torch.is_grad_enabled(), str(where)
    assert not torch.is_autocast_enabled("cpu"), str(where)
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0, str(where)
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert nested == 1, str(where)


@pytest.mark.timeout(3600)  # with --full, thousands of steps
@pytest.mark.parametrize("form", ["function", "three calls"])
@pytest.mark.parametrize("kind", ["first", "later"])
def test_ctrl_c_at_any_bytecode(form: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Each bytecode with `--full`; otherwise the delicate ones, and a sample of the others."""
    states = Run(form).trajectory()

    def start() -> Run:
        run = Run(form)
        if kind == "later":
            run.step()
        return run

    places = places_of(start())
    assert len(places) > 3000
    tried = places if request.config.getoption("--full") else select(places, 25 if kind == "first" else 60)
    run = start()
    for place in tried:
        if kind == "first" or run.stepper.counts.applied >= _UPDATES:
            run = start()
        before = run.stepper.counts.applied
        deferred = presses_ctrl_c(run, place)
        if run.stepper.in_window:
            # Before halfstep's handler is installed for a call, and after it is removed, Ctrl-C is between the calls.
            assert form == "three calls"
            assert not deferred, f"{place}: the window is open"
            assert place.code.co_filename != interrupts.__file__, f"{place}: the window is open"
            run.stepper.discard()
        applied = run.stepper.counts.applied
        assert applied in (before, before + 1), f"{place}: {applied} updates"
        assert run.state() == states[applied], f"{place}: neither the state before nor the one after"
        nothing_is_left(place)
        run.step()
        assert run.state() == states[applied + 1], f"{place}: the run continues with other bits"
