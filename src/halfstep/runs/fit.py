"""`halfstep.fit` runs a recipe from Python; `halfstep train` calls `launch` with a validated recipe."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep import distributed
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.errors import HUNG, RUN_FINISHED, BadRecipe, FolderLost, FolderTaken, HalfstepError, RankFailed
from halfstep.files import check_ownership, read_json
from halfstep.host_memory import pause_gc
from halfstep.journal.events import Journal, Listener
from halfstep.journal.listeners import create_listeners
from halfstep.journal.prometheus import Prometheus
from halfstep.ownership import LOCK, FolderOwnership, find_ownership
from halfstep.recipe.changes import format_change_list, list_differences
from halfstep.recipe.resolve import ResolvedRecipe
from halfstep.recipe.sources import build_raw_recipe, read_recipe
from halfstep.runs.registry import find_task_class
from halfstep.runs.resolve import Settings, list_accepted_changes, resolve_run_recipe, summarize_choices
from halfstep.status_files import parse_status_rank
from halfstep.status_line import Now, OnProgress, ignore_status
from halfstep.terminal import create_console, display_progress, print_plain_text
from halfstep.train.checkpointing import check_folder_writable
from halfstep.train.give_up import format_fit_call
from halfstep.train.lost_ranks import LostRanks, name_lost_ranks
from halfstep.train.microbatches import adapt_microbatches, describe_divided_microbatches
from halfstep.train.outputs import FACTS
from halfstep.train.process_group import join_process_group, preserve_rng
from halfstep.train.resume import ResumeRecord, find_checkpoint, resume_from
from halfstep.train.run import Run, make_loop, read_finished_run, run_training
from halfstep.train.run_folder import (
    NEW,
    UNFINISHED,
    FolderLock,
    State,
    choose_run_dir,
    open_run,
    remove_result,
    write_run_recipe,
)
from halfstep.train.signals import StopSignalHandler
from halfstep.train.status import (
    Launch,
    RankStatus,
    begin_attempt,
    can_be_restarted,
    count_restarts,
    record_rank_status,
)
from halfstep.train.task import Task, ignore_progress
from halfstep.train.watchdog import ENDING, MARGIN, Beat, OnHang, Watchdog, end_hung_process, set_group_timeout

if TYPE_CHECKING:
    from halfstep.train.remote import RemoteCheckpoints

MEGABYTE = 10**6


def fit(
    recipe: str | Path | Mapping[str, object],
    *,
    task: Task | type[Task] | None = None,
    precision: str | None = None,
    settings: Settings = (),
    new: bool = False,
    quiet: bool = False,
    accept_data_change: bool = False,
    accept_recipe_change: bool = False,
    extend: bool = False,
    rewarm: bool = False,
) -> Run:
    """Train a recipe and return the finished run; resume it if it was interrupted.

    A run that is already finished with these settings is returned unchanged. A resumed run keeps its data and recipe
    unless a change is accepted.

    Args:
        recipe: The name of a recipe, a path, or a dict with the content of a recipe file.
        task: Your own task, as an object or a class.
        precision: The precision; by default that of the recipe.
        settings: Settings that override the recipe.
        new: Start in a new numbered folder.
        quiet: Write to the run's folder only.
        accept_data_change: Resume although the data has changed.
        accept_recipe_change: Resume although the recipe has changed.
        extend: Continue a finished run to the length in `settings`, at its last learning rate.
        rewarm: With `extend`, use a new warm-up and decay over the added steps.

    Returns:
        The finished run.

    Raises:
        HalfstepError: The recipe, the data or the folder is not usable.
    """
    accepted = list_accepted_changes(new, accept_data_change, accept_recipe_change, extend, rewarm)
    found = build_raw_recipe(recipe) if isinstance(recipe, Mapping) else read_recipe(str(recipe))
    if precision is not None:
        settings = (
            {**settings, "precision": precision}
            if isinstance(settings, Mapping)
            else [*settings, f"precision={precision}"]
        )
    resolved = resolve_run_recipe(found, settings, schema=None if task is None else _find_task_type(task).schema)
    try:
        return launch(resolved, task=task, new=new, quiet=quiet, command=format_fit_call(recipe), accepted=accepted)
    except HalfstepError as error:
        finished = (
            read_finished_run(choose_run_dir(resolved.recipe, resolved.label)) if error.id == RUN_FINISHED else None
        )
        if finished is None:
            raise
    if not quiet and distributed.rank() == 0:
        print_plain_text(
            f"{finished.dir} contains this run, finished: nothing was trained; fit(..., new=True) trains it again"
        )
    return finished


def launch(
    resolved: ResolvedRecipe,
    *,
    task: Task | type[Task] | None,
    new: bool,
    quiet: bool,
    command: str,
    notes: Sequence[str] = (),
    accepted: Collection[str] = (),
    now: Now = ignore_status,
    on_hang: OnHang | None = None,
) -> Run:
    """Train a complete recipe on every rank that torchrun or srun started, or resume an earlier launch.

    `now` receives the current activity until the run emits its own events. `on_hang` ends a process that makes no
    progress; without it there is a warning, unless the process is one of several ranks that this call joined.
    """
    with pause_gc():
        # Imports create many objects that stay; the garbage collector would scan them again and again.
        kind = find_task_class(resolved.recipe.task) if task is None else _find_task_type(task)
    with _run_session(resolved, kind, new=new, accepted=accepted, now=now, on_hang=on_hang) as session:
        recipe, folder, journal, status = session.recipe, session.folder, session.journal, session.status
        remote = session.remote
        with session.preparing():
            if recipe.checkpoint.remote is not None:
                distributed.run_on_rank_zero(lambda: _claim_remote(remote, folder, status.launch.token))
            # Read before the loop is built: a resumed run takes its measurements and remedies from the checkpoint.
            found = find_checkpoint(folder) if session.state == UNFINISHED else None
            now("reading the data, building the model")
            with pause_gc(), _show_progress(quiet, now) as on_progress:
                prepared = _prepare_task(task, kind, recipe)
                if found is not None:
                    prepared.resume(distributed.run_on_rank_zero(lambda: read_json(folder / FACTS) or {}))
                loop = make_loop(
                    prepared,
                    recipe,
                    folder,
                    journal,
                    auto_choices=found.auto_choices_for(recipe) if found else None,
                    remedies=found.remedies_for(recipe) if found else None,
                    order=found.order_for(recipe) if found else None,
                    stopping=session.stopping,
                    on_progress=on_progress,
                    beat=session.beat,
                    disk=remote.disk if remote is not None else None,
                )
            if remote is not None:
                loop.checkpoints.remote, remote.beat = remote, functools.partial(loop.beat, ENDING)
            now("")
            session.beat("restoring", 0)
            unfinished, finished = session.state == UNFINISHED, session.result
            resumed = resume_from(loop, found, folder, accepted, finished) if unfinished else None
            check_folder_writable(folder, loop.live, status.launch.token)
            journal.begin(_create_listeners(folder, recipe, quiet, resumed), resumed.seconds if resumed else 0.0)
            for metrics in journal.listeners:
                if isinstance(metrics, Prometheus):
                    status.on_end = metrics.ended
        with session.training():
            if distributed.rank() == 0:  # only after the checkpoint was found to fit
                remove_result(folder)
                write_run_recipe(folder, recipe)
            # A resumed run keeps its own recipe; only values that still apply are reported.
            chosen = [one for one in resolved.sizing if attrgetter(one.key)(recipe) == one.value]
            in_parts = describe_divided_microbatches(recipe, status.launch.divided_by, loop.model)
            all_notes = [*notes, *resolved.notes, *in_parts, *summarize_choices(chosen)]
            return run_training(
                loop,
                folder,
                label=resolved.label,
                command=command,
                notes=all_notes,
                sizing=chosen,
                resumed=resumed,
                lost=session.lost,
            )


@dataclass(frozen=True)
class RunSession:
    """The objects of one launch that stay open while it prepares and trains."""

    recipe: Any
    """The recipe that rank 0 decided on: the folder it numbered is part of it."""
    folder: Path
    state: State
    result: dict[str, object] | None
    """The result of a finished run that is extended."""
    stopping: StopSignalHandler
    journal: Journal
    status: RankStatus
    beat: Beat
    lost: LostRanks
    remote: RemoteCheckpoints | None
    """The copy of the checkpoints in an object store, on rank 0."""

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Remove a new folder in which nothing was started, and name lost ranks and folders."""
        # Rank 0 removes a new folder in which nothing was started; that is no loss to the other ranks.
        is_kept = self.state != NEW
        with (
            _remove_unless_started(self.folder, self.state),
            _name_lost_folder(self.folder) if is_kept else contextlib.nullcontext(),
            name_lost_ranks(self.lost),
        ):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Name a lost folder and lost ranks."""
        with _name_lost_folder(self.folder), name_lost_ranks(self.lost):
            yield


@contextmanager
def _run_session(
    resolved: ResolvedRecipe,
    kind: type[Task],
    *,
    new: bool,
    accepted: Collection[str],
    now: Now,
    on_hang: OnHang | None,
) -> Iterator[RunSession]:
    """Catch signals, join the ranks, open and lock the folder, and watch the launch until it ends."""
    # The order matters: `_open_run` is collective and needs the process group, and signals must be caught around both.
    options = resolved.recipe.world
    with (
        _open_store_copy(resolved.recipe) as remote,
        StopSignalHandler() as stopping,
        name_lost_ranks(),
        join_process_group(options.start_timeout + MARGIN, ends_process=on_hang is not None) as joined,
        preserve_rng(),
        _require_same_settings(resolved),
        _open_run(resolved, new, accepted, now, remote) as opened,
    ):
        recipe = kind.schema.model_validate(opened.recipe)
        folder, journal = Path(recipe.run.dir), Journal()
        status = RankStatus(folder, opened.launch)
        watchdog = Watchdog(
            status,
            options,
            on_hang=end_hung_process if joined else on_hang,
            on_limit=set_group_timeout if joined else lambda limit: None,
            on_ending=joined.release if joined else lambda: None,
            peers=joined.peers if joined else None,
        )
        beat = _build_owned_beat(folder, watchdog.beat)
        stopping.record_leaving(functools.partial(status.ended, within=1.0))
        if joined:
            joined.on_lost = functools.partial(_end_lost_rank, status)
        lost = LostRanks(folder, status.launch.token, joined)
        # Once more inside: the status gets the exit code of an error raised there.
        with record_rank_status(status), watchdog, contextlib.closing(journal):
            yield RunSession(recipe, folder, opened.state, opened.result, stopping, journal, status, beat, lost, remote)


def _end_lost_rank(status: RankStatus, reason: str) -> None:
    status.ended(HUNG, reason, within=0.5)
    end_hung_process(reason)


def _build_owned_beat(folder: Path, beat: Beat) -> Beat:
    """Return `beat`, which also raises FolderLost if a heartbeat found that the folder is no longer the run's."""

    owner = find_ownership(folder)

    def beat_while_owned(phase: str, step: int) -> None:
        nonlocal owner
        owner = owner or find_ownership(folder)  # a rank other than 0 may claim the folder later
        if owner is not None:
            owner.raise_if_lost()
        beat(phase, step)

    return beat_while_owned


