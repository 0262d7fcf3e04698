"""Read and write objects in a store; the only module that imports obstore.

obstore must not be used in a process that forks afterwards: the children would wait forever. The trainer therefore
calls a `StoreProcess`, and a data worker creates its own Store on first use.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import secrets
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, BinaryIO, NamedTuple, TypeVar

from halfstep.errors import StoreFailed
from halfstep.store.address import StoreAddress, check_obstore_installed
from halfstep.store.failures import (
    CHANGED,
    ENDPOINTS,
    KINDS,
    MISSING,
    NO_RANGES,
    ONCE,
    PASSING,
    REFUSED,
    SETTING,
    SHORT,
    UNREACHABLE,
    Failure,
    classify_store_error,
    find_environment_failure,
)

T = TypeVar("T")
PATIENCE = 300.0
"""Seconds for which a failing request is repeated."""
REQUEST = 60.0
"""Seconds for one request, from the connection to the last byte."""
PART = 8 * 2**20
"""Bytes of one range and of one part of an upload."""
MOST_PARTS = 9_000
"""Parts of one upload; S3 allows 10,000."""
LARGEST_OBJECT = 64 * 2**20
"""Bytes of an object that is read as a whole."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0


class StoredObject(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    tag: str
    modified: datetime


class ObjectFacts(NamedTuple):
    """The facts of one object."""

    size: int
    tag: str
    """The ETag, which another content changes."""
    modified: datetime
    """The time of the last write, by the store's clock."""


class Store:
    """The objects below an address. Keys are relative to its prefix.

    Every request has a deadline, and is repeated within `patience` seconds. Raises StoreFailed with the kind of the
    failure, the bucket and the key; text of the library or the server is not passed on. Threads may share a Store.
    """

    def __init__(self, address: StoreAddress, patience: float = PATIENCE) -> None:
        check_obstore_installed()
        # Two threads are enough for one stream of requests; by default there is one for each core.
        os.environ.setdefault("TOKIO_WORKER_THREADS", "2")
        import obstore

        self.address, self.patience = address, patience
        self._obstore = obstore
        if (wrong := find_environment_failure(address.scheme)) is not None:
            raise self._store_error(wrong, "")
        self._calls = threading.local()
        """`until`: the end of the patience of the call in progress, which the calls inside it share."""
        pauses = {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=min(LONGEST_PAUSE, patience / 8)),
            "base": 2,
        }
        retries = {"max_retries": 1000, "retry_timeout": timedelta(seconds=patience / 2), "backoff": pauses}
        # The parts of a large upload are repeated by the library; `_patiently` repeats everything else.
        self._store = self._opened(retries)
        self._single = self._opened({**retries, "max_retries": 0})
        """For writes with a condition: repeated by the library, they would meet what they wrote."""

    def _opened(self, retries: Any) -> Any:
        from obstore.store import from_url

        endpoint = next((os.environ[name] for name in ENDPOINTS if name in os.environ), "")
        options: Any = {
            "timeout": timedelta(seconds=min(REQUEST, self.patience / 4)),
            "connect_timeout": timedelta(seconds=min(5.0, self.patience / 4)),
            "allow_http": endpoint.startswith("http://"),
        }
        try:
            url = f"{self.address.scheme}://{self.address.bucket}"
            return from_url(url, client_options=options, retry_config=retries)
        except Exception:
            raise self._store_error(KINDS[SETTING], "") from None

    def read(self, key: str, start: int, size: int, tag: str | None = None) -> bytes:
        """Return exactly `size` bytes from `start` on, of the object with this tag if one is given."""
        options = {"range": (start, start + size), **({"if_match": tag} if tag else {})}

        is_tried = False

        def ask() -> bytes:
            nonlocal is_tried
            try:
                found = bytes(self._obstore.get(self._store, self._full(key), options=options).bytes())
            except Exception as error:
                if not is_tried and _find_failure_kind(error) == UNREACHABLE:
                    is_tried = True
                    if self._answers_whole(key):
                        raise self._store_error(KINDS[NO_RANGES], key) from None
                raise
            if len(found) != size:
                raise self._store_error(KINDS[SHORT], key)
            return found

        return self._patiently(key, ask, MISSING) if size else b""

    def read_whole(self, key: str) -> bytes:
        """Return a small object."""
        return self.read_with_tag(key)[0]

    def read_with_tag(self, key: str) -> tuple[bytes, str]:
        """Return a small object and its tag."""
        while True:
            facts = self.size_and_tag(key)
            if facts is None or facts.size > LARGEST_OBJECT:
                raise self._store_error(KINDS[MISSING if facts is None else SHORT], key)
            try:
                return self.read(key, 0, facts.size, facts.tag), facts.tag
            except StoreFailed as failure:
                if failure.kind != CHANGED:  # replaced between the two requests
                    raise

    def ranges(self, key: str, facts: ObjectFacts) -> Iterator[bytes]:
        """Yield an object in parts, all of the same version."""
        for start in range(0, facts.size, PART):
            yield self.read(key, start, min(PART, facts.size - start), facts.tag)

    def put(self, key: str, content: bytes | BinaryIO) -> None:
        """Write an object; a failure counts only after the object was compared with `content`."""
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        size = file.seek(0, 2)

        def send() -> None:
            file.seek(0)
            try:
                if size <= PART:
                    self._obstore.put(self._store, self._full(key), file.read(), use_multipart=False)
                else:
                    part = max(PART, -(-size // MOST_PARTS))
                    self._obstore.put(
                        self._store, self._full(key), file, use_multipart=True, chunk_size=part, max_concurrency=2
                    )
            except Exception as error:
                # A finished upload whose answer was lost or late looks like a failed one.
                if _find_failure_kind(error) in ONCE or not self._holds(key, file):
                    raise
            self._check_written(key, size)

        self._patiently(key, send, MISSING)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless one exists; return whether it has this content now."""
        return self._conditional(key, content, "create")

    def replace(self, key: str, content: bytes, tag: str) -> bool:
        """Replace the object with this tag; return whether the object has this content now."""
        return self._conditional(key, content, {"e_tag": tag})

    def _conditional(self, key: str, content: bytes, mode: object) -> bool:
        def send() -> bool:
            try:
                self._obstore.put(self._single, self._full(key), content, mode=mode, use_multipart=False)
            except Exception as error:
                # Our own earlier request may have been the one that succeeded: the content decides.
                if _find_failure_kind(error) not in ONCE and self._holds(key, io.BytesIO(content)):
                    return True
                if _find_failure_kind(error) == CHANGED:
                    return False
                raise
            self._check_written(key, len(content))
            return True

        return self._patiently(key, send, MISSING)

    def list(self, prefix: str = "", most: int | None = None) -> list[StoredObject]:
        """Return the objects below a prefix, which ends at a slash: all of them, or the first `most`."""
        start = self._full(prefix).rstrip("/")

        def ask() -> list[StoredObject]:
            stream = self._obstore.list(self._store, prefix=start or None, chunk_size=most or 1000)
            found = stream.collect() if most is None else next(iter(stream), [])
            return [
                StoredObject(self._relative_key(one["path"]), one["size"], one["e_tag"] or "", one["last_modified"])
                for one in found
            ]

        return sorted(self._patiently(prefix, ask, MISSING))

    def size_and_tag(self, key: str) -> ObjectFacts | None:
        """Return the facts of an object; None if there is none."""

        def ask() -> ObjectFacts | None:
            try:
                found = self._obstore.head(self._store, self._full(key))
            except FileNotFoundError:
                return None
            except Exception as error:
                if _find_failure_kind(error) in ONCE:
                    # The answer to HEAD has no body; the one to GET has the reason.
                    self._obstore.get(self._store, self._full(key), options={"range": (0, 1)})
                raise
            return ObjectFacts(found["size"], found["e_tag"] or "", found["last_modified"])

        return self._patiently(key, ask)

    def delete(self, key: str) -> None:
        """Remove an object, if it exists."""

        def ask() -> None:
            try:
                self._obstore.delete(self._store, self._full(key))
            except FileNotFoundError:
                return

        self._patiently(key, ask)

    @contextlib.contextmanager
    def probing(self) -> Iterator[str]:
        """Write an object, and remove it in the end; raise StoreFailed where nothing can be written."""
        key = f"probe-{secrets.token_hex(8)}"
        try:
            self.put(key, b"probe")
            yield key
        finally:
            with contextlib.suppress(StoreFailed):
                self.delete(key)

    def honors_conditions(self) -> bool:
        """Return whether the store refuses to create an object that exists, and to replace another version.

        Raises StoreFailed if it does not answer ranges.
        """
        with self.probing() as key:
            self.read(key, 1, 2)
            try:
                return not self.create(key, b"second") and not self.replace(key, b"third", '"0"')
            except StoreFailed as failure:
                if failure.kind != REFUSED:
                    raise
                return False  # some stores answer 501 to a condition

    def _answers_whole(self, key: str) -> bool:
        """Return whether the store answers a range with 200: the library has no separate error for it."""
        with contextlib.suppress(Exception):
            url = self._obstore.sign(self._store, "GET", self._full(key), timedelta(minutes=1))
            asked = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
            with urllib.request.urlopen(asked, timeout=min(REQUEST, self.patience / 4)) as answer:
                return bool(answer.status == 200)
        return False

    def _check_written(self, key: str, size: int) -> None:
        """Raise StoreFailed unless the object has this size: an answer alone proves nothing."""
        facts = self.size_and_tag(key)
        if facts is None or facts.size != size:
            raise self._store_error(KINDS[SHORT], key)

    def _holds(self, key: str, content: BinaryIO) -> bool:
        """Return whether the object has this content, byte by byte."""
        size = content.seek(0, 2)
        facts = self.size_and_tag(key)
        if facts is None or facts.size != size:
            return False
        content.seek(0)
        return all(part == content.read(len(part)) for part in self.ranges(key, facts))

    def _patiently(self, key: str, work: Callable[[], T], *once: str) -> T:
        """Repeat `work` while it fails for reasons that pass, and once after a refusal or a failure in `once`."""
        outer: float | None = getattr(self._calls, "until", None)
        pause, ask_again = FIRST_PAUSE, (*ONCE, *once)
        until = time.monotonic() + self.patience if outer is None else outer
        while True:
            try:
                self._calls.until = until
                return work()
            except Exception as error:
                kind = _find_failure_kind(error)
                is_over = time.monotonic() + pause > until
                if is_over or (kind not in PASSING and kind not in ask_again):
                    # Without the library's error: its text has addresses, answers of the server and request ids.
                    raise (
                        error if isinstance(error, StoreFailed) else self._store_error(classify_store_error(error), key)
                    ) from None
                ask_again = () if kind in ask_again else ask_again
            finally:
                self._calls.until = outer
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _store_error(self, failure: Failure, key: str) -> StoreFailed:
        do = failure.do or f"halfstep doctor {self.address}"
        if "AWS_" in do and self.address.scheme != "s3":
            do = f"check the variables that obstore reads for {self.address.scheme}://"
        return StoreFailed(
            f"{self.address.scheme}://{self.address.bucket}/{self._full(key)} {failure.words}",
            allowed="a store that can be reached, read and written",
            do=do,
            kind=failure.kind,
        )

    def _full(self, key: str) -> str:
        return f"{self.address.prefix}/{key}" if self.address.prefix else key

    def _relative_key(self, path: str) -> str:
        return path[len(self.address.prefix) + 1 :] if self.address.prefix else path


def _find_failure_kind(error: Exception) -> str:
    return error.kind if isinstance(error, StoreFailed) else classify_store_error(error).kind
