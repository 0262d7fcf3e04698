"""Read the journal of a run: the one place where a report does."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from halfstep.draw.thinning import ThinnedCurve
from halfstep.errors import BadData
from halfstep.journal.jsonl import JOURNAL, list_journal_parts
from halfstep.journal.summary import Summary, summarize
from halfstep.report.json_fields import coerce_number, is_known_number

__all__ = ["CurvePoints", "Summary", "find_curve_points", "read_journal"]


class CurvePoints:
    """The points of one curve that were kept, and what they say; empty for a curve that was not recorded."""

    def __init__(self, curve: ThinnedCurve | None) -> None:
        found = [(point.attempt, coerce_number(point.value)) for point in curve.points] if curve is not None else []
        kept = [(attempt, value) for attempt, value in found if is_known_number(value)]
        self.x, self.y = [float(attempt) for attempt, _ in kept], [value for _, value in kept]
        self.is_whole = curve is not None and curve.count == len(kept)
        """Whether every point was kept, and not only the extremes of many spans."""

    @property
    def xy(self) -> tuple[list[float], list[float]]:
        """Return the attempts and the values."""
        return self.x, self.y

    def without_first(self) -> list[float]:
        """Return the values after the first, which includes what happens once; the first where there is no other."""
        return self.y[1:] or self.y

    @property
    def median(self) -> float:
        """Return the median without the first value; NaN if there is none."""
        return statistics.median(self.without_first() or [coerce_number(None)])


def find_curve_points(curves: Mapping[str, ThinnedCurve], name: str) -> CurvePoints:
    """Return the points of a curve by its name in the journal."""
    return CurvePoints(curves.get(name))


def read_journal(run: Path, why_empty: str = "") -> Summary:
    """Return what the journal of a run says, passing over damaged lines.

    Raises BadData if there is no journal, or none of its lines is the start of a run, and OtherForm where another
    version of halfstep wrote it. `why_empty` is what else is known of a run without one.
    """
    path = run / JOURNAL
    if not any(part.path.is_file() for part in list_journal_parts(path)):
        ended = f": {why_empty}" if why_empty else ""
        raise BadData(
            f"{run} has a recipe and no {JOURNAL}{ended}",
            allowed="a started run",
            do=f"start it again with the same command; {run}/train.log has its output, if any",
        )
    try:
        found = summarize(path)
    except OSError as error:
        raise BadData(
            f"{path} cannot be read: {error.strerror or error}",
            allowed="a journal that this user may read",
            do=f"check its permissions: ls -l {run}",
        ) from error
    if not found.start:
        raise BadData(
            f"no line of {path} can be read as the start of a run",
            allowed="the journal as `halfstep train` wrote it",
            do="restore it from a backup; the checkpoints of the run are not affected, and the same command resumes it",
        )
    return found