@contextmanager
def _name_lost_folder(folder: Path) -> Iterator[None]:
    """Raise FolderLost instead of RankFailed where the folder is lost: the other rank ended for that reason."""
    try:
        yield
    except RankFailed as error:
        with contextlib.suppress(OSError):
            try:
                check_ownership(folder)
            except FolderLost as lost:
                raise lost from error
        raise


@contextmanager
def _require_same_settings(resolved: ResolvedRecipe) -> Iterator[None]:
    """Raise BadRecipe on all ranks where one was started with other settings, or another torch, than rank 0.

    Rank 0's recipe is used on all ranks: a setting that another rank was given would lose without a word.
    """
    if distributed.count_ranks() == 1:
        yield
        return
    mine = {"torch": str(torch.__version__), **resolved.recipe.model_dump(mode="json")}
    theirs = distributed.run_on_rank_zero(lambda: {"given": mine, "drawn": sorted(resolved.drawn)})

    def compare() -> None:
        lines = list_differences(theirs["given"], mine, ignore={*theirs["drawn"], *resolved.drawn})
        if lines:
            raise BadRecipe(
                format_change_list("started differently from rank 0:", lines),
                allowed="the same command and the same versions on every rank",
                do="start all ranks with the command of rank 0",
            )

    distributed.run_with_shared_errors(compare)
    yield


