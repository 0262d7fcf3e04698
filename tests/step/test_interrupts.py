"""Ctrl-C at every place of a step: the state before it or the state after it, and no window that stays open."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Ema, Stepper, Window
from halfstep.errors import TornUpdate, WrongUse
from tests.support.digest import digest_of


def make() -> tuple[nn.Module, Stepper]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    stepper = Stepper(model, optimizer, precision="fp32", clip_norm=1.0, schedule=schedule, ema=Ema(model, 0.9))
    stepper.step(mse, batch())
    return model, stepper


def mse(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return (model(given[0]) - given[1]).square().mean()


def batch(bad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
    return x * float("nan") if bad else x, y


def state(model: nn.Module, stepper: Stepper) -> str:
    """Everything that a checkpoint in a handler would save, but how often was tried."""
    whole = stepper.state_dict()
    counts = {key: value for key, value in whole["counts"].items() if key == "applied"}
    return digest_of(model.state_dict(), whole["optimizers"]["loss"]["optimizer"], whole["ema"], counts)


class AtCall:
    """Runs `act` as the n-th Python function is entered."""

    def __init__(self, place: int, act: Callable[[], None]) -> None:
        self.place, self.act, self.calls = place, act, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        self.calls += 1
        if self.calls == self.place:
            self.act()


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def step_with(stepper: Stepper, given: Any, at: AtCall) -> bool:
    """Whether it ended in KeyboardInterrupt."""
    sys.setprofile(at)
    try:
        stepper.step(mse, given)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def entries(given: Any) -> int:
    _, stepper = make()
    counted = AtCall(-1, lambda: None)
    step_with(stepper, given, counted)
    return counted.calls


@pytest.mark.parametrize("kind", ["good", "bad", "window"])
def test_a_signal_at_every_function_entry(kind: str) -> None:
    given: Any = Window([batch(), batch()]) if kind == "window" else batch(bad=kind == "bad")
    model, stepper = make()
    before = state(model, stepper)
    stepper.step(mse, given)
    after = state(model, stepper)
    places = entries(given)
    assert places > 100
    interrupted = 0
    tried = range(1, places, 3 if kind == "window" else 1)
    for place in tried:
        model, stepper = make()
        interrupted += step_with(stepper, given, AtCall(place, press_ctrl_c))
        assert state(model, stepper) in (before, after), f"between, at entry {place} of {places}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert stepper.step(mse, batch()).applied
    assert interrupted == len(tried), "a Ctrl-C was lost"


def raise_it() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_an_exception_at_every_function_entry(request: pytest.FixtureRequest) -> None:
    """As if a signal could not be held back: inside an optimizer's own code a Stepper then refuses to go on.

    Every entry with `--full`, else every seventh one, beginning with another one for each kind of step.
    """
    for bad in (False, True):
        given = batch(bad)
        model, stepper = make()
        before = state(model, stepper)
        stepper.step(mse, given)
        after = state(model, stepper)
        torn = 0
        places = entries(given)
        tried = range(1, places) if request.config.getoption("--full") else range(1 + bad, places, 7)
        for place in tried:
            model, stepper = make()
            step_with(stepper, given, AtCall(place, raise_it))
            torch.set_grad_enabled(True)  # torch's own no_grad does not survive an exception as it is left
            signal.signal(signal.SIGINT, signal.default_int_handler)  # nor what takes the handler back
            try:
                assert state(model, stepper) in (before, after), f"between, at entry {place}"
                assert stepper.step(mse, batch()).applied
            except TornUpdate:
                torn += 1
        assert torn == 0 if bad else 0 < torn < len(tried) / 3


def test_a_handler_that_only_takes_notes_is_called_and_kept() -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    mine = signal.getsignal(signal.SIGINT)
    try:
        _model, stepper = make()

        def loss(model: nn.Module, given: Any) -> Tensor:
            press_ctrl_c()
            return mse(model, given)

        assert stepper.step(loss, batch()).applied
        assert noted == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_loss_stops_at_once() -> None:
    model, stepper = make()
    before = state(model, stepper)
    reached = []

    def loss(model: nn.Module, given: Any) -> Tensor:
        found = mse(model, given)
        press_ctrl_c()
        reached.append("on")
        return found

    with pytest.raises(KeyboardInterrupt):
        stepper.step(loss, batch())
    assert reached == []
    assert state(model, stepper) == before


class Switch:
    """Sets something for a while; Ctrl-C arrives on the way out, or on the way in."""

    def __init__(self, where: str) -> None:
        self.where, self.is_set = where, False

    def __enter__(self) -> None:
        if self.where == "in":
            press_ctrl_c()
        self.is_set = True

    def __exit__(self, *_: object) -> None:
        if self.where == "out":
            press_ctrl_c()
        self.is_set = False


@pytest.mark.parametrize("where", ["in", "out"])
@pytest.mark.parametrize("form", ["function", "three calls"])
def test_ctrl_c_does_not_leave_a_context_half_way(form: str, where: str) -> None:
    model, stepper = make()
    before, switch = state(model, stepper), Switch(where)

    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        with switch:
            return mse(model, given)

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (either of the calls)
        if form == "function":
            stepper.step(loss, batch())
        else:
            with stepper.forward():
                loss(model, batch())
    assert not switch.is_set
    assert not stepper.in_window
    assert state(model, stepper) == before
    assert stepper.step(mse, batch()).applied


def test_a_loop_inside_a_context_switch_is_interrupted_too() -> None:
    """The step is completed first, or given up between forward and backward."""
    _model, stepper = make()
    reached = []

    class Loop:
        def __enter__(self) -> None:
            def loss(model: nn.Module, given: Any) -> Tensor:
                press_ctrl_c()
                reached.append("on")
                return mse(model, given)

            for _ in range(2):
                stepper.step(loss, batch())

        def __exit__(self, *_: object) -> None: ...

    with pytest.raises(KeyboardInterrupt), Loop():
        pass
    assert reached == ["on"]
    assert not stepper.in_window
    assert stepper.step(mse, batch()).applied


def test_a_second_ctrl_c_does_not_end_what_takes_the_window_back() -> None:
    model, stepper = make()
    before = state(model, stepper)
    places = AtCall(-1, lambda: None)
    early = entries(batch()) // 5

    def twice(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            places.calls += 1
            if places.calls in range(early, early + 12, 2):
                press_ctrl_c()

    sys.setprofile(twice)
    try:
        with pytest.raises(KeyboardInterrupt):
            stepper.step(mse, batch())
    finally:
        sys.setprofile(None)
    assert state(model, stepper) == before
    assert stepper.step(mse, batch()).applied


def test_steps_in_other_threads_work() -> None:
    found: list[bool] = []

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _model, stepper = make()
            found.append(stepper.step(mse, batch()).applied)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _model, stepper = make()
        assert stepper.step(mse, batch()).applied
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- the context form ----------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_window_that_is_open_cannot_be_saved() -> None:
    model, stepper = make()
    with stepper.forward():
        loss = mse(model, batch())
    with pytest.raises(WrongUse, match=r"open window(?s:.*)discard"):
        stepper.state_dict()
    stepper.backward(loss)
    assert stepper.apply().applied
    assert stepper.state_dict()["counts"]["applied"] == 2


def test_ctrl_c_inside_forward_drops_the_window() -> None:
    model, stepper = make()
    before = state(model, stepper)
    with pytest.raises(KeyboardInterrupt), stepper.forward():  # noqa: PT012 (the context is what is tested)
        mse(model, batch())
        press_ctrl_c()
    assert state(model, stepper) == before


@pytest.mark.wording
@pytest.mark.parametrize("what", ["clip", "step"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_somebody_else_does_between_backward_and_apply_is_noticed(what: str, precision: str) -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stepper = Stepper(model, optimizer, precision=precision)
    with stepper.forward():
        loss = mse(model, batch())
    stepper.backward(loss)
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    else:
        optimizer.step()
    with pytest.raises(WrongUse, match="gradients that changed" if what == "clip" else "optimizer.step"):
        stepper.apply()
    assert stepper.counts.attempted == 0
    with stepper.forward():  # no window is left open
        mse(model, batch())
