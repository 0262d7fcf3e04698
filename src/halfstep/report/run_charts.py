"""Choose the charts of a run, and of several runs over one another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from halfstep import numbers
from halfstep.draw.curves import (
    build_learning_rate_chart,
    build_loss_chart,
    build_loss_scale_chart,
    build_metric_chart,
    choose_metric_scale,
    has_loss_scale,
)
from halfstep.metric_names import format_metric_name
from halfstep.page import Curve, Curves
from halfstep.report.run_facts import RunFacts
from halfstep.report.run_journal import CurvePoints, find_curve_points

MOST_CLASSES = 8
"""Classes in one chart: as many as there are colors."""


def build_run_charts(run: RunFacts) -> list[Curves]:
    """Return the curves of a run: loss, metric, its classes, learning rate, loss scale and gradient norm."""
    recorded = run.recorded
    loss, rate, scale, norm = (_find_step_curve(run, name) for name in ("loss", "lr", "loss_scale", "grad_norm"))
    val = find_curve_points(recorded.epochs, "val.loss")
    skips = [(float(skip.attempt), skip.reason) for skip in recorded.skips]
    charts = [build_loss_chart(loss.xy, val.xy, skips, numbers.format_metric_value)]
    if run.metric != "loss":
        train, val = (find_curve_points(recorded.epochs, f"{part}.{run.metric}") for part in ("train", "val"))
        charts.append(build_metric_chart(run.metric, train.xy, val.xy, numbers.format_metric_value))
    charts += [_build_class_chart(run), build_learning_rate_chart(rate.xy, numbers.format_learning_rate)]
    if has_loss_scale(scale.y):
        charts.append(build_loss_scale_chart(scale.xy, skips, numbers.format_loss_scale))
    curve = (Curve("each step", *norm.xy),)
    charts.append(
        Curves("Gradient norm", curve, y_title="gradient norm", skips=skips, form=numbers.format_metric_value)
    )
    return charts


def _build_class_chart(run: RunFacts) -> Curves:
    """Return the metric of each class in validation; of many classes, those that ended lowest."""
    prefix = f"val.{run.metric}_"
    found = [(name.removeprefix(prefix), CurvePoints(curve)) for name, curve in run.recorded.epochs.items()
             if name.startswith(prefix)]  # fmt: skip
    lowest = sorted((one for one in found if one[1].y), key=lambda one: one[1].y[-1])[:MOST_CLASSES]
    curves = tuple(Curve(name, *points.xy, n % 2 == 1, n) for n, (name, points) in enumerate(lowest))
    which = f", lowest {MOST_CLASSES} of {len(found)}" if len(found) > MOST_CLASSES else ""
    title = f"Validation {format_metric_name(run.metric)} by class{which}"
    name, scale = format_metric_name(run.metric), choose_metric_scale(run.metric)
    return Curves(title, curves, y_title=name, scale=scale, form=numbers.format_metric_value)


def list_nonfinite_curves(run: RunFacts) -> list[str]:
    """Return the curves of steps in which no number was finite, so that nothing is drawn."""
    names = {"loss": "loss", "grad_norm": "gradient norm"}
    return [word for key, word in names.items() if run.recorded.attempts and not _find_step_curve(run, key).y]


def build_speed_charts(run: RunFacts) -> list[Curves]:
    """Return the charts of the machine: throughput, waiting for data, the GPU's work, and memory."""
    rate, wait, busy = (
        _find_speed_curve(run, name) for name in ("samples_per_second", "wait_share", "gpu.utilisation")
    )
    throughput = (Curve("samples/s", *rate.xy),)
    return [
        Curves("Throughput", throughput, y_title="samples/s", scale="zero", form=numbers.format_speed),
        Curves(
            "Waiting for data",
            (_build_percent_curve(wait),),
            y_title="% of the time",
            scale="zero",
            form=_format_percent,
        ),
        Curves(
            "GPU utilization",
            (_build_percent_curve(busy),),
            y_title="% of the time",
            scale="zero",
            form=_format_percent,
        ),
    ]


def _build_percent_curve(shares: CurvePoints) -> Curve:
    return Curve("share", shares.x, [100 * share for share in shares.y])


def build_memory_chart(run: RunFacts) -> Curves:
    """Return the memory of the device and of the process while the run went on."""
    names = {"on the device": "memory.device_bytes", "of the process": "memory.host_bytes"}
    found = [(name, _find_speed_curve(run, key)) for name, key in names.items()]
    curves = tuple(
        Curve(name, one.x, [value / 2**20 for value in one.y], n == 1, n) for n, (name, one) in enumerate(found)
    )
    return Curves("Memory while it ran", curves, y_title="MiB", scale="zero", form="{:,.0f} MiB".format)


def build_headroom_chart(run: RunFacts) -> Curves:
    """Return how many bits were left in the tightest module, as the guard's monitors sampled it."""
    bits = _find_speed_curve(run, "meters.headroom_bits")
    curve = Curve("tightest module", *bits.xy)
    return Curves("Headroom", (curve,), y_title="bits to the format's end", scale="zero", form="{:.1f} bits".format)


def build_comparison_charts(runs: Sequence[tuple[str, RunFacts]]) -> list[Curves]:
    """Return the curves of several named runs over one another."""
    metric = runs[0][1].metric

    def of_steps(title: str, key: str, **look: object) -> Curves:
        found = [(name, _find_step_curve(run, key)) for name, run in runs]
        curves = (Curve(name, one.x, compute_moving_mean(one.y), n % 2 == 1, n) for n, (name, one) in enumerate(found))
        return Curves(title, tuple(curves), **look)  # type: ignore[arg-type]

    def of_points(title: str, found: list[tuple[str, CurvePoints]], **look: object) -> Curves:
        curves = (Curve(name, *one.xy, n % 2 == 1, n) for n, (name, one) in enumerate(found))
        return Curves(title, tuple(curves), **look)  # type: ignore[arg-type]

    metrics = [(name, find_curve_points(run.recorded.epochs, f"val.{metric}")) for name, run in runs]
    speeds = [(name, _find_speed_curve(run, "samples_per_second")) for name, run in runs]
    return [
        of_steps("Training loss", "loss", y_title="loss, moving mean", form=numbers.format_metric_value),
        of_points(
            f"Validation {format_metric_name(metric)}",
            metrics,
            y_title=format_metric_name(metric),
            scale=choose_metric_scale(metric),
            form=numbers.format_metric_value,
        ),
        of_steps("Gradient norm", "grad_norm", y_title="gradient norm, moving mean", form=numbers.format_metric_value),
        of_steps("Learning rate", "lr", y_title="learning rate", scale="zero", form=numbers.format_learning_rate),
        of_points("Throughput", speeds, y_title="samples/s", scale="zero", form=numbers.format_speed),
    ]


def compute_moving_mean(given: Sequence[float]) -> list[float]:
    """Return the mean over a fiftieth of the run before and after each number, so that curves stay distinguishable."""
    reach = max(1, len(given) // 50)
    sums = [0.0, *accumulate(given)]
    spans = [(max(n - reach, 0), min(n + reach + 1, len(given))) for n in range(len(given))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def _find_step_curve(run: RunFacts, name: str) -> CurvePoints:
    return find_curve_points(run.recorded.steps, name)


def _find_speed_curve(run: RunFacts, name: str) -> CurvePoints:
    return find_curve_points(run.recorded.speeds, name)


def _format_percent(value: float) -> str:
    return f"{value:.1f} %"
