"""Build the report of `halfstep estimate` as plain data, piece by piece, so that Ctrl-C keeps the results so far."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from halfstep.errors import HalfstepError, PrecisionRefused, UnknownName, WrongUse
from halfstep.host_memory import free_memory
from halfstep.measure.batches import size_of, taken_as_samples
from halfstep.measure.case import Case
from halfstep.measure.memory.devices import HERE, Target, device_named, own_choice
from halfstep.measure.memory.estimate import ledger_on
from halfstep.measure.memory.fake_tensors import MakeCase, as_wrong_use, in_one_line, made_once
from halfstep.measure.memory.fitting import MOST, MakeLedger, largest_batch, levers
from halfstep.measure.memory.ledger import Ledger, way_in_words
from halfstep.measure.setting import StepSetting, size_in_words
from halfstep.measure.subject import Subject
from halfstep.precision.names import AMP, AUTO, FP8, read_precision
from halfstep.precision.precision import precision_named
from halfstep.status_line import OnProgress

# -- verdict ----------------------------------------------------------------------------------------------------------
# Summarize an estimate: whether it fits, what would make it fit, and why memory is not halved.


_HALF = 0.45
"""Savings above this share count as half."""


def verdict(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line for each device, the savings, and the setting to use on the first device."""
    lines = [_line(page) for page in report["devices"]]
    return {
        "lines": lines or ["nothing was estimated"],
        "savings": [row for page in report["devices"][:1] for row in savings(page["columns"])],
        "take": _take(report["devices"][0]) if lines else None,
    }


