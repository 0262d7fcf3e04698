"""The process of one run of a case: every update says its time, its loss and why it was skipped."""

from __future__ import annotations

from typing import Any

from halfstep.measure.child import main


def _do(arm: Any, question: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if question["do"] == "nudge":
        arm.nudge(question["share"], question["seed"])
        return arm, {}
    from halfstep.measure.stopwatch import Stopwatch

    reports: list[Any] = []
    seconds = Stopwatch(arm.device).seconds(lambda: reports.append(arm.step()))
    return arm, {"seconds": seconds, "loss": reports[0].loss, "reason": reports[0].reason}


if __name__ == "__main__":
    main(do=_do)
