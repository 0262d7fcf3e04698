"""A worker that the system ends: said in words, not as a traceback."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data.dataset import Order, Sample, Samples, ValSamples
from halfstep.data.loader import TrainLoader, ValLoader
from halfstep.errors import BadData

HERE = torch.empty(0).device


class Ends:
    """A source whose first sample ends the process that reads it, as the system does where memory runs out."""

    def __init__(self, how: int) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> Sample:
        if index == 0:
            os.kill(os.getpid(), self.how)
        return {"x": torch.zeros(2)}

    def name(self, index: int) -> str:
        return f"number {index}"


def unchanged(sample: Sample) -> Sample:
    return sample


@pytest.mark.parametrize("how", [signal.SIGKILL])
@pytest.mark.parametrize("training", [True, False])
def test_a_killed_worker_is_bad_data_with_a_way_out(how: int, training: bool) -> None:
    with pytest.raises(BadData, match="process that reads samples was ended") as caught:
        list(_read(how, training))
    assert caught.value.do == "fewer train.num_workers, or smaller batches"


def _read(how: int, training: bool) -> Any:
    options: dict[str, Any] = {"batch_size": 8, "collate": default_collate, "workers": 1, "device": HERE}
    if training:
        return TrainLoader(Samples(Ends(how), unchanged, 0), Order(8, 0), **options).windows(epoch=0)
    return ValLoader(ValSamples(Ends(how), unchanged, 0), **options)


def _refused(samples: list[Sample]) -> Sample:
    raise RuntimeError("stack expects each tensor to be equal size")


def test_another_error_of_a_worker_stays_what_it_is() -> None:
    samples = Samples(Ends(0), unchanged, 0)
    loader = TrainLoader(samples, Order(8, 0), batch_size=8, collate=_refused, workers=1, device=HERE)
    with pytest.raises(RuntimeError, match="equal size") as caught:
        list(loader.windows(epoch=0))
    assert not isinstance(caught.value, BadData)
