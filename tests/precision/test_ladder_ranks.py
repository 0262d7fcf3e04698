"""Rank 0 decides for all, refusals included; real processes over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from described_devices import named
from halfstep.errors import HalfstepError
from halfstep.precision import ladder
from halfstep.precision.measurements import Measurements

rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mine = named(["A100", "Tesla T4"][rank])
theirs = Measurements({"bf16": {"GEMM": 3.0}}, {}, 0.0) if rank == 0 else Measurements({"fp16": {"GEMM": 9.0}}, {}, 0.0)
choice = ladder.choose_precision(device=mine, measured=theirs)
said = [choice.precision.name, len(choice.rungs), [f.id for f in choice.findings]]
try:
    ladder.choose_precision("fp8", device=mine, strict=True)
    said.append("went on")
except HalfstepError as error:
    said.append(type(error).__name__ + ": " + error.given)

measured_here = []

def broken(*_args, **_named):
    measured_here.append(rank)
    raise ValueError("the probe broke")

ladder.measure = broken
try:
    ladder.choose_precision("auto", device="cpu")
    said.append("went on")
except HalfstepError as error:
    said.append(error.given)
said.append(len(measured_here))
print(json.dumps(said))
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_rank_zero_decides_and_its_refusal_travels(tmp_path: Path) -> None:
    folder = str(Path(__file__).parent)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, folder, str(tmp_path / "meet"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [process.communicate(timeout=90) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outs
    zero, one = (json.loads(out) for out, _ in outs)
    assert zero[0] == one[0] == "bf16"
    assert zero[1] == one[1] == 3
    assert (zero[2], one[2]) == ([], ["precision.uneven"])
    assert zero[3] == one[3]
    assert "fp8 on A100 is refused" in zero[3]
    assert zero[4] == one[4] == "rank 0 could not choose: ValueError('the probe broke')"
    assert (zero[5], one[5]) == (1, 0)
