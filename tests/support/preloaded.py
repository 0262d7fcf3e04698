"""The server that tests fork processes from: it has torch loaded, has run nothing, and has one thread.

A new interpreter takes five seconds of a processor to load what a run needs; a fork of this one takes a tenth of a
second. A process of Python has one such server, whoever starts it first: rows of the fault matrix, ranks and commands
all ask `server()` for it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ["tests.support.forked"]


def server() -> ForkServerContext:
    """Return the context whose processes are forked from the server, which is started where it is not yet running."""
    context = multiprocessing.get_context("forkserver")
    if multiprocessing.parent_process() is not None and forkserver._forkserver._forkserver_address is not None:
        # This process was forked from the server itself, and asks the same one. It is not this process's child.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        return context
    context.set_forkserver_preload(PRELOADED)
    # Python 3.11's server is not told sys.path: begun in another folder it would load nothing, and say nothing.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def settle(folder: str, environment: Mapping[str, str]) -> None:
    """Give a forked process the folder and the variables of whoever asked for it, and leave to have children."""
    # Started as daemons, which end with the test's process; a run has workers of its own that read its data.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # What the server forks with is no choice of a run: without this its own workers would each load torch anew.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
