"""Two ranks in network namespaces, as if on two machines, and the cable between them: cut, both end and say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfstep.checkpoint.paths import list_generations
from halfstep.files import read_json
from halfstep.train.status import name_status_file

IP = shutil.which("ip") or "/usr/sbin/ip"
TIMEOUT = 15.0
pytestmark = [pytest.mark.full, pytest.mark.ranks, pytest.mark.timeout(400)]


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Yield two namespaces, 10.99.0.1 and 10.99.0.2, with a cable between them."""
    names = [f"halfstep-{os.getpid()}-{rank}" for rank in range(2)]
    if os.geteuid() or not Path(IP).exists():
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in names:
            ip("netns", "add", name)
        ends = ("v0", "v1")
        ip("-n", names[0], "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", names[1])
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("-n", name, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run([IP, "netns", "del", name], capture_output=True, check=False)


def launch(host: str, rank: int, folder: Path) -> subprocess.Popen[str]:
    settings = [f"run.dir={folder / 'run'}", "precision=fp32", "train.epochs=400", "train.num_workers=0"]
    settings += [f"world.timeout={TIMEOUT}", "checkpoint.every_steps=2", "run.pictures=0"]
    ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.99.0.1"}
    environment = {**os.environ, **ranks, "MASTER_PORT": "29411", "GLOO_SOCKET_IFNAME": f"v{rank}"}
    return subprocess.Popen(
        [IP, "netns", "exec", host, sys.executable, "-m", "halfstep", "train", "classification_tiny", *settings],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_cut_link_ends_both_ranks_and_is_named(hosts: list[str], tmp_path: Path) -> None:
    ranks = [launch(host, rank, tmp_path) for rank, host in enumerate(hosts)]
    try:
        until = time.monotonic() + 180.0
        while len(list_generations(tmp_path / "run" / "checkpoints")) < 2:
            assert time.monotonic() < until
            assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()[0]
            time.sleep(0.2)
        ip("-n", hosts[1], "link", "set", "v1", "down")
        cut = time.monotonic()
        said = [rank.communicate(timeout=120.0)[0] for rank in ranks]
        took = time.monotonic() - cut
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [76, 76], said
    # Twice the timeout at the most, and what a slow machine takes to write the stacks and to end.
    assert took < 2 * TIMEOUT + 30.0
    statuses = [read_json(tmp_path / "run" / name_status_file(rank)) for rank in range(2)]
    assert [status["restartable"] for status in statuses] == [True, True], statuses
    for status, text in zip(statuses, said, strict=True):
        assert "the network between them may be cut" in status["reason"], status
        assert "the network between them may be cut" in " ".join(text.split()), text
