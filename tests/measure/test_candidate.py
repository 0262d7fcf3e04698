"""Arms: what they do to a case, in this process and in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import Case, build_case
from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem
from halfstep.measure.local_candidate import LocalCandidate
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.timing import Speed, TimedRace, race_candidates, warm_up_candidate
from halfstep.measure.worker_process import CandidateFailed, CandidateProcess, CandidateTooSlow
from tests.support import cases

LINEAR = Subject("tests.support.cases:linear")


def test_an_arm_trains_a_copy_in_the_precision_asked_for() -> None:
    case = LINEAR.open()
    before = [p.detach().clone() for p in case.model.parameters()]
    arm = Candidate(case, StepSetting("bf16", batch=4, microbatches=2))
    losses = arm.losses(20)
    assert losses[-1] < losses[0]
    assert arm.samples == 8
    assert arm.stepper.observed is not None
    assert arm.stepper.observed.share == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters(), strict=True))


@pytest.mark.wording
def test_a_precision_that_is_not_here_is_refused_not_replaced() -> None:
    with pytest.raises(HalfstepError, match="tf32"):
        Candidate(LINEAR.open(), StepSetting("tf32"))


def test_an_arm_elsewhere_is_the_same_arm() -> None:
    setting = StepSetting("bf16", batch=4)
    with CandidateProcess(LINEAR, setting) as away:
        opened = away.open()
        assert opened["samples"] == 4
        assert opened["conditions"]["torch"] == torch.__version__
        assert away.losses(3) == Candidate(LINEAR.open(), setting).losses(3)
        assert away.seconds(2) > 0
        assert away.memory() > 4 * (64 * 128 + 128 * 10) * 4  # weights, gradients and two of AdamW


@pytest.mark.wording
@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_an_arm_elsewhere_says_why_it_cannot() -> None:
    with (
        CandidateProcess(LINEAR, StepSetting("tf32")) as away,
        pytest.raises(HalfstepError, match="tf32 on") as refused,
    ):
        away.open()
    assert refused.value.do
    with CandidateProcess(Subject("tests.support.cases:broken"), StepSetting()) as away:
        away.open()
        with pytest.raises(CandidateFailed, match="IndexError"):
            away.seconds()


@pytest.mark.parametrize(("error", "expected"), [(MemoryError(), True), (ValueError("a wrong shape"), False)])
def test_a_candidate_that_ran_out_of_memory_says_so_in_a_field(error: Exception, expected: bool) -> None:
    def loss(_model: torch.nn.Module, _batch: torch.Tensor) -> torch.Tensor:
        raise error

    here = LocalCandidate(build_case(torch.nn.Linear(2, 2), loss, torch.ones(1, 2)), StepSetting())
    here.open()
    with pytest.raises(CandidateFailed) as failed:
        here.seconds()
    assert failed.value.out_of_memory is expected


def test_an_arm_that_dies_or_hangs_is_told_apart() -> None:
    with CandidateProcess(LINEAR, StepSetting()) as away:
        with pytest.raises(CandidateTooSlow):
            away.open(limit=0.01)
        with pytest.raises(CandidateFailed):
            away.seconds()


@pytest.mark.usefixtures("forked_python")
def test_no_time_left_is_too_slow_and_not_a_wait_without_end() -> None:
    with CandidateProcess(LINEAR, StepSetting()) as away:
        away.open()
        with pytest.raises(CandidateTooSlow):
            away.seconds(1, limit=-0.5)


class Clockwork:
    """An arm that takes exactly as long as it is told, without taking it."""

    def __init__(self, *times: float) -> None:
        self.times, self.calls = list(times), 0

    def seconds(self, steps: int = 1) -> float:
        self.calls += 1
        return self.times[min(self.calls, len(self.times)) - 1]


def test_warming_up_ends_when_three_times_agree() -> None:
    arm = Clockwork(9.0, 4.0, 1.2, 1.0, 1.01, 1.02, 1.0)
    assert warm_up_candidate(arm) == 1.02
    assert arm.calls == 6
    restless = Clockwork(*(1.0 + (n % 2) for n in range(100)))
    warm_up_candidate(restless)
    assert restless.calls == 20


def test_a_race_pairs_times_and_gives_no_verdict_where_it_cannot() -> None:
    found = race_candidates({"base": Clockwork(2.0), "fast": Clockwork(1.0), "noisy": Clockwork(1.9, 2.1, 1.9, 2.1)},
                 baseline="base", pairs=20)  # fmt: skip
    assert not found.interrupted
    assert found.speeds["fast"] == Speed(1.0, 2.0, 2.0, 2.0, 20)
    assert found.speeds["fast"].verdict == "faster"
    assert found.speeds["base"].verdict == "can't tell"
    two = {"base": Clockwork(1.0), "slow": Clockwork(4.0)}
    assert race_candidates(two, baseline="base", pairs=6).speeds["slow"].verdict == "slower"
    assert race_candidates(two, baseline="base", pairs=5).speeds["slow"].verdict == "can't tell", (
        "five pairs are no 95 %"
    )


def test_a_race_ends_in_time_and_on_ctrl_c_with_what_it_has() -> None:
    class Interrupted(Clockwork):
        def seconds(self, steps: int = 1) -> float:
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().seconds(steps)

    interrupted = race_candidates({"a": Interrupted(1.0)}, baseline="a", pairs=10)
    assert interrupted.interrupted
    assert interrupted.speeds["a"].pairs == 3
    at_once = Interrupted(1.0)
    at_once.calls = 3
    assert race_candidates({"a": at_once}, baseline="a") == TimedRace({}, interrupted=True)
    late = race_candidates({"a": Clockwork(1.0)}, baseline="a", pairs=10, seconds=0.0)
    assert late.speeds["a"].pairs == 1
    assert not late.interrupted


class Failing(Clockwork):
    """An arm that cannot go on after some calls."""

    def __init__(self, error: Exception, calls: int) -> None:
        super().__init__(1.0)
        self.error, self.most = error, calls

    def seconds(self, steps: int = 1) -> float:
        if self.calls == self.most:
            raise self.error
        return super().seconds(steps)


def test_an_arm_that_fails_leaves_the_race_and_the_others_go_on() -> None:
    error = CandidateFailed("ValueError: call 61")
    found = race_candidates({"a": Clockwork(2.0), "b": Failing(error, 4), "c": Clockwork(1.0)}, baseline="a", pairs=10)
    assert found.failed == {"b": error}
    assert found.speeds["b"].pairs == 4
    assert found.speeds["c"].pairs == 10
    alone = race_candidates({"a": Clockwork(2.0), "b": Failing(error, 4)}, baseline="a", pairs=10)
    assert alone.speeds["a"].pairs < 10, "a baseline does not race with itself"
    with pytest.raises(CandidateFailed, match="call 61"):
        race_candidates({"a": Failing(error, 4), "b": Clockwork(1.0)}, baseline="a", pairs=10)
    late = race_candidates(
        {"a": Failing(CandidateTooSlow("time is up"), 4), "b": Clockwork(1.0)}, baseline="a", pairs=10
    )
    assert late.speeds["b"].pairs == 4
    assert "a" in late.failed


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no groups of processes here")
def test_what_a_case_started_does_not_outlive_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleepy.py").write_text(
        "import subprocess\nfrom tests.support.cases import linear\n"
        "def case():\n    print('pid', subprocess.Popen(['sleep', '60']).pid, file=open('pid', 'w'))\n"
        "    return linear()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), str(tmp_path)]))
    monkeypatch.chdir(tmp_path)
    with CandidateProcess(Subject("sleepy:case"), StepSetting()) as away:
        away.open()
        started = int(Path("pid").read_text().split()[1])
        begin = time.monotonic()
    assert time.monotonic() - begin < 20, "it holds the standard error of the arm"
    assert _is_gone(started)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_arm_ends_with_its_parent_even_in_a_long_step(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, time\nfrom tests.support.cases import linear\n"
        "def case():\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(60)\n    return linear()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "from halfstep.measure.worker_process import *; "
         "CandidateProcess(Subject('endless:case'), StepSetting()).open()"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(tmp_path)])},
    )  # fmt: skip
    file, deadline = tmp_path / "pid", time.monotonic() + 60
    while time.monotonic() < deadline and not (file.exists() and file.read_text()):
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert _is_gone(int(file.read_text()))


def _is_gone(pid: int) -> bool:
    """Within a few seconds; one that nobody has waited for is gone, too."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def dropping() -> Case:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    return build_case(model, cases.loss_fn, (torch.randn(8, 64), torch.randint(0, 10, (8,))))


def test_arms_draw_the_same_random_numbers_and_leave_the_callers_alone() -> None:
    case = dropping()
    before = torch.get_rng_state()
    one, other = Candidate(case, StepSetting()), Candidate(case, StepSetting())
    found: dict[Candidate, list[float]] = {one: [], other: []}
    for arm in (one, other, other, one):  # whoever takes turns with it
        found[arm] += arm.losses(1)
    assert found[one] == found[other]
    assert found[one][0] != found[one][1]
    assert torch.equal(torch.get_rng_state(), before)


def test_conditions_show_what_reaches_the_device_and_warn_of_other_work() -> None:
    found = collect_conditions("cpu")
    assert "cuda" not in describe_conditions(found)
    assert "cudnn" not in describe_conditions(found)
    assert "mkldnn.matmul" in describe_conditions(found)
    assert "cudnn.conv" in describe_conditions({**found, "place": "cuda:0"})
    assert describe_load_problem({"load": 3.14, "cores": 2}).startswith("load 3.1 on 2 cores before measuring began")
    assert describe_load_problem({"load": 0.4, "cores": 2}) == describe_load_problem({"load": None, "cores": 2}) == ""
