"""Settings that contradict each other, with the lines that would make them agree. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from halfstep.doctor.repairs import line_for
from halfstep.doctor.settings import Setting
from halfstep.finding import Finding
from halfstep.precision.names import AUTO, Settled, settle


class Way(NamedTuple):
    """One way out: what to write where, and what then runs."""

    precision: str
    where: str
    write: str

    def __str__(self) -> str:
        # On a line of its own, which no terminal wraps and a person can copy.
        return f"to run in {self.precision}, write in {self.where}:\n    {self.write}"


class Conflict(NamedTuple):
    """Two settings that cannot both be obeyed."""

    one: Setting
    other: Setting
    ways: tuple[Way, Way]

    @property
    def finding(self) -> Finding:
        evidence = "\n".join(f"{s}  ({s.where}): {s.means}" for s in (self.one, self.other))
        fix = "\nor: ".join(map(str, self.ways))
        return Finding("settings.precision_mismatch", "error", f"{evidence}{_together(self)}", fix)

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": [self.one.as_dict(), self.other.as_dict()],
            "ways": [way._asdict() for way in self.ways],
        }


class Verdict(NamedTuple):
    """What all settings come to together."""

    precision: str | None
    conflicts: list[Conflict]


def judge(settings: Sequence[Setting]) -> Verdict:
    """Whether all that speak of precision ask for the same. `auto` agrees with every other file."""
    speaking = [s for s in settings if s.claim]
    if not speaking:
        return Verdict(None, [])
    firm = [s for s in speaking if s.claim and (s.claim.meaning != AUTO or s.claim.denies)]
    groups = [firm, *(_same_file(speaking, s) for s in speaking if s not in firm)]
    for group in groups:
        settled = _settled(group)
        if settled and settled.against:
            return Verdict(settled.name, _conflicts(settled, group))
    decided = _settled(firm) or _settled(speaking)
    return Verdict(decided.name if decided else None, [])


def _settled(settings: Sequence[Setting]) -> Settled | None:
    claims = [s.claim for s in settings if s.claim]
    return settle(claims) if claims else None


def _same_file(settings: Sequence[Setting], one: Setting) -> list[Setting]:
    return [s for s in settings if s.place == one.place]


def _conflicts(settled: Settled, settings: Sequence[Setting]) -> list[Conflict]:
    by_claim = {id(s.claim): s for s in settings}
    one = by_claim[id(settled.by)]
    found = []
    for claim in settled.against:
        other = by_claim[id(claim)]
        if other is one:
            continue
        wish = _wish(other, one, settings, settled.name)
        ways = (
            Way(settled.name, other.where, line_for(other, settled.name)),
            Way(wish, one.where, line_for(one, wish)),
        )
        found.append(Conflict(one, other, ways))
    return found


def _wish(other: Setting, one: Setting, settings: Sequence[Setting], refused: str) -> str:
    """What the file of the other setting wants as a whole: `amp: true` beside `fp16: false` wants bf16."""
    own = _settled([s for s in _same_file(settings, other) if s is not one])
    wish = own.name if own else refused
    if wish not in (refused, AUTO):
        return wish
    return "fp32" if refused != "fp32" else "bf16"


def _together(conflict: Conflict) -> str:
    """What would happen if nobody looked."""
    kinds = {conflict.one.kind, conflict.other.kind}
    if kinds == {"accelerate", "environment"}:
        return "\naccelerate launch puts the file's word in place of the variable; plain python never reads the file"
    if kinds == {"accelerate", "recipe"}:
        return "\naccelerate obeys its own file, and the script believes its own: a precision mismatch, with no message"
    return "\nprecision mismatch: which of the two is obeyed depends on the code that reads them"
