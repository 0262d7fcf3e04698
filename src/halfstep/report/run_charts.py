"""Choose the charts of a run, and of several runs over one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfstep.journal import numbers
from halfstep.journal.text import named
from halfstep.report.charts import Chart, Curve, Scale, line_chart
from halfstep.report.plain import known, number
from halfstep.report.recorded import Recorded
from halfstep.report.run_facts import RunFacts

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
    curves = run.recorded.curves
    return [word for name, word in names.items() if run.recorded.attempt and not any(map(known, curves[name]))]


def speed_of(run: RunFacts) -> list[Chart]:
    """Return the charts of the machine: throughput, waiting for data, and the GPU's work."""
    speeds = run.recorded.speeds
    x = [one.attempt for one in speeds]
    rate = Curve("samples/s", x, [one.samples_per_second for one in speeds])
    wait = Curve("share", x, [100 * one.wait_share for one in speeds])
    busy = Curve("share", x, [100 * number(one.gpu.get("utilisation")) for one in speeds])
    charts = [
        line_chart("Throughput", [rate], unit="samples/s", form=numbers.speed, scale="zero"),
        line_chart("Waiting for data", [wait], unit="% of the time", form=_percent, scale="zero"),
        line_chart("GPU utilisation", [busy], unit="%", form=_percent, scale="zero"),
    ]
    return [chart for chart in charts if chart is not None]


def memory_of(run: RunFacts) -> Chart | None:
    """Return the memory of the device and of the process while the run went on."""
    speeds, x = run.recorded.speeds, [one.attempt for one in run.recorded.speeds]
    mebibytes = {
        name: [number(one.memory.get(key)) / 2**20 for one in speeds]
        for name, key in (("on the device", "device_bytes"), ("of the process", "host_bytes"))
    }
    curves = [Curve(name, x, values, n == 1, n) for n, (name, values) in enumerate(mebibytes.items())]
    return line_chart("Memory while it ran", curves, unit="MiB", form=_mebibytes, scale="zero")


def headroom_of(run: RunFacts) -> Chart | None:
    """Return how many bits were left in the tightest module, as the guard's monitors sampled it."""
    found = [(one.attempt, number(one.meters.get("headroom_bits"))) for one in run.recorded.speeds]
    found = [one for one in found if known(one[1])]
    curve = Curve("tightest module", [at for at, _ in found], [bits for _, bits in found])
    return line_chart("Headroom", [curve], unit="bits to the format's end", form=_bits, scale="zero")


def compared(runs: Sequence[tuple[str, RunFacts]]) -> list[Chart]:
    """Return the curves of several named runs over one another."""
    numbered = list(enumerate(runs))
    loss = [
        Curve(name, run.recorded.attempt, smooth(run.recorded.curves["loss"]), color=n, dashed=n % 2 == 1)
        for n, (name, run) in numbered
    ]
    metric = [Curve(name, *_validated(run), color=n, dashed=n % 2 == 1) for n, (name, run) in numbered]
    charts = [
        line_chart("Training loss", loss, unit="mean of the steps around each"),
        line_chart(f"Validation {named(runs[0][1].metric)}", metric),
    ]
    for key in ("grad_norm", "lr"):
        curves = [
            Curve(name, run.recorded.attempt, smooth(run.recorded.curves[key]), color=n, dashed=n % 2 == 1)
            for n, (name, run) in numbered
        ]
        charts.append(line_chart(LABELS[key], curves, form=FORMS[key], scale=SCALES[key]))
    speed = [
        Curve(name, [s.attempt for s in r.recorded.speeds[1:]], [s.samples_per_second for s in r.recorded.speeds[1:]],
              color=n, dashed=n % 2 == 1)
        for n, (name, r) in numbered
    ]  # fmt: skip
    charts.append(line_chart("Throughput", speed, unit="samples/s", form=numbers.speed, scale="zero"))
    return [chart for chart in charts if chart is not None]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a fiftieth of the run before and after each number, so that curves can be told apart."""
    found = np.array(values, float)
    width = max(1, len(found) // 50)
    known_ = np.isfinite(found)
    ones = np.ones(2 * width + 1)
    sums = np.convolve(np.where(known_, found, 0.0), ones, "same")[: len(found)]
    counts = np.convolve(known_.astype(float), ones, "same")[: len(found)]
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return [float(one) for one in means]


def _loss(recorded: Recorded) -> Chart | None:
    epochs = [one for one in recorded.epochs if one.val]
    curves = [
        Curve("train", recorded.attempt, recorded.curves["loss"], color=TRAIN),
        Curve("val", [e.attempt for e in epochs], [number(e.val.get("loss")) for e in epochs], True, VAL),
    ]
    return line_chart("Loss", curves, skips=recorded.skips)


def _metric(run: RunFacts) -> Chart | None:
    if run.metric == "loss":
        return None
    epochs = run.recorded.epochs
    train = Curve("train", [e.attempt for e in epochs], [number(e.train.get(run.metric)) for e in epochs], color=TRAIN)
    return line_chart(named(run.metric), [train, Curve("val", *_validated(run), True, VAL)])


def _validated(run: RunFacts) -> tuple[list[float], list[float]]:
    found = [(one.attempt, number(one.val.get(run.metric))) for one in run.recorded.epochs if one.val]
    return [at for at, _ in found], [value for _, value in found]


def _steps(recorded: Recorded, name: str) -> Chart | None:
    skips = recorded.skips if name != "lr" else ()
    curve = Curve("each step", recorded.attempt, recorded.curves[name])
    return line_chart(LABELS[name], [curve], form=FORMS[name], skips=skips, scale=SCALES[name])


def _moves(recorded: Recorded, name: str) -> bool:
    """Return whether a curve is worth its place: without a loss scale, it is 1 all the way."""
    return name != "loss_scale" or any(known(value) and value != 1.0 for value in recorded.curves[name])


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _mebibytes(value: float) -> str:
    return f"{value:,.0f} MiB"


def _bits(value: float) -> str:
    return f"{value:.1f} bits"
