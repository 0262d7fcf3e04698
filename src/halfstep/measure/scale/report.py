"""Build the report of `halfstep estimate --world`: layouts side by side, and the least that fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.batches import count_samples
from halfstep.measure.case import Case
from halfstep.measure.memory.devices import HERE, Target, device_named
from halfstep.measure.memory.estimate import estimate_device_ledger
from halfstep.measure.memory.fake_tensors import build_case_factory, convert_user_error
from halfstep.measure.memory.ledger import WORKING, Ledger
from halfstep.measure.memory.report import RECOMPUTE, WHERE_NEEDED, EstimateOptions, resolve_precision_names
from halfstep.measure.scale.counting import RankCounts, count_rank_bytes
from halfstep.measure.scale.layout import AUTO, DDP, FSDP, HSDP, RankLayout, list_layouts, resolve_ranks_and_nodes
from halfstep.measure.scale.page import LayoutCost, ScaleReport
from halfstep.measure.scale.traffic import (
    DeviceLinks,
    estimate_step_seconds,
    find_device_links,
    sum_link_traffic,
    sum_traffic_by_kind,
)
from halfstep.measure.scale.upkeep import compute_upkeep
from halfstep.measure.setting import StepSetting
from halfstep.numbers import format_bytes
from halfstep.precision.names import AUTO as OWN_PRECISION
from halfstep.status_line import OnProgress

MODELED = (
    "state and collectives are counted on a process group without peers; bytes in flight, bytes by link and seconds "
    "are a model, and none of it was measured on a cluster"
)
_PADDED = 1.05
"""Where shards hold more than this for each element of the model, the report says why."""


@dataclass(frozen=True)
class ScaleOptions:
    """The parameters of an estimate for several ranks."""

    estimate: EstimateOptions
    world: int
    nodes: int | None = None
    sharding: str = AUTO
    shard: int | None = None


def build_scale_report(
    make_case: Callable[[], Case], options: ScaleOptions, on_progress: OnProgress = lambda done, of: None
) -> ScaleReport:
    """Return the whole report. `on_progress` is called with the number of layouts counted and their total.

    Ctrl-C keeps the layouts that were counted, and passes on where none was.

    Raises `WrongUse` for numbers of ranks that cannot be, and with the line of the user's code where that code fails.
    """
    world, nodes = resolve_ranks_and_nodes(options.world, options.nodes)
    wanted = list_layouts(world, nodes, options.sharding, options.shard)
    target = device_named(_select_at_most_one(options.estimate.devices, "--device") or HERE)
    try:
        with warnings.catch_warnings():
            # FSDP2 warns of views that a model returns; nothing is computed from them here.
            warnings.simplefilter("ignore", UserWarning)
            make_case, case = build_case_factory(make_case)
            setting = _resolve_rank_setting(case, options.estimate, target)
            ledger = estimate_device_ledger(make_case, setting, target)
            rows: list[LayoutCost] = []
            interrupted = False
            try:
                _count_layouts(rows, make_case, setting, ledger, wanted, on_progress, target)
            except KeyboardInterrupt:
                if not rows:
                    raise
                interrupted = True
    except HalfstepError:
        raise
    except Exception as error:
        raise convert_user_error(error, (), "") or error from error
    taken, links = next((row for row in rows if row.fits), None), find_device_links(target.id)
    return ScaleReport(
        case=case.name,
        device=target,
        setting=setting,
        samples=ledger.samples * setting.microbatches * world,
        taken=taken,
        reason=explain_layout_choice(rows, taken, target, options.sharding, setting),
        layouts=tuple(rows),
        links=links,
        notes=(*_list_scale_notes(rows, links, target), *ledger.notes, MODELED),
        interrupted=interrupted,
    )


Given = TypeVar("Given")


def _select_at_most_one(given: Sequence[Given], name: str) -> Given | None:
    if len(given) > 1:
        raise WrongUse(
            f"{name} {','.join(map(str, given))} with --world", allowed=f"one {name}", do=f"{name} {given[0]}"
        )
    return given[0] if given else None


def _resolve_rank_setting(case: Case, options: EstimateOptions, target: Target) -> StepSetting:
    """Return the setting of every rank: the case's own, in the device's precision unless another was requested."""
    name = _select_at_most_one(options.precisions, "--precision") or OWN_PRECISION
    (precision,) = resolve_precision_names(target, replace(options, precisions=(name,)))
    batch = _select_at_most_one(options.batches, "--batch") or case.setting.batch or count_samples(case.batch)
    recompute = case.setting.recompute
    if options.recompute != WHERE_NEEDED:
        recompute = bool(_select_at_most_one(RECOMPUTE[options.recompute], "--recompute"))
    return replace(case.setting, precision=precision, batch=batch, recompute=recompute, compile=False)


def _count_layouts(
    rows: list[LayoutCost],
    make_case: Callable[[], Case],
    setting: StepSetting,
    ledger: Ledger,
    wanted: Sequence[RankLayout],
    on_progress: OnProgress,
    target: Target,
) -> None:
    """Count layouts from the least sharded on; larger groups of HSDP only until one fits."""
    links = find_device_links(target.id)
    for number, layout in enumerate(wanted, 1):
        larger = layout.sharding == HSDP and any(row.layout.sharding == HSDP for row in rows)
        if not (larger and any(row.fits for row in rows)):
            rows.append(_build_layout_cost(count_rank_bytes(make_case, setting, layout), ledger, target, links))
        on_progress(number, len(wanted))


def _build_layout_cost(counted: RankCounts, ledger: Ledger, target: Target, links: DeviceLinks | None) -> LayoutCost:
    is_whole, average = counted.layout.shard_size == 1, ledger.at_peak["average"]
    average = average if is_whole else counted.weights * bool(average)
    memory = (
        _compute_replicated_memory(counted, ledger) if is_whole else _compute_sharded_memory(counted, ledger, average)
    )
    crossed = sum_link_traffic(counted.collectives)
    return LayoutCost(
        counts=counted,
        memory=memory,
        fits=sum(memory.values()) <= target.usable,
        collectives=sum_traffic_by_kind(counted.collectives),
        bytes_inside=round(crossed.inside),
        bytes_between=round(crossed.between),
        seconds=estimate_step_seconds(counted, links, ledger.setting.microbatches),
        upkeep=compute_upkeep(counted, average),
    )


def _compute_replicated_memory(counted: RankCounts, ledger: Ledger) -> dict[str, int]:
    """Return the memory of one device, plus DDP's buckets."""
    parts = {part: size for part, size in ledger.at_peak.items() if part not in WORKING}
    working = sum(ledger.at_peak[part] for part in WORKING)
    return {**parts, "activations": working, "in flight": counted.in_flight}


