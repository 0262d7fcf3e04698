"""A batch that is too large for the machine."""

from __future__ import annotations

import resource

import pytest

from tests.journeys.desk import Desk

pytestmark = pytest.mark.full

OUT_OF_MEMORY = 81
ROOM = 6 << 30
"""Bytes of addresses: torch's libraries take about half of them, and the batch wants more than are left."""


def little_room() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))


def test_a_batch_too_large_ends_with_the_one_that_fits(desk: Desk) -> None:
    large = ("--size", "512", "--crop", "512", "--width", "64", "--batch_size", "16", "--samples", "40", "--steps", "2")
    with desk.type("train", "segmentation_tiny", "--fp32", *large, before=little_room) as terminal:
        code = terminal.finish(120)
    assert code == OUT_OF_MEMORY, terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.shows(r"memory")
    assert terminal.shows(r"batch_size[ =]\d+"), terminal.text
