"""No test may leave torch's process-wide settings other than it found them."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

from tests.support.cpu import described_with_bf16

# Before halfstep is imported, here and in every process that a test starts. Without bf16 instructions torch computes
# the same numbers more slowly; what tests assert about bf16 is the numbers.
if "HALFSTEP_CPUINFO" not in os.environ and (description := described_with_bf16(Path("/proc/cpuinfo"))):
    _described = Path(tempfile.gettempdir()) / f"halfstep-cpuinfo-{os.getuid()}"
    _described.write_text(description, encoding="utf-8")
    os.environ["HALFSTEP_CPUINFO"] = str(_described)
if "--without-words" in sys.argv:
    # The workers of this process and the processes that tests start import it by their PYTHONPATH.
    _folder = str(Path(__file__).parent / "support" / "without_words")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_folder, os.environ.get("PYTHONPATH"))))
    importlib.import_module("tests.support.without_words.sitecustomize")

import pytest
import torch

from halfstep.precision.flags import read_fp32_flags
from tests.support import curves
from tests.support.chromium import MISSING, Chromium, program
from tests.support.forked_python import STARTING_PYTHON, SUBPROCESS
from tests.support.preloaded import server
from tests.support.quick import Quick, Stopwatch, long_files
from tests.support.ranks import Ranks

# Several workers with several threads each would fight over the cores.
torch.set_num_threads(1)
# nohup and a shell's & start programs that ignore these; tests send them.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
curves.leave_out()


_WORDING = "checks the wording of an error or a finding"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what takes longer than CI has time for")
    parser.addoption("--quick", action="store_true", help="what a change touches, two minutes at most")
    parser.addoption("--since", default="HEAD", help="the commit that --quick compares with (default: HEAD)")
    parser.addoption(
        "--without-words", action="store_true", help="with ids in place of the text of errors and findings"
    )
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json, for --quick")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", config.getoption("numprocesses", None) or 1))
        config.pluginmanager.register(Quick(config.getoption("--since"), workers))
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch("scripts/test --record-durations"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # One worker takes a file: started last, a long one would keep it busy while the others wait.
    long = long_files()
    items.sort(key=lambda item: (item.path.name != "test_faults.py", item.path not in long))
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="needs --full"))
    if config.getoption("--without-words"):
        for item in items:
            if item.get_closest_marker("wording"):
                item.add_marker(pytest.mark.skip(reason=_WORDING))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from modules and tests: none of them goes away, and they are most of the heap."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--without-words"):
        skipped = terminalreporter.stats.get("skipped", [])
        terminalreporter.write_line(f"wording={sum(_WORDING in str(report.longrepr) for report in skipped)}")


def settings() -> dict[str, object]:
    return {
        **read_fp32_flags(),
        "default dtype": torch.get_default_dtype(),
        "grad enabled": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def _seed(seed: int) -> None:
    # torch.manual_seed would note where it was called, for each kind of device that is not there: 5 ms a test.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


@pytest.fixture(autouse=True)
def nothing_leaks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    _seed(0)
    before = settings()
    yield
    assert settings() == before


@pytest.fixture
def drawn_curves() -> Iterator[None]:
    """For tests that look at a run's curves."""
    with curves.drawn():
        yield


@pytest.fixture(scope="session")
def loaded_server() -> None:
    """The server of forked processes has loaded all that they need: no test's patience is for that."""
    process = server().Process(target=gc.collect)
    process.start()
    process.join()


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch, loaded_server: None) -> None:
    """Python processes that halfstep starts are forked where torch is loaded: for tests that are not about them."""
    for module in STARTING_PYTHON:
        monkeypatch.setattr(module, "subprocess", SUBPROCESS)


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Ranks]:
    """Runs a function on two processes, which all tests of a worker share."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """A Chromium for all tests of a worker; without one they are skipped, and say how to install it."""
    if program() is None:
        pytest.skip(MISSING)
    opened = Chromium()
    yield opened
    opened.close()