class OpenedRun(NamedTuple):
    """A run's folder as rank 0 opened it for all ranks."""

    recipe: dict[str, Any]
    """As JSON; the folder that rank 0 numbered is part of it."""
    launch: Launch
    state: State
    result: dict[str, object] | None
    """The result of a finished run that is extended."""


@contextmanager
def _open_store_copy(recipe: Any) -> Iterator[RemoteCheckpoints | None]:
    """Yield the copy of the checkpoints in an object store, on rank 0; its process starts before anything else."""
    if recipe.checkpoint.remote is None:
        yield None
        return
    from halfstep.train.remote import open_remote_checkpoints  # not loaded for plain paths

    with open_remote_checkpoints(recipe) as remote:
        yield remote


def _claim_remote(remote: RemoteCheckpoints | None, folder: Path, launch: str) -> None:
    if remote is not None:
        remote.claim(folder, launch)


@contextmanager
def _open_run(
    resolved: ResolvedRecipe, new: bool, accepted: Collection[str], now: Now, remote: RemoteCheckpoints | None
) -> Iterator[OpenedRun]:
    """Open and lock the run's folder on rank 0 for all ranks."""
    held: list[FolderLock] = []

    def open_it() -> tuple[object, ...]:
        try:
            opened = open_run(
                resolved.recipe,
                resolved.label,
                new,
                drawn=resolved.drawn,
                accepted=accepted,
                now=now,
                fill=lambda path: remote is not None and remote.fill(path, now),
            )
        except FolderTaken as taken:
            if taken.id == RUN_FINISHED and remote is not None:
                # The last upload may have failed.
                news = remote.complete(choose_run_dir(resolved.recipe, resolved.label), now)
                now("")
                if news:
                    create_console(stderr=True).print(news)
            raise
        held.append(opened.lock)
        newest = max((one.attempt for one in list_generations(opened.path / CHECKPOINTS)), default=-1)
        launched = begin_attempt(opened.path, newest, count_restarts(), opened.recipe.train.batch_size, accepted)
        launched = replace(launched, token=opened.lock.token)
        # Sent to the other ranks as plain data.
        recipe = adapt_microbatches(opened.recipe, distributed.count_ranks(), launched.divided_by)
        return recipe.model_dump(mode="json"), asdict(launched), opened.state, opened.result

    try:
        recipe, launch, state, result = distributed.run_on_rank_zero(open_it)
        opened = OpenedRun(recipe, Launch(**launch), state, result)
        folder = Path(opened.recipe["run"]["dir"])
        if distributed.rank() > 0:
            FolderOwnership.joined(
                folder, opened.launch.token
            )  # again in `check_folder_writable`, where a network disk is late
        try:
            yield opened
        finally:
            owner = find_ownership(folder)
            if owner is not None:
                owner.release()
    finally:
        for one in held:
            one.release()


