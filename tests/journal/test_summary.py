"""The summary of a journal of any length: what a straightforward reader finds, in bounded space."""

from __future__ import annotations

import json
import math
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from halfstep.draw.thinning import MOST_POINTS, AttemptPoint, AttemptSpans, ThinnedCurve
from halfstep.errors import OtherForm
from halfstep.journal import jsonl, summary
from halfstep.journal.events import Event
from halfstep.journal.jsonl import JOURNAL, format_event_line, iterate_lines_backwards, parse_event
from halfstep.journal.summary import MOST_CURVES, MOST_EVENTS, MOST_SKIPS, STEP_CURVES, Summary, summarize
from halfstep.journal.thinning import MOST_NAMES, OTHER, Subsample, parse_journal_number
from tests.journal.told import end, epoch, note, speed, start, step, whole_run

# -- a straightforward reader -----------------------------------------------------------------------------------------


def plain_events(content: bytes) -> list[Event]:
    """The events of all complete lines, read by the standard parser."""
    found = []
    for line in content.split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            found.append(event)
    return found


def is_attempt(value: object) -> bool:
    return type(value) is int and 0 < value < 2**53


def last_word(events: list[Event]) -> list[tuple[int, Event]]:
    """Steps and what came after each; a restart, or a step with a lower number, takes back what it does again."""
    kept: list[tuple[int, Event]] = []
    at = 0
    for event in events:
        if event["event"] == "step":
            if not is_attempt(event.get("attempt")):
                continue
            at = event["attempt"]
            kept = [(place, other) for place, other in kept if place < at]
        elif event["event"] == "start":
            resumed = event.get("resumed")
            at = resumed["attempt"] if isinstance(resumed, dict) else 0
            if isinstance(resumed, dict):
                kept = [(place, other) for place, other in kept if place <= at]
            continue
        kept.append((at, event))
    return kept


def plain_points(axis: AttemptSpans, points: list[tuple[int, float]]) -> list[AttemptPoint]:
    """The extremes of every span and both ends, from a list of all points; of equal ones, the last."""
    finite = [AttemptPoint(*point) for point in points if math.isfinite(point[1])][::-1]
    spans: dict[int, list[AttemptPoint]] = {}
    for point in finite:
        spans.setdefault(max(0, (point.attempt - axis.first) // axis.width), []).append(point)
    kept = {pick(span, key=lambda point: point.value) for span in spans.values() for pick in (min, max)}
    return sorted(kept | set(finite[:1]) | set(finite[-1:]))


def assert_as_plain(found: Summary, content: bytes) -> None:
    events = plain_events(content)
    kept = last_word(events)
    steps = [event for _, event in kept if event["event"] == "step"]
    every = [event["attempt"] for event in events if event["event"] == "step" and is_attempt(event.get("attempt"))]
    assert (found.attempts, found.attempts + found.superseded) == (len(steps), len(every))
    assert found.last_attempt == (steps[-1]["attempt"] if steps else 0)
    assert found.applied == sum(bool(event.get("applied")) for event in steps)
    skips = [event for event in steps if not event.get("applied")]
    assert [(skip.attempt, skip.reason) for skip in found.skips] == [(e["attempt"], str(e["reason"])) for e in skips]
    if steps:
        assert found.axis == AttemptSpans.of(min(every[0], found.last_attempt), found.last_attempt)
    for name in STEP_CURVES if steps else ():
        points = [(event["attempt"], parse_journal_number(event.get(name))) for event in steps]
        assert found.steps[name].points == plain_points(found.axis, points)
        assert found.steps[name].not_finite == sum(not math.isfinite(value) for _, value in points)
    rates = [
        (at, parse_journal_number(event.get("samples_per_second"))) for at, event in kept if event["event"] == "speed"
    ]
    curve = found.speeds.get("samples_per_second")
    assert (curve.points if curve else []) == plain_points(found.axis, rates)
    assert [(at, one["text"]) for at, one in found.notes] == [
        (at, event["text"]) for at, event in kept if event["event"] == "note"
    ]
    assert found.launch_count == sum(event["event"] == "start" for event in events)
    assert found.start == next((event for event in events[::-1] if event["event"] == "start"), {})


# -- journals of all kinds --------------------------------------------------------------------------------------------


values = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, None, "NaN", "Infinity", "x", True, 10**400, [1.0]]),
)


