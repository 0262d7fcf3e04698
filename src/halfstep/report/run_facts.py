"""Gather what a report says of one run, in words: the verdict, its precision, figures, incidents and provenance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from halfstep import numbers
from halfstep.checkpoint.paths import list_generations
from halfstep.files import read_json
from halfstep.json_data import convert_to_json_data
from halfstep.metric_names import format_metric_name
from halfstep.recipe.strict_yaml import iterate_dotted_keys
from halfstep.report.examined import read_examination
from halfstep.report.json_fields import (
    coerce_mapping,
    coerce_number,
    coerce_rows,
    coerce_text,
    coerce_texts,
    format_typed_setting,
    is_known_number,
)
from halfstep.report.run_journal import Summary, find_curve_points, read_journal
from halfstep.runs.listing import FINISHED, GIVEN_UP, KILLED, RUNNING, STATUS, STOPPED, RunState, read_run_state
from halfstep.train.run_folder import RESULT, find_recipe_file

NOT_RECORDED, NONE_YET = "not recorded", "no evaluation"
FAILED_STEPS = "failed_steps"
Pairs = list[tuple[str, str]]
"""Rows of two cells: what, and its value in words."""


@dataclass(frozen=True)
class RunFacts:
    """One run, as plain data and words."""

    folder: Path
    recorded: Summary
    state: RunState
    result: dict[str, Any]
    examined: dict[str, Any] = field(default_factory=dict)
    """What `halfstep report --examine` found about the model; empty where nothing was."""

    @property
    def start(self) -> dict[str, Any]:
        return self.recorded.start

    @property
    def label(self) -> str:
        """Return the name of the run's recipe."""
        return coerce_text(self.start.get("label"), 120) or self.folder.name

    @property
    def precision(self) -> dict[str, Any]:
        return coerce_mapping(self.start.get("precision"))

    @property
    def metric(self) -> str:
        """Return the name of the metric that decides."""
        return coerce_text(coerce_mapping(self.start.get("metric")).get("name"), 60) or "loss"

    @property
    def higher_is_better(self) -> bool:
        return bool(coerce_mapping(self.start.get("metric")).get("higher_is_better"))

    @property
    def recipe(self) -> dict[str, str]:
        """Return all settings by their keys."""
        return {
            key: format_typed_setting(value)
            for key, value in iterate_dotted_keys(coerce_mapping(self.start.get("recipe")))
        }

    @property
    def samples_per_second(self) -> float:
        """Return the median over epochs, without the first, which includes warm-up; NaN if there is none."""
        of_epochs = find_curve_points(self.recorded.epochs, "samples_per_second").median
        return (
            of_epochs
            if is_known_number(of_epochs)
            else find_curve_points(self.recorded.speeds, "samples_per_second").median
        )

    @property
    def wait_share(self) -> float:
        """Return the median share of time spent waiting for data; NaN where it was not measured."""
        return find_curve_points(self.recorded.speeds, "wait_share").median

    @property
    def best(self) -> tuple[float, float]:
        """Return the best value of the metric and its epoch; NaN if there is none."""
        # A run that ended in an error has none in its last line, and an earlier launch may have left a result.
        told = [coerce_mapping(event.get("best")) for event in (self.recorded.end, self.recorded.epoch, self.result)]
        best = next(filter(None, told), {})
        return coerce_number(best.get("value")), coerce_number(best.get("epoch"))

    @property
    def final(self) -> float:
        """Return the metric of the last evaluation; NaN if there is none."""
        found = coerce_number(coerce_mapping(self.recorded.end.get("metrics")).get(self.metric))
        last = find_curve_points(self.recorded.epochs, f"val.{self.metric}").y[-1:]
        return found if is_known_number(found) or not last else last[0]

    @property
    def why(self) -> str:
        """Return how the run came to its end, in full; empty if it did not."""
        return coerce_text(self.recorded.end.get("error")) or self.state.why

    @property
    def do(self) -> str:
        """Return what to type after the run's end, as its last line says it; empty if it says nothing."""
        return coerce_text(self.recorded.end.get("do"), 500)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is added to the run unless it is started again."""
        return self.state.word != RUNNING

    @property
    def verdict(self) -> str:
        """Return the run in one sentence."""
        share = coerce_number(self.recorded.precision_check.get("share"))
        observed = f" ({numbers.format_percent(share)} of the FLOPs)" if is_known_number(share) else ""
        steps = f"in {self.chosen}{observed}, {_describe_run_skips(self.recorded)}"
        reason = _shorten_reason(self)
        if reason:
            return f"{_describe_state(self)}{f', {steps}' if self.recorded.last_attempt else ''}: {reason}."
        return f"{_describe_state(self)}: {_describe_outcome(self)}, {steps}."

    @property
    def chosen(self) -> str:
        return coerce_text(self.precision.get("chosen"), 40) or "a precision that was not recorded"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can represent."""
        return {
            "kind": "run",
            "run": str(self.folder),
            "label": self.label,
            "state": self.state.word,
            "why": self.why,
            "verdict": self.verdict,
            "precision": dict(build_precision_rows(self)),
            "figures": dict(build_figure_rows(self)),
            "skipped": dict(self.recorded.skipped),
            "incidents": convert_to_json_data(collect_incidents(self)),
            "provenance": dict(build_provenance_rows(self)),
            "recipe": self.recipe,
            "examined": sorted(self.examined),
        }


