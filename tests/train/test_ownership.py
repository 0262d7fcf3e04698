"""A run's folder is its own, or the run ends: nothing is written to, created in or deleted from another one's."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import halfstep
from halfstep import files
from halfstep.checkpoint.paths import CHECKPOINTS, Disk, list_generations
from halfstep.checkpoint.sealed import MANIFEST, add_seal, read_manifest
from halfstep.errors import FolderLost, FolderTaken
from halfstep.files import parse_known_fields, write_json, write_text
from halfstep.journal.events import Event, Journal
from halfstep.journal.jsonl import JOURNAL, LOG, JsonLinesListener, read_events
from halfstep.ownership import LOCK, FolderOwnership, find_ownership
from halfstep.peers import compute_boot_container_id
from halfstep.recipe.sources import build_raw_recipe
from halfstep.runs.fit import _remove_unless_started
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.status_files import HEARTBEAT, RankStatusRecord, name_status_file
from halfstep.train import run_folder
from halfstep.train.run_folder import NEW, check_run, lock_folder
from halfstep.train.watchdog import RankPosition, write_stacks
from tests.support.tiny_task import Tiny

STATUS = name_status_file(0)

FORK = multiprocessing.get_context("fork")
TAKEN, GONE = 73, 74
SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "train.seed": 5,
    "train.steps": 12,
    "train.batch_size": 8,
    "train.num_workers": 0,
    "checkpoint.every_steps": 4,
    "checkpoint.background": False,
    "run.pictures": 0,
    "data.samples": 64,
}


class Disturbed(Tiny):
    """Something happens to the folder in the sixth step."""

    disturb: Callable[[Path], object] = staticmethod(lambda folder: None)
    at = 6

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        if model.training:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == self.at:
                type(self).disturb(Path(self.recipe.run.dir))
        return super().loss(model, batch, metrics)


def trained(folder: Path, disturb: Callable[[Path], object] = lambda folder: None, **settings: Any) -> halfstep.Run:
    class Task(Disturbed):
        pass

    Task.disturb = staticmethod(disturb)
    given = {**SETTINGS, "run.dir": str(folder), **{key.replace("__", "."): value for key, value in settings.items()}}
    return halfstep.fit({"task": "tiny"}, task=Task, settings=given, quiet=True)


def lost(folder: Path, disturb: Callable[[Path], object], **settings: Any) -> FolderLost:
    with pytest.raises(FolderLost) as caught:
        trained(folder, disturb, **settings)
    assert not find_ownership(folder)
    return caught.value


def tree(folder: Path, *but: str) -> dict[str, str]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {
        str(one.relative_to(folder)): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in found
        if one.name not in but
    }


# -- another run ------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_run_whose_name_was_taken_touches_nothing_of_the_other(tmp_path: Path) -> None:
    trained(tmp_path / "other", train__seed=2)
    before = tree(tmp_path / "other")

    def exchange(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "other", folder)

    error = lost(tmp_path / "run", exchange, train__seed=1)
    assert error.exit_code == TAKEN
    assert "is no longer this run's folder" in error.given
    assert tree(tmp_path / "run") == before


def _again(folder: Path) -> None:
    text = (folder / LOCK).read_bytes()
    (folder / LOCK).unlink()
    (folder / LOCK).write_bytes(text)


def _link(folder: Path) -> None:
    (folder / LOCK).rename(folder / "elsewhere")
    (folder / LOCK).symlink_to(folder / "elsewhere")


def _pipe(folder: Path) -> None:
    (folder / LOCK).unlink()
    os.mkfifo(folder / LOCK)


def _folder(folder: Path) -> None:
    (folder / LOCK).unlink()
    (folder / LOCK).mkdir()


def _token(folder: Path) -> None:
    (folder / LOCK).write_text(json.dumps({**json.loads((folder / LOCK).read_text()), "launch": "0" * 16}))


def _huge(folder: Path) -> None:
    os.truncate(folder / LOCK, 2**40)


WAYS: dict[str, Callable[[Path], object]] = {
    "a copy": _again,
    "a link to it": _link,
    "a pipe": _pipe,
    "a folder": _folder,
    "another token": _token,
    "emptied": lambda folder: (folder / LOCK).write_bytes(b""),
    "binary": lambda folder: (folder / LOCK).write_bytes(bytes(range(256)) * 100),
    "huge": _huge,
    "nested": lambda folder: (folder / LOCK).write_bytes(b"[" * 4096),
    "edited": lambda folder: (folder / LOCK).write_text("do not touch, Jo\n"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lock_that_is_not_the_run_s_own_ends_it(way: str, tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def disturb(folder: Path) -> None:
        WAYS[way](folder)
        seen.update(tree(folder, LOCK, JOURNAL, LOG))

    error = lost(tmp_path / "run", disturb)
    assert error.exit_code == TAKEN
    assert tree(tmp_path / "run", LOCK, JOURNAL, LOG) == seen
    assert all(event["event"] != "end" for event in read_events(tmp_path / "run" / JOURNAL)), "it may be another's"


def test_a_run_that_is_started_again_after_its_lock_was_edited_goes_on(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    lost(tmp_path / "run", WAYS["edited"])
    trained(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_link_to_a_run_may_not_be_turned(tmp_path: Path) -> None:
    trained(tmp_path / "other", train__seed=2)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    trained(tmp_path / "link")
    assert (tmp_path / "real" / "result.json").exists(), "a run folder may be a link"
    (tmp_path / "second").mkdir()
    (tmp_path / "turned").symlink_to(tmp_path / "second")
    before = tree(tmp_path / "other")

    def turn(folder: Path) -> None:
        folder.unlink()
        folder.symlink_to(tmp_path / "other")

    assert lost(tmp_path / "turned", turn).exit_code == TAKEN
    assert tree(tmp_path / "other") == before


def test_a_heartbeat_that_finds_the_folder_taken_ends_a_run_that_does_not_save(
    tmp_path: Path,
) -> None:
    def notice(folder: Path) -> None:
        _token(folder)
        owner = find_ownership(folder)
        with pytest.raises(FolderLost):
            owner.check()  # type: ignore[union-attr]  # as the thread does that writes the status

    error = lost(tmp_path / "run", notice, checkpoint__every_steps=1000, train__steps=8)
    assert error.exit_code == TAKEN
    assert list_generations(tmp_path / "run" / CHECKPOINTS) == []
    assert len([one for one in read_events(tmp_path / "run" / JOURNAL) if one["event"] == "step"]) == 5


# -- no folder --------------------------------------------------------------------------------------------------------


def remove_at_once(folder: Path) -> None:
    """Remove a folder in one moment: where a save in the background writes to it meanwhile, rmtree alone may fail."""
    shutil.rmtree(folder.rename(folder.with_name("removed")), ignore_errors=True)


GONE_WAYS: dict[str, Callable[[Path], object]] = {
    "removed": remove_at_once,
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
    "a file": lambda folder: (folder.rename(folder.with_name("moved")), folder.write_text("")),
    "no lock": lambda folder: (folder / LOCK).unlink(),
}


@pytest.mark.wording
@pytest.mark.parametrize(("way", "background"), [*((way, False) for way in GONE_WAYS), ("removed", True)])
def test_a_run_without_its_folder_ends_and_makes_nothing_anew(way: str, background: bool, tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def disturb(folder: Path) -> None:
        GONE_WAYS[way](folder)
        seen.update(tree(folder, JOURNAL, LOG) if folder.is_dir() else {})

    error = lost(tmp_path / "run", disturb, checkpoint__background=background)
    assert error.exit_code == GONE
    assert f"{tmp_path / 'run' / LOCK} is gone" in error.given
    assert "start the run with the same command" in error.do
    assert (tmp_path / "run").is_dir() == (way == "no lock")
    assert (tree(tmp_path / "run", JOURNAL, LOG) if way == "no lock" else {}) == seen


@pytest.mark.wording
def test_a_task_that_changes_the_working_directory_of_a_relative_run_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    error = lost(Path("run"), lambda folder: os.chdir(tmp_path / "other"))
    assert error.exit_code == GONE
    assert f"run.dir={tmp_path / 'run'}" in error.do
    assert list((tmp_path / "other").iterdir()) == []


def test_a_lock_that_a_full_disk_left_without_its_token_is_compared_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        ours = lock_folder(tmp_path)
    assert (tmp_path / LOCK).read_bytes() == b""
    write_text(tmp_path / "file", "")
    other = FolderOwnership.joined(tmp_path, ours.token)
    assert other is not None
    other.release()
    (tmp_path / LOCK).rename(tmp_path / "old")
    (tmp_path / LOCK).touch()
    with pytest.raises(FolderLost):
        write_text(tmp_path / "file", "")
    ours.release()


def test_a_run_that_is_asked_to_stop_without_its_folder_does_not_say_that_it_was_saved(tmp_path: Path) -> None:
    def remove(folder: Path) -> None:
        shutil.rmtree(folder)
        os.kill(os.getpid(), signal.SIGTERM)

    assert lost(tmp_path / "run", remove, checkpoint__every_steps=1000).exit_code == GONE
    assert not (tmp_path / "run").exists()


def losses(folder: Path) -> list[str]:
    return [event["loss"].hex() for event in read_events(folder / JOURNAL) if event["event"] == "step"]


def test_a_run_that_was_moved_goes_on_in_its_new_place(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    lost(tmp_path / "run", GONE_WAYS["moved"])
    run = trained(tmp_path / "moved")
    assert run.reason == "finished"
    assert losses(tmp_path / "moved") == losses(tmp_path / "whole")


def test_nothing_is_removed_for_a_start_that_failed_in_another_run_s_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        with _remove_unless_started(folder, NEW):
            raise ZeroDivisionError

    (tmp_path / "run").mkdir()
    ours = lock_folder(tmp_path / "run")
    _again(tmp_path / "run")
    (tmp_path / "run" / "precious").write_text("keep")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "run")
    assert (tmp_path / "run" / "precious").read_text() == "keep"
    ours.release()
    assert json.loads((tmp_path / "run" / LOCK).read_text()), "the text of another lock is left alone"
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_way_to_write_asks_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("")
    ours = lock_folder(folder)
    journal = JsonLinesListener(folder / JOURNAL, largest=1)
    journal.on_event({"event": "note"})
    (folder / CHECKPOINTS).mkdir()
    (folder / CHECKPOINTS / "file").write_text("")
    _token(folder)
    before = tree(folder)
    disk = Disk()
    tried: list[Callable[[], object]] = [
        lambda: write_text(folder / "result.json", ""),
        lambda: write_text(folder / "pictures" / "epoch-0001.png", ""),
        lambda: write_json(Path(os.path.relpath(folder / "status.rank-00001.json")), {}),
        lambda: run_folder.remove_result(folder),
        lambda: disk.make_folder(folder / CHECKPOINTS / "step"),
        lambda: disk.create(folder / CHECKPOINTS / "new"),
        lambda: disk.rename(folder / CHECKPOINTS / "file", folder / CHECKPOINTS / "other"),
        lambda: disk.remove(folder / CHECKPOINTS / "file"),
        lambda: disk.remove_folder(folder / CHECKPOINTS),
        lambda: JsonLinesListener(folder / JOURNAL),
    ]
    for attempt in tried:
        with pytest.raises(FolderLost):
            attempt()
    write_stacks(folder / "stacks" / "rank-00000.txt", RankPosition(0, "computing", 0, None))
    journal.on_event({"event": "note"})
    journal.close()
    assert tree(folder) == before
    assert not (folder / "stacks").exists()
    ours.release()


def test_only_the_folder_of_a_running_run_is_not_created(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "c.txt", "free")
    ours = lock_folder(tmp_path / "a")
    write_text(tmp_path / "a" / "pictures" / "one.png", "")
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "a" / "x" / "y" / "z", "")
    assert not (tmp_path / "a" / "x").exists()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FolderLost):
        write_text(tmp_path / "a" / "c.txt", "")
    assert not (tmp_path / "a").exists()
    ours.release()
    files.create_parent_folder(tmp_path / "a" / "c.txt")
    assert (tmp_path / "a").exists()


def test_a_disk_that_cannot_be_asked_is_not_a_lost_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, real = lock_folder(tmp_path), os.stat

    def away(path: Any, *given: Any, **more: Any) -> os.stat_result:
        if Path(path).name == LOCK:
            raise OSError(5, "Input/output error")
        return real(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", away)
        with pytest.raises(OSError, match="Input/output"):
            write_text(tmp_path / "file", "")
    assert ours.lost is None
    write_text(tmp_path / "file", "later")
    ours.release()


class Failing:
    def on_event(self, event: Event) -> None:
        raise FolderLost("gone", exit_code=GONE)

    def close(self) -> None: ...


class Hearing(Failing):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_event(self, event: Event) -> None:
        self.heard.append(event["event"])


def test_every_listener_hears_the_event_at_which_the_folder_was_found_lost() -> None:
    last = Hearing()
    journal = Journal([Failing(), last])
    with pytest.raises(FolderLost):
        journal.emit("step")
    journal.emit("end")
    assert last.heard == ["step", "end"]


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_the_token_of_a_launch_is_in_its_lock_status_and_manifests(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def look(folder: Path) -> None:
        lock_text, status = json.loads((folder / LOCK).read_text()), json.loads((folder / STATUS).read_text())
        seen.append((lock_text["launch"], status["launch"]))

    trained(tmp_path / "run", look)
    [(token, same)] = seen
    assert token == same
    assert {read_manifest(one).launch for one in list_generations(tmp_path / "run" / CHECKPOINTS)} == {token}
    assert (tmp_path / "run" / LOCK).read_bytes() == b""


def _as_before(folder: Path) -> None:
    """Take back what an earlier version did not write."""
    for one in list_generations(folder / CHECKPOINTS):
        content = json.loads((one.path / MANIFEST).read_text())
        assert content.pop("launch")
        content.pop("seal")
        (one.path / MANIFEST).write_bytes(add_seal(content))
    status = json.loads((folder / STATUS).read_text())
    for key in ("machine", "beat"):
        status.pop(key, None)
    (folder / STATUS).write_text(json.dumps({**status, "state": "running", "pid": 2**22 + 1}))
    (folder / LOCK).write_text(
        json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "since": "2026-01-01T00:00:00+00:00"})
    )


class Stop(Exception): ...


def _stop(folder: Path) -> None:
    raise Stop


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    with pytest.raises(Stop):
        trained(tmp_path / "run", _stop)
    _as_before(tmp_path / "run")
    trained(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    start = [event for event in read_events(tmp_path / "run" / JOURNAL) if event["event"] == "start"][-1]
    assert start["resumed"]["exact"]


def test_a_manifest_with_something_else_for_a_token_is_damaged(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    newest = list_generations(tmp_path / "run" / CHECKPOINTS)[0]
    content = json.loads((newest.path / MANIFEST).read_text())
    content.pop("seal")
    for launch in ("", "0" * 15, "0" * 17, "A" * 16, 5, None, ["0" * 16], "../" * 5):
        (newest.path / MANIFEST).write_bytes(add_seal({**content, "launch": launch}))
        with pytest.raises(ValueError, match="token"):
            read_manifest(newest)
    (newest.path / MANIFEST).write_bytes(add_seal({**content, "launch": "0" * 16}))
    assert read_manifest(newest).launch == "0" * 16


def test_a_copy_of_a_run_goes_on_whatever_became_of_the_original(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    trained(tmp_path / "run", lambda folder: shutil.copytree(folder, tmp_path / "while it ran"))
    assert json.loads((tmp_path / "while it ran" / LOCK).read_text())["launch"]
    trained(tmp_path / "while it ran")
    assert losses(tmp_path / "while it ran") == losses(tmp_path / "whole")
    shutil.copytree(tmp_path / "run", tmp_path / "finished")
    given = {**SETTINGS, "run.dir": str(tmp_path / "finished"), "train.steps": 16}
    halfstep.fit({"task": "tiny"}, task=Disturbed, settings=given, quiet=True, extend=True)
    assert losses(tmp_path / "finished")[:12] == losses(tmp_path / "whole")


def _hold(folder: Path, told: Any) -> None:
    lock_folder(folder)
    since = json.loads((folder / LOCK).read_text())
    (folder / STATUS).write_text(json.dumps({"state": "running", **since}))
    (folder / JOURNAL).touch()
    kept = (folder / JOURNAL).open("ab")
    told.send(os.getpid())
    time.sleep(60)
    kept.close()


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that has the lock of `tmp_path/run`."""
    (tmp_path / "run").mkdir()
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(tmp_path / "run", theirs))
    process.start()
    assert ours.poll(20)
    yield process
    process.kill()
    process.join()