@st.composite
def journals(draw: st.DrawFn) -> bytes:
    """Steps of a run that was restarted now and then, with damage of all kinds between its lines."""
    attempt, lines = draw(st.sampled_from([0, 0, 0, 900_000])), [format_event_line(start()).encode()]
    stretch = draw(st.sampled_from([1, 1, 97]))
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=40)):
        if kind in ("step", "skip", "strange"):
            attempt += stretch
            numbers = {name: draw(values) for name in STEP_CURVES}
            reason = draw(st.sampled_from(["gradient_overflow", "refused:\x1b[2J\u202e"])) if kind == "skip" else None
            event = step(attempt, reason, **numbers)
            strange = draw(st.sampled_from([None, True, 2.5, -1, 0, 2**60, "7"])) if kind == "strange" else attempt
            lines.append(format_event_line({**event, "attempt": strange}).encode("utf-8", "replace"))
        elif kind == "restart":
            attempt = draw(st.integers(0, attempt))
            lines.append(format_event_line(start(resumed={"attempt": attempt, "checkpoint": "step-1"})).encode())
        elif kind == "back":
            attempt = draw(st.integers(0, attempt))
        elif kind == "speed":
            lines.append(format_event_line(speed(samples_per_second=draw(values))).encode("utf-8", "replace"))
        elif kind == "note":
            lines.append(format_event_line(note(draw(st.text(max_size=5)))).encode("utf-8", "replace"))
        else:
            lines.append(draw(damage) + b"\n")
    content = b"".join(lines)
    return content[: len(content) - draw(st.sampled_from([0, 0, 1, 17]))]


KINDS = ["step", "step", "step", "step", "skip", "strange", "restart", "back", "speed", "note", "damage"]
damage = st.one_of(
    st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from([b"", b"\0\0\0", b"{}", b"[]", b'{"event":3}', b'{"event":["step"]}', b'{"event":"step"}']),
    st.sampled_from([b'{"event":"note","text":"\\ud800"}', b"[" * 5000, b'\xef\xbb\xbf{"event":"note","text":"bom"}']),
)


def write(folder: Path, content: bytes, cuts: list[int]) -> Path:
    """Write a journal in files that end after some of its lines, as one that has grown does."""
    begin = 0
    newlines = [i + 1 for i, byte in enumerate(content) if byte == 10]
    for end_of_line in sorted({newlines[cut % len(newlines)] for cut in cuts}) if newlines else ():
        (folder / f"journal.{begin:015d}.jsonl").write_bytes(content[begin:end_of_line])
        begin = end_of_line
    (folder / JOURNAL).write_bytes(content[begin:])
    return folder / JOURNAL


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(journals(), st.lists(st.integers(0, 100), max_size=2))
def test_it_is_what_a_straightforward_reader_finds(content: bytes, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_as_plain(summarize(write(Path(folder), content, cuts)), content)


# -- lines from the end -----------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.binary(max_size=30), max_size=8), st.integers(1, 20), st.integers(0, 10), st.lists(st.integers(0, 9))
)
def test_lines_from_the_end_are_the_lines(pieces: list[bytes], block: int, longest: int, cuts: list[int]) -> None:
    content = b"\n".join(pieces)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(jsonl, "_LARGE_BLOCK", block)
        # As it is: a line can be longer than a block that is read at once.
        longest += block
        patch.setattr(jsonl, "LARGEST_JSON", longest)
        found = list(iterate_lines_backwards(write(Path(folder), content, cuts[:2])))
    lines = content.split(b"\n")[:-1]
    assert found == [line if len(line) <= longest else b"" for line in lines[::-1]]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / JOURNAL).open("wb") as file:
        file.write(format_event_line(step(1)).encode())
        file.seek(3 * jsonl.LARGEST_JSON, 1)
        file.write(b"\n" + format_event_line(step(2)).encode() + b'{"event":"st')
    found = summarize(tmp_path / JOURNAL)
    assert (found.lines, found.damaged, found.attempts, found.last_attempt) == (3, 1, 2, 2)