def read_run_facts(folder: Path) -> RunFacts:
    """Return the facts of the run in `folder`.

    Raises BadData if it holds no run, or one that wrote nothing that can be read.
    """
    find_recipe_file(folder)
    recorded = read_journal(folder, coerce_text(coerce_mapping(read_json(folder / STATUS)).get("reason"), 300))
    result = coerce_mapping(read_json(folder / RESULT))
    return RunFacts(folder, recorded, read_run_state(folder, recorded.end), result, read_examination(folder))


def format_metric_in_sentence(metric: str) -> str:
    """Return a metric as it stands within a sentence: `IoU`, and `loss`."""
    found = format_metric_name(metric)
    return metric if found == metric.capitalize() else found


def _describe_state(run: RunFacts) -> str:
    steps, planned = run.recorded.last_attempt, coerce_number(run.start.get("steps"))
    at = f"step {steps:,.0f}" + (f" of {planned:,.0f}" if is_known_number(planned) else "")
    words = {
        FINISHED: "Finished" if run.recorded.end.get("reason") != "early_stopping" else f"Stopped early at {at}",
        STOPPED: f"Stopped at {at}, and can be resumed",
        GIVEN_UP: f"Gave up at {at}",
        KILLED: f"Killed at {at}",
        RUNNING: f"Running, at {at}",
    }
    if not steps:
        return "Still before its first step" if run.state.word == RUNNING else "Ended before its first step"
    return words.get(run.state.word, f"Failed at {at}")


def _describe_outcome(run: RunFacts) -> str:
    value, epoch = run.best
    if is_known_number(value):
        when = f" (epoch {epoch:.0f})" if is_known_number(epoch) else ""
        best = f"best {format_metric_in_sentence(run.metric)} {numbers.format_metric_value(value)}{when}"
        return f"{best} after {numbers.format_duration(run.recorded.seconds)}"
    last = (
        f"last {format_metric_in_sentence(run.metric)} {numbers.format_metric_value(run.final)}"
        if is_known_number(run.final)
        else NONE_YET
    )
    return f"{last} after {numbers.format_duration(run.recorded.seconds)}"


def _shorten_reason(run: RunFacts) -> str:
    """Return the first clause of the reason for which a run without a result ended; the page has all of it."""
    if is_known_number(run.best[0]) or run.state.word in (FINISHED, RUNNING):
        return ""
    ends = [at for mark in (". ", "; ", "\n") if (at := run.why.find(mark)) > 0]
    return coerce_text(run.why[: min(ends, default=len(run.why))], 300).rstrip(".")


def _describe_run_skips(recorded: Summary) -> str:
    total = sum(recorded.skipped.values())
    if not total:
        return "no step skipped"
    most = sorted(recorded.skipped.items(), key=lambda item: (-item[1], item[0]))[:3]
    reasons = ", ".join(f"{count:,} × {reason.replace('_', ' ')}" for reason, count in most)
    return f"{total:,} of {recorded.attempts:,} steps skipped ({reasons})"


