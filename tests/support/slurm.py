"""A real Slurm on this machine: two virtual nodes of four cores, and a partition that preempts the other.

Debian's packages slurmctld, slurmd, slurm-client and munge, as root and without systemd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge-run/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/run/slurmd.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=90 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What a cluster needs and this machine has not; empty where it has everything."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "slurmctld, slurmd and munged are started as root"
    places = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacks = [name for name in PROGRAMS if shutil.which(name, path=places) is None]
    return f"not installed: {', '.join(lacks)} (Debian: slurmctld slurmd slurm-client munge)" if lacks else ""


class Slurm:
    """A cluster that runs; every command is one of Slurm's own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] += ":/usr/sbin:/sbin"

    def call(self, *words: str, **more: str) -> str:
        """Run a command of Slurm and return what it printed."""
        done = subprocess.run(
            words, env={**self.environment, **more}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING, with its number of restarts."""
        facts = dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", job).split() if "=" in word)
        return f"{facts['JobState']} {facts['Restarts']}"


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, and stop them by their ids at the end."""
    # The user munge reads its own folders below it.
    for place in (folder, *folder.parents):
        if place.owner() == "root" and len(place.parts) > 2:
            place.chmod(0o755)
    for name in ("state", "log", "run"):
        (folder / name).mkdir()
    text = CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=_free_ports(3))
    (folder / "slurm.conf").write_text(text)
    cluster = Slurm(folder)
    try:
        _start_munge(cluster, folder)
        cluster.call("slurmctld", "-f", str(folder / "slurm.conf"))
        for node in ("n0", "n1"):
            cluster.call("slurmd", "-N", node, "-f", str(folder / "slurm.conf"))
        wait_for(
            lambda: cluster.call("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == "2", 60, "two idle nodes"
        )
        yield cluster
    finally:
        _stop(folder)


def wait_for(is_so: Callable[[], object], seconds: float, what: str) -> None:
    """Look twice a second, and fail where it takes too long."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.5)


def _start_munge(cluster: Slurm, folder: Path) -> None:
    key, run = folder / "munge", folder / "munge-run"
    for place, mode in ((key, 0o700), (run, 0o755)):
        place.mkdir()
        place.chmod(mode)
        shutil.chown(place, "munge", "munge")
    (key / "key").write_bytes(os.urandom(1024))
    (key / "key").chmod(0o400)
    shutil.chown(key / "key", "munge", "munge")
    names = {"key-file": key / "key", "socket": run / "munge.socket", "pid-file": run / "munged.pid"}
    names |= {"log-file": run / "munged.log", "seed-file": run / "seed"}
    options = " ".join(f"--{name}={path}" for name, path in names.items())
    cluster.call("su", "-s", "/bin/bash", "munge", "-c", f"/usr/sbin/munged {options} --force")


def _stop(folder: Path) -> None:
    pids = [int(path.read_text()) for path in (*folder.glob("run/*.pid"), *folder.glob("munge-run/*.pid"))]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, "the daemons to end")


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found