# -- one line ---------------------------------------------------------------------------------------------------------


texts = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
        st.sampled_from([math.nan, math.inf, -math.inf, 10**400, 1e-320, 2**63, -(2**63) - 1, -0.0]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


def by_standard(line: bytes) -> Any:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), texts, max_size=3), st.booleans(), st.integers(0, 80), st.binary(max_size=2)
)
@example({"\ud800": 1}, True, 0, b"")
@example({"a": "\ud800\udc00"}, True, 0, b"\xef\xbb\xbf")
def test_a_line_is_read_as_the_standard_parser_reads_it(
    more: dict[str, Any], is_ascii: bool, at: int, other: bytes
) -> None:
    line = json.dumps({"event": "note", **more}, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    for one in (line, line[:at] + other + line[at:], line[:at] + other + line[at + len(other) :], line[:at]):
        assert repr(parse_event(one)) == repr(by_standard(one)), one


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"a","event":"b"}',
        b'{"event":1e400,"a":-1e400,"b":1E5,"c":-0,"d":0.1e-7}',
        b' \t{"event" : "a" } \r\n',
        b'{"event":"a","n":' + b"9" * 5000 + b"}",
        b'{"event":"a","n":01}',
        b'{"event":"a","n":NaN,"m":-Infinity,"o":Infinity}',
        b'{"event":"a\x01"}',
        b'{"event":"a","deep":' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"event":"a","deep":' + b"[" * 100_000,
        '{"event":"a"}'.encode("utf-16"),
        b'{"event":"\xff"}',
    ],
)
def test_lines_on_which_parsers_differ(line: bytes) -> None:
    assert repr(parse_event(line)) == repr(by_standard(line))


# -- bounds -----------------------------------------------------------------------------------------------------------


def told(folder: Path, *events: Event) -> Summary:
    (folder / JOURNAL).write_bytes(b"".join(format_event_line(event).encode("utf-8", "replace") for event in events))
    return summarize(folder / JOURNAL)


def test_a_long_run_keeps_few_points_with_the_one_spike(tmp_path: Path) -> None:
    steps = [step(n, loss=1.0 + math.sin(n) / 10, step=n) for n in range(1, 6001)]
    steps[4321]["loss"], steps[17]["loss"] = 1e9, -1e9
    loss = told(tmp_path, start(), *steps).steps["loss"]
    assert loss.count == 6000 > MOST_POINTS >= len(loss.points)
    assert {
        AttemptPoint(4322, 1e9),
        AttemptPoint(18, -1e9),
        AttemptPoint(1, steps[0]["loss"]),
        AttemptPoint(6000, steps[-1]["loss"]),
    } <= set(loss.points)
    assert len({loss.axis.bucket(point.attempt) for point in loss.points}) == 200, "no span of the run is empty"


def test_a_short_run_keeps_every_point(tmp_path: Path) -> None:
    steps = [step(n, loss=math.sin(n)) for n in range(1, 201)]
    assert told(tmp_path, start(), *steps).steps["loss"].points == [(n, math.sin(n)) for n in range(1, 201)]


def test_of_too_many_skips_counts_are_whole_and_rare_reasons_stay(tmp_path: Path) -> None:
    reasons = {n: "loss_not_finite" if n % 1500 == 0 else "gradient_overflow" for n in range(1, 4001)}
    found = told(tmp_path, start(), *(step(n, reason) for n, reason in reasons.items()))
    assert found.skipped == {"gradient_overflow": 3998, "loss_not_finite": 2}
    assert not found.are_all_skips_kept
    assert [skip.attempt for skip in found.skips if skip.reason == "loss_not_finite"] == [1500, 3000]
    many = [skip.attempt for skip in found.skips if skip.reason == "gradient_overflow"]
    assert MOST_SKIPS / 2 <= len(many) <= MOST_SKIPS + 1
    assert (many[0], many[-1]) == (1, 4000)
    assert max(b - a for a, b in pairwise(many)) <= 9, "evenly"