def build_precision_rows(run: RunFacts) -> Pairs:
    """Return the requested precision, the chosen one with the reason, and the observed one."""
    found = run.precision
    asked = coerce_text(found.get("asked"), 80) or NOT_RECORDED
    took = coerce_text(found.get("took"), 80)
    observed = coerce_text(run.recorded.precision_check.get("text"), 200)
    return [
        ("Requested", f"{asked}, read as {took}" if took else asked),
        ("Chosen", f"{run.chosen}: {coerce_text(found.get('summary'), 300)}".rstrip(": ")),
        ("Why", "; ".join(coerce_texts(found.get("reasons"))) or NOT_RECORDED),
        ("Observed", observed or f"{NOT_RECORDED}: no step was watched to its end"),
    ]


def build_figure_rows(run: RunFacts) -> Pairs:
    """Return the figures of the run."""
    recorded, rate, wait = run.recorded, run.samples_per_second, run.wait_share
    value, epoch = run.best
    pairs = [
        ("Steps", f"{recorded.applied:,} applied, {sum(recorded.skipped.values()):,} skipped"),
        (
            f"Best {format_metric_in_sentence(run.metric)}",
            f"{numbers.format_metric_value(value)}, epoch {epoch:.0f}" if is_known_number(value) else NONE_YET,
        ),
        (
            f"Last {format_metric_in_sentence(run.metric)}",
            numbers.format_metric_value(run.final) if is_known_number(run.final) else NONE_YET,
        ),
        ("Time", numbers.format_duration(recorded.seconds)),
        ("Throughput", f"{numbers.format_speed(rate)} samples/s" if is_known_number(rate) else "not measured"),
        ("Waiting for data", numbers.format_percent(wait) if is_known_number(wait) else "not measured"),
        (
            "Checkpoints",
            f"{recorded.checkpoints:,} written, {len(list_generations(run.folder / 'checkpoints')):,} kept",
        ),
    ]
    return pairs + ([("Launches", f"{recorded.launch_count:,}")] if recorded.launch_count > 1 else [])


def build_provenance_rows(run: RunFacts) -> Pairs:
    """Return where the run came from: enough to make it again."""
    start, recorded = run.start, run.recorded
    device, batch = coerce_mapping(start.get("device")), coerce_mapping(start.get("batch"))
    parameters, samples = coerce_mapping(start.get("parameters")), coerce_mapping(start.get("samples"))
    found = coerce_mapping(start.get("git"))
    pairs: list[tuple[str, object]] = [
        ("Command", start.get("command")),
        ("Ranks", _describe_ranks(batch)),
        ("Folder", run.folder),
        ("Device", device.get("name")),
        ("Host", start.get("host")),
        ("Job", start.get("job") or "none"),
        ("Versions", _list_values(start.get("versions"))),
        ("Flags", _list_values(start.get("flags"))),
        ("Git", f"{found.get('commit')} ({found.get('branch') or 'no branch'})" if found else ""),
        ("Batch", f"{batch.get('total')} samples a step" if batch else None),
        ("Samples", _list_values(samples)),
        ("Parameters", f"{numbers.format_short_count(coerce_number(parameters.get('total')))}" if parameters else None),
        ("Began", recorded.first_utc),
        ("Last line", recorded.last_utc),
        ("Weights", run.result.get("weights") and f"sha256 {run.result['weights']}"),
        ("Notes", "; ".join(coerce_texts(start.get("notes"))) or "none"),
    ]
    return [(name, coerce_text(value, 1000) or NOT_RECORDED) for name, value in pairs]


def _describe_ranks(batch: dict[str, Any]) -> str:
    ranks = coerce_number(batch.get("devices"))
    if not is_known_number(ranks):
        return ""
    return f"{ranks:.0f}, each with this command" if ranks > 1 else "1"


def _list_values(value: object) -> str:
    return ", ".join(f"{key} {inner}" for key, inner in coerce_mapping(value).items())


MOST_BAD_SAMPLES = 20
"""Samples that are listed; all are counted."""


@dataclass
class Incident:
    """A failed step with the verdict of its replay, or another notable event, and the action taken."""

    json_keys: ClassVar = ("attempt", "cause", "sentence", "culprit", "remedies", "evidence", "done=all_done", "replay")

    attempt: int | None
    cause: str
    sentence: str
    culprit: Pairs = field(default_factory=list)
    remedies: Pairs = field(default_factory=list)
    """Remedies that the replay tried, and whether they work."""
    evidence: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    do: str = ""
    """What to type, of a run that was given up."""
    replay: str = ""
    ended_run: bool = False
    """Whether the run was given up for this cause."""

    @property
    def all_done(self) -> list[str]:
        """Return the actions taken, and the command to type."""
        return [*self.done[:-1], f"{self.done[-1]}; to do: {self.do}"] if self.do else self.done


