"""Parse the address of a place in an object store, such as `s3://bucket/runs/unet`. Imports no obstore."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple
from urllib.parse import urlsplit

from halfstep.errors import MissingExtra, WrongUse

SCHEMES = ("s3", "gs", "az")
"""S3 and what speaks its protocol; Google's and Azure's stores, which are not tried."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class StoreAddress(NamedTuple):
    """A place in a store."""

    scheme: str
    bucket: str
    prefix: str
    """The start of all keys, without slashes at its ends; empty for the whole bucket."""

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(part for part in (self.bucket, self.prefix) if part)}"


def has_scheme(text: str) -> bool:
    """Return whether a path is an address, such as `s3://bucket/prefix`, and not one of a file system."""
    return _SCHEME.match(text) is not None


def parse_address(text: str, setting: str, do: str = "") -> StoreAddress:
    """Return the address in a setting; raise WrongUse for any other text, and for credentials in it.

    `do` is the advice for another text, where the address is no setting.
    """
    parts = urlsplit(text if text.isprintable() else "")  # which drops line breaks silently
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment or "@" in parts.netloc:
        # The text is not repeated: the message may reach a log.
        raise WrongUse(
            f"{setting} contains credentials or options in its address",
            allowed=f"{parts.scheme[:8]}://BUCKET/PREFIX; credentials come from the environment or a role",
            do="remove everything before @ and after ? or #, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    prefix = parts.path.strip("/")
    is_plain = all(part not in ("", ".", "..") and part.isprintable() for part in prefix.split("/")) or not prefix
    if parts.scheme not in SCHEMES or not _BUCKET.fullmatch(parts.netloc) or not is_plain:
        raise WrongUse(
            f"{setting}={text[:200]!r}",
            allowed=f"SCHEME://BUCKET/PREFIX with one of {', '.join(SCHEMES)}",
            do=do or f"write {setting}=s3://BUCKET/PREFIX",
        )
    return StoreAddress(parts.scheme, parts.netloc, prefix)


def check_obstore_installed() -> None:
    """Raise MissingExtra where obstore is not installed; it is not imported."""
    if find_spec("obstore") is None:
        raise MissingExtra(
            "the package 'obstore' is not installed, which reads and writes object stores",
            allowed="halfstep with its extra store",
            do="pip install 'halfstep[store]'",
        )
