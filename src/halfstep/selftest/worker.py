"""The process in which the parts run: a crash of the device's driver ends it, and not the self-test."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError, convert_import_error, format_error_line, format_error_reason
from halfstep.measure.worker import serve_requests
from halfstep.selftest.names import FAILED, PASSED, SKIPPED

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
"""What a launcher leaves in the environment, by which torch would take this process for one rank of several."""


def _start_worker(question: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
        del os.environ[name]
    if question["folder"] is not None:
        # What torch and its children write, such as compiled code, goes with the folder.
        os.environ["TMPDIR"] = tempfile.tempdir = question["folder"]
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    import torch

    from halfstep.precision.hardware import describe_device
    from halfstep.selftest.facts import collect_device_facts
    from halfstep.selftest.part import PartContext

    device = describe_device(question["device"])
    if device.kind == "cpu":
        # Several threads wait for one another where other work runs, and models as small as these gain nothing.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    place = PartContext(device, Path(question["folder"]) if question["folder"] is not None else None)
    return place, collect_device_facts(device)


def _answer_question(place: Any, question: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    began = time.perf_counter()
    row = {"part": question["do"], "figure": "", "figures": {}, "error": None, **_run_part(place, question["do"])}
    return place, row | {"seconds": round(time.perf_counter() - began, 1)}


def _run_part(place: Any, name: str) -> dict[str, Any]:
    """Run a part and return how it ended."""
    from halfstep.selftest.facts import anonymize_text
    from halfstep.selftest.part import PartFailed, PartSkipped

    try:
        # Findings about a device that computes slowly are no news here, and would break the table's progress line.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(f"halfstep.selftest.parts.{name}").check(place)
        return {"result": PASSED, "figure": anonymize_text(found.figure), "figures": found.figures}
    except PartSkipped as skipped:
        return {"result": SKIPPED, "figure": anonymize_text(str(skipped))}
    except ImportError as error:
        extra = convert_import_error(error) or (error if isinstance(error, HalfstepError) else None)
        if extra is not None:
            return {"result": SKIPPED, "figure": anonymize_text(f"{format_error_reason(extra)}: {extra.do}")}
        return {"result": FAILED, "error": anonymize_text(format_error_line(error))}
    except PartFailed as failed:
        return {"result": FAILED, "error": anonymize_text(str(failed))}
    except Exception as error:  # anything that the device, its driver or halfstep raises
        return {
            "result": FAILED,
            "error": anonymize_text(f"{format_error_line(error)} ({_find_raising_line(error)})"),
        }


def _find_raising_line(error: BaseException) -> str:
    """Return the file and the line that raised, without its folder."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at else "no line"


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # the folder of an installed package may be read-only
    serve_requests(_start_worker, _answer_question)