def main_column(page: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the column of the first line: the device's own precision at the first batch, run as the case is."""
    columns = page["columns"]
    if not columns:
        return None
    own = [column for column in columns if column["setting"]["precision"] == page["auto"]]
    first: Mapping[str, Any] = (own or columns[-1:])[0]
    return first


def place_in_words(device: Mapping[str, Any]) -> str:
    """Return the device's id, or "this machine"."""
    return "this machine" if device["id"] == HERE else str(device["id"])


def _line(page: Mapping[str, Any]) -> str:
    column = main_column(page)
    if column is None:
        return f"{place_in_words(page['device'])}: nothing was estimated"
    setting, device = column["setting"], page["device"]
    how = way_in_words(setting["precision"], setting["recompute"], column["samples"])
    word = "fits" if column["fits"] else "does not fit"
    if column["by_cpu_rules"]:
        word += ", by the CPU's rules"
    peak, memory = size_in_words(column["peak"]), size_in_words(device["memory"])
    return f"{word}: peak {peak} of {memory} on {place_in_words(device)} {how}{_farther(page, setting)}"


def _farther(page: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
    rows = {row["recompute"]: row for row in page["largest"] if row["precision"] == setting["precision"]}
    row = rows.get(setting["recompute"])
    if row is None:
        return ""
    if row["batch"]:
        return f"; {reach(row)}"
    fitting = [lever for lever in row["levers"] if lever["fits"]]
    short = f"; even {row['smallest']} is {size_in_words(row['missing'])} too much"
    return f"{short}, but {_way(fitting[0])} fits" if fitting else f"{short}, however it is run"


def reach(row: Mapping[str, Any]) -> str:
    """Return the largest batch as text, for a row where some batch fits."""
    if row["at_least"]:
        return f"no limit found up to batch {row['batch']}"
    return f"largest batch about {row['batch']}, which fits" if row["about"] else f"largest batch {row['batch']}"


def _way(lever: Mapping[str, Any]) -> str:
    return f"{lever['precision']}{' with recomputing' if lever['recompute'] else ''}"


def savings(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the savings of each column against fp32 with the same batch, and the reason where they are below half."""
    wide = {_kind(column): column for column in columns if column["setting"]["precision"] == "fp32"}
    rows = []
    for column in columns:
        base = wide.get(_kind(column))
        if base is not None and base is not column and base["peak"]:
            saved = 1 - column["peak"] / base["peak"]
            rows.append({**_column_named(column), "saved": round(saved, 4), "why": _why(column, base, saved)})
    return rows


def _kind(column: Mapping[str, Any]) -> tuple[int, bool]:
    return column["samples"], column["setting"]["recompute"]


def _column_named(column: Mapping[str, Any]) -> dict[str, Any]:
    setting = column["setting"]
    return {"precision": setting["precision"], "batch": column["samples"], "recompute": setting["recompute"]}


def _why(column: Mapping[str, Any], base: Mapping[str, Any], saved: float) -> str:
    """Return the notes of this column that fp32's does not have: what did not shrink."""
    return "" if saved >= _HALF else "; ".join(note for note in column["notes"] if note not in base["notes"])


def _take(page: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the setting to train with: as requested if it fits, else the largest batch of the first row that fits."""
    column = main_column(page)
    if column is None:
        return None
    if column["fits"]:
        return _column_named(column)
    own = [row for row in page["largest"] if row["precision"] == page["auto"]]
    for row in [*own, *page["largest"]]:
        if row["batch"]:
            batch = row["preferred"] or row["batch"]
            return {"precision": row["precision"], "batch": batch, "recompute": row["recompute"]}
    return None


# -- report -----------------------------------------------------------------------------------------------------------


WHERE_NEEDED = "auto"
RECOMPUTE = {"both": (False, True), "off": (False,), "on": (True,)}
_MANY_MODULES = 100
"""With more modules a ledger takes seconds, so the largest batch is only searched approximately."""
_NEAR = 0.1
_WIDE = "fp32"


@dataclass(frozen=True)
class EstimateOptions:
    """The parameters of an estimate. Raises `UnknownName` for `recompute` and `WrongUse` for a batch out of range."""

    devices: tuple[str, ...] = ()
    """This machine, if empty."""
    precisions: tuple[str, ...] = ()
    """fp32 and the device's own choice, if empty."""
    batches: tuple[int, ...] = ()
    """The case's own batch, if empty."""
    recompute: str = WHERE_NEEDED
    """By default as the case does, with a recomputing column added where that does not fit."""
    search: bool = True
    """Whether to search for the largest batch."""

    def __post_init__(self) -> None:
        if self.recompute not in (WHERE_NEEDED, *RECOMPUTE):
            raise UnknownName(
                f"recompute {self.recompute!r}",
                allowed=", ".join((WHERE_NEEDED, *RECOMPUTE)),
                do="--recompute both, or leave it out",
            )
        wrong = [batch for batch in self.batches if not 1 <= batch <= MOST]
        if wrong:
            raise WrongUse(f"a batch of {wrong[0]}", allowed=f"1 sample or more, up to {MOST}", do="--batch 8")


def report_of(
    make_case: MakeCase, options: EstimateOptions, on_progress: OnProgress = lambda done, of: None
) -> dict[str, Any]:
    """Return the whole report. `on_progress` is called with the number of pieces done and their total.

    Raises `WrongUse` with the line of the user's code where that code fails.
    """
    targets = [device_named(name) for name in options.devices or (HERE,)]
    plans = [(target, precisions(target, options)) for target in targets]
    report: dict[str, Any] = {"case": "", "devices": [], "interrupted": False}
    # torch logs a full traceback for a shape mismatch; the error below says it in one line.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True
    try:
        make_case, case = made_once(make_case)
        report["case"] = case.name
        making = _Making(make_case, case, options, on_progress, sum(2 * len(names) for _, names in plans))
        for target, names in plans:
            report["devices"].append(_page(target, names))
            making.fill(report["devices"][-1], target)
    except KeyboardInterrupt:
        report["interrupted"] = True
    except HalfstepError:
        raise
    except Exception as error:
        raise as_wrong_use(error, (), "") or error from error
    finally:
        log.disabled = silent
    report["verdict"] = verdict(report)
    return report


def precisions(target: Target, options: EstimateOptions) -> list[str]:
    """Return the names without repetition, in the order given."""
    names = [_named(text, target) for text in options.precisions or (_WIDE, AUTO)]
    return list(dict.fromkeys(names))


def _named(text: str, target: Target) -> str:
    name = read_precision(text).name
    if name == FP8:
        raise PrecisionRefused(
            f"{text}: no run computes in fp8 yet, so that there is no memory to estimate",
            allowed="fp32, tf32, bf16, fp16, auto",
            do="--survive fp8_e4m3 tells whether a model would survive it",
        )
    return own_choice(target, name) if name in (AUTO, AMP) else name


def _page(target: Target, names: list[str]) -> dict[str, Any]:
    return {
        "device": target.as_dict(),
        "auto": own_choice(target),
        "abilities": {name: _ability(target, name) for name in names},
        "columns": [],
        "refused": [],
        "largest": [],
        "not_searched": [],
    }


def _ability(target: Target, name: str) -> dict[str, Any]:
    can = target.ability(precision_named(name).computes.name)
    return {"native": None if target.device.kind == "other" else can.native, "reason": can.reason}


@dataclass
class _Making:
    make_case: MakeCase
    case: Case
    options: EstimateOptions
    on_progress: OnProgress
    pieces: int
    done: int = 0
    ledgers: dict[tuple[str, StepSetting], Ledger] = field(default_factory=dict)

    def fill(self, page: dict[str, Any], target: Target) -> None:
        """Fill the columns first, because they answer the question; then search for the largest batches."""
        ledger = self._ledgers_for(target)
        for name in list(page["abilities"]):
            try:
                page["columns"] += self._columns(name, target, ledger)
            except PrecisionRefused as error:
                refusal = {"given": error.given, "allowed": error.allowed, "do": error.do}
                page["refused"].append({"precision": name, **refusal})
            self._tell()
        refused = {row["precision"] for row in page["refused"]}
        for name in page["abilities"]:
            for recompute in self._ways(page, name) if self.options.search and name not in refused else ():
                self._seek(page, name, recompute, target, ledger)
            self._tell()

    def _tell(self) -> None:
        self.done += 1
        self.on_progress(self.done, self.pieces)

    def _ways(self, page: dict[str, Any], name: str) -> Iterable[bool]:
        """Return the values of `recompute` for which there is a column."""
        settings = [column["setting"] for column in page["columns"]]
        return dict.fromkeys(setting["recompute"] for setting in settings if setting["precision"] == name)

    @property
    def _own_batch(self) -> int:
        return self.case.setting.batch or size_of(self.case.batch)

    def _batches(self) -> tuple[int, ...]:
        return self.options.batches or (self._own_batch,)

    def _columns(self, name: str, target: Target, ledger: MakeLedger) -> Iterator[dict[str, Any]]:
        own = self.case.setting.recompute
        for batch in self._batches():
            for recompute in RECOMPUTE.get(self.options.recompute, (own,)):
                found = self._ledger(
                    replace(self.case.setting, precision=name, batch=batch, recompute=recompute), ledger
                )
                yield {**found.as_dict(), "fits": found.peak <= target.usable}
            # Only where it is needed: recomputing costs time.
            if self.options.recompute == WHERE_NEEDED and not own and found.peak > target.usable:
                found = self._ledger(replace(found.setting, recompute=True), ledger)
                yield {**found.as_dict(), "fits": found.peak <= target.usable}

    def _ledger(self, setting: StepSetting, ledger: MakeLedger) -> Ledger:
        """Return the ledger of a requested setting; if it does not run, raise `WrongUse` with a setting that does."""
        try:
            return ledger(self.make_case, setting)
        except HalfstepError:
            raise
        except Exception as error:
            samples = taken_as_samples(self.case.batch) if setting.batch != self._own_batch else []
            do = (
                "--batch 2 runs: one sample alone has no spread to normalise by"
                if self._two_run(setting, ledger)
                else ""
            )
            raise as_wrong_use(error, samples, do) or error from error

    def _two_run(self, setting: StepSetting, ledger: MakeLedger) -> bool:
        if setting.batch != 1:
            return False
        try:
            ledger(self.make_case, replace(setting, batch=2))
        except Exception:
            return False
        return True

    def _seek(self, page: dict[str, Any], name: str, recompute: bool, target: Target, ledger: MakeLedger) -> None:
        """Add the largest batch; if the case does not run at another size, record why and keep its columns."""
        try:
            page["largest"].append(self._largest(name, recompute, target, page["auto"], ledger))
        except HalfstepError:
            raise
        except Exception as error:
            samples = ", ".join(taken_as_samples(self.case.batch))
            why = f"no other batch was tried: {in_one_line(error)}; {samples} were taken as samples"
            page["not_searched"].append({"precision": name, "recompute": recompute, "why": why})

    def _largest(self, name: str, recompute: bool, target: Target, narrow: str, ledger: MakeLedger) -> dict[str, Any]:
        setting = replace(self.case.setting, precision=name, recompute=recompute, batch=self._batches()[0])
        many = sum(1 for _ in self.case.model.modules()) > _MANY_MODULES
        fit = largest_batch(self.make_case, setting, target.usable, ledger, tolerance=_NEAR if many else 0.0)
        ways = [] if fit.batch else levers(fit, self.make_case, narrow, ledger)
        return {
            "precision": name,
            "recompute": recompute,
            **fit.as_dict(),
            "smallest": fit.ledger.samples,
            "levers": [
                {"precision": way.setting.precision, "recompute": way.setting.recompute, "peak": way.peak,
                 "fits": way.peak <= target.usable} for way in ways
            ],
        }  # fmt: skip

    def _ledgers_for(self, target: Target) -> MakeLedger:
        """Return a ledger function with a cache; devices with the same rules share their ledgers."""

        def ledger(make_case: MakeCase, setting: StepSetting) -> Ledger:
            key = (target.rules, setting)
            if key not in self.ledgers:
                self.ledgers[key] = ledger_on(make_case, setting, target)
            return replace(self.ledgers[key], device=target.id)

        return ledger


# -- way out ----------------------------------------------------------------------------------------------------------
# After a step that ran out of memory: report its estimated memory, the available memory and the largest batch that
# fits. It runs as a program in its own process: where memory is exhausted, even loading a library may fail.


NEAR = 0.1
"""Relative tolerance of the search for the largest batch; the user is waiting for it."""


@dataclass(frozen=True)
class WayOut:
    """The remedy for a step that ran out of memory."""

    failed: Ledger
    batch: int
    """The largest batch that fits by the estimate; 0 if none does."""
    recomputed: int = 0
    """The batch that fits with recomputed activations, where no batch fits otherwise."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "at_peak": dict(self.failed.at_peak),
            "peak": self.failed.peak,
            "moment": self.failed.moment,
            "batch": self.batch,
            "recomputed": self.recomputed,
        }


def way_out(make_case: MakeCase, precision: str, batch: int, target: Target, limit: int) -> WayOut:
    """Return a remedy for a batch that did not fit into `limit` bytes; the case and its ledgers are made once."""
    make_case, case = made_once(make_case)
    setting = replace(case.setting, precision=precision, batch=batch)
    made: dict[StepSetting, Ledger] = {}

    def ledger(make: MakeCase, wanted: StepSetting) -> Ledger:
        if wanted not in made:
            made[wanted] = ledger_on(make, wanted, target)
        return made[wanted]

    failed = ledger(make_case, setting)
    fit = largest_batch(make_case, setting, limit, ledger, tolerance=NEAR)
    if fit.batch or setting.recompute:
        return WayOut(failed, fit.batch)
    again = ledger(make_case, replace(setting, batch=fit.ledger.samples, recompute=True))
    return WayOut(failed, 0, again.samples if again.peak <= limit else 0)


def within_reach(target: Target) -> int:
    """Return the bytes that tensors of this process can use now: the device's memory, less what others hold."""
    found = [target.usable]
    with contextlib.suppress(Exception):  # a limit applies only where it can be read
        found += _of_accelerator() if target.device.kind != "cpu" else _of_main_memory(target)
    return max(0, min(found))


def _of_accelerator() -> list[int]:
    free, _ = torch.accelerator.get_memory_info()
    # Reserved memory is the caching allocator's, so this process can reuse it.
    return [int(free) + int(torch.accelerator.memory_reserved())]


def _of_main_memory(target: Target) -> Iterator[int]:
    """Yield free memory plus what this process holds, without its code: the process can reuse what it has freed."""
    import psutil

    process = psutil.Process().memory_info()
    own = int(process.rss) - target.reserved
    free = free_memory()
    if free is not None:
        yield free + own
    with contextlib.suppress(ImportError):  # Windows
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            # This limit is on address space, so the virtual size is subtracted, not the resident one.
            yield most - int(process.vms) + own


def _main() -> None:
    asked = json.loads(sys.argv[1])
    wanted = Subject(asked["recipe"], tuple(asked["settings"]))
    found = way_out(wanted.open, asked["precision"], asked["batch"], device_named(HERE), asked["limit"])
    print(json.dumps(found.as_dict()))


if __name__ == "__main__":
    _main()
