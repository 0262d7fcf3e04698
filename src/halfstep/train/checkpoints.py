"""The checkpoints of a run, as its loop sees them: taken, told of in the journal, and counted when they fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from halfstep.errors import HalfstepError, Stopped, StorageFailed
from halfstep.train.checkpoint.commit import NotCommitted
from halfstep.train.checkpoint.generation import CHECKPOINTS, Generation
from halfstep.train.checkpoint.saver import Saved, Saver
from halfstep.train.checkpoint.spoilt import Ruined, set_aside_since
from halfstep.train.environment import environment
from halfstep.train.journal import journal as events
from halfstep.train.journal.journal import Journal
from halfstep.train.state import Live, State

MOST_FAILURES = 3
"""Saves in a row that may fail before the run ends: it could be lost as a whole by now."""


def diverged(given: str) -> HalfstepError:
    """For a run that has nothing to show: its numbers were not finite whenever they could have been kept."""
    return HalfstepError(
        given,
        allowed="weights that are finite",
        do="add --new to begin again, with a lower optimizer.lr, or with train.clip_norm",
    )


class Checkpoints:
    """Called by every process at the same steps."""

    def __init__(self, live: Live, saver: Saver, journal: Journal) -> None:
        self._live, self._saver, self._journal = live, saver, journal
        self._environment = environment(live.parts.stepper.device)
        self._asked_for = -1
        self._held_back = False
        self.failures = 0
        self._failure = NotCommitted("it was never begun")
        self.last: Saved | None = None
        """The newest that is on the disk."""
        self.doubt = ""
        """Of a run that was stopped while steps failed: what was saved, or not, and why."""

    def save(self) -> None:
        """The run as it is between two steps."""
        self._asked_for = self._live.progress.attempts
        self._saver.save(State.of(self._live).snapshot(self._asked_for, self._environment))

    def save_unless(self, alarmed: bool) -> None:
        """The same, but for a run whose weights may be spoilt: the newest checkpoint is then one from before."""
        if not alarmed:
            self._held_back = False
            self.save()
        elif not self._held_back:
            self._held_back = True
            stays = f"{self.name} stays the newest" if self.name else "there is none yet"
            text = f"no checkpoint of step {self._live.progress.attempts} while steps fail: {stays}"
            self._journal.note(text, "warning")

    def set_aside(self, since: int, ruined: Ruined = lambda attempt: False) -> bool:
        """Use no more those that were taken at or after this attempt, or are ruined; whether there are others."""
        self.finish()
        if self.last is None or self.last.generation is None:
            return False
        left = set_aside_since(self.last.generation.path.parent, since, ruined)
        if left is not None and left != self.last.generation:
            self._journal.note(f"{_name(self.last)} is set aside: its weights are spoilt", "info")
            self.last = Saved(left.attempt, left, None, seconds=0.0, blocked=0.0, bytes=0)
        return left is not None

    def hear(self) -> None:
        """Tell what became of earlier saves; StorageFailed where too many in a row came to nothing."""
        self._tell(self._saver.news())

    def finish(self) -> None:
        """The same, when the last one has come to its end."""
        self._tell(self._saver.finish())

    def resumed(self, generation: Generation) -> None:
        """The run goes on from this one, so that much is saved."""
        self._asked_for = generation.attempt
        self.last = Saved(generation.attempt, generation, None, seconds=0.0, blocked=0.0, bytes=0)

    @property
    def name(self) -> str | None:
        """Of the newest on the disk."""
        return None if self.last is None else _name(self.last)

    def close(self) -> None:
        """At the end of a run, however it ends: what was under way is waited for, and told of."""
        self._saver.close()
        with contextlib.suppress(StorageFailed):  # the run ends already, and for a reason of its own
            self._tell(self._saver.news())

    def stop(self, signal: str, planned: int, alarmed: bool = False) -> None:
        """Save now, unless that is just being done or the weights may be spoilt, and end the run."""
        if self._asked_for != self._live.progress.attempts and not (alarmed and self._asked_for >= 0):
            self.save()
        if alarmed:
            self.finish()
            self.doubt = self._in_doubt()
        self.stopped(signal, planned)

    def _in_doubt(self) -> str:
        now = self._live.progress.attempts
        if self.last is None or self.last.attempt < now:
            return f"step {now:,} was not saved: steps fail, and its weights may be spoilt"
        return f"{_name(self.last)} was saved while steps failed, for want of an older one: its weights may be spoilt"

    def stopped(self, signal: str, planned: int) -> None:
        """End the run with what was last saved."""
        self.finish()
        if self.last is None or self.last.attempt < self._asked_for:
            if self._failure.for_its_numbers:
                raise self._stopped_without_numbers(signal, planned)
            raise StorageFailed(
                f"the run was asked to stop by {signal}, and its last state could not be saved: {self._failure}",
                allowed="a disk with room for a checkpoint",
                do="make room, and start the run again with the same command: it goes on from an earlier checkpoint",
            )
        newest = f"{self.last.attempt:,} of {planned:,}: saved as {_name(self.last)}"
        if self.doubt:
            newest = f"{self._live.progress.attempts:,} of {planned:,}: {self.doubt}; the newest is {_name(self.last)}"
        raise Stopped(f"stopped by {signal} at step {newest}", do="start it again with the same command to go on")

    def _stopped_without_numbers(self, signal: str, planned: int) -> HalfstepError:
        """The disk is well, and there was nothing to write: room on it would change nothing."""
        at = f"stopped by {signal} at step {self._live.progress.attempts:,} of {planned:,}"
        if self.last is None:
            return diverged(f"{at}, and nothing could be saved: the weights are not finite ({self._failure})")
        return Stopped(
            f"{at}: the newest checkpoint is {_name(self.last)}; "
            f"the state since then is not finite and was not kept ({self._failure})",
            do="start it again with the same command to go on from there; if that ends alike, change the recipe",
        )

    def _tell(self, told: Iterable[Saved]) -> None:
        for saved in told:
            if saved.failure is None:
                self.failures, self.last = 0, saved
                self._journal.tell(
                    events.SAVED,
                    file=f"{CHECKPOINTS}/{_name(saved)}",
                    what="checkpoint",
                    attempt=saved.attempt,
                    seconds=saved.seconds,
                    blocked=saved.blocked,
                    bytes=saved.bytes,
                )
            else:
                self._failed(saved)

    def _failed(self, saved: Saved) -> None:
        assert saved.failure is not None
        self._failure = saved.failure
        if saved.failure.for_its_numbers:
            text = f"no checkpoint of step {saved.attempt}: {saved.failure}; the earlier ones stay"
            self._journal.tell(events.NOTE, text=text, level="warning")
            return
        self.failures += 1
        text = f"no checkpoint of step {saved.attempt}: {saved.failure} ({self.failures} of {MOST_FAILURES} in a row)"
        self._journal.tell(events.NOTE, text=text, level="warning")
        if self.failures >= MOST_FAILURES:
            raise StorageFailed(
                f"{self.failures} checkpoints in a row could not be written, the last of step {saved.attempt}: "
                f"{saved.failure}",
                allowed="a disk that can be written to, with room for a checkpoint more than are kept",
                do="make room, and start the run again with the same command: it goes on from the last whole one",
            )


def _name(saved: Saved) -> str:
    return saved.generation.name if saved.generation is not None else "nothing"
