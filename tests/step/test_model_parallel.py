"""A model over several devices, by fake tensors: everything that is agreed on ends on one of them.

Real steps over two devices are in `test_two_devices.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.step.optimizer_slot import Gradients, move_number_to_device
from halfstep.step.rollback import Rollback


def test_loss_and_norm_of_a_model_over_two_devices_meet_on_one() -> None:
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(4, 4, device=place)) for place in ("cuda:0", "cuda:1", "cpu")]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        loss = torch.empty((), device="cuda:1")
        gradients = Gradients(parameters)
        assert gradients.collect()
        agreed = torch.stack(
            [move_number_to_device(loss.device, n) for n in (gradients.norm(), loss, gradients.squared_share())]
        )
        assert agreed.device == loss.device
        gradients.multiply_(0.5)
        gradients.clamp_all_but_bf16_(1.0)


def test_buffers_on_two_devices_are_judged_together() -> None:
    with FakeTensorMode():
        largest = [torch.empty((), device=place) for place in ("cuda:1", "cuda:0", "cpu")]
        held: Any = SimpleNamespace(_finite=["a", "b", "c"], zeros_if_finite=lambda: largest)
        flag = Rollback.not_finite(held)
        assert flag is not None
        assert flag.device == largest[0].device


def test_numbers_that_are_on_one_device_stay_the_same_tensors() -> None:
    numbers = [torch.ones(()), torch.zeros(())]
    assert all(move_number_to_device(number.device, number) is number for number in numbers)
