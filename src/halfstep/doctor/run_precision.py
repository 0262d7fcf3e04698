"""The precision of one run: its settings, their contradictions, and the values that are known only at run time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from halfstep.doctor.checkup import compare_precision_settings
from halfstep.doctor.linking import ProjectRun
from halfstep.doctor.located import is_test_file
from halfstep.doctor.precedence import Provenance
from halfstep.doctor.settings import FoundSetting
from halfstep.doctor.settings_page import Conflict
from halfstep.precision.names import FORMATS, SWITCHES, PrecisionClaim, is_off


@dataclass(frozen=True)
class RuntimeDecision:
    """A tool whose precision the run computes, and the settings that the value may contradict."""

    row: Provenance
    beaten: list[FoundSetting]
    """Settings that ask for something else than a possible value."""
    refuted: list[FoundSetting]
    """Settings that no tool ranks, and with which no possible value agrees."""

    @property
    def setting(self) -> FoundSetting:
        """The computed setting; the first one if there are several."""
        return self.row.winners[0]

    @property
    def candidates(self) -> list[FoundSetting]:
        """The settings that the value seems to come from: of `fp16: false` and `bf16: true`, the one that is on."""
        found = [candidate for winner in self.row.winners for candidate in winner.candidates]
        return [one for one in found if one.claim and one.claim.says] or found

    @property
    def is_settled(self) -> bool:
        """Return whether the settings that the value seems to come from agree with all others."""
        return self.row.precision is not None and not self.beaten


@dataclass(frozen=True)
class RunPrecision:
    """The precision that the settings of a run agree on, or their conflicts."""

    precision: str | None
    conflicts: list[Conflict]
    decisions: list[RuntimeDecision] = field(default_factory=list)
    """The tools whose precision the run computes, those of tests left out."""


def list_runtime_decisions(runs: Sequence[ProjectRun]) -> list[RuntimeDecision]:
    """Return the tools whose precision a run computes, one for each place, with what it beats in any run."""
    found: dict[tuple[str, int | None], RuntimeDecision] = {}
    for run in runs:
        for one in resolve_run_precision(run, run.provenance()).decisions:
            place = (one.setting.place, one.setting.line)
            beaten = [*found[place].beaten, *one.beaten] if place in found else one.beaten
            found[place] = replace(found.get(place, one), beaten=_drop_repeated(beaten))
    return list(found.values())


def resolve_run_precision(run: ProjectRun, rows: Sequence[Provenance]) -> RunPrecision:
    """Return the precision of a run, and the conflicts between settings that are known to belong together."""
    # The settings that must agree: those that win in their tool, and those that no tool ranks.
    # Without a winner the settings that were read say what everybody believes: `fp16: false` and `bf16: false`.
    lost = [setting for row in rows for setting in (*(row.overrode if row.winners else ()), *row.unread)]
    compared = [setting for setting in run.settings() if setting not in lost]
    computed = [row for row in rows if row.winners and row.winners[0].is_computed]
    certain_rows = [row for row in computed if row.precision is not None and not row.is_assumed]
    compared += [one for row in certain_rows for one in _build_stand_ins(row, next(filter(None, row.cases), ()))]
    found = compare_precision_settings([setting for setting in compared if setting.decides])
    conflicts = list(filter(_is_counted, found.conflicts))
    weighed = [_weigh_values(row, compared) for row in computed if row not in certain_rows]
    decisions = [one for one in weighed if not is_test_file(one.setting.place)]
    if any(not one.is_settled for one in decisions):
        return RunPrecision(None, conflicts, decisions)
    if found.precision is None:
        # What the project's own flags say is shown, and compared with nothing.
        return RunPrecision(compare_precision_settings(_drop_idle_formats(compared)).precision, [], decisions)
    is_open = bool(found.conflicts) and not conflicts and not all(map(_is_composition, found.conflicts))
    return RunPrecision(None if is_open else found.precision, conflicts, decisions)


def _drop_idle_formats(settings: Sequence[FoundSetting]) -> list[FoundSetting]:
    """Return the settings without the defaults of `--amp-dtype` in scripts whose `--amp` is off by default."""
    defaults = [s for s in settings if s.rank == "default"]
    off = {s.place for s in defaults if s.argument in SWITCHES and is_off(s.value)}
    idle = [s for s in defaults if s.place in off and s.argument in FORMATS]
    return [s for s in settings if s not in idle]


def _weigh_values(row: Provenance, compared: Sequence[FoundSetting]) -> RuntimeDecision:
    """Return what the possible values of a computed setting contradict."""
    sources = [candidate for winner in row.winners for candidate in winner.candidates]
    # A file of tests is none that a run of the project reads.
    others = [s for s in compared if s.claim and s.decides and not s.is_computed and s not in sources]
    others = [s for s in others if not is_test_file(s.place)]
    objections = [list(_iterate_objections(others, _build_stand_ins(row, case))) for case in row.cases]
    ranked = [s for s in row.doubtful() if not row.deliberate(s) and s not in sources and not is_test_file(s.place)]
    unranked = [setting for found in objections for setting in found]
    is_limited = not row.is_open and not row.is_assumed
    refuted = unranked if is_limited and all(objections) else []
    return RuntimeDecision(row, _drop_repeated([*ranked, *unranked]), _drop_repeated(refuted))


def _iterate_objections(others: Sequence[FoundSetting], stand_ins: Sequence[FoundSetting]) -> Iterator[FoundSetting]:
    """Yield the settings that contradict a value."""
    for conflict in compare_precision_settings([*others, *stand_ins]).conflicts:
        against = [setting for setting in (conflict.one, conflict.other) if not setting.is_computed]
        if len(against) == 1 and _is_counted(conflict):
            yield against[0]


def _build_stand_ins(row: Provenance, case: Sequence[PrecisionClaim]) -> list[FoundSetting]:
    """Return the computed setting once for each claim of a case, as if it said so."""
    return [replace(row.winners[0], claim=claim) for claim in case]


def _drop_repeated(settings: Sequence[FoundSetting]) -> list[FoundSetting]:
    return list({(s.place, s.line, s.key): s for s in settings}.values())


def _is_counted(conflict: Conflict) -> bool:
    return not _is_composition(conflict) and _is_known(conflict)


def _is_known(conflict: Conflict) -> bool:
    """Return whether a program whose words are known reads one of the two, or torch itself does.

    How two settings of the project's own code go together, that code alone knows.
    """
    one, other = conflict.one, conflict.other
    return any(setting.is_judged or setting.owner == "torch" for setting in (one, other))


def _is_composition(conflict: Conflict) -> bool:
    """Return whether one file of Hydra replaces what another says, which is what they are for."""
    return conflict.one.kind == conflict.other.kind == "hydra" and conflict.one.place != conflict.other.place
