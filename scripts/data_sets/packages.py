"""Packages by name, with the clients that people have: npm, apt-get, pip. What arrives is compared with a digest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


class Failed(Exception):
    """Said to the person, in words."""


@dataclass(frozen=True)
class Npm:
    name: str
    version: str
    sha256: str
    tool = "npm"

    def fetch(self, folder: Path) -> Path:
        return _fetched(self, ["npm", "pack", "--silent", f"{self.name}@{self.version}"], folder)


@dataclass(frozen=True)
class Debian:
    name: str
    sha256: str
    tool = "apt-get"

    def fetch(self, folder: Path) -> Path:
        # apt's own user writes the download, where there is one.
        folder.chmod(0o755)
        return _fetched(self, ["apt-get", "download", "--quiet", self.name], folder)


@dataclass(frozen=True)
class PyPI:
    name: str
    version: str
    sha256: str
    kind: str
    """`wheel` or `source`."""
    tool = "pip"

    def fetch(self, folder: Path) -> Path:
        # With the digest in the requirement, pip compares it before it looks into a source archive, which runs code.
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        only = ["--only-binary", ":all:"] if self.kind == "wheel" else ["--no-binary", self.name]
        arguments = ["--no-deps", "--ignore-requires-python", *only, "--requirement", str(wanted)]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        return _fetched(self, [*pip, "download", *arguments], folder, besides=wanted)


Package = Npm | Debian | PyPI


def _fetched(package: Package, command: list[str], folder: Path, besides: Path | None = None) -> Path:
    if shutil.which(command[0]) is None:
        raise Failed(f"{package.tool} is needed to get the package {package.name}: install {package.tool} first")
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    arrived = [path for path in folder.iterdir() if path != besides]
    if ran.returncode or len(arrived) != 1:
        last = "\n  ".join((ran.stderr or ran.stdout).strip().splitlines()[-5:])
        raise Failed(f"{package.tool} could not get the package {package.name}:\n  {last}")
    if (digest := _sha256(arrived[0])) != package.sha256:
        raise Failed(f"{arrived[0].name} is not the file that was asked for: SHA-256 {digest}, not {package.sha256}")
    return arrived[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()