def _compute_sharded_memory(counted: RankCounts, ledger: Ledger, average: int) -> dict[str, int]:
    """Return the memory of a rank at its peak: in backward, or in the update, where only shards are left."""
    backward, update = ledger.working + counted.in_flight, ledger.updating // counted.layout.shard_size
    late = update > backward
    return {
        "weights": counted.weights,
        "buffers": ledger.at_peak["buffers"],
        "average": average,
        "optimizer": counted.optimizer,
        "batch": ledger.at_peak["batch"],
        "gradients": counted.gradients,
        "activations": update if late else ledger.working,
        "in flight": 0 if late else counted.in_flight,
    }


def explain_layout_choice(
    rows: Sequence[LayoutCost], taken: LayoutCost | None, target: Target, sharding: str, setting: StepSetting
) -> str:
    """Return in a sentence why this layout is the one to take."""
    usable = format_bytes(target.usable)
    if taken is None:
        least = min(rows, key=lambda row: row.peak)
        ways = [] if setting.recompute else ["recompute activations"]
        ways += ["take a smaller batch"] if (setting.batch or 0) > 1 else []
        ways.append("shard over more ranks")
        return (
            f"none fits: {least.name} needs the least, {format_bytes(least.peak)} of the {usable} available to a rank; "
            f"{' or '.join(ways)}"
        )
    needs, layout = f"{format_bytes(taken.peak)} of the {usable} available to a rank", taken.layout
    if sharding != AUTO:
        return f"{taken.name} fits: {needs}"
    if layout.sharding == DDP:
        return f"{taken.name}: a full copy needs {needs}, so no parameters are sent"
    passed = rows[rows.index(taken) - 1]
    where = "inside a node" if layout.shard_size <= layout.per_node else "over nodes"
    return (
        f"{taken.name}: {passed.name} would take {format_bytes(passed.peak)}; sharded over "
        f"{layout.shard_size} ranks {where} it is {needs}"
    )


def _list_scale_notes(rows: Sequence[LayoutCost], links: DeviceLinks | None, target: Target) -> list[str]:
    notes = []
    for row in rows:
        if row.counts.padded > _PADDED:
            better = " hsdp with smaller shard groups avoids it" if row.layout.sharding == FSDP else ""
            notes.append(
                f"{row.name}: {row.counts.padded:.2f} times the model is stored and sent, because parameters with "
                f"fewer rows than ranks are padded;{better or ' take a smaller --shard-size'}"
            )
    if links is None:
        notes.append(f"no links are known for {target.id}, so that there are no seconds; see links.json")
    return notes