@contextmanager
def _show_progress(quiet: bool, now: Now) -> Iterator[OnProgress]:
    """Yield a progress callback whose bar appears with the first call: most tasks have nothing to prepare."""
    with contextlib.ExitStack() as stack:
        bars: list[OnProgress] = []

        def on_progress(done: int, of: int) -> None:
            if not bars:
                now("")
                bars.append(stack.enter_context(display_progress("getting ready", "samples")))
            bars[0](done, of)

        yield ignore_progress if quiet or distributed.rank() > 0 else on_progress


@contextmanager
def _remove_unless_started(folder: Path, state: str) -> Iterator[None]:
    """Remove the folder of a run that failed to start, so that the corrected command can be repeated."""
    try:
        yield
    except BaseException:
        # Only a new folder without checkpoints: a folder that holds work is never removed.
        if distributed.rank() == 0 and state == NEW and not (folder / CHECKPOINTS).exists():
            with contextlib.suppress(OSError, FolderLost):
                check_ownership(folder)
                _clear_folder(folder)
        raise


def _clear_folder(folder: Path) -> None:
    """Remove a folder without work; where the run may be restarted its status stays, by which restarts are counted."""
    if not can_be_restarted():
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            # The lock too: without it, the last status would not be written.
            elif parse_status_rank(entry.name) is None and entry.name != LOCK:
                entry.unlink()


def _find_task_type(task: Task | type[Task]) -> type[Task]:
    return task if isinstance(task, type) else type(task)


def _prepare_task(task: Task | type[Task] | None, kind: type[Task], recipe: Any) -> Task:
    if not isinstance(task, Task):
        return kind(recipe)
    # A copy, so that two fits with one task object do not share state.
    given = copy.copy(task)
    given.begin(recipe)
    return given


def _create_listeners(folder: Path, recipe: Any, quiet: bool, resumed: ResumeRecord | None) -> list[Listener]:
    # Rank 0 alone writes the journal and the console.
    if distributed.rank() > 0:
        return []
    console = None if quiet else create_console()
    return create_listeners(
        folder,
        tracker=recipe.run.tracker,
        console=console,
        style=recipe.run.console,
        resumed_at=resumed.attempt if resumed else None,
        prometheus=recipe.run.prometheus,
        largest_file=recipe.run.journal_mb * MEGABYTE,
    )
