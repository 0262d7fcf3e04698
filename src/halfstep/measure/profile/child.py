"""The child process that profiles a subject: opens it, then measures the requested stages."""

from __future__ import annotations

from typing import Any

from halfstep.measure.worker import serve_requests


def _open_profiled_case(question: dict[str, Any]) -> tuple[Any, object]:
    from halfstep.measure.profile.examined import ProfiledCase
    from halfstep.measure.subject import Subject

    case = Subject(question["text"], tuple(question["settings"])).open()
    examined = ProfiledCase(case, question["precision"], question["device"])
    return examined, examined.measure("", 0.0)


def _measure_stage(examined: Any, question: dict[str, Any]) -> tuple[Any, object]:
    return examined, examined.measure(question["do"], question["seconds"])


if __name__ == "__main__":
    serve_requests(_open_profiled_case, _measure_stage)
