"""Check an object store for checkpoints: access, conditions, ranges, times, and its clock. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from halfstep.errors import StoreFailed
from halfstep.numbers import format_counted_noun
from halfstep.page import Instruction, Page, Pairs, Paragraph, Span, Text
from halfstep.store.address import StoreAddress, parse_address
from halfstep.store.failures import NO_RANGES
from halfstep.store.objects import Store

PATIENCE = 20.0
"""Seconds for which a failing request is repeated: a person waits for the answer."""
RANGE = 2**20
TIMES = 5
COUNTED = 1000
"""Objects that are counted: one request."""
SKEW = 5.0
"""Seconds of difference between two clocks that are reported; signatures fail at 15 minutes."""


@dataclass(frozen=True)
class StoreReport:
    """The result of the check; None for steps that were not reached."""

    address: str
    problem: str | None = None
    """Why checkpoints cannot be kept there, or None."""
    kind: str | None = None
    """The kind of the problem, such as `denied`, `unreachable` or `no-ranges`."""
    do: str = ""
    objects: int | None = None
    """Objects below the address, at most `COUNTED`."""
    put_seconds: float | None = None
    """The median time to write 1 MB."""
    read_seconds: float | None = None
    """The median time to read a range of 1 MB."""
    answers_ranges: bool | None = None
    honours_conditions: bool | None = None
    clock_skew: float | None = None
    """Seconds by which the clock of the store is ahead of this one, to about a second."""
    unfinished_uploads: int | None = None
    """Always None: the client library does not list them."""

    def page(self) -> Page:
        """Return the page: the verdict, then each result."""
        rows: list[tuple[str, Text]] = [("reachable", _format_yes(self.objects is not None))]
        if self.objects is not None:
            more = " or more" if self.objects >= COUNTED else ""
            rows[0] = ("reachable", f"yes, {format_counted_noun(self.objects, 'object')}{more} at this address")
        if self.put_seconds is not None:
            rows.append(("put of 1 MB", f"{1000 * self.put_seconds:,.0f} ms"))
        if self.answers_ranges is not None:
            rows.append(("ranges answered with 206", _format_yes(self.answers_ranges)))
        if self.read_seconds is not None:
            rows.append(("range of 1 MB", f"{1000 * self.read_seconds:,.0f} ms"))
        if self.honours_conditions is not None:
            alone = Span("no: unique names alone keep launches apart", "warn")
            rows.append(("conditions honored", "yes" if self.honours_conditions else alone))
        if self.clock_skew is not None:
            text = f"{self.clock_skew:+.0f} s"
            rows.append(("clock of the store", Span(text, "warn") if abs(self.clock_skew) > SKEW else text))
        rules: tuple[Instruction, ...] = ()
        if self.objects is not None and self.address.startswith("s3"):
            rows.append(("unfinished uploads", "not visible to this client, and cost money until a rule removes them:"))
            bucket = parse_address(self.address, "ADDRESS").bucket
            rules = (
                Instruction(f"aws s3api list-multipart-uploads --bucket {bucket}"),
                Instruction(_format_lifecycle_command(bucket)),
            )
        verdict = Span("this store can hold checkpoints", "good") if self.problem is None else Span(self.problem, "bad")
        blocks = [Paragraph(verdict), *([Paragraph(f"do: {self.do}", indent=True)] if self.problem else [])]
        return Page(f"store {self.address}", (*blocks, Pairs(tuple(rows), gap=True), *rules))


def _format_yes(is_so: bool) -> Text:
    return "yes" if is_so else Span("no", "bad")


def _format_lifecycle_command(bucket: str) -> str:
    rule = (
        '{"Rules":[{"ID":"unfinished","Status":"Enabled","Filter":{},'
        '"AbortIncompleteMultipartUpload":{"DaysAfterInitiation":2}}]}'
    )
    return f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration '{rule}'"


def check_store(address: StoreAddress, patience: float = PATIENCE) -> StoreReport:
    """Write, read and remove objects at the address, and return the findings."""
    found, key = StoreReport(str(address)), f"probe-{secrets.token_hex(8)}"
    content = os.urandom(2 * RANGE)
    try:
        store = Store(address, patience)
        found = replace(found, objects=len(store.list(most=COUNTED)))
        found = replace(found, put_seconds=_measure_median(lambda: store.put(key, content[:RANGE])))
        before = datetime.now(UTC)
        store.put(key, content)
        facts = store.size_and_tag(key)
        if facts is not None:
            found = replace(found, clock_skew=(facts.modified - before).total_seconds())
            seconds = _measure_median(lambda: store.read(key, RANGE // 2, RANGE, facts.tag))
            found = replace(found, answers_ranges=True, read_seconds=seconds)
        found = replace(found, honours_conditions=store.honors_conditions())
        store.delete(key)  # without the right to remove objects, old checkpoints would stay
        return found
    except StoreFailed as failure:
        if failure.kind == NO_RANGES:
            found = replace(found, answers_ranges=False)
        return replace(found, problem=failure.given, kind=failure.kind, do=failure.do)
    finally:
        if found.objects is not None:
            with contextlib.suppress(StoreFailed):
                store.delete(key)


def _measure_median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