def test_a_copy_of_a_run_that_is_alive_is_not_that_run(holder: Any, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    lock_folder(tmp_path / "copy").release()
    with pytest.raises(FolderTaken):
        lock_folder(tmp_path / "run")


# -- no working locks -------------------------------------------------------------------------------------------------


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)


@pytest.mark.wording
@pytest.mark.parametrize("left", [(LOCK, STATUS), (STATUS,), (LOCK,)])
def test_where_locks_exclude_nobody_the_process_decides(
    left: tuple[str, ...], holder: Any, tmp_path: Path, without_locks: None
) -> None:
    run = tmp_path / "run"
    for name in {LOCK, STATUS} - set(left):
        (run / name).unlink()
    with pytest.raises(FolderTaken) as caught:
        lock_folder(run)
    assert f"is in use by process {holder.pid} on {socket.gethostname()}" in caught.value.given
    if LOCK in left:
        assert json.loads((run / LOCK).read_text())["pid"] == holder.pid
    holder.kill()
    holder.join()
    lock_folder(run).release()


@pytest.mark.wording
def test_where_locks_exclude_nobody_one_process_still_has_it_once(tmp_path: Path, without_locks: None) -> None:
    ours = lock_folder(tmp_path)
    with pytest.raises(FolderTaken, match="this process"):
        lock_folder(tmp_path)
    ours.release()
    lock_folder(tmp_path).release()


