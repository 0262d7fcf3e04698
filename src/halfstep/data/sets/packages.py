"""Download packages with npm, apt-get or pip, and verify their digests."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from PIL import Image

from halfstep.errors import TRY_AGAIN, HalfstepError, Unsafe


class DownloadFailed(HalfstepError, RuntimeError, id="download-failed"):
    """A package that cannot be downloaded, or has unexpected content."""

    exit_code = TRY_AGAIN


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry."""

    name: str
    version: str
    sha256: str
    tool = "npm"

    def fetch(self, folder: Path) -> Path:
        """Return the package's file in `folder`; raise DownloadFailed or Unsafe."""
        return _fetched(self, ["npm", "pack", "--silent", f"{self.name}@{self.version}"], folder)


@dataclass(frozen=True)
class Debian:
    """A package of the Debian archive."""

    name: str
    sha256: str
    tool = "apt-get"

    def fetch(self, folder: Path) -> Path:
        """Return the package's file in `folder`; raise DownloadFailed or Unsafe."""
        # apt downloads as a user of its own, where there is one.
        folder.chmod(0o755)
        return _fetched(self, ["apt-get", "download", "--quiet", self.name], folder)


@dataclass(frozen=True)
class PyPI:
    """A package of PyPI."""

    name: str
    version: str
    sha256: str
    kind: str
    """`wheel` or `source`."""
    tool = "pip"

    def fetch(self, folder: Path) -> Path:
        """Return the package's file in `folder`; raise DownloadFailed or Unsafe."""
        # With the digest in the requirement, pip verifies it before it opens a source archive, which runs code.
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        only = ["--only-binary", ":all:"] if self.kind == "wheel" else ["--no-binary", self.name]
        arguments = ["--no-deps", "--ignore-requires-python", *only, "--requirement", str(wanted)]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        return _fetched(self, [*pip, "download", *arguments], folder, besides=wanted)


Package = Npm | Debian | PyPI


def _fetched(package: Package, command: list[str], folder: Path, besides: Path | None = None) -> Path:
    """Return the package's file, from an earlier attempt where that is complete, or from the registry."""
    for path in folder.iterdir():
        # A partial download of an earlier attempt has another digest, and is removed.
        if path != besides and _sha256(path) == package.sha256:
            return path
        if path != besides:
            path.unlink()
    if shutil.which(command[0]) is None:
        raise DownloadFailed(
            f"{package.tool} is needed to get the package {package.name}",
            allowed=f"a machine that has {package.tool}",
            do=f"install {package.tool} first",
        )
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    arrived = [path for path in folder.iterdir() if path != besides]
    if ran.returncode or len(arrived) != 1:
        last = "\n  ".join((ran.stderr or ran.stdout).strip().splitlines()[-5:])
        raise DownloadFailed(
            f"{package.tool} could not get the package {package.name}:\n  {last}",
            allowed="a registry that can be reached",
            do="look at the network and at the settings of the tool, then type the command again",
        )
    if (digest := _sha256(arrived[0])) != package.sha256:
        arrived[0].unlink()
        raise Unsafe(
            f"{arrived[0].name} is not the file that was asked for: SHA-256 {digest}",
            allowed=f"SHA-256 {package.sha256}",
            do="look at which registry is asked: somebody may have changed the package",
        )
    return arrived[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


# -- writing ----------------------------------------------------------------------------------------------------------
# Write shards and pictures with the same bytes each time.


Bar = Callable[[int], None]
"""A callback with the number of samples done since the last call."""
PER_SHARD = 5000


def png(array: Any) -> bytes:
    """Return an image as PNG."""
    into = io.BytesIO()
    # The level is fixed: Pillow's default may change, and with it the bytes.
    Image.fromarray(array).save(into, "PNG", compress_level=6)
    return into.getvalue()


def write_shards(folder: Path, samples: Iterable[tuple[Any, int]], bar: Bar) -> None:
    """Write images and labels as WebDataset shards of `PER_SHARD` samples."""
    folder.mkdir(parents=True)
    numbered = enumerate(samples)
    for shard in count():
        some = list(islice(numbered, PER_SHARD))
        if not some:
            return
        # USTAR without times or owners: the same samples give the same bytes.
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, (image, label) in some:
                _add(archive, f"{number:06d}.png", png(image))
                _add(archive, f"{number:06d}.cls", str(label).encode())
                bar(1)


def member_bytes(package: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    """Return the content of a file of the package."""
    file = package.extractfile(member)
    assert file is not None
    return file.read()


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
