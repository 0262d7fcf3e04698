"""What `halfstep estimate` says, as plain data, made piece by piece so that Ctrl-C leaves what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from halfstep.errors import PrecisionRefused, UnknownName, WrongUse
from halfstep.measure.batches import size_of
from halfstep.measure.case import Case
from halfstep.measure.memory.accelerator_rules import ledger_on
from halfstep.measure.memory.building import built, fake_mode
from halfstep.measure.memory.devices import HERE, Target, device_named
from halfstep.measure.memory.fitting import MakeCase, MakeLedger, largest_batch, levers
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.memory.verdict import verdict
from halfstep.measure.setting import Setting
from halfstep.precision.ladder import choose_precision
from halfstep.precision.names import AUTO, FP8, read_precision
from halfstep.precision.registry import precision_named

RECOMPUTE = {"both": (False, True), "off": (False,), "on": (True,)}
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
    recompute: str = "both"

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise UnknownName(
                f"recompute {self.recompute!r}", allowed=", ".join(RECOMPUTE), do="--recompute both, or leave it out"
            )
        wrong = [batch for batch in self.batches if batch < 1]
        if wrong:
            raise WrongUse(f"a batch of {wrong[0]}", allowed="1 sample or more", do="--batch 8")


def report_of(
    make_case: MakeCase, wish: Wish, told: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """Everything about a wish. `told` hears of each piece that is done."""
    targets = [device_named(name) for name in wish.devices or (HERE,)]
    plans = [(target, _precisions(target, wish)) for target in targets]
    report: dict[str, Any] = {"case": "", "devices": [], "interrupted": False}
    try:
        case = built(make_case, fake_mode())
        report["case"] = case.name
        making = _Making(make_case, case, wish, told, sum(2 * len(names) for _, names in plans))
        for target, names in plans:
            report["devices"].append(_page(target, names))
            making.fill(report["devices"][-1], target)
    except KeyboardInterrupt:
        report["interrupted"] = True
    report["verdict"] = verdict(report)
    return report


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
            for recompute in RECOMPUTE[self.wish.recompute] if name not in refused else ():
                page["largest"].append(self._largest(name, recompute, target, page["auto"], ledger))
            self._tell()

    def _tell(self) -> None:
        self.done += 1
        self.told(self.done, self.pieces)

    def _settings(self, name: str) -> Iterator[Setting]:
        for batch, recompute in product(self._batches(), RECOMPUTE[self.wish.recompute]):
            yield replace(self.case.setting, precision=name, batch=batch, recompute=recompute)

    def _batches(self) -> tuple[int, ...]:
        return self.wish.batches or (self.case.setting.batch or size_of(self.case.batch),)

    def _columns(self, name: str, target: Target, ledger: MakeLedger) -> list[dict[str, Any]]:
        made = [ledger(self.make_case, setting) for setting in self._settings(name)]
        return [{**found.as_dict(), "fits": found.peak <= target.usable} for found in made]

    def _largest(self, name: str, recompute: bool, target: Target, narrow: str, ledger: MakeLedger) -> dict[str, Any]:
        setting = replace(self.case.setting, precision=name, recompute=recompute, batch=self._batches()[0])
        fit = largest_batch(self.make_case, setting, target.usable, ledger)
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
