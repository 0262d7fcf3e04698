"""S3 servers for tests: moto in a separate environment (`scripts/store_server`), and with --full s3rver and rclone."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOTO = Path(os.environ.get("HALFSTEP_MOTO", ROOT / ".venv-moto")) / "bin" / "moto_server"
S3RVER = Path(os.environ.get("HALFSTEP_S3RVER", "/nowhere")) / "node_modules" / "s3rver" / "bin" / "s3rver.js"
RCLONE = shutil.which("rclone", path=os.environ.get("HALFSTEP_RCLONE", "/nowhere"))
MISSING = f"no moto at {MOTO}: scripts/store_server installs it"
BUCKET = "bkt"
STARTS_WITHIN = 120.0
"""Seconds; moto takes 3 s on an idle machine and more than 20 s on a busy one."""


def variables(port: int) -> dict[str, str]:
    """The environment of a client of the server at this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "S3RVER",
        "AWS_SECRET_ACCESS_KEY": "S3RVER",
        "AWS_REGION": "us-east-1",
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(command: Sequence[object], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server, from the moment it answers at its port until the end of the block."""
    server = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until = time.monotonic() + STARTS_WITHIN
        while True:
            assert server.poll() is None, f"{command[0]} ended with {server.returncode}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            assert time.monotonic() < until, f"{command[0]} did not open its port"
            time.sleep(0.1)
        yield server
    finally:
        server.kill()
        server.wait()


@contextmanager
def moto() -> Iterator[int]:
    """The port of a moto with the bucket: of the one at HALFSTEP_MOTO_PORT, or of a new one."""
    port = int(os.environ.get("HALFSTEP_MOTO_PORT", 0)) or free_port()
    with contextlib.ExitStack() as stack:
        if "HALFSTEP_MOTO_PORT" not in os.environ:
            stack.enter_context(serving([MOTO, "-H", "127.0.0.1", "-p", port], port))
        make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make, timeout=STARTS_WITHIN).read()
        yield port


@contextmanager
def s3rver(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server that keeps its objects in a folder, and ignores conditions."""
    words = ["node", S3RVER, "-d", folder, "-a", "127.0.0.1", "-p", port, "--configure-bucket", BUCKET]
    with serving(words, port) as server:
        yield server


@contextmanager
def rclone() -> Iterator[int]:
    """A server that answers ranges with 200."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / BUCKET).mkdir()
        words = [RCLONE, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "S3RVER,S3RVER", folder]
        with serving(words, port):
            yield port
