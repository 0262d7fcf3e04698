"""The code on docs/measure.md runs as it stands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.measure.candidate import Candidate
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.survival import survival

PAGE = (Path(__file__).parents[2] / "docs" / "measure.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))

PROJECT = """
import torch
from torch import nn

class LitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()

def train_loader():
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    return torch.utils.data.DataLoader(data, batch_size=4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, code in {**BLOCKS, "my_project": PROJECT}.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in (*BLOCKS, "my_project"):
            del sys.modules[name]


@pytest.mark.usefixtures("folder")
def test_the_case_is_a_case() -> None:
    case = Subject("my_case:make").open()
    assert isinstance(case.model, nn.Sequential)
    assert Candidate(case, StepSetting(precision="bf16"), "cpu").step().applied
    assert survival(case).survives


@pytest.mark.usefixtures("folder")
def test_a_case_from_a_lightning_module() -> None:
    case = Subject("my_lightning_case:make").open()
    assert case.data is not None
    assert isinstance(case.batch[0], torch.Tensor)
    assert Candidate(case, StepSetting(), "cpu").step().applied


def test_both_blocks_were_found_and_each_command_has_its_link() -> None:
    assert set(BLOCKS) == {"my_case", "my_lightning_case"}
    links = set(re.findall(r"\]\((\w+\.md)\)", PAGE))
    assert links == {"estimate.md", "survival.md", "plan.md", "bench.md", "audit.md", "profile.md", "scale.md"}
