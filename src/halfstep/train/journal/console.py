"""The live console: bars and numbers at the bottom of a terminal, everything else above them."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.train.journal import journal, numbers, words
from halfstep.train.journal.area import Clocks, area
from halfstep.train.journal.endings import TO_TYPE, ending
from halfstep.train.journal.journal import Event
from halfstep.train.journal.latest import Latest
from halfstep.train.journal.resuming import goes_on, resumed

REFRESHES_A_SECOND = 4
_LEVELS = {"info": "cyan", "warning": "yellow", "error": "bold red"}


class LiveConsole:
    """Hears cheaply and draws in a thread of its own, a few times a second, whatever the speed of the steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._latest = Latest()
        self._time = 0.0
        self._heard = self._measured = self._epoch_began = time.monotonic()
        self._live = Live(
            console=console, get_renderable=self._area, refresh_per_second=REFRESHES_A_SECOND, transient=True
        )

    def hear(self, event: Event) -> None:
        self._latest.hear(event)
        self._heard, self._time = time.monotonic(), event["time"]
        kind = event["event"]
        if kind == journal.STEP:
            if event["in_epoch"] <= 1:
                self._epoch_began = self._heard
            if not event["applied"]:
                self._tell_skip(event)
        elif kind == journal.SPEED:
            self._measured = self._heard
        elif kind != journal.EVALUATING:
            self._tell(kind, event)

    def recall(self, event: Event) -> None:
        self._latest.hear(event)

    def close(self) -> None:
        """The cursor comes back, also after an interruption."""
        self._live.stop()
        atexit.unregister(self.close)

    def _tell(self, kind: str, event: Event) -> None:
        if kind == journal.START:
            # An epoch that is taken up in its middle has no first step to start its clock.
            self._epoch_began = self._heard
            self._begin(event)
        elif kind == journal.EPOCH:
            self._print_summary(event)
        elif kind == journal.END:
            self.close()
            self._print_ending(event)
        elif kind == journal.OBSERVED:
            self._print(words.observed(event), "green")
        elif kind == journal.REPLACED:
            self._print(words.replaced(event), "yellow")
        elif kind == journal.GUARD:
            self._print_guard(event)
        elif kind == journal.NOTE:
            self._print(words.clean(event["text"]), "yellow" if event.get("level") == "warning" else "dim")

    def _begin(self, start: Event) -> None:
        self._print(f"halfstep train {words.clean(start['label'])}", "bold")
        for text, alarm in resumed(start):
            self._print(text, "yellow" if alarm else "cyan")
        self._print(words.precision(start), "bold green" if words.is_mixed(start["precision"]["chosen"]) else "bold")
        for line in words.why(start):
            self._print(line, "dim", indent=2)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for word, line in words.header(start):
            table.add_row(Text(word, style="dim"), Text(self._fitted(line)))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))
        if not goes_on(start):
            self._print("recipe", "dim", indent=2)
            for line in words.recipe(start):
                self._print(line, "dim", indent=4)
        for text, alarm in words.remarks(start):
            self._print(text, "yellow" if alarm else "dim")
        self._console.print()
        atexit.register(self.close)
        self._live.start()

    def _tell_skip(self, event: Event) -> None:
        nth = self._latest.skipped[event["reason"]]
        if event["reason"] != words.ORDINARY and words.is_told(nth):
            self._print(words.skip(event, nth), "yellow")

    def _print_guard(self, event: Event) -> None:
        first, *others = words.guard(event)
        self._print(first, _LEVELS.get(event.get("level", ""), "yellow"))
        for line in others:
            self._print(line.strip(), "dim", indent=2)

    def _print_summary(self, event: Event) -> None:
        title, *rows, closing = words.summary(event, self._latest.metric)
        text = Text(title, style="bold").append("".join(f"\n{row}" for row in rows), style="not bold")
        text.append(f"\n{self._fitted(closing)}", style="not bold green" if event.get("is_best") else "not bold dim")
        self._console.print(text, highlight=False)

    def _print_ending(self, event: Event) -> None:
        first, *others = ending(event, self._latest)
        self._console.print()
        self._print(first, "bold green" if event["reason"] in ("finished", "early_stopping") else "bold yellow")
        for line in others:
            if line.strip().startswith(TO_TYPE):
                # Unbroken, whatever the width: it is to be copied.
                self._console.print(Text(self._fitted(line), style="bold"), soft_wrap=True)
            else:
                self._print(line.strip(), indent=2)

    def _print(self, text: str, style: str = "", indent: int = 0) -> None:
        self._console.print(Padding(Text(self._fitted(text), style=style), (0, 0, 0, indent), expand=False))

    def _fitted(self, text: str) -> str:
        return words.fitted(text, self._console.encoding)

    def _area(self) -> Group:
        now = time.monotonic()
        since = now - self._measured
        left = numbers.real(self._latest.speed.get("seconds_left"))
        run = self._time + now - self._heard
        clocks = Clocks(run, now - self._epoch_began, math.nan if math.isnan(left) else max(left - since, 0.0))
        return Group(*area(self._latest, clocks, self._console.width, self._console.encoding))


def _give_back_streams() -> None:
    """In a forked worker of a loader: the area is the parent's, and so are the locks that drawing it would wait for."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_back_streams)
