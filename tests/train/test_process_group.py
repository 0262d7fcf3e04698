"""How ranks find each other: under torchrun that restarts them, and under srun without torchrun."""

from __future__ import annotations

import pytest

from halfstep.errors import WrongUse
from halfstep.launch_variables import PORTS, convert_slurm_variables
from halfstep.train.process_group import build_store_prefix
from tests.support.commands import Command

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
TORCHRUN |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
TORCHRUN |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
SRUN |= {"SLURM_JOB_NODELIST": "gpu[03-04,09]"}


def test_attempts_on_one_node_have_keys_of_their_own() -> None:
    one = {**TORCHRUN, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert build_store_prefix(one) != build_store_prefix({**one, "TORCHELASTIC_RESTART_COUNT": "1"})


@pytest.mark.wording
def test_on_several_nodes_restarts_need_a_store_for_each_attempt() -> None:
    assert build_store_prefix(TORCHRUN)
    for more in ({"TORCHELASTIC_MAX_RESTARTS": "3"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        with pytest.raises(WrongUse) as caught:
            build_store_prefix({**TORCHRUN, **more})
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caught.value.do
        # The count differs between the nodes: it must not be part of a prefix that they share.
        own = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}
        assert build_store_prefix(own) == build_store_prefix({**own, "TORCHELASTIC_RESTART_COUNT": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-04,09]", "gpu03"),
        ("a1,b[2-3]", "a1"),
        ("alone", "alone"),
        ("n[7,9]-x", "n7-x"),
        ("c-1-[10-12]", "c-1-10"),
    ],
)
def test_tasks_of_srun_are_ranks(nodes: str, first: str) -> None:
    found = convert_slurm_variables({**SRUN, "SLURM_JOB_NODELIST": nodes})
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
    }
    assert found["MASTER_ADDR"] == first
    assert int(found["MASTER_PORT"]) in PORTS


def test_jobs_and_steps_of_one_host_have_other_ports() -> None:
    ports = {convert_slurm_variables({**SRUN, **more})["MASTER_PORT"] for more in ({}, {"SLURM_STEP_ID": "1"})}
    assert len(ports | {convert_slurm_variables({**SRUN, "SLURM_JOB_ID": "78"})["MASTER_PORT"]}) == 3


def test_an_address_that_the_user_chose_stays() -> None:
    found = convert_slurm_variables({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "4000")


@pytest.mark.parametrize("left", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"])
def test_a_batch_script_is_no_rank(left: str) -> None:
    assert convert_slurm_variables({name: value for name, value in SRUN.items() if name != left}) == {}


def test_torchrun_under_srun_and_a_single_task_stay_as_they_are() -> None:
    assert convert_slurm_variables({**SRUN, **TORCHRUN}) == {}
    assert convert_slurm_variables({**SRUN, "SLURM_NTASKS": "1"}) == {}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_task_of_srun_prints_what_is_done_before_torch_is_loaded(rank: str) -> None:
    command = Command("train", "segmentation_tiny", "--show", environment={**SRUN, "SLURM_PROCID": rank})
    code, _, err = command.ended()
    assert (code, "reading the recipe" in err) == (0, rank == "0"), err
