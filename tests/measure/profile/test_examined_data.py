"""Steps with data: waiting, reading, and workers that start anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from halfstep.errors import WrongUse
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import CaseData, build_case
from halfstep.measure.profile.examined import measure_feeding
from halfstep.measure.setting import StepSetting
from tests.support.cases import linear


def test_waiting_for_data_is_told_from_computing() -> None:
    case = build_case(*linear())

    def batches() -> Iterator[Any]:
        for _ in range(3):  # shorter than what is asked of it
            time.sleep(0.05)
            yield case.batch

    def read() -> Any:
        time.sleep(0.05)
        return case.batch

    arm = Candidate(case, StepSetting("fp32", microbatches=2), observe=False)
    found = measure_feeding(arm, CaseData(batches, read, workers=0), seconds=0.5)
    assert found.wait >= 0.09  # two batches a step; time without a core is subtracted
    assert found.read >= 0.09
    assert found.read_cpu < found.read / 2
    assert found.wait_share > 0.5
    assert found.warming is not None
    assert not any(found.warming.compiled)


@pytest.mark.parametrize("length", [1, 4])
def test_workers_that_start_anew_are_told_from_reading(length: int) -> None:
    case = build_case(*linear())

    def batches() -> Iterator[Any]:
        time.sleep(0.05)  # as processes do that start
        for _ in range(length):
            yield case.batch

    found = measure_feeding(
        Candidate(case, StepSetting("fp32"), observe=False),
        CaseData(batches, lambda: case.batch, workers=2),
        seconds=1.0,
    )
    # The wait for a core after the sleep is not counted, and a busy machine has much of it.
    assert found.restarting >= 0.7 * 0.05 / length
    assert found.wait < 0.04
    assert (
        measure_feeding(
            Candidate(case, StepSetting("fp32"), observe=False),
            CaseData(batches, lambda: case.batch, workers=0),
            seconds=0.3,
        ).restarting
        == 0.0
    )


@pytest.mark.wording
def test_data_without_a_batch_is_an_error_not_a_loop() -> None:
    case = build_case(*linear())
    arm = Candidate(case, StepSetting("fp32"), observe=False)
    with pytest.raises(WrongUse, match="no batch"):
        measure_feeding(arm, CaseData(lambda: iter(()), lambda: case.batch, workers=0), seconds=0.1)
