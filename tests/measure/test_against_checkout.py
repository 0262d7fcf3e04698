"""Two checkouts timed in turns: each process has its own checkout's code, and a slower one is seen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import against, halfstep
pause = getattr(halfstep, "PAUSE", 0.002)
against.answer({{"step": lambda: lambda: (print("noise"), time.sleep(pause))}})
"""


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("against", ROOT / "benchmarks" / "against.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "against", module)
    spec.loader.exec_module(module)
    return module


def checkout(folder: Path, pause: float) -> Path:
    """A checkout whose step takes this long."""
    package = folder / "src" / "halfstep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"PAUSE = {pause}\n")
    (package / "clock.py").write_text((ROOT / "src" / "halfstep" / "clock.py").read_text())
    return folder


def test_a_slower_checkout_is_seen_and_the_other_is_like_itself(
    tmp_path: Path, against: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT.format(benchmarks=str(ROOT / "benchmarks")))
    monkeypatch.setattr(against, "OWN", checkout(tmp_path / "new", 0.06))
    found = against.compare(str(script), checkout(tmp_path / "old", 0.02), {"step": 1}, 5, [])
    assert 1.8 < found["step"].new.median < 4.5
    assert 0.6 < found["step"].aa.median < 1.6
    assert found["step"].new.pairs == 5
    assert against.in_one_line(found).startswith("step: new/old=")
    assert "noise" in capfd.readouterr().err, "what a step prints is no answer"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, against: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no src/halfstep"):
        against.compare("nothing.py", tmp_path, {"step": 1}, 1, [])