def test_of_two_that_were_granted_the_lock_the_first_finds_the_token_of_the_second(
    tmp_path: Path, without_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lock_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_refuse_running_here", lambda folder, descriptor: None)
        second = lock_folder(tmp_path)
    with pytest.raises(FolderLost) as caught:
        first.check()
    assert caught.value.exit_code == TAKEN
    first.release()
    second.check()
    second.release()


def elsewhere(**more: Any) -> dict[str, Any]:
    who = {"pid": os.getpid(), "host": "far", "since": "2026-01-01T00:00:00+00:00", "launch": "a" * 16}
    return {"state": "running", **who, "world": 1, "beat": 5, **more}


@pytest.mark.parametrize(
    "status",
    [
        elsewhere(),
        elsewhere(host=socket.gethostname(), machine="0" * 16),
        elsewhere(world=10**12, beat=None),
        elsewhere(world=-1, beat="x" * 1000),
    ],
)
def test_a_run_of_another_host_without_a_heartbeat_is_taken_over(
    status: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "WATCHED", 0.6)
    monkeypatch.setattr(run_folder, "LONGEST_WATCH", 1.0)
    (tmp_path / STATUS).write_text(json.dumps(status))
    told: list[str] = []
    began = time.monotonic()
    lock_folder(tmp_path, told.append).release()
    assert 0.6 <= time.monotonic() - began < 5.0
    assert told[0].startswith("watching for 1 s whether process")


@pytest.mark.parametrize(
    ("status", "seconds"), [(elsewhere(), 15.0), (elsewhere(world=1000), 60.0), (elsewhere(world=10**9), 300.0)]
)
def test_a_run_of_another_host_is_watched_for_three_heartbeats(status: dict[str, Any], seconds: float) -> None:
    assert run_folder._compute_watch_seconds(parse_known_fields(RankStatusRecord, status)) == seconds
    assert 3 * HEARTBEAT <= run_folder.WATCHED


@pytest.mark.wording
@pytest.mark.parametrize(("moves", "kind"), [("beat", int), ("time", str), ("step", int)])
def test_a_run_of_another_host_with_a_heartbeat_has_the_folder(
    moves: str, kind: Callable[[int], object], tmp_path: Path
) -> None:
    write_json(tmp_path / STATUS, elsewhere(**{moves: kind(1)}))
    (tmp_path / LOCK).write_text("theirs")
    over = threading.Event()

    def go_on() -> None:
        count = 1
        while not over.wait(0.2):
            count += 1
            write_json(tmp_path / STATUS, elsewhere(**{moves: kind(count)}))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        with pytest.raises(FolderTaken) as caught:
            lock_folder(tmp_path)
    finally:
        over.set()
        thread.join()
    assert "on far since" in caught.value.given
    assert f"kill {os.getpid()} on far" in caught.value.do
    assert (tmp_path / LOCK).read_text() == "theirs"


@pytest.mark.parametrize("later", [{"state": "ended", "code": 0}, {"host": socket.gethostname(), "pid": 2**22 + 1}])
def test_a_run_of_another_host_that_ends_meanwhile_is_not_waited_for(later: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / STATUS, elsewhere())
    timer = threading.Timer(0.3, write_json, (tmp_path / STATUS, elsewhere(**later)))
    timer.start()
    began = time.monotonic()
    lock_folder(tmp_path).release()
    assert time.monotonic() - began < 10.0
    timer.join()


def test_a_check_before_the_start_writes_nothing_to_the_lock_of_a_run_on_another_host(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        trained(tmp_path / "run", _stop)
    given = {**SETTINGS, "run.dir": str(tmp_path / "run")}
    recipe = resolve_run_recipe(build_raw_recipe({"task": "tiny"}), given, schema=Tiny.schema).recipe
    (tmp_path / "run" / LOCK).write_text("theirs")
    (tmp_path / "run" / STATUS).write_text(json.dumps(elsewhere()))
    assert check_run(recipe, "tiny") == "unfinished"
    assert (tmp_path / "run" / LOCK).read_text() == "theirs"


@pytest.mark.parametrize("status", [b"\xff" * 100, b"[" * 4000, b'{"state": "running", "pid": 1e999}', b"x" * 10**6])
def test_a_status_that_nobody_can_read_is_no_run(status: bytes, tmp_path: Path) -> None:
    (tmp_path / STATUS).write_bytes(status)
    began = time.monotonic()
    lock_folder(tmp_path).release()
    assert time.monotonic() - began < 5.0


# -- other ranks ------------------------------------------------------------------------------------------------------


def test_another_rank_claims_the_folder_that_rank_zero_has_locked(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    assert FolderOwnership.joined(tmp_path, "0" * 16) is None
    theirs = FolderOwnership.joined(tmp_path, ours.token)
    assert theirs is not None
    theirs.check()
    _token(tmp_path)
    with pytest.raises(FolderLost):
        theirs.check()
    theirs.release()
    ours.release()
    assert find_ownership(tmp_path) is None


def test_a_rank_that_ends_after_rank_zero_still_records_its_own_reason(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    theirs = FolderOwnership.joined(tmp_path, ours.token)
    assert theirs is not None
    ours.release()
    assert (tmp_path / LOCK).read_bytes() == b""
    write_text(tmp_path / "status", "lost a rank")
    assert (tmp_path / "status").read_text() == "lost a rank"
    theirs.check()
    next_launch = lock_folder(tmp_path)
    with pytest.raises(FolderLost) as refused:
        theirs.check()
    assert refused.value.exit_code == TAKEN
    theirs.release()
    next_launch.release()


def test_rank_zero_does_not_take_an_emptied_lock_for_its_own(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    os.truncate(tmp_path / LOCK, 0)
    with pytest.raises(FolderLost):
        ours.check()
    ours.release()


@pytest.mark.parametrize("way", ["a pipe", "a folder", "a link to it"])
def test_another_rank_does_not_claim_what_is_no_file(way: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("")
    WAYS[way](tmp_path)
    assert FolderOwnership.joined(tmp_path, "0" * 16) is None


def test_this_machine_has_one_name(tmp_path: Path) -> None:
    assert compute_boot_container_id() == compute_boot_container_id()
    process = FORK.Process(target=(tmp_path / "id").write_text, args=(compute_boot_container_id(),))
    process.start()
    process.join()
    assert (tmp_path / "id").read_text() == compute_boot_container_id()
