"""The child process that profiles a subject: opens it, then measures the requested stages."""

from __future__ import annotations

from typing import Any

from halfstep.measure.worker import main


def _open(question: dict[str, Any]) -> tuple[Any, object]:
    from halfstep.measure.profile.examined import Examined
    from halfstep.measure.subject import Subject

    case = Subject(question["text"], tuple(question["settings"])).open()
    examined = Examined(case, question["precision"], question["device"])
    return examined, examined.measure("", 0.0)


def _do(examined: Any, question: dict[str, Any]) -> tuple[Any, object]:
    return examined, examined.measure(question["do"], question["seconds"])


if __name__ == "__main__":
    main(_open, _do)