def test_names_and_texts_of_another_program_are_bounded(tmp_path: Path) -> None:
    skips = [step(n, f"reason {n} " + "x" * 5000) for n in range(1, 101)]
    metrics = [speed(train_metrics={f"{n} {m}" * 500: 1.0 for m in range(10)}) for n in range(50)]
    notes = [note("y" * 100_000) for _ in range(500)]
    found = told(tmp_path, start(), *skips, *metrics, *notes)
    assert sum(found.skipped.values()) == 100
    assert (len(found.skipped), found.skipped[OTHER]) == (MOST_NAMES, 100 - (MOST_NAMES - 1))
    assert max(map(len, found.skipped)) <= 200
    assert len(found.speeds) == MOST_CURVES
    assert len(found.notes) <= MOST_EVENTS + 1
    assert max(len(one.event["text"]) for one in found.notes) == 2000
    assert found.left_out == 0


def test_what_is_too_much_between_two_steps_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "LARGEST_BETWEEN", 1000)
    found = told(tmp_path, start(), step(1), *(note("z" * 100) for _ in range(100)), step(2), note("last"))
    assert (len(found.notes) + found.left_out, found.left_out > 80) == (101, True)
    assert found.notes[-1] == (2, {**found.notes[-1].event, "text": "last"})


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_a_sample_has_the_first_the_last_and_no_more_than_asked(count: int) -> None:
    sample: Subsample[int] = Subsample(8)
    for n in range(count):
        sample.add(n)
    assert sample.count == count
    assert sample.kept == sorted(set(sample.kept))
    assert len(sample.kept) == count if count <= 8 else 4 <= len(sample.kept) <= 9
    assert not count or (sample.kept[0], sample.kept[-1]) == (0, count - 1)


def test_points_that_are_not_numbers_leave_a_curve_empty() -> None:
    curve = ThinnedCurve(AttemptSpans.of(1, 10))
    curve.add_span([3, 2], [math.nan, math.inf])
    curve.add(1, math.nan)
    assert (curve.points, curve.count, curve.not_finite) == ([], 0, 3)


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp16", "nan", "no_val"])
def test_a_whole_run(tmp_path: Path, kind: str) -> None:
    events = whole_run(kind)
    found = told(tmp_path, *events)
    assert_as_plain(found, (tmp_path / JOURNAL).read_bytes())
    assert found.end["reason"] == "finished"
    assert found.skipped == found.end["skipped"]
    assert found.precision_check["share"] == 0.974
    assert (found.speed["samples_per_second"], found.epoch["epoch"]) == (123.4, 2)
    assert [point.attempt for point in found.epochs["train.iou"].points] == [20, 40]
    assert ("val.iou" in found.epochs) == (kind != "no_val")


def test_an_end_before_the_last_start_is_not_how_it_ended(tmp_path: Path) -> None:
    again = start(resumed={"attempt": 2, "checkpoint": "step-2"})
    found = told(tmp_path, start(), step(1), step(2), end(reason="stopped"), again, step(3))
    assert (found.end, found.launch_count, [one.attempt for one in found.launches]) == ({}, 2, [0, 2])


def test_the_least_headroom_of_a_module(tmp_path: Path) -> None:
    told_bits = [("a", 5.0), ("b", 2.0), ("a", 3.0), ("a", 4.0), ("c", "NaN")]
    meters = [speed(meters={"headroom_module": name, "headroom_bits": bits}) for name, bits in told_bits]
    steps = [step(n) for n in range(1, 6)]
    found = told(tmp_path, start(), *(one for pair in zip(steps, meters, strict=True) for one in pair))
    assert found.headroom == {"a": AttemptPoint(3, 3.0), "b": AttemptPoint(2, 2.0)}


def test_a_journal_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OtherForm):
        told(tmp_path, start(format=1), step(1))


def test_a_folder_without_a_journal_has_an_empty_summary(tmp_path: Path) -> None:
    found = summarize(tmp_path / JOURNAL)
    assert (found.lines, found.start, found.steps) == (0, {}, {})


def test_earlier_files_that_were_deleted_leave_the_rest_in_detail(tmp_path: Path) -> None:
    found = told(tmp_path, *(step(n) for n in range(900_000, 900_200)), epoch(3))
    assert (found.axis, found.steps["loss"].count) == (AttemptSpans(900_000, 1), 200)
    assert len(found.steps["loss"].points) == 200
