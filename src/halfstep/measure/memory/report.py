"""What `halfstep estimate` says, as plain data, made piece by piece so that Ctrl-C leaves what there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.errors import HalfstepError, PrecisionRefused, UnknownName, WrongUse
from halfstep.measure.batches import size_of, taken_as_samples
from halfstep.measure.case import Case
from halfstep.measure.memory.accelerator_rules import ledger_on
from halfstep.measure.memory.building import as_fake, fake_mode
from halfstep.measure.memory.devices import HERE, Target, device_named
from halfstep.measure.memory.fitting import MOST, MakeCase, MakeLedger, largest_batch, levers
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.memory.persons_error import as_wrong_use, in_one_line
from halfstep.measure.memory.verdict import verdict
from halfstep.measure.setting import Setting
from halfstep.precision.ladder import choose_precision
from halfstep.precision.names import AUTO, FP8, read_precision
from halfstep.precision.registry import precision_named

WHERE_NEEDED = "auto"
RECOMPUTE = {"both": (False, True), "off": (False,), "on": (True,)}
_MANY_MODULES = 100
"""With more of them a ledger takes seconds, and the largest batch is not sought to the last sample."""
_NEAR = 0.1
_WIDE, _UNKNOWN_NARROW = "fp32", "bf16"


@dataclass(frozen=True)
class Wish:
    """What a person wants to know."""

    devices: tuple[str, ...] = ()
    """This machine's, where none is named."""
    precisions: tuple[str, ...] = ()
    """fp32 and the device's own choice, where none is named."""
    batches: tuple[int, ...] = ()
    """The case's own, where none is named."""
    recompute: str = WHERE_NEEDED
    """As the case does, and recomputing beside it where that does not fit, if nothing else is asked for."""

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
    make_case: MakeCase, wish: Wish, told: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """Everything about a wish. `told` hears of each piece that is done."""
    targets = [device_named(name) for name in wish.devices or (HERE,)]
    plans = [(target, _precisions(target, wish)) for target in targets]
    report: dict[str, Any] = {"case": "", "devices": [], "interrupted": False}
    # torch logs a whole traceback where a shape is wrong; the error says it in one line.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True
    try:
        make_case, case = _made_once(make_case)
        report["case"] = case.name
        making = _Making(make_case, case, wish, told, sum(2 * len(names) for _, names in plans))
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


def _made_once(make_case: MakeCase) -> tuple[MakeCase, Case]:
    """A case on fakes, and how to make it again: on fakes that is quick; one that needs real numbers is kept."""
    try:
        mode = fake_mode()
        with mode:
            case = make_case()
        return make_case, as_fake(case, mode)
    except Exception:  # it needs a value while it is built, or its own error, which comes again now
        real = make_case()
        return lambda: real, real


def _precisions(target: Target, wish: Wish) -> list[str]:
    """Without a repetition, in the order asked for."""
    names = [_named(text, target) for text in wish.precisions or (_WIDE, AUTO)]
    return list(dict.fromkeys(names))


def _named(text: str, target: Target) -> str:
    name = read_precision(text).name
    if name == FP8:
        raise PrecisionRefused(
            f"{text}: no run computes in fp8 yet, so that there is no memory to estimate",
            allowed="fp32, tf32, bf16, fp16, auto",
            do="--survive fp8_e4m3 tells whether a model would survive it",
        )
    return own_choice(target) if name == AUTO else name


def own_choice(target: Target) -> str:
    """The precision that `auto` would take there, by what is known of the device."""
    if target.device.kind == "other":
        return _UNKNOWN_NARROW
    return choose_precision(AUTO, device=target.device).precision.name


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
    wish: Wish
    told: Callable[[int, int], None]
    pieces: int
    done: int = 0
    ledgers: dict[tuple[str, Setting], Ledger] = field(default_factory=dict)

    def fill(self, page: dict[str, Any], target: Target) -> None:
        """Columns first: they answer the question. How far one could go comes after."""
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
            for recompute in self._ways(page, name) if name not in refused else ():
                self._seek(page, name, recompute, target, ledger)
            self._tell()

    def _tell(self) -> None:
        self.done += 1
        self.told(self.done, self.pieces)

    def _ways(self, page: dict[str, Any], name: str) -> Iterable[bool]:
        """With recomputing or without: those that there is a column of."""
        settings = [column["setting"] for column in page["columns"]]
        return dict.fromkeys(setting["recompute"] for setting in settings if setting["precision"] == name)

    @property
    def _own_batch(self) -> int:
        return self.case.setting.batch or size_of(self.case.batch)

    def _batches(self) -> tuple[int, ...]:
        return self.wish.batches or (self._own_batch,)

    def _columns(self, name: str, target: Target, ledger: MakeLedger) -> Iterator[dict[str, Any]]:
        own = self.case.setting.recompute
        for batch in self._batches():
            for recompute in RECOMPUTE.get(self.wish.recompute, (own,)):
                found = self._ledger(
                    replace(self.case.setting, precision=name, batch=batch, recompute=recompute), ledger
                )
                yield {**found.as_dict(), "fits": found.peak <= target.usable}
            if self.wish.recompute == WHERE_NEEDED and not own and found.peak > target.usable:
                found = self._ledger(replace(found.setting, recompute=True), ledger)
                yield {**found.as_dict(), "fits": found.peak <= target.usable}

    def _ledger(self, setting: Setting, ledger: MakeLedger) -> Ledger:
        """Of a setting that was asked for; where it does not run, an error that says what would."""
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

    def _two_run(self, setting: Setting, ledger: MakeLedger) -> bool:
        if setting.batch != 1:
            return False
        try:
            ledger(self.make_case, replace(setting, batch=2))
        except Exception:
            return False
        return True

    def _seek(self, page: dict[str, Any], name: str, recompute: bool, target: Target, ledger: MakeLedger) -> None:
        """The largest batch; where the case does not run with another size, that is told, and its columns stay."""
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
        """Devices with the same rules share their ledgers."""

        def ledger(make_case: MakeCase, setting: Setting) -> Ledger:
            key = (target.rules, setting)
            if key not in self.ledgers:
                self.ledgers[key] = ledger_on(make_case, setting, target)
            return replace(self.ledgers[key], device=target.id)

        return ledger
