"""The process in which a subject is profiled: opens it, then measures the stage that it is asked for."""

from __future__ import annotations

from typing import Any

from halfstep.measure.child import main


def _open(question: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from halfstep.measure.case import Subject
    from halfstep.measure.profiling.examined import Examined

    case = Subject(question["text"], tuple(question["settings"])).open()
    examined = Examined(case, question["precision"], question["device"])
    return examined, examined.describe()


def _do(examined: Any, question: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from halfstep.measure.profiling.examined import STAGES

    return examined, STAGES[question["do"]].measure(examined, question["seconds"])


if __name__ == "__main__":
    main(_open, _do)
