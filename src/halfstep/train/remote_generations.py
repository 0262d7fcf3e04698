"""Checkpoints of a run in an object store: claim the place, upload, commit, retire and restore. Imports no torch.

    OWNER.json                                     the run, and its newest launch, replaced only by If-Match
    checkpoints/NAME-0003-LAUNCH/...               the files of a checkpoint
    checkpoints/NAME-0003-LAUNCH/COMMIT.json       written last and only if absent: without it there is no checkpoint
    kept/0003-LAUNCH/SHA256                        recipe, journal, log and best weights at the checkpoint, in blocks

`0003` counts the launches of the run, LAUNCH is the token of one. No two launches write the same key, and a launch
removes nothing of a later one. The functions with a `request` run in the store's process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.errors import StoreFailed
from halfstep.files import LARGEST_JSON, flush, parse_strict_json, replace_storage_errors, write_json, write_text
from halfstep.journal.jsonl import JOURNAL, LOG, list_journal_parts
from halfstep.store.address import parse_address
from halfstep.store.failures import CHANGED, MISSING, SHORT
from halfstep.store.objects import PART, Store
from halfstep.train.run_folder import RECIPE, RESTORING

OWNER, COMMIT, KEPT = "OWNER.json", "COMMIT.json", "kept"
LEASE = "remote.json"
"""The file in the run's folder that names the run in the store, and the number of its launch."""
BEST, MANIFEST, STATE = "best.safetensors", "MANIFEST.json", "rank-00000.json"
BESIDE = (RECIPE, JOURNAL, LOG, BEST)
FORM = 1
TAKEN, DAMAGED, KEPT_ALL = "taken", "damaged", "kept-all"
"""Kinds of failure: the place is another launch's or another run's; no checkpoint in it is intact; a checkpoint was
committed, and the older ones could not be removed."""
REMOVAL = 15.0
"""Seconds for which the removal of an older checkpoint is repeated; the next upload tries it again."""
TRIES = 5
_DIRECTORY = re.compile(r"(step-([0-9]{8,15})\.([0-9a-f]{4,12}))-([0-9a-f]{4,8})-([0-9a-f]{16})")
_FILE = re.compile(r"rank-[0-9]{5}\.(?:safetensors|json)|MANIFEST\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = re.compile(rf"{KEPT}/([0-9a-f]{{4,8}})-([0-9a-f]{{16}})/[0-9a-f]{{64}}")


@dataclass(frozen=True)
class Lease:
    """The claim of a launch on a place in a store."""

    address: str
    patience: float
    run: str
    """Drawn once for each run: another run must not use the same place."""
    number: int
    """The number of the launch, counted over all machines."""
    launch: str
    conditional: bool
    """Whether the store honors `If-None-Match` and `If-Match`."""

    @property
    def place(self) -> str:
        return f"{self.number:04x}-{self.launch}"

    def covers(self, number: int, launch: str) -> bool:
        """Return whether this launch may remove objects of a launch: its own, and those of earlier ones."""
        return number < self.number or launch == self.launch


@dataclass(frozen=True)
class KnownLaunch:
    """The run and the launch that a folder on disk belongs to."""

    run: str
    number: int


@dataclass(frozen=True)
class Owner:
    """The content of OWNER.json."""

    run: str
    number: int
    launch: str
    newest: str | None = None
    """The last commit, for a listing that does not show it yet."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    recipe: str = ""
    """The run's recipe.yaml until the first commit, which has it: another run must not start here meanwhile."""

    def text(self) -> bytes:
        return _add_seal({"form": FORM, **asdict(self)})


class RemoteCheckpointName(NamedTuple):
    """The name of a checkpoint in the store; a later one is greater."""

    launch_number: int
    number: int
    attempt: int
    launch: str
    name: str

    @property
    def key(self) -> str:
        return f"{CHECKPOINTS}/{self.name}-{self.launch_number:04x}-{self.launch}"

    @property
    def blocks_prefix(self) -> str:
        """The start of the keys of its blocks."""
        return f"{KEPT}/{self.launch_number:04x}-{self.launch}"


class Seal(NamedTuple):
    """The size and the digest of an object."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """The content of COMMIT.json."""

    run: str
    name: str
    files: Mapping[str, Seal]
    beside: Mapping[str, Sequence[Seal]]
    """The other files that a resume needs, each as its blocks."""

    def text(self) -> bytes:
        return _add_seal({"form": FORM, **asdict(self)})

    @property
    def blocks(self) -> Iterator[Seal]:
        """All blocks of all other files."""
        return (seal for blocks in self.beside.values() for seal in blocks)


@dataclass(frozen=True)
class RestoreResult:
    """The result of a restore from a store."""

    name: str | None
    """The checkpoint, or None if the store has none; the run's recipe may be restored all the same."""
    known: KnownLaunch | None
    """The run in the store, if there is one."""
    skipped: Mapping[str, str]
    """Newer checkpoints that are damaged, and why."""

    @classmethod
    def of(cls, content: Any) -> RestoreResult:
        known = content["known"]
        return cls(content["name"], KnownLaunch(**known) if known else None, content["skipped"])


class RemoteStoreRequest(TypedDict):
    """The part of every request that names the store."""

    address: str
    patience: float


class ClaimRequest(RemoteStoreRequest):
    """The request of `claim`."""

    launch: str
    known: Any
    """The fields of a Known."""
    recipe: str
    """The content of the folder's recipe.yaml."""


class RestoreRequest(RemoteStoreRequest):
    """The request of `restore`."""

    folder: str


class UploadRequest(TypedDict):
    """The request of `upload`."""

    lease: Any
    """The fields of a Lease."""
    folder: str
    name: str
    keep: int
    skipped: list[str]
    withdrawn: list[str]


class DamagedCheckpoint(Exception):
    """A checkpoint in the store that differs from its commit; its text is the reason."""


def claim(request: ClaimRequest) -> dict[str, object]:
    """Make a launch the owner of a place and return its lease; raise StoreFailed `taken` for another run's place."""
    store = _open_remote_store(request)
    known = KnownLaunch(**request["known"])
    conditional = store.honors_conditions()
    for _ in range(TRIES):
        owner, tag = read_owner(store)
        if owner is not None and owner.launch == request["launch"]:
            return asdict(_build_lease(request, owner, conditional))
        if owner is not None:
            _refuse_other_runs(store, owner, known)
        number = max(known.number, owner.number if owner is not None else 0) + 1
        newest = owner.newest if owner is not None else None
        recipe = request["recipe"] if newest is None else ""
        wanted = Owner(known.run, number, request["launch"], newest, recipe=recipe)
        if _write_owner(store, wanted, tag, conditional):
            return asdict(_build_lease(request, wanted, conditional))
    raise _taken_error(store, "is repeatedly claimed by another launch")


def release(request: Any) -> None:
    """Let another run have a place that this launch has claimed, and in which it started nothing.

    The request has the fields of its Lease.
    """
    lease, store = Lease(**request), _open_remote_store(request)
    owner, tag = read_owner(store)
    if owner is not None and owner.launch == lease.launch and owner.newest is None:
        _write_owner(store, Owner(lease.run, lease.number, lease.launch), tag, lease.conditional)


def _build_lease(request: RemoteStoreRequest, owner: Owner, conditional: bool) -> Lease:
    return Lease(request["address"], request["patience"], owner.run, owner.number, owner.launch, conditional)


def _refuse_other_runs(store: Store, owner: Owner, known: KnownLaunch) -> None:
    if known.run != owner.run:
        raise _taken_error(store, "contains a different run than this folder")
    newest = max(list_commits(store, owner), default=None)
    if newest is not None and newest.launch_number > known.number:
        raise _taken_error(
            store, f"is ahead of this folder: another machine trained this run to step {newest.attempt:,}"
        )


def _taken_error(
    store: Store, what: str, do: str = "to continue the run in the store, start in an empty folder"
) -> StoreFailed:
    return StoreFailed(
        f"{store.address} {what}",
        allowed="one run for each address, and one launch of it at a time",
        do=f"give checkpoint.remote={store.address}-2; or, {do}",
        kind=TAKEN,
    )


def read_owner(store: Store) -> tuple[Owner | None, str]:
    """Return the owner of a place with the tag of its object; None if there is none."""
    try:
        content, tag = _read_sealed(store, OWNER)
        found = Owner(
            **{name: content[name] for name in ("run", "number", "launch", "newest", "host", "pid", "recipe")}
        )
        texts = (found.run, found.launch, found.host, found.newest or "", found.recipe)
        if type(found.number) is not int or not all(isinstance(one, str) for one in texts):
            raise DamagedCheckpoint("its fields have other types")
        return found, tag
    except StoreFailed as failure:
        if failure.kind != MISSING:
            raise
        return None, ""
    except (DamagedCheckpoint, KeyError, TypeError):
        again = f"if no other run is there, remove {store.address}/{OWNER}: the same command writes it again"
        raise _taken_error(store, f"has an {OWNER} that halfstep did not write, or that is damaged", again) from None


def _write_owner(store: Store, owner: Owner, tag: str, conditional: bool) -> bool:
    """Write OWNER.json over the version with this tag, or the first one; return whether it is there."""
    if not conditional:
        store.put(OWNER, owner.text())
        return True
    return store.replace(OWNER, owner.text(), tag) if tag else store.create(OWNER, owner.text())


def upload(request: UploadRequest) -> str | None:
    """Upload and commit a checkpoint of the run in `folder`, then remove older ones; return the name of the commit.

    `withdrawn` are checkpoints that the run has set aside: they are removed first. None if local retention has
    removed the checkpoint before it could be opened. Raises StoreFailed `taken` where a later launch owns the place,
    and `kept-all` if the checkpoint is committed and older ones could not be removed.
    """
    lease, folder, name = Lease(**request["lease"]), Path(request["folder"]), request["name"]
    store = _open_remote_store(request["lease"])
    owner, tag = _read_owned(store, lease)
    found = list_commits(store, owner)
    for one in found:
        if one.name in request["withdrawn"] and lease.covers(one.launch_number, one.launch):
            store.delete(f"{one.key}/{COMMIT}")
    with contextlib.ExitStack() as opened:
        try:
            # Open files stay readable when retention removes the checkpoint.
            paths = sorted((folder / CHECKPOINTS / name).iterdir())
            files: dict[str, BinaryIO] = {path.name: opened.enter_context(path.open("rb")) for path in paths}
        except FileNotFoundError:
            return None
        seals = _build_seals(files)
        if any(one.name == name and _find_manifest_seal(store, one) == seals[MANIFEST] for one in found):
            return None
        target = _parse_name(f"{name}-{lease.place}")
        assert target is not None
        for file, content in files.items():
            _send_once(store, f"{target.key}/{file}", content, seals[file].size)
        beside = {
            one: _send_blocks(store, lease, blocks) for one, blocks in _list_resume_files(folder, files[STATE], opened)
        }
    _, tag = _read_owned(store, lease)
    _write_commit(store, target, Commit(lease.run, name, seals, beside), lease)
    if not _write_owner(store, Owner(lease.run, lease.number, lease.launch, target.key), tag, lease.conditional):
        _read_owned(store, lease)
    try:
        remove_old_commits(
            _open_remote_store(request["lease"], REMOVAL), lease, target, request["keep"], request["skipped"]
        )
    except StoreFailed as failure:
        # A refused removal has no separate error: the answer to a removal is 200, with an error for each key.
        raise StoreFailed(failure.given, kind=KEPT_ALL) from None
    return target.key


def _read_owned(store: Store, lease: Lease) -> tuple[Owner, str]:
    """Return the owner, this launch; raise StoreFailed `taken` where it is another one."""
    owner, tag = read_owner(store)
    if owner is None:  # somebody removed it
        _write_owner(store, Owner(lease.run, lease.number, lease.launch), "", lease.conditional)
        owner, tag = read_owner(store)
    if owner is None or owner.launch != lease.launch:
        by = f"launch {owner.number} on {owner.host}" if owner else "nobody"
        raise _taken_error(store, f"belongs to {by} now: a later launch continues this run")
    return owner, tag


def _write_commit(store: Store, target: RemoteCheckpointName, commit: Commit, lease: Lease) -> None:
    key = f"{target.key}/{COMMIT}"
    if not lease.conditional:
        store.put(key, commit.text())  # unique names carry the protocol: no other launch writes this key
    elif not store.create(key, commit.text()) and _find_manifest_seal(store, target) != commit.files[MANIFEST]:
        raise _taken_error(store, f"has another {key}")


def _build_seals(files: Mapping[str, BinaryIO]) -> dict[str, Seal]:
    """Return size and SHA-256 of each file: the manifest has those of all others."""
    text = files[MANIFEST].read()
    listed = {name: Seal(*entry) for name, entry in parse_strict_json(text)["files"].items()}
    if set(listed) | {MANIFEST} != set(files):
        raise StoreFailed(f"a checkpoint with the files {', '.join(sorted(files))}", kind=DAMAGED)
    return {**listed, MANIFEST: Seal(len(text), hashlib.sha256(text).hexdigest())}


def _find_manifest_seal(store: Store, one: RemoteCheckpointName) -> Seal | None:
    """Return the seal of the manifest of a committed checkpoint; None if its commit is damaged."""
    with contextlib.suppress(DamagedCheckpoint):
        return read_commit(store, one).files[MANIFEST]
    return None


def _send_once(store: Store, key: str, content: bytes | BinaryIO, size: int) -> None:
    # A key is never used for two contents: an object of this size is from an earlier attempt of this launch.
    facts = store.size_and_tag(key)
    if facts is None or facts.size != size:
        store.put(key, content)


def _list_resume_files(
    folder: Path, state: BinaryIO, opened: contextlib.ExitStack
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the other files that a resume needs, in their state at the checkpoint, in blocks."""
    state.seek(0)
    sizes: dict[str, int] = parse_strict_json(state.read())["position"]["journal_sizes"]
    for name in BESIDE:
        parts = _open_parts(folder / name, opened)
        if parts:
            yield name, _iterate_file_blocks(parts, sizes.get(name))


def _open_parts(path: Path, opened: contextlib.ExitStack) -> list[BinaryIO]:
    """Open a file, or all parts of a journal; again where the journal was divided meanwhile."""
    for _ in range(TRIES):
        found = [part for part in list_journal_parts(path) if part.path.is_file()]
        try:
            files: list[BinaryIO] = [opened.enter_context(part.path.open("rb")) for part in found]
        except FileNotFoundError:
            continue
        if [part.begin for part in list_journal_parts(path) if part.path.is_file()] == [part.begin for part in found]:
            return files
    return []


def _iterate_file_blocks(parts: Sequence[BinaryIO], size: int | None) -> Iterator[bytes]:
    # Blocks of a fixed size: the earlier blocks of a growing journal stay the same, and are sent once.
    left, block = size, b""
    for part in parts:
        while more := part.read(PART - len(block) if left is None else min(PART - len(block), left)):
            left = None if left is None else left - len(more)
            block += more
            if len(block) == PART:
                yield block
                block = b""
    if block:
        yield block


def _send_blocks(store: Store, lease: Lease, blocks: Iterator[bytes]) -> list[Seal]:
    sent = []
    for block in blocks:
        seal = Seal(len(block), hashlib.sha256(block).hexdigest())
        _send_once(store, f"{KEPT}/{lease.place}/{seal.sha256}", block, seal.size)
        sent.append(seal)
    return sent


def remove_old_commits(
    store: Store, lease: Lease, newest: RemoteCheckpointName, keep: int, skipped: Sequence[str] = ()
) -> None:
    """Remove all but the newest `keep` commits and what belongs to no commit; only after the commit of `newest`.

    `skipped` are checkpoints that were found damaged; they do not count.
    """
    objects = [one.key for one in store.list(f"{CHECKPOINTS}/")]
    # The listing may not show the newest one yet.
    found = sorted({one for one in _select_commits(objects) if one.key not in skipped} | {newest}, reverse=True)
    kept = {one.key for one in found[:keep]}
    removable = {one.key: one for key in objects if (one := _parse_checkpoint_key(key)) and one.key not in kept}
    removable = {key: one for key, one in removable.items() if lease.covers(one.launch_number, one.launch)}
    # The commits first: a crash after that leaves files that belong to no checkpoint, and no torn checkpoint.
    for key in objects:
        if key.endswith(f"/{COMMIT}") and key.removesuffix(f"/{COMMIT}") in removable:
            store.delete(key)
    for key in objects:
        if key.rpartition("/")[0] in removable and not key.endswith(f"/{COMMIT}"):
            store.delete(key)
    with contextlib.suppress(DamagedCheckpoint):  # then nobody knows which blocks it needs
        used = {
            f"{directory.blocks_prefix}/{seal.sha256}"
            for directory in found[:keep]
            for seal in read_commit(store, directory).blocks
        }
        for kept_object in store.list(f"{KEPT}/"):
            block = _BLOCK.fullmatch(kept_object.key)
            if block and kept_object.key not in used and lease.covers(int(block[1], 16), block[2]):
                store.delete(kept_object.key)


def list_commits(store: Store, owner: Owner | None) -> list[RemoteCheckpointName]:
    """Return the committed checkpoints; the last one also where a listing does not show it yet."""
    keys = [one.key for one in store.list(f"{CHECKPOINTS}/")]
    if owner is not None and owner.newest is not None:
        key = f"{owner.newest}/{COMMIT}"
        if key not in keys and store.size_and_tag(key) is not None:
            keys.append(key)
    return list(_select_commits(keys))


def _select_commits(keys: Sequence[str]) -> Iterator[RemoteCheckpointName]:
    for key in keys:
        directory = _parse_checkpoint_key(key)
        if directory is not None and key == f"{directory.key}/{COMMIT}":
            yield directory


def _parse_checkpoint_key(key: str) -> RemoteCheckpointName | None:
    top, _, rest = key.partition("/")
    return _parse_name(rest.partition("/")[0]) if top == CHECKPOINTS else None


def _parse_name(name: str) -> RemoteCheckpointName | None:
    found = _DIRECTORY.fullmatch(name)
    return (
        RemoteCheckpointName(int(found[4], 16), int(found[3], 16), int(found[2]), found[5], found[1]) if found else None
    )


def read_commit(store: Store, one: RemoteCheckpointName) -> Commit:
    """Return the content of a commit; raise Damaged if it is not what halfstep wrote."""
    try:
        content, _ = _read_sealed(store, f"{one.key}/{COMMIT}")
        files = {name: _validate_seal(*entry) for name, entry in content["files"].items()}
        beside = {name: [_validate_seal(*block) for block in blocks] for name, blocks in content["beside"].items()}
        commit = Commit(content["run"], content["name"], files, beside)
    except StoreFailed as failure:
        raise _convert_store_failure(failure, COMMIT) from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedCheckpoint(f"{COMMIT} was not written by halfstep") from None
    # Names become paths: anything but our own is refused.
    is_ours = commit.name == one.name and all(_FILE.fullmatch(name) for name in files) and MANIFEST in files
    if not is_ours or RECIPE not in beside or not set(beside) <= set(BESIDE):
        raise DamagedCheckpoint(f"{COMMIT} was not written by halfstep")
    return commit


def _validate_seal(size: object, digest: object) -> Seal:
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError
    return Seal(size, digest)


def _convert_store_failure(failure: StoreFailed, what: str) -> Exception:
    """Return Damaged for an object that is missing or has another size, and the failure itself for any other."""
    reasons = {MISSING: "is missing", SHORT: "has another size", CHANGED: "was replaced while it was read"}
    return DamagedCheckpoint(f"{what} {reasons[failure.kind]}") if failure.kind in reasons else failure


def restore(request: RestoreRequest) -> dict[str, object]:
    """Download the newest intact checkpoint of a place into an empty run folder, with all that a resume needs.

    Every byte is compared with the commit. Returns a `RestoreResult`. Raises StoreFailed `damaged` where there are
    commits and none is intact.
    """
    store, folder = _open_remote_store(request), Path(request["folder"])
    owner, _ = read_owner(store)
    found = sorted(list_commits(store, owner), reverse=True)
    latest = max([one.launch_number for one in found] + ([owner.number] if owner is not None else []), default=0)
    skipped: dict[str, str] = {}
    for one in found:
        try:
            commit = read_commit(store, one)
            needed = sum(seal.size for seal in (*commit.files.values(), *commit.blocks))
            room, do = f"a disk with room for {needed:,} bytes", "make room there, or give run.dir on another disk"
            with replace_storage_errors(f"{one.name} cannot be restored into {folder}", allowed=room, do=do):
                _download_checkpoint(store, one, commit, folder / RESTORING)
        except DamagedCheckpoint as damage:
            skipped[one.key] = str(damage)
            continue
        known = KnownLaunch(owner.run if owner is not None else commit.run, latest)
        _move_into_place(folder, {"remote": request["address"], **asdict(known)})
        return asdict(RestoreResult(one.name, known, skipped))
    if skipped:
        lines = "\n    ".join(f"{key}: {problem}" for key, problem in list(skipped.items())[:10])
        raise StoreFailed(
            f"{store.address} has no intact checkpoint:\n    {lines}",
            allowed="at least one intact checkpoint; a run is never restarted silently",
            do=f"give checkpoint.remote={store.address}-2 to start again",
            kind=DAMAGED,
        )
    if owner is None:
        return asdict(RestoreResult(None, None, {}))
    known = KnownLaunch(owner.run, latest)
    if owner.recipe:
        write_json(folder / LEASE, {"remote": request["address"], **asdict(known)})
        write_text(folder / RECIPE, owner.recipe)
    return asdict(RestoreResult(None, known, {}))


def _download_checkpoint(store: Store, one: RemoteCheckpointName, commit: Commit, draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    target = draft / CHECKPOINTS / one.name
    target.mkdir(parents=True)
    for name, seal in commit.files.items():
        _fetch_objects(store, target / name, [(f"{one.key}/{name}", seal)])
    for name, blocks in commit.beside.items():
        _fetch_objects(store, draft / name, [(f"{one.blocks_prefix}/{seal.sha256}", seal) for seal in blocks])
    flush(target)
    flush(draft)


def _fetch_objects(store: Store, path: Path, objects: Sequence[tuple[str, Seal]]) -> None:
    """Write objects one after the other to a file; each is compared, and requested again once."""
    with path.open("wb") as file:
        for key, seal in objects:
            begin = file.tell()
            if _fetch_object(store, key, seal, file) != seal.sha256:
                file.seek(begin)
                file.truncate()
                if _fetch_object(store, key, seal, file) != seal.sha256:
                    raise DamagedCheckpoint(
                        f"{path.name} has the right size, but a different SHA-256 than was committed"
                    )
        file.flush()
        os.fsync(file.fileno())


def _fetch_object(store: Store, key: str, seal: Seal, file: BinaryIO) -> str:
    name, digest = key.rpartition("/")[2], hashlib.sha256()
    try:
        facts = store.size_and_tag(key)
        if facts is None or facts.size != seal.size:
            reason = "is missing" if facts is None else f"has {facts.size:,} bytes, and {seal.size:,} were committed"
            raise DamagedCheckpoint(f"{name} {reason}")
        for part in store.ranges(key, facts):
            digest.update(part)
            file.write(part)
    except StoreFailed as failure:
        raise _convert_store_failure(failure, name) from None
    return digest.hexdigest()


def _move_into_place(folder: Path, lease: Mapping[str, object]) -> None:
    """Move the restored files into the run's folder; the recipe, which makes it a run, comes last."""
    draft = folder / RESTORING
    write_json(folder / LEASE, lease)
    for name in (CHECKPOINTS, JOURNAL, LOG, BEST, RECIPE):
        if (draft / name).exists():
            os.rename(draft / name, folder / name)
        if name == BEST:
            flush(folder)
    flush(folder)
    shutil.rmtree(draft)


def _add_seal(content: Mapping[str, object]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f'{{"seal":"{hashlib.sha256(text.encode()).hexdigest()}","content":{text}}}\n'.encode()


def _read_sealed(store: Store, key: str) -> tuple[dict[str, Any], str]:
    """Return the content of an object with its tag; wrong bytes are requested again once."""
    with contextlib.suppress(DamagedCheckpoint):
        text, tag = store.read_with_tag(key)
        return _parse_sealed(text), tag
    text, tag = store.read_with_tag(key)
    return _parse_sealed(text), tag


def _parse_sealed(text: bytes) -> dict[str, Any]:
    try:
        found = parse_strict_json(text[:LARGEST_JSON])
        content: dict[str, Any] = found["content"]
        is_intact = _add_seal(content) == text and content["form"] == FORM
    except (ValueError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        raise DamagedCheckpoint("it is cut or changed")
    return content


def _open_remote_store(request: RemoteStoreRequest, most: float = math.inf) -> Store:
    return Store(parse_address(request["address"], "checkpoint.remote"), min(request["patience"], most))
