"""Which files of a project belong to one run: what a launch line starts, what a script names. Imports no torch.

Two configurations of a project need not agree: they may be for two runs. They are compared where something ties them
together: a launch line that names both, a script that opens or imports them, a `defaults` list of Hydra; or where each
is the only one of its kind in the project.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from halfstep.doctor.precedence import ACCELERATE, FABRIC, PYTHON, Provenance, find_provenance, list_ranked_tools
from halfstep.doctor.project import Project
from halfstep.doctor.settings import FoundSetting, SettingSource, remove_ambiguous_claims
from halfstep.doctor.sources.launch import LaunchLine
from halfstep.doctor.sources.reading import read_lightning_word

MOST_RUNS = 200
"""Runs of a project that are compared at most."""


@dataclass(frozen=True)
class ProjectRun:
    """One run of a project: how it is started, and every source that it reads."""

    start: str
    sources: list[SettingSource]
    launch: LaunchLine | None = None
    aside: tuple[SettingSource, ...] = ()
    """Files of the project that a person may expect this run to read, and that it does not."""

    @property
    def name(self) -> str:
        """The launch line or the file that stands for the run."""
        if self.launch:
            return f"{self.launch.source.place}:{self.launch.line}"
        return self.sources[0].place if self.sources else ""

    @property
    def tools(self) -> frozenset[str]:
        """The libraries whose precision the run decides; where no script is known, those of its files."""
        told = frozenset().union(*(source.tools for source in self.sources if source.kind != "launch"))
        launched = {"accelerate"} if self.start == ACCELERATE and "transformers" not in told else set()
        files = {source.kind for source in self.sources} & {"accelerate", "transformers"}
        scripts = any(source.kind == "code" for source in self.sources)
        own = {"halfstep"} if any(source.halfstep for source in self.sources) else set()
        return told | own | ((launched | files) if not scripts or "transformers" in files else launched)

    def settings(self) -> list[FoundSetting]:
        """Return every setting of the run; flags of a script stand where the script uses them."""
        found = _place_settings([setting for source in self.sources for setting in source.precision], self.tools)
        # A run calls one of two functions that each make an Accelerator.
        code = iter(remove_ambiguous_claims([setting for setting in found if setting.kind == "code"]))
        return [next(code) if setting.kind == "code" else setting for setting in found]

    def provenance(self) -> list[Provenance]:
        """Return who wins in each tool of the run."""
        aside = [setting for source in self.aside for setting in source.precision]
        settings = self.settings()
        tools = self.tools | {"hydra"}
        rows = [find_provenance(tool, self.start, settings, aside) for tool in list_ranked_tools() if tool in tools]
        return [row for row in rows if row]


def _place_settings(settings: Sequence[FoundSetting], tools: frozenset[str]) -> list[FoundSetting]:
    flags = {s.argument: s for s in settings if s.kind == "launch" and s.tool == "script"}
    given = {s.argument for s in settings if s.kind == "code" and s.argument in flags}
    placed = []
    for setting in settings:
        if setting.kind == "code" and setting.argument in flags:
            placed.append(_apply_argument(setting, flags[setting.argument]))
        elif setting.argument not in given or setting.kind != "launch":
            placed.append(_add_owner(setting, settings, tools))
    return [_add_candidates(setting, placed) for setting in placed]


def _add_candidates(setting: FoundSetting, settings: Sequence[FoundSetting]) -> FoundSetting:
    """Return a value that is looked up in a configuration with the settings of the run that have its key."""
    if not setting.lookup:
        return setting
    leaf = setting.lookup.rpartition(".")[2]
    named = [(other, own) for other in settings if other.claim and (own := _find_key(other)).rpartition(".")[2] == leaf]
    # The section may have a name of its own in the script: `self.config.precision` for `trainer.precision`.
    exact = [(other, own) for other, own in named if f".{setting.lookup}".endswith(f".{own}") or own == setting.lookup]
    keyed = [other for other, _ in exact or named]
    # A flag that somebody types replaces the files and the default.
    found = [other for other in keyed if other.kind == "launch"] or keyed
    outcomes = tuple(other.claim for other in found if other.claim) or setting.outcomes
    return replace(setting, candidates=tuple(found), outcomes=outcomes)


FILES_OF_SCRIPTS = frozenset({"recipe", "hydra", "lightning", "transformers"})
"""Kinds of files that a script may read by itself."""
_LAUNCHERS = frozenset({"accelerate", "fabric", "halfstep"})
"""Programs whose own flags do not reach the script."""


def _find_key(setting: FoundSetting) -> str:
    """Return the key by which a script may look a setting up."""
    if setting.kind in FILES_OF_SCRIPTS:
        return setting.key
    is_flag = setting.kind == "launch" and setting.owner not in _LAUNCHERS
    return setting.argument if is_flag or (setting.kind == "code" and setting.rank == "default") else ""


def _apply_argument(setting: FoundSetting, flag: FoundSetting) -> FoundSetting:
    """Return what a setting of a script is once its argument is given: the flag's value, on the flag's line."""
    if setting.tool == "torch":
        is_on = flag.claim is not None and "fp32" in flag.claim.denies
        return (
            setting.read_as(read_lightning_word(setting.key, setting.value)) if is_on else replace(setting, claim=None)
        )
    level = "" if setting.rank == "default" else "code"
    return replace(flag, tool=setting.tool, level=level, decides=setting.decides)


def _add_owner(setting: FoundSetting, settings: Sequence[FoundSetting], tools: frozenset[str]) -> FoundSetting:
    """Return a flag of a script with the library that reads it."""
    if setting.kind != "launch" or setting.tool != "script":
        return setting
    if setting.argument in ("fp16", "bf16") and "transformers" in tools:
        return replace(setting, tool="transformers")
    if setting.argument.endswith("trainer.precision") and "lightning cli" in tools:
        return replace(setting.read_as(read_lightning_word(setting.key, setting.value)), tool="lightning cli")
    if any(other.kind == "hydra" and setting.argument in _list_hydra_keys(other) for other in settings):
        return replace(setting, tool="hydra")
    # The script's own parser reads it, and no library is known to.
    return replace(setting, decides=False)


def _list_hydra_keys(setting: FoundSetting) -> tuple[str, str]:
    """Return the key as its file has it, and as the whole configuration does: conf/trainer/gpu.yaml is `trainer`."""
    group = posixpath.basename(posixpath.dirname(setting.place))
    return setting.key, f"{group}.{setting.key}"


class SourceIndex:
    """The sources of a project, found by the names that scripts and launch lines give them."""

    def __init__(self, sources: Sequence[SettingSource]) -> None:
        self.sources = sources
        self._by_place = {source.place: source for source in sources}
        self._by_ending: dict[str, list[SettingSource]] = {}
        for source in sources:
            self._by_ending.setdefault(posixpath.basename(source.place), []).append(source)

    def named(self, name: str, by: str) -> SettingSource | None:
        """Return the file that a name means: next to the file that names it, in the root, or the only one that fits.

        A module of one word is looked for in the first two places only: `utils` is in many folders.
        """
        own = posixpath.normpath(name)
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(by), name))
        if found := self._by_place.get(beside) or self._by_place.get(own):
            return found
        if own.endswith(".py") and ("/" not in own or name.startswith(".")):
            return None
        ending = "/" + own.lstrip("./")
        same = self._by_ending.get(posixpath.basename(own), ())
        fitting = [source for source in same if source.place.endswith(ending)]
        return fitting[0] if len(fitting) == 1 else None


def link_project_runs(project: Project, environment: SettingSource) -> list[ProjectRun]:
    """Return the runs of a project, each with the sources that it reads."""
    by_place = SourceIndex(project.sources)
    launched = [launch for launch in project.launches if launch.launcher]
    runs = [_link_launch(launch, by_place) for launch in launched[:MOST_RUNS]]
    told = {source.place for run in runs for source in run.sources}
    runs += _list_unlaunched(by_place, told) if not runs else []
    # The files of known programs that nothing names, where each is the only one of its kind in the project.
    told = {source.place for run in runs for source in run.sources}
    known = [*project.sources, *(launch.source for launch in project.launches if not launch.launcher)]
    kinds = [source.kind for source in known]
    loose = [s for s in known if s.place not in told and s.kind != "code" and kinds.count(s.kind) == 1 and s.precision]
    if not runs:
        runs = _build_configuration_runs(loose, by_place)
        loose = []
    # A file that the project's own code reads belongs to the script that names it, and to no other.
    loose = [source for source in loose if source.kind not in ("recipe", "hydra")]
    return [_add_loose_settings(run, loose, environment) for run in runs]


def _link_launch(launch: LaunchLine, by_place: SourceIndex) -> ProjectRun:
    script = by_place.named(_format_module_path(launch.script), launch.source.place)
    members = collect_linked_sources(
        [_format_module_path(launch.script), *launch.source.names], launch.source.place, by_place
    )
    members = [member if member is script else _drop_autocast_claims(member) for member in members]
    start = {"accelerate": ACCELERATE, "fabric": FABRIC}.get(launch.launcher, PYTHON)
    return ProjectRun(start, [launch.source, *members], launch)


def _format_module_path(name: str) -> str:
    return name if "/" in name or name.endswith((".py", ".yaml", ".yml", ".json")) else f"{name.replace('.', '/')}.py"


def _list_unlaunched(by_place: SourceIndex, told: set[str]) -> list[ProjectRun]:
    """Return a run for each script that decides a precision and that no other script imports."""
    scripts = [s for s in by_place.sources if s.kind == "code" and s.place not in told]
    named = _list_imported_names(scripts, by_place)
    roots = [s for s in scripts if s.place not in named and (s.tools or any(x.claim for x in s.precision))]
    return [ProjectRun(PYTHON, [s, *_list_other_sources(s, by_place)]) for s in roots[:MOST_RUNS]]


def _list_imported_names(sources: Iterable[SettingSource], by_place: SourceIndex) -> set[str]:
    met = ((source, by_place.named(name, source.place)) for source in sources for name in source.names)
    return {other.place for source, other in met if other and other is not source}


def _drop_autocast_claims(source: SettingSource) -> SettingSource:
    """Return a module as an import runs it: autocast at its top, or in its own test, says nothing of the run."""
    return source._replace(precision=[replace(s, claim=None) if s.tool == "torch" else s for s in source.precision])


def _list_other_sources(source: SettingSource, by_place: SourceIndex) -> list[SettingSource]:
    return [
        _drop_autocast_claims(member)
        for member in collect_linked_sources(source.names, source.place, by_place)
        if member is not source
    ]


def collect_linked_sources(names: Iterable[str], place: str, by_place: SourceIndex) -> list[SettingSource]:
    """Return the sources that are named, and those that they name, in the order in which they were met."""
    found: dict[str, SettingSource] = {}
    waiting = [(name, place) for name in names]
    while waiting:
        name, by = waiting.pop(0)
        met = by_place.named(name, by)
        if met and met.place not in found:
            found[met.place] = met
            waiting += [(further, met.place) for further in met.names]
    return list(found.values())


def _build_configuration_runs(loose: Sequence[SettingSource], by_place: SourceIndex) -> list[ProjectRun]:
    """Return the runs of a project without a launch line and without a script that decides a precision."""
    scattered = [s for s in by_place.sources if s not in loose and s.kind != "code"]
    named = _list_imported_names(scattered, by_place)
    roots = [s for s in scattered if s.place not in named]
    alone = [[root, *_list_other_sources(root, by_place)] for root in roots[:MOST_RUNS]] or [[]]
    runs = []
    for members in alone:
        sources = [*members, *(s for s in loose if s not in members)]
        # Without a launch line, a file of accelerate is taken for what it is there for.
        start = ACCELERATE if any(source.kind == "accelerate" for source in sources) else PYTHON
        runs.append(ProjectRun(start, sources))
    return runs


def _add_loose_settings(run: ProjectRun, loose: Sequence[SettingSource], environment: SettingSource) -> ProjectRun:
    sources = [*run.sources, *(source for source in loose if source.kind != "accelerate")]
    files = [source for source in loose if source.kind == "accelerate"]
    start, aside = run.start, ()  # type: str, tuple[SettingSource, ...]
    if files and run.launch is None:
        # A script that uses accelerate, with a configuration of accelerate, is started with accelerate launch.
        sources, start = [*sources, *files], ACCELERATE
    elif files and ("accelerate" in run.tools or "transformers" in run.tools):
        aside = tuple(files)
    own = {setting.key for source in sources for setting in source.precision if setting.kind == "environment"}
    kept = [setting for setting in environment.precision if setting.key not in own]
    return replace(run, start=start, sources=[*sources, environment._replace(precision=kept)], aside=aside)
