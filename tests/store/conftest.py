"""A moto server for the tests of a worker, and a process that makes requests to it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import pytest

from halfstep.store.process import StoreProcess
from tests.support.store_proxy import Proxy
from tests.support.store_servers import BUCKET, MISSING, MOTO, moto, variables


class InStore:
    """Functions of `tests.store.calls` on one address, through a proxy that obeys."""

    def __init__(self, process: StoreProcess, proxy: Proxy) -> None:
        self.address, self.proxy = f"s3://{BUCKET}/{uuid4().hex}", proxy
        self.process = process

    def __call__(self, function: str, **request: Any) -> Any:
        return self.process.call(f"tests.store.calls:{function}", {"address": self.address, **request})


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    if find_spec("obstore") is None:
        pytest.skip("obstore is not installed: pip install 'halfstep[store]'")
    if not MOTO.exists():
        pytest.skip(MISSING)
    with moto() as port:
        yield port


@pytest.fixture(scope="session")
def session_proxy(moto_port: int) -> Proxy:
    return Proxy(moto_port)


@pytest.fixture(scope="session")
def store_process(session_proxy: Proxy) -> Iterator[StoreProcess]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(session_proxy.port).items():
            patch.setenv(name, value)
        process = StoreProcess()
        yield process
        process.close()


@pytest.fixture
def in_store(store_process: StoreProcess, session_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[InStore]:
    """An empty place in the store; the environment leads to it through the proxy."""
    for name, value in variables(session_proxy.port).items():
        monkeypatch.setenv(name, value)
    session_proxy.plan.clear()
    session_proxy.seen.clear()
    session_proxy.hidden.clear()
    yield InStore(store_process, session_proxy)
    session_proxy.plan.clear()
    session_proxy.hidden.clear()
