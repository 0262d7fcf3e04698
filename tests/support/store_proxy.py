"""A proxy before an S3 server that misbehaves on order: `plan` is a list of faults for the next matching requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from typing import NamedTuple

ERRORS = {
    "503": b"SlowDown",
    "500": b"InternalError",
    "429": b"TooManyRequests",
    "404": b"NoSuchKey",
    "403": b"ExpiredToken",
}
CONDITIONS = ("if-none-match", "if-match")
FOREVER = 3600.0


class Planned(NamedTuple):
    """A fault for a request of this method whose path holds this text; `*` at the end: for all such requests.

    A status may be followed by a code, as in `400 ExpiredToken`. A removal is a POST with the keys in its body, which
    count as its path; so do the conditions of a request, as in `if-none-match`.
    """

    method: str
    fault: str
    match: str = ""


class Seen(NamedTuple):
    time: float
    method: str
    path: str
    fault: str


class Request(NamedTuple):
    method: str
    path: str
    head: bytes
    body: bytes


class Proxy:
    """A thread that answers at `port`."""

    def __init__(self, upstream: int) -> None:
        self.upstream, self.port = upstream, 0
        self.plan: list[Planned] = []
        self.seen: list[Seen] = []
        self.hidden: set[str] = set()
        """Texts: keys that hold one are left out of listings, as by a store whose listings lag."""
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start() -> None:
            server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=2**26)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._starting = self._loop.create_task(start())
            self._loop.run_forever()

        threading.Thread(target=run, daemon=True, name="store proxy").start()
        assert ready.wait(10.0)

    def requests(self, method: str, match: str = "") -> int:
        return sum(one.method == method and match in one.path for one in self.seen)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            while True:
                request = await _request(reader, writer)
                fault = self._fault_for(request)
                self.seen.append(Seen(time.monotonic(), request.method, request.path, fault))
                if await self._answered(request, writer, fault):
                    break
        writer.close()

    def _fault_for(self, request: Request) -> str:
        path = request.path + (request.body.decode("latin-1") if "?delete" in request.path else "")
        path += "".join(name for name in CONDITIONS if f"\n{name}:".encode() in request.head.lower())
        for planned in self.plan:
            if planned.method in (request.method, "*") and planned.match in path:
                if not planned.fault.endswith("*"):
                    self.plan.remove(planned)
                return planned.fault.rstrip("*")
        return ""

    async def _answered(self, request: Request, writer: asyncio.StreamWriter, fault: str) -> bool:
        """Answer; return whether the connection is over."""
        if fault == "stall":
            await asyncio.sleep(FOREVER)
        if fault == "reset":
            return _reset(writer)
        if fault[:3].isdigit() or fault in ("not-done", "delete-denied"):
            await _send(writer, _canned(fault, request))
            return False
        head, body = await self._asked(request, is_whole=fault == "whole")
        half = len(body) // 2
        if fault == "done-then-reset":
            return _reset(writer)
        if fault == "done-then-503":
            await _send(writer, _error("503", request.method))
            return False
        if fault == "done-then-late":
            await asyncio.sleep(FOREVER)
        if fault == "stall-in-body":
            await _send(writer, head + body[:half])
            await asyncio.sleep(FOREVER)
        if fault == "drip":
            await _send(writer, head)
            for index in range(len(body)):
                await _send(writer, body[index : index + 1])
                await asyncio.sleep(0.2)
        if fault == "reset-in-body":
            await _send(writer, head + body[:half])
            await asyncio.sleep(0.05)
            return _reset(writer)
        if fault == "close-in-body":
            await _send(writer, head + body[:half])
            return True
        if fault == "length-lies":
            head, body = _with_length(head, half), body[:half]
        if fault == "wrong-bytes" and body:
            # In several places: a tar has bytes that nobody reads.
            wrong = set(range(half, min(len(body), half + 1000), 50))
            body = bytes(byte ^ (at in wrong) for at, byte in enumerate(body))
        if self.hidden and b"<ListBucketResult" in body:
            head, body = self._lagging(head, body)
        await _send(writer, head + body)
        return b"connection: close" in head.lower()

    async def _asked(self, request: Request, is_whole: bool) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream, limit=2**26)
        dropped = (b"expect:", b"range:") if is_whole else (b"expect:",)
        lines = [line for line in request.head.split(b"\r\n") if not line.lower().startswith(dropped)]
        writer.write(b"\r\n".join(lines) + request.body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        body = b"" if request.method == "HEAD" or head[9:12] in (b"204", b"304") else await _body(reader, head)
        writer.close()
        return head, body

    def _lagging(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        first, *rest = body.split(b"<Contents>")
        last = rest[-1].partition(b"</Contents>")[2] if rest else b""
        kept = [one.partition(b"</Contents>")[0] for one in rest]
        kept = [one for one in kept if not any(text.encode() in one for text in self.hidden)]
        body = first + b"".join(b"<Contents>" + one + b"</Contents>" for one in kept) + last
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"transfer-encoding:")]
        return _with_length(b"\r\n".join(lines), len(body)), body


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"expect: 100-continue" in head.lower():
        await _send(writer, b"HTTP/1.1 100 Continue\r\n\r\n")
    method, path = head.split(b" ")[:2]
    return Request(method.decode(), path.decode(), head, await _body(reader, head))


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    low = head.lower()
    if b"transfer-encoding: chunked" in low:
        body = b""
        while True:
            line = await reader.readline()
            size = int(line.split(b";")[0], 16)
            body += line + await reader.readexactly(size + 2)
            if size == 0:
                return body
    for line in low.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.split(b":")[1]))
    return b""


async def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(content)
    await writer.drain()


def _error(fault: str, method: str) -> bytes:
    status, _, code = fault.partition(" ")
    text = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>no</Message></Error>" % (
        code.encode() or ERRORS[status]
    )
    kind = b"Content-Type: application/xml"
    head = b"HTTP/1.1 %s X\r\n%s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), kind, len(text))
    return head if method == "HEAD" else head + text


def _canned(fault: str, request: Request) -> bytes:
    """Return an answer for which the server is not asked."""
    if fault == "not-done":
        return b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\n\r\n'
    return _denied_removal(request) if fault == "delete-denied" else _error(fault, request.method)


def _denied_removal(request: Request) -> bytes:
    """Answer as S3 does where the permission is missing: with 200, and an error for each key."""
    keys = [part.partition(b"</Key>")[0] for part in request.body.split(b"<Key>")[1:]]
    errors = [b"<Error><Key>%s</Key><Code>AccessDenied</Code><Message>no</Message></Error>" % key for key in keys]
    text = b"<?xml version='1.0'?><DeleteResult>%s</DeleteResult>" % b"".join(errors)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text


def _reset(writer: asyncio.StreamWriter) -> bool:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return True


def _with_length(head: bytes, length: int) -> bytes:
    lines = head.split(b"\r\n")
    others = [line for line in lines if line and not line.lower().startswith(b"content-length:")]
    return b"\r\n".join([*others, b"Content-Length: %d" % length]) + b"\r\n\r\n"
