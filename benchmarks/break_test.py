"""Break training runs from outside: the network, the disk, the clock, memory, permissions, signals, and long runs.

    python benchmarks/break_test.py [ROW ...] [--record]

Each row prints what was tried and what held. A trial holds where the run ends with the promised exit code and without
a traceback, and the same command on a healthy machine then ends with the bits of a run that nobody disturbed. Needs
Linux; rows that need root, gcc, nft, libfaketime or a cgroup say what is missing. Faults of single file operations come
from `file_faults.c`, by LD_PRELOAD; libfaketime is found by LIBFAKETIME=PATH.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from PIL import Image  # noqa: E402

from faults import rig  # noqa: E402
from halfstep.checkpoint.paths import CHECKPOINTS  # noqa: E402
from halfstep.files import read_json, write_json  # noqa: E402
from halfstep.journal.jsonl import JOURNAL  # noqa: E402
from halfstep.measure.conditions import collect_conditions, describe_conditions  # noqa: E402
from halfstep.train.status import name_status_file  # noqa: E402
from tests.support.commands import Command  # noqa: E402

RECORD = Path(__file__).with_suffix(".json")
SHIM = Path(__file__).with_name("file_faults.c")
COMPILED = f"cc -O1 -shared -fPIC -o {{}} {SHIM} -ldl"
PATIENCE = 240.0
"""Seconds after which a run that should end has hung; the machine may be busy."""
RECIPE = """
task: segmentation
precision: fp32
model: {name: unet, width: 2, depth: 1}
data: {name: shapes, size: 8, samples: 40, classes: 2, val: 0.2, crop: 8}
train: {epochs: null, steps: 24, batch_size: 2, seed: 5, num_workers: 0}
checkpoint: {every_steps: 4}
evaluate: {every_epochs: 1}
run: {pictures: 0}
"""
ENDLESS = ("train.steps=100000",)
OK, TAKEN, STORAGE, TRY_AGAIN, HUNG = 0, 73, 74, 75, 76

Trials = Iterator[tuple[str, str | None]]
"""The name of each trial, and what was wrong; None where it held."""


class Impossible(Exception):
    """This machine cannot run a trial: the command that shows it, and its error."""


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A scratch folder with the recipe, and a run in it that nobody disturbs."""

    folder: Path

    def start(
        self,
        run: Path,
        *settings: str,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> Command:
        recipe = self.folder / "tiny.yaml"
        recipe.write_text(RECIPE)
        return Command("train", recipe, *settings, f"run.dir={run}", environment=environment, before=before)

    def whole(self, name: str = "whole", *settings: str) -> rig.Ending:
        """The ending of a run of these settings; it is trained once."""
        run = self.folder / name
        if not (run / "result.json").exists():
            code, _, err = self.start(run, *settings).ended(PATIENCE)
            assert code == OK, err
        return rig.ending(run)

    def tried(
        self,
        run: Path,
        *settings: str,
        codes: tuple[int, ...] = (OK,),
        whole: rig.Ending | None = None,
        **around: object,
    ) -> str | None:
        """Train under a fault, and then without it; return what is wrong."""
        wrong = ended_wrong(self.start(run, *settings, **around), codes)  # type: ignore[arg-type]
        return wrong or self.resumed(run, *settings, whole=whole)

    def resumed(self, run: Path, *settings: str, whole: rig.Ending | None = None) -> str | None:
        """Return what is wrong with the end of a run after the same command on a healthy machine."""
        if not (run / "result.json").exists():
            wrong = ended_wrong(self.start(run, *settings), (OK,))
            if wrong is not None:
                return f"healthy again: {wrong}"
        return None if rig.ending(run) == (whole or self.whole()) else "other bits"


def ended_wrong(command: Command, codes: tuple[int, ...], within: float = PATIENCE) -> str | None:
    """Wait for the end of a command; return what is wrong with it."""
    try:
        code, _, err = command.ended(within)
    except AssertionError as hung:
        return f"hung: {str(hung)[-300:]}"
    if "Traceback (most recent call last)" in err:
        return f"traceback, exit code {code}: {err.strip().splitlines()[-1]}"
    return None if code in codes else f"exit code {code}: {err.strip()[-300:]}"


def wait_for_steps(command: Command, run: Path, steps: int) -> bool:
    """Wait until a run has taken so many steps; return whether it still trains."""
    rig.wait_for(lambda: command.code is not None or rig.last_step(run) >= steps, PATIENCE)
    return command.code is None


def killed(command: Command) -> None:
    command.send_signal(signal.SIGKILL)
    with suppress(AssertionError):
        command.ended(10.0)


# -- the system -------------------------------------------------------------------------------------------------------


_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_PRIVATE = (1 << 18) | (1 << 14)


def shell(command: str) -> str:
    """Run a command; raise Impossible with its error."""
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Impossible(f"{command}: {(ended.stderr or ended.stdout).strip()}")
    return ended.stdout


def checked(result: int, what: str) -> None:
    if result != 0:
        raise Impossible(f"{what}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def mounted(kind: str, at: Path, options: str, source: str | None = None) -> Iterator[Path]:
    """Mount a file system; it is unmounted with whatever is open in it."""
    at.mkdir(parents=True, exist_ok=True)
    given = (source or kind).encode(), str(at).encode(), kind.encode(), 0, options.encode()
    checked(_libc.mount(*given), f"mount -t {kind} -o {options} {source or kind} {at}")
    try:
        yield at
    finally:
        _libc.umount2(str(at).encode(), 2)


def drop_capabilities() -> None:
    """Give up all rights of root but those of the owner of a file, as any user has them."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked(_libc.capset(header, none), "capset")


def set_umask(mask: int) -> None:
    os.umask(mask)


def forget_home() -> None:
    """Be a user id without a name, and without HOME."""
    import pwd

    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    pwd.getpwuid = unknown  # type: ignore[assignment]


# -- files ------------------------------------------------------------------------------------------------------------

FILES = (
    *("recipe.yaml", JOURNAL, "train.log", "status.rank", "best.safetensors", "last.safetensors", "result.json"),
    *("curves", "/checkpoints", "MANIFEST", "rank-00000.safetensors", ".lock"),
)
OFTEN = {"once": 1, "50 times": 50, "always": 1_000_000}
OPERATIONS = (
    *(("open", "fail", "EIO", "once"), ("write", "fail", "EIO", "once"), ("write", "fail", "ENOSPC", "always")),
    *(("fsync", "fail", "EIO", "once"), ("fsync", "fail", "EIO", "always"), ("rename", "fail", "EROFS", "once")),
    *(("rename", "late", "ENOENT", "once"), ("rename", "late", "ENOENT", "always")),
)
"""Operation, action, error and how often it happens; see `file_faults.c`."""
OTHERS = (
    *(("mkdir", "fail", "EDQUOT", "once", "/checkpoints"), ("mkdir", "fail", "EDQUOT", "always", "/checkpoints")),
    *(("unlink", "fail", "EBUSY", "once", "rank-00000"), ("unlink", "fail", "EBUSY", "always", "rank-00000")),
    *(("read", "fail", "ESTALE", "once", "MANIFEST"), ("read", "fail", "EIO", "always", "rank-00000")),
)
HARMLESS = (
    *(("write", "short", "EIO", "always", "/file_faults/"), ("write", "fail", "EINTR", "50 times", "/file_faults/")),
    *(("fsync", "fail", "EINTR", "50 times", "/file_faults/"), ("read", "fail", "EINTR", "50 times", "/file_faults/")),
)
"""Faults that the caller repeats: no run notices them."""


def file_faults(bench: Bench) -> Trials:
    """Single operations on each run file fail once or always, with EIO, ENOSPC, EROFS, EINTR, or a partial write"""
    check_preloaded()
    short = ("train.steps=8", "data.samples=16")
    whole = bench.whole("whole", *short)
    everywhere = [(*one, part) for part in FILES for one in OPERATIONS]
    for number, (operation, action, error, often, part) in enumerate((*everywhere, *OTHERS, *HARMLESS)):
        name = f"{operation} {part.strip('/')} {action} {error} {often}"
        run, hit = bench.folder / f"run-{number}", bench.folder / "hit"  # no name that a rule could mean
        hit.unlink(missing_ok=True)
        first = 2 if often == "once" and operation != "mkdir" else 1
        rule = f"{operation}|{part}|{action}|{getattr(errno, error)}|{first}|{OFTEN[often]}"
        is_harmless = (operation, action, error, often, part) in HARMLESS
        codes = (OK,) if is_harmless else (OK, TAKEN, STORAGE)
        around = {"FILE_FAULTS": rule, "FILE_FAULTS_HIT": str(hit)}
        # Without a journal, of which a warning tells, no losses are kept; the weights and the state are the same.
        end = replace(whole, losses=()) if (part, often) == (JOURNAL, "always") else whole
        wrong = bench.tried(run, *short, codes=codes, whole=end, environment=around)
        if hit.exists():  # else a run has no such operation on this file
            yield name, wrong


def without_locks(bench: Bench) -> Trials:
    """A file system without locks."""
    check_preloaded()
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EINTR):
        name = errno.errorcode[number]
        often = "once" if number == errno.EINTR else "always"
        around = {"FILE_FAULTS": f"flock|.lock|fail|{number}|1|{OFTEN[often]}"}
        yield name, bench.tried(bench.folder / name, codes=(OK, TAKEN, STORAGE), environment=around)


def inodes(bench: Bench) -> Trials:
    """No free inodes, from the start or during a run."""
    for most in (8, 12, 16, 20, 24):
        with mounted("tmpfs", bench.folder / f"inodes-{most}", f"size=100m,nr_inodes={most}") as disk:
            wrong = ended_wrong(bench.start(disk / "run"), (OK, TAKEN, STORAGE))
            given = b"tmpfs", str(disk).encode(), b"tmpfs", 32, b"size=100m,nr_inodes=10000"
            checked(_libc.mount(*given), "mount -o remount")
            yield f"{most} inodes", wrong or bench.resumed(disk / "run")
    with mounted("tmpfs", bench.folder / "inodes-later", "size=100m,nr_inodes=200") as disk:
        command = bench.start(disk / "run", *ENDLESS)
        wait_for_steps(command, disk / "run", 20)
        with suppress(OSError):
            for number in range(1000):
                (disk / f"x{number}").touch()
        yield "none left at step 20", ended_wrong(command, (STORAGE,))


def read_only(bench: Bench) -> Trials:
    """ext4 becomes read-only after an error, or is shut down, during a run."""
    for name in ("remounted", "shut-down"):
        image = bench.folder / f"{name}.img"
        shell(f"truncate -s 64M {image} && mkfs.ext4 -q -F {image}")
        loop = shell(f"losetup --show -f {image}").strip()
        try:
            with mounted("ext4", bench.folder / name, "errors=remount-ro", loop) as disk:
                run = disk / "run"
                command = bench.start(run, *ENDLESS)
                wait_for_steps(command, run, 20)
                if name == "remounted":
                    Path(f"/sys/fs/ext4/{Path(loop).name}/trigger_fs_error").write_text("break_test")
                else:
                    at = os.open(disk, os.O_RDONLY)
                    flags = ctypes.c_uint32(2)
                    checked(_libc.ioctl(at, 0x8004587D, ctypes.byref(flags)), "FS_IOC_SHUTDOWN")
                    os.close(at)
                yield f"{name} at step 20", ended_wrong(command, (STORAGE,))
                yield f"{name}: a start", ended_wrong(bench.start(disk / "other"), (TAKEN, STORAGE))
                yield f"{name}: a resume", ended_wrong(bench.start(run, *ENDLESS), (TAKEN, STORAGE))
            with mounted("ext4", bench.folder / name, "", loop) as disk:
                reached = rig.last_step(disk / "run")
                more = (f"train.steps={reached + 8}", "--accept-recipe-change")
                yield f"{name}: healthy again", ended_wrong(bench.start(disk / "run", *more), (OK,))
        finally:
            subprocess.run(["losetup", "-d", loop], check=False)


def overlay(bench: Bench) -> Trials:
    """An overlay: a new run, and one started in the lower layer."""
    with mounted("tmpfs", bench.folder / "overlay", "size=200m") as disk:
        lower, upper, work, merged = (disk / name for name in ("lower", "upper", "work", "merged"))
        for folder in (lower, upper, work):
            folder.mkdir()
        command = bench.start(lower / "run")
        wait_for_steps(command, lower / "run", 9)
        killed(command)
        with mounted("overlay", merged, f"lowerdir={lower},upperdir={upper},workdir={work}"):
            yield "resumed from the lower layer", bench.tried(merged / "run")
            yield "a new run", bench.tried(merged / "new")


def oom_killer(bench: Bench) -> Trials:
    """Too small a memory cgroup: the kernel kills the run, or a data worker."""
    group = Path("/sys/fs/cgroup/memory/halfstep-break-test")
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise Impossible(f"mkdir {group}: {error.strerror}") from None
    limit, large = (
        group / "memory.limit_in_bytes",
        ("data.size=512", "data.crop=512", "train.batch_size=32", "train.steps=2"),
    )
    for name, settings in {"the run": (), "with workers": ("train.num_workers=2",)}.items():
        run = bench.folder / name.replace(" ", "-")
        command = bench.start(run, *large, *settings, before=partial(join_group, str(group), 150 * 2**20))
        code, _, err = command.ended(PATIENCE)
        said = "Traceback" not in err
        good = code in (-signal.SIGKILL, HUNG, 81) and said
        yield name, None if good else f"exit code {code}, {limit.read_text().strip()} bytes: {err.strip()[-300:]}"
        again = bench.start(run, *large, *settings)
        yield f"{name}, with enough memory", ended_wrong(again, (OK,))
    with suppress(OSError):
        group.rmdir()


def join_group(group: str, room: int) -> None:
    """Join a memory cgroup with room for so many bytes; what was forked with the process does not count."""
    Path(group, "memory.limit_in_bytes").write_text(str(room))
    Path(group, "cgroup.procs").write_text(str(os.getpid()))


# -- surroundings -----------------------------------------------------------------------------------------------------


def places(bench: Bench) -> Trials:
    """HOME, cache, temporary folder, locale, umask, and variables set by other programs."""
    variables = {
        "HOME is read-only": {"HOME": "/proc", "XDG_CACHE_HOME": ""},
        "HOME is a file": {"HOME": "/etc/passwd", "XDG_CACHE_HOME": ""},
        "HOME is empty": {"HOME": "", "XDG_CACHE_HOME": ""},
        "the cache is a file": {"XDG_CACHE_HOME": "/etc/passwd"},
        **{f"LC_ALL={one}": {"LC_ALL": one, "LANG": one} for one in ("C", "POSIX", "tr_TR.UTF-8", "xx_XX")},
        "COLUMNS=0": {"COLUMNS": "0"},
        "TZ is a path": {"TZ": "../../etc/passwd"},
    }
    for name, around in variables.items():
        yield name, bench.tried(bench.folder / name.replace("/", "-"), environment=around)
    settings, around = ("train.num_workers=2",), {"TMPDIR": "/nonexistent"}
    whole = bench.whole("with workers", *settings)
    yield "no TMPDIR", bench.tried(bench.folder / "no TMPDIR", *settings, whole=whole, environment=around)
    words = [sys.executable, "-m", "halfstep", "train", str(bench.folder / "tiny.yaml")]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in ([*words, f"run.dir={bench.folder}/grün"], [*words[:3], "evaluate", f"{bench.folder}/grün"]):
        ended = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, check=False)
        yield f"{command[3]} in ASCII", None if ended.returncode == OK else f"exit code {ended.returncode}"
    # Without --fp32 the precision is chosen, and its measurements are cached.
    home = bench.start(bench.folder / "no home", "precision=auto", "train.steps=2", before=forget_home)
    yield "a user id without a name, and no HOME", ended_wrong(home, (OK,))
    for mask in (0o000, 0o077, 0o777):
        yield f"umask {mask:03o}", bench.tried(bench.folder / f"umask-{mask}", before=partial(set_umask, mask))
    run = bench.folder / "umask not root"
    yield (
        "umask 777, not root",
        bench.tried(run, codes=(TAKEN, STORAGE), before=strict_umask) if os.geteuid() == 0 else None,
    )


def strict_umask() -> None:
    drop_capabilities()
    os.umask(0o777)


def clock(bench: Bench) -> Trials:
    """The clock jumps during a run, and differs at the resume (libfaketime on CLOCK_REALTIME)."""
    library = os.environ.get("LIBFAKETIME", "")
    if not Path(library).is_file():
        raise Impossible(f"LIBFAKETIME={library}: no such file (Debian: apt-get install libfaketime)")
    jumps = {
        "10 days ahead": ("+10d", "+10d"),
        "10 days back": ("-10d", "-10d"),
        "1970": ("@1970-01-01 00:00:05", "@1970-01-01 00:00:05"),
        "2107": ("@2107-01-01 00:00:00", "@2107-01-01 00:00:00"),
        "10 years back at the resume": ("+0", "-3650d"),
    }
    settings = ("train.steps=40", "checkpoint.every_minutes=0.02")
    whole = bench.whole("clock-whole", *settings)
    for name, (then, again) in jumps.items():
        run, stamp = bench.folder / name.replace(" ", "-"), bench.folder / "faketime"
        stamp.write_text("+0\n")
        with fake_time(bench, run, settings, library, stamp) as process:
            rig.wait_for(partial(has_steps, run, 8, process), PATIENCE)
            stamp.write_text(f"{then}\n")
            rig.wait_for(partial(has_steps, run, 20, process), PATIENCE)
            process.kill()
        stamp.write_text(f"{again}\n")
        with fake_time(bench, run, settings, library, stamp) as process:
            code = process.wait(PATIENCE)
        yield name, f"exit code {code}" if code else bench.resumed(run, *settings, whole=whole)


def has_steps(run: Path, steps: int, process: subprocess.Popen[bytes]) -> bool:
    return rig.last_step(run) >= steps or process.poll() is not None


@contextmanager
def fake_time(
    bench: Bench, run: Path, settings: tuple[str, ...], library: str, stamp: Path
) -> Iterator[subprocess.Popen[bytes]]:
    around = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(stamp), "FAKETIME_CACHE_DURATION": "1"}
    around |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "halfstep", "train", str(bench.folder / "tiny.yaml"), *settings, f"run.dir={run}"]
    with subprocess.Popen(
        words, env={**os.environ, **around}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def copied(bench: Bench) -> Trials:
    """A killed run is copied: the copy and the original both resume to the same result."""
    run = bench.folder / "original"
    command = bench.start(run)
    wait_for_steps(command, run, 9)
    shutil.copytree(run, bench.folder / "live copy")
    killed(command)
    shutil.copytree(run, bench.folder / "copy")
    for name in ("copy", "original", "live copy"):
        yield name, bench.tried(bench.folder / name)


# -- data -------------------------------------------------------------------------------------------------------------


def image_folder(root: Path, count: int) -> None:
    """Make a folder of tiny images in two classes."""
    draw = random.Random(1)
    for split, most in (("train", count), ("val", 6)):
        for label in ("a", "b"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(most):
                Image.frombytes("RGB", (8, 8), draw.randbytes(192)).save(folder / f"{number:06d}.png")


def workers(bench: Bench) -> Trials:
    """A data worker gets a signal: the run continues, stops or ends with 76, and its result is bitwise equal."""
    settings = ("train.num_workers=2", "train.steps=60")
    whole = bench.whole("workers-whole", *settings)
    promised = {signal.SIGINT: (OK,), signal.SIGTERM: (OK, TRY_AGAIN), signal.SIGHUP: (OK, TRY_AGAIN, HUNG)}
    names = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGSTOP")
    for name in names:
        number, run = signal.Signals[name], bench.folder / name
        command = bench.start(run, *settings)
        wait_for_steps(command, run, 5)
        rig.wait_for(partial(_children, command.pid), 60.0)
        for worker in _children(command.pid)[:1]:
            with suppress(psutil.Error):
                worker.send_signal(number)
                if number == signal.SIGSTOP:
                    time.sleep(5.0)
                    worker.send_signal(signal.SIGCONT)
        codes = (OK,) if number == signal.SIGSTOP else promised.get(number, (OK, HUNG))
        wrong = ended_wrong(command, codes)
        yield name, wrong or bench.resumed(run, *settings, whole=whole)


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(psutil.Process(pid).children())
    return []


def classify(root: Path, run: Path, *settings: str, **around: object) -> Command:
    words = ("train", "classification_tiny", "precision=fp32", "data.name=folder", f"data.path={root}", "data.val=val")
    words += ("data.classes=2", "data.size=8", "train.epochs=null", "train.batch_size=4", "run.pictures=0")
    return Command(*words, *settings, f"run.dir={run}", **around)  # type: ignore[arg-type]


def permissions(bench: Bench) -> Trials:
    """Images, classes and run folders without read or write permission."""
    root = bench.folder / "images"
    image_folder(root, 12)
    (root / "train" / "a" / "000001.png").chmod(0)
    start = partial(classify, root, before=drop_capabilities)
    yield "one image", ended_wrong(start(bench.folder / "one image", "train.steps=12"), (OK,))
    (root / "train" / "b").chmod(0)
    yield "a class", ended_wrong(start(bench.folder / "a class", "train.steps=12"), (65,))
    yield "data check", ended_wrong(Command("data", "check", root, before=drop_capabilities), (65,))
    root.chmod(0)
    yield "the data", ended_wrong(start(bench.folder / "the data", "train.steps=12"), (65,))
    run = bench.folder / "run"
    command = bench.start(run)
    wait_for_steps(command, run, 9)
    killed(command)
    for name in ("recipe.yaml", JOURNAL, ".lock", CHECKPOINTS, "."):
        shutil.rmtree(bench.folder / "denied", ignore_errors=True)
        shutil.copytree(run, bench.folder / "denied")
        (bench.folder / "denied" / name).chmod(0)
        command = bench.start(bench.folder / "denied", before=drop_capabilities)
        yield f"{name} of a run", ended_wrong(command, (TAKEN, STORAGE))
        (bench.folder / "denied" / name).chmod(0o700)


def many_files(bench: Bench) -> Trials:
    """200,000 images: a start, a kill and a resume."""
    root, run = bench.folder / "images", bench.folder / "run"
    image_folder(root, 1)
    for label in ("a", "b"):
        original = root / "train" / label / "000000.png"
        for number in range(1, 100_000):
            if number % 50_000 == 0:  # a file system bounds the names of one file
                original = Path(shutil.copy(original, original.with_name(f"{number:06d}.png")))
            else:
                os.link(original, original.with_name(f"{number:06d}.png"))
    command = classify(root, run, "train.steps=24", "checkpoint.every_steps=4")
    wait_for_steps(command, run, 9)
    killed(command)
    yield "resumed", ended_wrong(classify(root, run, "train.steps=24", "checkpoint.every_steps=4"), (OK,))
    whole = classify(root, bench.folder / "other", "train.steps=24", "checkpoint.every_steps=4")
    wrong = ended_wrong(whole, (OK,))
    yield "to the bit", wrong or (None if rig.ending(run) == rig.ending(bench.folder / "other") else "other bits")


# -- ranks ------------------------------------------------------------------------------------------------------------

HOSTS = ("10.213.7.1", "10.213.7.2")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_host(space: str, host: str) -> None:
    """Be a process of another host: another network, and another name."""
    checked(_libc.unshare(_NEWUTS), "unshare --uts")
    checked(_libc.sethostname(host.encode(), len(host)), f"hostname {host}")
    at = os.open(f"/run/netns/{space}", os.O_RDONLY)
    checked(_libc.setns(at, _NEWNET), f"nsenter --net=/run/netns/{space}")
    os.close(at)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them."""
    spaces = ("halfstepA", "halfstepB")
    try:
        shell(" && ".join(f"ip netns add {space}" for space in spaces))
        shell(f"ip -n {spaces[0]} link add hs0 type veth peer name hs0 netns {spaces[1]}")
        for space, address in zip(spaces, HOSTS, strict=True):
            shell(f"ip -n {space} addr add {address}/24 dev hs0")
            shell(f"ip -n {space} link set hs0 up && ip -n {space} link set lo up")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def ranks(bench: Bench, run: Path, *settings: str, spaces: tuple[str, str] | None = None) -> list[Command]:
    """Start two ranks: on this host, or in two network namespaces as on two hosts."""
    every = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    every |= {"MASTER_ADDR": HOSTS[0], "GLOO_SOCKET_IFNAME": "hs0"} if spaces else {"MASTER_ADDR": "127.0.0.1"}
    return [
        bench.start(
            run,
            *settings,
            environment={**every, "RANK": str(rank)},
            before=partial(on_host, spaces[rank], f"host-{rank}") if spaces else None,
        )
        for rank in (0, 1)
    ]


def dropped(space: str, packets: str) -> str:
    """Return the command that drops these packets where they arrive."""
    rules = f"table inet t {{ chain c {{ type filter hook input priority 0; {packets} drop; }}; }}"
    return f"ip netns exec {space} nft '{rules}'"


def network(bench: Bench) -> Trials:
    """A link between two hosts loses packets, works in one direction only, is intermittent, or is cut."""
    limits = ("train.steps=60", "world.timeout=20", "world.start_timeout=60")
    with two_hosts() as spaces:
        for command in ranks(bench, bench.folder / "whole", *limits, spaces=spaces):
            assert ended_wrong(command, (OK,)) is None
    whole = rig.ending(bench.folder / "whole")
    some, sent = "numgen random mod 100 < 10", f"ip saddr {HOSTS[0]}"
    up, down = (f"ip -n halfstepB link set hs0 {one}" for one in ("up", "down"))
    faults: dict[str, tuple[list[str], tuple[int, ...]]] = {
        "10 % of the packets lost": ([dropped("halfstepB", some)], (OK, HUNG)),
        "10 % lost in both directions": ([dropped("halfstepA", some), dropped("halfstepB", some)], (OK, HUNG)),
        "one way": ([dropped("halfstepB", sent)], (HUNG,)),
        "flapping, 2 s down and 2 s up": ([down, "sleep 2", up, "sleep 2"] * 3, (OK,)),
        "cut": ([down], (HUNG,)),
    }
    for name, (commands, codes) in faults.items():
        run = bench.folder / name.replace(" ", "-")
        with two_hosts() as spaces:
            started = ranks(bench, run, *limits, spaces=spaces)
            wait_for_steps(started[0], run, 12)
            for command in commands:
                shell(command)
            wrong = [ended_wrong(one, codes) for one in started]
        if not any(wrong) and not (run / "result.json").exists():
            with two_hosts() as spaces:
                wrong = [ended_wrong(one, (OK,)) for one in ranks(bench, run, *limits, spaces=spaces)]
        yield name, next(filter(None, wrong), None) or (None if rig.ending(run) == whole else "other bits")
    with two_hosts() as spaces:
        shell(f"tc -n {spaces[1]} qdisc add dev hs0 root netem delay 30ms")  # last: not every kernel has it


def stopped(bench: Bench) -> Trials:
    """SIGSTOP for 60 s and SIGCONT: one process, one of two ranks, both; default timeouts."""
    steps = ("train.steps=60",)
    run = bench.folder / "one process"
    command = bench.start(run, *steps)
    wait_for_steps(command, run, 12)
    yield "one process", stopped_for([command], 60.0) or bench.resumed(run, *steps, whole=bench.whole("60", *steps))
    for command in ranks(bench, bench.folder / "ranks-whole", *steps):
        assert ended_wrong(command, (OK,)) is None
    whole = rig.ending(bench.folder / "ranks-whole")
    for name, which in {"rank 0 of 2": (0,), "rank 1 of 2": (1,), "both ranks": (0, 1)}.items():
        run = bench.folder / name
        started = ranks(bench, run, *steps)
        wait_for_steps(started[0], run, 12)
        wrong = stopped_for([started[rank] for rank in which], 60.0)
        wrong = wrong or next(filter(None, (ended_wrong(one, (OK,)) for one in started if one.code is None)), None)
        yield name, wrong or (None if rig.ending(run) == whole else "other bits")


def stopped_for(commands: list[Command], seconds: float) -> str | None:
    """Stop processes and continue them; return what is wrong with their ends."""
    for command in commands:
        command.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    for command in commands:
        command.send_signal(signal.SIGCONT)
    return next(filter(None, (ended_wrong(command, (OK,)) for command in commands)), None)


# -- long runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """What a process holds."""

    step: int
    resident: int
    descriptors: int
    threads: int
    saved: int
    """Bytes in the folder of checkpoints."""


def long_run(bench: Bench) -> Trials:
    """20,000 steps and 200 saves: memory, descriptors, threads and checkpoints do not grow in the second half."""
    run = bench.folder / "long"
    command = bench.start(run, "train.steps=20000", "checkpoint.every_steps=100", "evaluate.every_epochs=500")
    seen = []
    while command.code is None:
        with suppress(psutil.Error, OSError):
            seen.append(use_of(command.pid, run))
        time.sleep(2.0)
    yield "20,000 steps", ended_wrong(command, (OK,))
    early, late = (
        [one for one in seen if low <= one.step < high] for low, high in ((10_000, 15_000), (15_000, 20_000))
    )
    for what in ("resident", "descriptors", "threads", "saved"):
        before, after = (sorted(getattr(one, what) for one in half)[len(half) // 2] for half in (early, late))
        slack = 4 * 2**20 if what == "resident" else 2**20 if what == "saved" else 2
        yield f"{what}: {before:,} and {after:,}", None if after <= before + slack else "it grows"


def use_of(pid: int, run: Path) -> Use:
    process = psutil.Process(pid)
    saved = sum(file.stat().st_size for file in (run / CHECKPOINTS).rglob("*") if file.is_file())
    resident = process.memory_info().rss
    status = read_json(run / name_status_file(0)) or {}
    return Use(int(status.get("step", 0)), resident, process.num_fds(), process.num_threads(), saved)


def resumes(bench: Bench) -> Trials:
    """20 interruptions at random steps by SIGKILL, SIGTERM and SIGINT, each resume with 0, 2 or 4 workers."""
    draw, run, steps = random.Random(3), bench.folder / "interrupted", "train.steps=600"
    whole = bench.whole("600", steps)
    for number in range(20):
        count = draw.choice((0, 2, 4))
        command = bench.start(run, steps, f"train.num_workers={count}")
        alive = wait_for_steps(command, run, min(590, rig.last_step(run) + draw.randint(5, 45)))
        sent = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        command.send_signal(sent)
        codes = {signal.SIGKILL: (-9,), signal.SIGTERM: (TRY_AGAIN,), signal.SIGINT: (130, TRY_AGAIN)}[sent]
        yield f"{number + 1}: {sent.name}, {count} workers", ended_wrong(command, codes) if alive else "it had ended"
    yield "to the bit", bench.resumed(run, steps, whole=whole)


# -- rows -------------------------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[Bench], Trials]] = {
    one.__name__: one
    for one in (
        *(network, stopped, file_faults, without_locks, overlay, oom_killer, read_only, inodes, places, clock),
        *(workers, many_files, permissions, copied, long_run, resumes),
    )
}
FIXED: dict[str, str] = {
    "file_faults": "a traceback if a test file could not be removed at the start",
    "permissions": "a traceback for a data folder without execute permission",
    "overlay": "checkpoints of a lower layer were never removed: an overlay does not rename their folders",
    "places": "a traceback for a user id without a name and without HOME (precision=auto, shards, doctor, data); "
    "a run in a folder with a name that the locale cannot encode could not be reopened",
}
"""Defects that a row found, and that are fixed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of {', '.join(ROWS)}; all without")
    parser.add_argument("--record", action="store_true", help=f"write the rows that ran to {RECORD.name}")
    asked = parser.parse_args()
    if unknown := set(asked.rows) - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(ROWS)}")
    # A mount namespace of its own: what a row mounts is seen by nobody else, and gone with this process.
    if _libc.unshare(_NEWNS) == 0:
        _libc.mount(b"none", b"/", None, _PRIVATE, None)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        preload_faults(Path(folder))
        for name in asked.rows or ROWS:
            found = row(name, Path(folder) / name)
            failed = failed or found["held"] != found["tried"]
            if asked.record:
                record(found)
    print(describe_conditions(collect_conditions()))
    sys.exit(int(failed))


def preload_faults(folder: Path) -> None:
    """Load `file_faults.c` into the server that runs are forked from, which starts later."""
    library = folder / "file_faults.so"
    with suppress(Impossible):
        shell(COMPILED.format(library))
        os.environ["LD_PRELOAD"] = str(library)


def check_preloaded() -> None:
    if not os.environ.get("LD_PRELOAD"):
        shell(COMPILED.format(os.devnull))


def row(name: str, folder: Path) -> dict[str, object]:
    """Run the trials of a row, and print them."""
    folder.mkdir()
    tried = held = 0
    notes = []
    try:
        for trial, wrong in ROWS[name](Bench(folder)):
            tried, held = tried + 1, held + (wrong is None)
            print(f"{name}: {trial}: {wrong or 'held'}", flush=True)
            if wrong is not None:
                notes.append(f"{trial}: {wrong}")
    except Impossible as error:
        notes.append(f"not on this machine: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    note = "; ".join(" ".join(one.split()) for one in notes)
    print(f"{name} tried={tried} held={held} {note}", flush=True)
    what = (ROWS[name].__doc__ or "").rstrip(".")
    known = {"name": name, "what": what, "command": f"python benchmarks/break_test.py {name}"}
    return {**known, "tried": tried, "held": held, "fixed": FIXED.get(name, ""), "note": note}


def record(found: dict[str, object]) -> None:
    """Put a row into its place; rows that were not run stay."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": []}
    rows = {one["name"]: one for one in (*kept["rows"], found)}
    content = {"command": "python benchmarks/break_test.py --record", "conditions": collect_conditions()}
    write_json(RECORD, {**content, "rows": [rows[name] for name in ROWS if name in rows]})


if __name__ == "__main__":
    main()
