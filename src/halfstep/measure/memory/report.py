"""Build the report of `halfstep estimate`, piece by piece, so that Ctrl-C keeps the results so far."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from halfstep.errors import HalfstepError, PrecisionRefused, UnknownName, WrongUse
from halfstep.measure.batches import count_samples, describe_sample_tensors
from halfstep.measure.case import Case
from halfstep.measure.memory.devices import HERE, Target, choose_target_precision, device_named
from halfstep.measure.memory.estimate import estimate_device_ledger
from halfstep.measure.memory.fake_tensors import (
    MakeCase,
    build_case_factory,
    convert_user_error,
    describe_error_with_line,
)
from halfstep.measure.memory.fitting import (
    MOST,
    BatchFit,
    Lever,
    MakeLedger,
    estimate_lever_ledgers,
    find_largest_batch,
)
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.memory.page import EstimateReport
from halfstep.measure.memory.verdict import (
    DeviceEstimate,
    EstimateColumn,
    NativeFormat,
    RefusedPrecision,
    UnsearchedSetting,
    summarize_estimate,
)
from halfstep.measure.setting import StepSetting
from halfstep.precision.names import AMP, AUTO, format_policy_name, parse_policy_name, parse_precision
from halfstep.precision.precision import resolve_precision_name
from halfstep.status_line import OnProgress

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


def build_estimate_report(
    make_case: MakeCase, options: EstimateOptions, on_progress: OnProgress = lambda done, of: None
) -> EstimateReport:
    """Return the whole report. `on_progress` is called with the number of pieces done and their total.

    Raises `WrongUse` with the line of the user's code where that code fails.
    """
    targets = [device_named(name) for name in options.devices or (HERE,)]
    plans = [(target, resolve_precision_names(target, options)) for target in targets]
    name, devices, interrupted = "", list[DeviceEstimate](), False
    # torch logs a full traceback for a shape mismatch; the error below says it in one line.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True
    try:
        make_case, case = build_case_factory(make_case)
        name = case.name
        making = _EstimateBuilder(make_case, case, options, on_progress, sum(2 * len(names) for _, names in plans))
        for target, names in plans:
            devices.append(
                DeviceEstimate(
                    target,
                    choose_target_precision(target),
                    {name: _build_native_format(target, name) for name in names},
                )
            )
            making.fill(devices[-1])
    except KeyboardInterrupt:
        interrupted = True
    except HalfstepError:
        raise
    except Exception as error:
        raise convert_user_error(error, (), "") or error from error
    finally:
        log.disabled = silent
    return EstimateReport(name, tuple(devices), interrupted, summarize_estimate(devices))


def resolve_precision_names(target: Target, options: EstimateOptions) -> list[str]:
    """Return the names without repetition, in the order given."""
    names = [_resolve_target_precision(text, target) for text in options.precisions or (_WIDE, AUTO)]
    return list(dict.fromkeys(names))


def _resolve_target_precision(text: str, target: Target) -> str:
    default, rules = parse_policy_name(parse_precision(text).name)
    name = choose_target_precision(target, default) if default in (AUTO, AMP) else default
    return format_policy_name(name, rules)


def _build_native_format(target: Target, name: str) -> NativeFormat:
    can = target.ability(resolve_precision_name(name).needs)
    return NativeFormat(None if target.device.kind == "other" else can.native, can.reason)


@dataclass
class _EstimateBuilder:
    make_case: MakeCase
    case: Case
    options: EstimateOptions
    on_progress: OnProgress
    pieces: int
    done: int = 0
    ledgers: dict[tuple[str, StepSetting], Ledger] = field(default_factory=dict)

    def fill(self, page: DeviceEstimate) -> None:
        """Fill the columns first, because they answer the question; then search for the largest batches."""
        ledger = self._ledgers_for(page.device)
        for name in page.abilities:
            try:
                page.columns.extend(self._columns(name, page.device, ledger))
            except PrecisionRefused as error:
                page.refused.append(RefusedPrecision(name, error.given, error.allowed, error.do))
            self._tell()
        refused = {row.precision for row in page.refused}
        for name in page.abilities:
            for recompute in self._ways(page, name) if self.options.search and name not in refused else ():
                self._seek(page, name, recompute, ledger)
            self._tell()

    def _tell(self) -> None:
        self.done += 1
        self.on_progress(self.done, self.pieces)

    def _ways(self, page: DeviceEstimate, name: str) -> Iterable[bool]:
        """Return the values of `recompute` for which there is a column."""
        settings = [column.setting for column in page.columns]
        return dict.fromkeys(setting.recompute for setting in settings if setting.precision == name)

    @property
    def _own_batch(self) -> int:
        return self.case.setting.batch or count_samples(self.case.batch)

    def _batches(self) -> tuple[int, ...]:
        return self.options.batches or (self._own_batch,)

    def _columns(self, name: str, target: Target, ledger: MakeLedger) -> Iterator[EstimateColumn]:
        own = self.case.setting.recompute
        for batch in self._batches():
            for recompute in RECOMPUTE.get(self.options.recompute, (own,)):
                found = self._ledger(
                    replace(self.case.setting, precision=name, batch=batch, recompute=recompute), ledger
                )
                yield EstimateColumn(**vars(found), fits=found.peak <= target.usable)
            # Only where it is needed: recomputing costs time.
            if self.options.recompute == WHERE_NEEDED and not own and found.peak > target.usable:
                found = self._ledger(replace(found.setting, recompute=True), ledger)
                yield EstimateColumn(**vars(found), fits=found.peak <= target.usable)

    def _ledger(self, setting: StepSetting, ledger: MakeLedger) -> Ledger:
        """Return the ledger of a requested setting; if it does not run, raise `WrongUse` with a setting that does."""
        try:
            return ledger(self.make_case, setting)
        except HalfstepError:
            raise
        except Exception as error:
            samples = describe_sample_tensors(self.case.batch) if setting.batch != self._own_batch else []
            do = (
                "--batch 2 runs: one sample alone has no spread to normalize by"
                if self._two_run(setting, ledger)
                else ""
            )
            raise convert_user_error(error, samples, do) or error from error

    def _two_run(self, setting: StepSetting, ledger: MakeLedger) -> bool:
        if setting.batch != 1:
            return False
        try:
            ledger(self.make_case, replace(setting, batch=2))
        except Exception:
            return False
        return True

    def _seek(self, page: DeviceEstimate, name: str, recompute: bool, ledger: MakeLedger) -> None:
        """Add the largest batch; if the case does not run at another size, record why and keep its columns."""
        try:
            page.largest.append(self._largest(name, recompute, page, ledger))
        except HalfstepError:
            raise
        except Exception as error:
            samples = ", ".join(describe_sample_tensors(self.case.batch))
            why = f"no other batch was tried: {describe_error_with_line(error)}; {samples} were taken as samples"
            page.not_searched.append(UnsearchedSetting(name, recompute, why))

    def _largest(self, name: str, recompute: bool, page: DeviceEstimate, ledger: MakeLedger) -> BatchFit:
        limit = page.device.usable
        setting = replace(self.case.setting, precision=name, recompute=recompute, batch=self._batches()[0])
        many = sum(1 for _ in self.case.model.modules()) > _MANY_MODULES
        fit = find_largest_batch(self.make_case, setting, limit, ledger, tolerance=_NEAR if many else 0.0)
        ways = [] if fit.batch else estimate_lever_ledgers(fit, self.make_case, page.auto, ledger)
        found = (Lever(way.setting.precision, way.setting.recompute, way.peak, way.peak <= limit) for way in ways)
        return replace(fit, levers=tuple(found))

    def _ledgers_for(self, target: Target) -> MakeLedger:
        """Return a ledger function with a cache; devices with the same rules share their ledgers."""

        def ledger(make_case: MakeCase, setting: StepSetting) -> Ledger:
            key = (target.rules, setting)
            if key not in self.ledgers:
                self.ledgers[key] = estimate_device_ledger(make_case, setting, target)
            return replace(self.ledgers[key], device=target.id)

        return ledger
