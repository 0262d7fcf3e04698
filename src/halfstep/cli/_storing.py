"""What a command writes where its user asked for: a system that refuses is told in the user's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from halfstep.errors import StorageFailed


@contextmanager
def storing(given: str, *, allowed: str, do: str) -> Iterator[None]:
    """Around whatever writes. `given` says what then could not be done; why is added."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{given}: {error.strerror or error}", allowed=allowed, do=do) from None
