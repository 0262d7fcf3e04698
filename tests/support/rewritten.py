"""Rewrites the asserts of all test files once: `python tests/support/rewritten.py`.

Pytest keeps rewritten files next to its bytecode, and reads them from there. Where Python writes no bytecode, each
worker would rewrite every file.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc_fp, get_cache_dir

TESTS = Path(__file__).resolve().parents[1]


def rewrite(path: Path) -> None:
    """Write what pytest would load for a test file, unless it is there."""
    kept = get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"
    if _read_pyc(path, kept) is not None:
        return
    digest, code = _rewrite_test(path, None)  # type: ignore[arg-type]
    kept.parent.mkdir(exist_ok=True)
    with kept.open("wb") as file:
        _write_pyc_fp(file, digest, code)


if __name__ == "__main__":
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(rewrite, [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")], chunksize=8))
