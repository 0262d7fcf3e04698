"""Who wins in each tool among code, flags, files and variables; the rules are data. Imports no torch.

Every rule was tried with the library itself: `tests/doctor/precedence.json` records what accelerate, Lightning and
transformers made of every combination of places, and `tests/doctor/test_precedence.py` holds this table against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from halfstep.doctor.settings import FoundSetting
from halfstep.doctor.sources import NOT_GIVEN
from halfstep.precision.names import NamedPrecision, PrecisionClaim, resolve_claims

PYTHON, ACCELERATE, FABRIC = "python", "accelerate", "fabric"
"""How a run is started: by python or torchrun, by `accelerate launch`, by `fabric run`."""
ANY = (PYTHON, ACCELERATE, FABRIC)


class ReadingOrder(NamedTuple):
    """The order of one tool under one way to start: places as `owner.rank`, the winner first.

    A place that is not in the order is not read.
    """

    tool: str
    starts: tuple[str, ...]
    order: tuple[str, ...]
    refuses: bool = False
    """Whether the tool stops with an error where two places disagree."""


RULES = (
    # The launcher puts its flag or its file into the variable, and `no` where both are silent.
    ReadingOrder("accelerate", (ACCELERATE,), ("accelerate.code", "accelerate.flag", "accelerate.file")),
    # Nothing but the launcher reads the file.
    ReadingOrder("accelerate", (PYTHON, FABRIC), ("accelerate.code", "accelerate.environment")),
    # TrainingArguments that say `true` win; `false` and silence leave the choice to accelerate's variable.
    ReadingOrder(
        "transformers",
        (ACCELERATE,),
        ("transformers.code", "transformers.flag", "transformers.file", "accelerate.flag", "accelerate.file"),
    ),
    ReadingOrder(
        "transformers",
        (PYTHON, FABRIC),
        ("transformers.code", "transformers.flag", "transformers.file", "accelerate.environment"),
    ),
    # PL_TRAINER_PRECISION fills in what Trainer(...) was not given.
    ReadingOrder("lightning", ANY, ("lightning.code", "lightning.environment")),
    # LightningCLI gives the Trainer every argument, so that Lightning's own variable is never looked at. It reads its
    # words from left to right: a flag before --config loses against the file.
    ReadingOrder(
        "lightning cli",
        ANY,
        ("lightning cli.flag", "lightning.file", "lightning cli.early flag", "lightning cli.default"),
    ),
    # Fabric's variable wins over the code, in silence; `fabric run` sets it, and then Fabric refuses to run with both.
    ReadingOrder("fabric", (PYTHON, ACCELERATE), ("fabric.environment", "fabric.code")),
    ReadingOrder("fabric", (FABRIC,), ("fabric.flag", "fabric.code"), refuses=True),
    ReadingOrder("hydra", ANY, ("hydra.flag", "hydra.file")),
    ReadingOrder("halfstep", ANY, ("halfstep.flag", "recipe.file")),
)
_ONLY_IF_ON = frozenset({"transformers"})
"""Tools in which `false` and silence are the same."""


def format_precedence(setting: FoundSetting) -> str:
    """Return where a tool ranks a setting, as `owner.rank`."""
    return f"{setting.owner}.{setting.rank}"


def find_reading_order(tool: str, start: str) -> ReadingOrder | None:
    """Return the rule of a tool under a way to start, None if it has none."""
    return next((rule for rule in RULES if rule.tool == tool and start in rule.starts), None)


@dataclass(frozen=True)
class Provenance:
    """Where a tool's precision comes from in one run."""

    json_keys: ClassVar = ("tool", "start", "precision", "possible", "wins=winners", "overrode", "not_read=unread")

    tool: str
    start: str
    winners: list[FoundSetting]
    """The settings that decide; empty if the tool's own default does."""
    overrode: list[FoundSetting]
    """Settings that the tool reads, and that lost."""
    unread: list[FoundSetting]
    """Settings of the tool that it does not read when it is started in this way."""
    refuses: bool = False
    cases: tuple[tuple[PrecisionClaim, ...], ...] = ()
    """The claims that decide, for each possible outcome; one case unless the run computes the winner."""
    is_open: bool = False
    """Whether the run computes the winner, and nothing in the project limits its value."""

    @property
    def possible(self) -> list[str]:
        """The precisions that the tool can run in; empty if any of them is possible."""
        found = dict.fromkeys(resolve_claims(case).name if case else "fp32" for case in self.cases)
        return [] if self.is_open else list(found)

    @property
    def precision(self) -> str | None:
        """The precision that the tool runs in; fp32 where nothing is set, None where only the run knows."""
        return self.possible[0] if len(self.possible) == 1 else None

    @property
    def is_assumed(self) -> bool:
        """Return whether the cases come from settings that the run may not read."""
        return any(winner.candidates for winner in self.winners)

    def disagreeing(self) -> Iterator[FoundSetting]:
        """Yield the settings without effect that ask for something else than what runs, in every case."""
        if not self.is_open and not self.is_assumed:
            yield from (s for s in self._list_without_effect() if not any(_agrees(s, case) for case in self.cases))

    def doubtful(self) -> Iterator[FoundSetting]:
        """Yield the settings without effect that ask for something else than what runs, in some case."""
        yield from (s for s in self._list_without_effect() if not all(_agrees(s, case) for case in self.cases))

    def deliberate(self, loser: FoundSetting) -> bool:
        """Return whether it was replaced on purpose: by a flag that somebody typed, or as a script's default.

        A flag of a launcher that replaces what the code says is no such case: the two are far apart.
        """
        typed = any(winner.kind == "launch" for winner in self.winners) and loser.rank != "code"
        return not self.refuses and loser not in self.unread and (typed or loser.rank == "default")

    def _list_without_effect(self) -> list[FoundSetting]:
        return [s for s in (*self.overrode, *self.unread) if s.claim and s.value != NOT_GIVEN]


