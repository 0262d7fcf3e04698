"""Download files over HTTP, verify their SHA-256, and read tar archives within bounds; nothing is unpickled."""

from __future__ import annotations

import hashlib
import http.client
import io
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from PIL import Image

from halfstep.errors import TRY_AGAIN, HalfstepError, Unsafe
from halfstep.status_line import OnProgress

SECONDS = 60.0
"""The time that a server has for the next bytes."""
BLOCK = 2**18
PER_SHARD = 5000

OnSample = Callable[[], None]
"""A callback after each sample."""


class DownloadFailed(HalfstepError, RuntimeError, id="download-failed"):
    """A data set that cannot be downloaded, or has unexpected content."""

    exit_code = TRY_AGAIN


@dataclass(frozen=True)
class RemoteFile:
    """A file of a known size and SHA-256."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    def fetch(self, folder: Path, on_progress: OnProgress) -> Path:
        """Return the file in `folder`, from an earlier attempt if it is complete; raise DownloadFailed or Unsafe."""
        path, partial = folder / self.name, folder / f"{self.name}.part"
        if path.is_file():
            return path  # it was verified before it got this name
        digest, done = hashlib.sha256(), 0
        with partial.open("wb") as file:
            for block in self._download_blocks():
                done += len(block)
                if done > self.size:
                    break
                digest.update(block)
                file.write(block)
                on_progress(done, self.size)
        if done < self.size:
            raise self._download_error(f"the connection ended after {done:,} of {self.size:,} bytes")
        if done > self.size or digest.hexdigest() != self.sha256:
            partial.unlink()
            raise Unsafe(
                f"{self.url} is not the expected file: "
                + (f"SHA-256 {digest.hexdigest()}" if done == self.size else f"more than {self.size:,} bytes"),
                allowed=f"{self.size:,} bytes with SHA-256 {self.sha256}",
                do="check for a proxy that answers with its login page; the file may also have been replaced",
            )
        return partial.rename(path)

    def _download_blocks(self) -> Iterator[bytes]:
        try:
            with urllib.request.urlopen(self.url, timeout=SECONDS) as answer:
                while block := answer.read(BLOCK):
                    yield block
        except urllib.error.HTTPError as error:
            with error:
                raise self._download_error(str(error)) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._download_error(str(getattr(error, "reason", None) or error)) from None

    def _download_error(self, reason: str) -> DownloadFailed:
        return DownloadFailed(
            f"{self.url} cannot be downloaded: {reason}",
            allowed="a server that can be reached",
            do="check the network (https_proxy, if there is a proxy), then repeat the command",
        )


def read_members(archive: Path, is_wanted: Callable[[str], object], largest: int) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of the wanted regular files of a .tar.gz; nothing is extracted by its own name.

    Raises Unsafe for a wanted member that is no regular file, or larger than `largest`, and DownloadFailed for a
    damaged archive.
    """
    try:
        with tarfile.open(archive, "r:gz") as package:
            for member in package:
                if not is_wanted(member.name) or member.isdir():
                    continue
                if not member.isreg() or member.size > largest:
                    raise Unsafe(
                        f"{archive.name}: {member.name!r} is "
                        + (f"{member.size:,} bytes large" if member.isreg() else "a link or a device"),
                        allowed=f"regular files of up to {largest:,} bytes",
                        do="report this: the archive has changed",
                    )
                file = package.extractfile(member)
                assert file is not None
                yield member.name, file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise build_archive_error(f"{archive.name} cannot be read: {error}") from None


def build_archive_error(given: str) -> DownloadFailed:
    """Return the error for an archive whose content is not that of the known version."""
    return DownloadFailed(given, allowed="the content of the known version", do="report this: the archive has changed")


def encode_png(array: Any) -> bytes:
    """Return an image as PNG."""
    into = io.BytesIO()
    # The level is fixed: Pillow's default may change, and with it the bytes.
    Image.fromarray(array).save(into, "PNG", compress_level=6)
    return into.getvalue()


def write_shards(folder: Path, samples: Iterable[tuple[Any, int]], on_sample: OnSample) -> None:
    """Write images and labels as WebDataset shards of `PER_SHARD` samples; the same samples give the same bytes."""
    folder.mkdir(parents=True)
    numbered = enumerate(samples)
    for shard in count():
        some = list(islice(numbered, PER_SHARD))
        if not some:
            return
        # USTAR without times or owners.
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, (image, label) in some:
                for name, content in (
                    (f"{number:06d}.png", encode_png(image)),
                    (f"{number:06d}.cls", str(label).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                on_sample()
