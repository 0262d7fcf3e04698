"""The entry point, called in a process that lives on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from halfstep.stop_signals import POSSIBLE
from tests.support.commands import typed


@pytest.mark.parametrize("command", ["train", "estimate"])
def test_a_refused_command_leaves_the_signal_handlers_of_its_process(command: str, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in POSSIBLE}
    assert before[signal.SIGINT] is signal.default_int_handler
    code, _, _ = typed(0, command, f"{tmp_path}/none.yaml")
    assert code != 0
    assert {number: signal.getsignal(number) for number in POSSIBLE} == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