def _agrees(setting: FoundSetting, claims: Sequence[PrecisionClaim]) -> bool:
    assert setting.claim
    if not claims:
        return "fp32" not in setting.claim.denies and setting.claim.meaning in ("fp32", "tf32", "auto")
    return not resolve_claims([*claims, setting.claim]).against


class _Decision(NamedTuple):
    winners: list[FoundSetting]
    cases: tuple[tuple[PrecisionClaim, ...], ...]
    is_open: bool


def find_provenance(
    tool: str, start: str, settings: Sequence[FoundSetting], aside: Sequence[FoundSetting] = ()
) -> Provenance | None:
    """Return who wins in a tool; None if it has no rule, or no setting here.

    `aside` are settings in files that the tool could read and that this run does not give to it.
    """
    rule = find_reading_order(tool, start)
    if rule is None:
        return None
    # Every place that the tool reads when it is started in one way or another.
    known = {place for rule in RULES if rule.tool == tool for place in rule.order}
    speaking = [setting for setting in settings if setting.claim or setting.is_computed]
    read = [s for s in speaking if format_precedence(s) in rule.order]
    unread = [s for s in speaking if s.claim and format_precedence(s) in known - set(rule.order)]
    unread += [s for s in aside if s.claim and format_precedence(s) in known]
    if not read and not unread:
        return None
    silent = [s for s in speaking if s.kind == "deepspeed" and s.claim and s.claim.says]
    places = [[s for s in read if format_precedence(s) == place] for place in rule.order]
    winners, cases, is_open = _find_decision(tool, places, silent)
    overrode = [s for s in read if s not in winners]
    return Provenance(tool, start, winners, overrode, unread, rule.refuses, cases, is_open)


def _find_decision(tool: str, places: Sequence[list[FoundSetting]], silent: list[FoundSetting]) -> _Decision:
    """Return the settings that decide, the first place first, and what each outcome of them claims."""
    computed: list[FoundSetting] = []
    cases: list[tuple[PrecisionClaim, ...]] = []
    for here in places:
        firm = [s for s in here if s.claim]
        if any(_can_decide(tool, s, s.claim) for s in firm):
            return _Decision(computed or firm, (*cases, _list_claims(firm)), is_open=False)
        open_here = [s for s in here if s.is_computed]
        computed += open_here
        if any(not s.outcomes for s in open_here):
            return _Decision(computed, _ANY_CASE, is_open=True)
        deciding = [[c for c in s.outcomes if c and _can_decide(tool, s, c)] for s in open_here]
        cases += [(claim,) for claims in deciding for claim in claims]
        # A value that decides nothing leaves the choice to the next place.
        if any(claims and len(claims) == len(s.outcomes) for s, claims in zip(open_here, deciding, strict=True)):
            return _Decision(computed, tuple(cases), is_open=False)
    # Where accelerate is silent, the DeepSpeed file that it was given decides.
    last = silent if tool == "accelerate" or (computed and tool == "transformers") else []
    return _Decision(computed or last, (*cases, _list_claims(last)), is_open=False)


_ANY_CASE = tuple((PrecisionClaim("precision", name, NamedPrecision(name)),) for name in ("fp32", "bf16", "fp16"))


def _list_claims(settings: Sequence[FoundSetting]) -> tuple[PrecisionClaim, ...]:
    return tuple(setting.claim for setting in settings if setting.claim)


def _can_decide(tool: str, setting: FoundSetting, claim: PrecisionClaim | None) -> bool:
    own = setting.owner in _ONLY_IF_ON and tool in _ONLY_IF_ON
    return claim is not None and (not own or claim.says is not None)


def list_ranked_tools() -> Collection[str]:
    """Return the tools whose order is known."""
    return dict.fromkeys(rule.tool for rule in RULES)
