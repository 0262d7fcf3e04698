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
from halfstep.precision.names import resolve_claims

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

    json_keys: ClassVar = ("tool", "start", "precision", "wins=winners", "overrode", "not_read=unread")

    tool: str
    start: str
    winners: list[FoundSetting]
    """The settings that decide; empty if the tool's own default does."""
    overrode: list[FoundSetting]
    """Settings that the tool reads, and that lost."""
    unread: list[FoundSetting]
    """Settings of the tool that it does not read when it is started in this way."""
    refuses: bool = False

    @property
    def precision(self) -> str:
        """The precision that the tool runs in; fp32 where nothing is set."""
        claims = [setting.claim for setting in self.winners if setting.claim]
        return resolve_claims(claims).name if claims else "fp32"

    def disagreeing(self) -> Iterator[FoundSetting]:
        """Yield the settings without effect that ask for something else than what runs."""
        for setting in (*self.overrode, *self.unread):
            if setting.claim and setting.value != NOT_GIVEN and not self._agrees(setting):
                yield setting

    def deliberate(self, loser: FoundSetting) -> bool:
        """Return whether it was replaced on purpose: by a flag that somebody typed, or as a script's default.

        A flag of a launcher that replaces what the code says is no such case: the two are far apart.
        """
        typed = any(winner.kind == "launch" for winner in self.winners) and loser.rank != "code"
        return not self.refuses and loser not in self.unread and (typed or loser.rank == "default")

    def _agrees(self, setting: FoundSetting) -> bool:
        assert setting.claim
        claims = [winner.claim for winner in self.winners if winner.claim]
        if not claims:
            return "fp32" not in setting.claim.denies and setting.claim.meaning in ("fp32", "tf32", "auto")
        return not resolve_claims([*claims, setting.claim]).against


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
    speaking = [setting for setting in settings if setting.claim]
    read = [s for s in speaking if format_precedence(s) in rule.order]
    unread = [s for s in speaking if format_precedence(s) in known - set(rule.order)]
    unread += [s for s in aside if s.claim and format_precedence(s) in known]
    if not read and not unread:
        return None
    first = next(
        (place for place in rule.order if any(_can_decide(tool, s) for s in read if format_precedence(s) == place)),
        None,
    )
    winners = [s for s in read if format_precedence(s) == first]
    if not winners and tool == "accelerate":
        # Where accelerate is silent, the DeepSpeed file that it was given decides.
        winners = [s for s in speaking if s.kind == "deepspeed" and s.claim and s.claim.says]
    return Provenance(tool, start, winners, [s for s in read if s not in winners], unread, rule.refuses)


def _can_decide(tool: str, setting: FoundSetting) -> bool:
    own = setting.owner in _ONLY_IF_ON and tool in _ONLY_IF_ON
    return not own or bool(setting.claim and setting.claim.says)


def list_ranked_tools() -> Collection[str]:
    """Return the tools whose order is known."""
    return dict.fromkeys(rule.tool for rule in RULES)
