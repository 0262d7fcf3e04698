"""`scripts/test --quick` chooses the tests nearest to a change, and no more than its time holds."""

from __future__ import annotations

from pathlib import Path

from tests.support.quick import ROOT, SECONDS, UNKNOWN, chosen, distances, imported_by, module_files

SRC, TESTS = ROOT / "src" / "halfstep", ROOT / "tests"


def test_imports_are_followed_wherever_they_stand() -> None:
    known = module_files()
    assert SRC / "recipe" / "explain.py" in imported_by(SRC / "runs" / "registry.py", known)  # inside a function
    far = distances([SRC / "step" / "ema.py"])
    assert far[SRC / "step" / "ema.py"] == 0
    assert far[SRC / "step" / "stepper_base.py"] == 1
    assert far[TESTS / "step" / "test_skip.py"] <= 3


def test_a_change_that_nothing_imports_reaches_nothing() -> None:
    assert distances([ROOT / "README.md"]) == {ROOT / "README.md": 0}


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_nearest_are_taken_while_there_is_time() -> None:
    files = [TESTS / name for name in ("near.py", "nearer.py", "long.py", "far.py", "unreached.py")]
    far = {files[0]: 1, files[1]: 0, files[2]: 1, files[3]: 5}
    seconds = {"tests/near.py": 60.0, "tests/nearer.py": 1.0, "tests/long.py": 2 * SECONDS, "tests/far.py": 50.0}
    assert names(chosen(far, files, seconds, workers=1)) == ["nearer.py", "near.py"]
    assert names(chosen(far, files, seconds, workers=2)) == ["nearer.py", "near.py", "far.py"]
    unknown = [TESTS / f"{number}.py" for number in range(100)]
    assert len(chosen(dict.fromkeys(unknown, 0), unknown, {}, workers=1)) == SECONDS // UNKNOWN
