"""Launch variables name a rank of a group, or the command says which of them does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from halfstep.errors import CONFIGURATION, WrongLaunch
from halfstep.launch_variables import LaunchedRank, convert_slurm_variables, read_launched_rank
from halfstep.train.status import can_be_restarted, count_restarts

TWO = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_one_process_and_a_rank_of_two() -> None:
    assert read_launched_rank({}) == LaunchedRank(0, 1, 0, None)
    assert read_launched_rank({"RANK": "somebody's own"}) == LaunchedRank(), "without WORLD_SIZE it is no launch"
    assert read_launched_rank({"WORLD_SIZE": "1", "RANK": "0"}) == LaunchedRank()
    assert read_launched_rank({**TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == LaunchedRank(1, 2, 1, 2)


@pytest.mark.wording
@pytest.mark.parametrize("text", ["", "abc", "-1", "1e3", "9" * 5000, "\u0663"])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_what_is_no_number_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(WrongLaunch, match=name) as caught:
        read_launched_rank({**TWO, name: text})
    assert caught.value.exit_code == CONFIGURATION
    assert len(str(caught.value)) < 400


@pytest.mark.wording
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "2"}, "RANK is '2'\n  allowed: an integer from 0 to 1"),
        ({"RANK": "5"}, "from 0 to 1"),
        ({"WORLD_SIZE": "1", "RANK": "1"}, "from 0 to 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_PORT": "65536"}, "from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "without MASTER_ADDR"),
    ],
)
def test_a_rank_outside_of_its_group_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(WrongLaunch) as caught:
        read_launched_rank({**TWO, **changed})
    assert words in str(caught.value)


@pytest.mark.wording
def test_numbers_of_slurm_and_of_restarts() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    assert convert_slurm_variables(step)["RANK"] == "1"
    for name in ("SLURM_NTASKS", "SLURM_JOB_ID"):
        with pytest.raises(WrongLaunch, match=name):
            convert_slurm_variables({**step, name: "x"})
    assert count_restarts({"TORCHELASTIC_RESTART_COUNT": "9" * 5000}) == 0
    assert not can_be_restarted({"TORCHELASTIC_MAX_RESTARTS": "x"})


@pytest.mark.wording
def test_a_rank_that_is_none_of_its_group_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TWO, "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    words = [sys.executable, "-m", "halfstep", "train", "segmentation_tiny", "run.dir=never"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == CONFIGURATION
    assert "rank 5: the variable RANK is '5'" in done.stderr
    assert "Traceback" not in done.stderr
