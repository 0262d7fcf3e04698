"""Choose the charts of a run, and of several runs over one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfstep.journal import numbers
from halfstep.journal.text import named
from halfstep.report.charts import Chart, Curve, Scale, line_chart
from halfstep.report.run_facts import RunFacts
from halfstep.report.run_journal import CurvePoints, Summary, curve_points

TRAIN, VAL = 0, 1
"""Places in the palette."""
LABELS = {"lr": "Learning rate", "loss_scale": "Loss scale", "grad_norm": "Gradient norm"}
SCALES: dict[str, Scale] = {"lr": "zero", "loss_scale": "log2", "grad_norm": "auto"}
FORMS = {"lr": numbers.rate, "loss_scale": numbers.scale, "grad_norm": numbers.value}


def curves_of(run: RunFacts) -> list[Chart]:
    """Return the charts of what was optimized: loss, metric, learning rate, loss scale and gradient norm."""
    recorded = run.recorded
    charts = [_loss(recorded), _metric(run), *(_steps(recorded, name) for name in LABELS if _moves(recorded, name))]
    return [chart for chart in charts if chart is not None]


def not_finite(run: RunFacts) -> list[str]:
    """Return the curves of steps in which no number was finite, so that nothing is drawn."""
    names = {"loss": "loss", "grad_norm": "gradient norm"}
    return [word for key, word in names.items() if run.recorded.attempts and not _of_steps(run.recorded, key).y]


def speed_of(run: RunFacts) -> list[Chart]:
    """Return the charts of the machine: throughput, waiting for data, and the GPU's work."""
    rate, wait, busy = (_speeds(run, name) for name in ("samples_per_second", "wait_share", "gpu.utilisation"))
    charts = [
        line_chart(
            "Throughput", [Curve("samples/s", rate.x, rate.y)], unit="samples/s", form=numbers.speed, scale="zero"
        ),
        line_chart("Waiting for data", [_in_percent(wait)], unit="% of the time", form=_percent, scale="zero"),
        line_chart("GPU utilisation", [_in_percent(busy)], unit="%", form=_percent, scale="zero"),
    ]
    return [chart for chart in charts if chart is not None]


def _in_percent(shares: CurvePoints) -> Curve:
    return Curve("share", shares.x, [100 * share for share in shares.y])


def memory_of(run: RunFacts) -> Chart | None:
    """Return the memory of the device and of the process while the run went on."""
    names = {"on the device": "memory.device_bytes", "of the process": "memory.host_bytes"}
    found = [(name, _speeds(run, key)) for name, key in names.items()]
    curves = [Curve(name, one.x, [value / 2**20 for value in one.y], n == 1, n) for n, (name, one) in enumerate(found)]
    return line_chart("Memory while it ran", curves, unit="MiB", form=_mebibytes, scale="zero")


def headroom_of(run: RunFacts) -> Chart | None:
    """Return how many bits were left in the tightest module, as the guard's monitors sampled it."""
    bits = _speeds(run, "meters.headroom_bits")
    curve = Curve("tightest module", bits.x, bits.y)
    return line_chart("Headroom", [curve], unit="bits to the format's end", form=_bits, scale="zero")


def compared(runs: Sequence[tuple[str, RunFacts]]) -> list[Chart]:
    """Return the curves of several named runs over one another."""
    metric = runs[0][1].metric
    charts = [
        line_chart(
            "Training loss", [_smoothed(n, *run, "loss") for n, run in enumerate(runs)], unit="mean of those around"
        ),
        line_chart(
            f"Validation {named(metric)}",
            [
                _one_of(n, name, curve_points(run.recorded.epochs, f"val.{metric}"))
                for n, (name, run) in enumerate(runs)
            ],
        ),
    ]
    for key in ("grad_norm", "lr"):
        curves = [_smoothed(n, *run, key) for n, run in enumerate(runs)]
        charts.append(line_chart(LABELS[key], curves, form=FORMS[key], scale=SCALES[key]))
    speed = [_one_of(n, name, _speeds(run, "samples_per_second")) for n, (name, run) in enumerate(runs)]
    charts.append(line_chart("Throughput", speed, unit="samples/s", form=numbers.speed, scale="zero"))
    return [chart for chart in charts if chart is not None]


def _one_of(n: int, name: str, found: CurvePoints) -> Curve:
    return Curve(name, found.x, found.y, n % 2 == 1, n)


def _smoothed(n: int, name: str, run: RunFacts, key: str) -> Curve:
    found = _of_steps(run.recorded, key)
    return Curve(name, found.x, smooth(found.y), n % 2 == 1, n)


def smooth(given: Sequence[float]) -> list[float]:
    """Return the mean over a fiftieth of the run before and after each number, so that curves can be told apart."""
    if not given:
        return []  # a run before its first step, or one without a finite loss
    found = np.array(given, float)
    ones = np.ones(2 * max(1, len(found) // 50) + 1)
    sums, counts = (np.convolve(one, ones, "same") for one in (found, np.ones_like(found)))
    # Of fewer numbers than the window is long, `same` has the length of the window.
    return [float(one) for one in (sums / counts)[: len(found)]]


def _loss(recorded: Summary) -> Chart | None:
    train, val = _of_steps(recorded, "loss"), curve_points(recorded.epochs, "val.loss")
    curves = [Curve("train", train.x, train.y, color=TRAIN), Curve("val", val.x, val.y, True, VAL)]
    return line_chart("Loss", curves, skips=_skips(recorded))


def _metric(run: RunFacts) -> Chart | None:
    if run.metric == "loss":
        return None
    train, val = (curve_points(run.recorded.epochs, f"{part}.{run.metric}") for part in ("train", "val"))
    curves = [Curve("train", train.x, train.y, color=TRAIN), Curve("val", val.x, val.y, True, VAL)]
    return line_chart(named(run.metric), curves)


def _steps(recorded: Summary, name: str) -> Chart | None:
    found = _of_steps(recorded, name)
    skips = _skips(recorded) if name != "lr" else []
    curve = Curve("each step", found.x, found.y)
    return line_chart(LABELS[name], [curve], form=FORMS[name], skips=skips, scale=SCALES[name])


def _skips(recorded: Summary) -> list[tuple[float, str]]:
    return [(float(skip.attempt), skip.reason) for skip in recorded.skips]


def _moves(recorded: Summary, name: str) -> bool:
    """Return whether a curve is worth its place: without a loss scale, it is 1 all the way."""
    return name != "loss_scale" or any(value != 1.0 for value in _of_steps(recorded, name).y)


def _of_steps(recorded: Summary, name: str) -> CurvePoints:
    return curve_points(recorded.steps, name)


def _speeds(run: RunFacts, name: str) -> CurvePoints:
    return curve_points(run.recorded.speeds, name)


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _mebibytes(value: float) -> str:
    return f"{value:,.0f} MiB"


def _bits(value: float) -> str:
    return f"{value:.1f} bits"
