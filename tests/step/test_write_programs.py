"""
Random programs of writes with bad steps in them end as the same programs without the bad steps do.

`python -m tests.step.test_write_programs SEED` reruns one and prints the script of its smallest form that fails, and
what is wrong with it.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.write_programs import draw_program, script_of
from tests.support.write_promise import broken_promises, smallest

CHUNK = 50


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forget what other tests have compiled: a process that has compiled something is observed once only."""
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        dynamo.counters.clear()


def check(seed: int) -> str:
    """Nothing, or which program breaks which promise."""
    program = draw_program(seed)
    if not broken_promises(program):
        return ""
    program = smallest(program)
    return "\n".join([str(program), *(f"  ! {sentence}" for sentence in broken_promises(program))])


def check_chunk(first: int) -> None:
    broken = [told for seed in range(first, first + CHUNK) if (told := check(seed))]
    rerun = "\n(python -m tests.step.test_write_programs SEED reruns one)" if broken else ""
    assert not broken, f"{len(broken)} of {CHUNK} programs break a promise:\n" + "\n".join(broken) + rerun


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
@pytest.mark.wording
def test_a_run_ends_as_if_its_bad_steps_had_not_been(first: int) -> None:
    check_chunk(first)


@pytest.mark.full
@pytest.mark.parametrize("first", range(200, 2000, CHUNK))
def test_more_runs_end_as_if_their_bad_steps_had_not_been(first: int) -> None:
    check_chunk(first)


if __name__ == "__main__":
    chosen = draw_program(int(sys.argv[1]))
    if broken_promises(chosen):
        chosen = smallest(chosen)
    print(script_of(chosen))
    print("\n".join(broken_promises(chosen)) or "no promise is broken")