def collect_incidents(run: RunFacts) -> list[Incident]:
    """Return the failed steps with the verdict of their replay, the action taken on each, and unusable samples."""
    kept = {one.attempt for one in list_generations(run.folder / FAILED_STEPS)}
    found: list[Incident] = []
    for _, event in run.recorded.guard:
        facts = coerce_mapping(event.get("facts"))
        if event.get("kind") == "verdict":
            found.append(_build_incident(run, facts, coerce_text(event.get("text")), kept))
        elif found and event.get("kind") in ("remedy", "probation"):
            found[-1].done.append(coerce_text(event.get("text")))
        else:
            found.append(Incident(None, coerce_text(event.get("kind"), 40), coerce_text(event.get("text"))))
    if found and run.state.word == GIVEN_UP:
        found[-1].done.append("the run gave up")
        found[-1].do = run.do
        found[-1].ended_run = found[-1].cause == _format_cause(run.recorded.end)
    for incident in found:
        incident.done = incident.done or ["the step was skipped: the weights are unchanged"]
    return [*found, *_list_bad_samples(run.recorded)]


def _list_bad_samples(recorded: Summary) -> list[Incident]:
    kept, uses = recorded.bad_samples, recorded.bad_sample_count
    if not uses:
        return []
    # A bad sample comes again in every epoch. Of very many events only some are kept.
    times = Counter(
        f"{coerce_text(event.get('name'), 200)}: {coerce_text(event.get('reason'), 300)}" for _, event in kept
    )
    lines = [sample if n == 1 else f"{sample} ({n} times)" for sample, n in times.most_common(MOST_BAD_SAMPLES)]
    more = [f"and {len(times) - len(lines):,} more"] if len(times) > len(lines) else []
    replaced = sum(coerce_number(event.get("replacement")) >= 0 for _, event in kept)
    done = ["each was replaced by another sample"] if replaced else []
    done += ["those of the evaluation were skipped"] if replaced < len(kept) else []
    samples = f"{'at least ' if len(kept) < uses else ''}{numbers.format_counted_noun(len(times), 'sample')}"
    sentence = f"{samples} could not be used" + (f", {uses:,} times in all" if uses > len(times) else "")
    return [Incident(None, "bad samples", sentence, evidence=[*lines, *more], done=done)]


def _build_incident(run: RunFacts, facts: dict[str, Any], said: str, kept: set[int]) -> Incident:
    attempt = coerce_number(facts.get("attempt"))
    is_kept = is_known_number(attempt) and int(attempt) in kept
    return Incident(
        int(attempt) if is_known_number(attempt) else None,
        _format_cause(facts),
        said.removeprefix(f"{facts.get('cause')}: "),
        _describe_culprit(coerce_mapping(facts.get("culprit"))),
        [_describe_remedy(remedy) for remedy in coerce_rows(facts.get("remedies"))],
        coerce_texts(facts.get("evidence")),
        replay=f"halfstep replay {run.folder} --attempt {int(attempt)}" if is_kept else "",
    )


def _format_cause(facts: dict[str, Any]) -> str:
    return coerce_text(facts.get("cause"), 40).replace("_", " ")


def _describe_culprit(found: dict[str, Any]) -> Pairs:
    if not found:
        return []
    pairs = [
        ("Operation", coerce_text(found.get("operation")) or coerce_text(found.get("outside"))),
        ("Module", coerce_text(found.get("module")) or "the model's own forward"),
        ("Line", coerce_text(found.get("line")) or "not known"),
        ("Largest input", numbers.format_number(coerce_number(found.get("largest_input")))),
        (
            "Limit of the format",
            f"{numbers.format_number(coerce_number(found.get('limit')))} in {coerce_text(found.get('format'), 20)}",
        ),
    ]
    return [(name, value) for name, value in pairs if value]


def _describe_remedy(remedy: dict[str, Any]) -> tuple[str, str]:
    works = {"True": "finite with it", "False": "not finite with it either"}.get(str(remedy.get("works")), "not tried")
    kind, target = coerce_text(remedy.get("kind"), 40).replace("_", " "), coerce_text(remedy.get("target"), 200)
    # The remedy of a divergence has its words as target.
    return (target if remedy.get("kind") == "lower_rate" else f"{kind} {target}".strip()), works
