"""A trainer of your own for nnU-Net, with halfstep; see `before.py` for the class that it stands on here.

    python examples/nnunet/after.py

For nnU-Net itself, put the class into a file of its folder `training/nnUNetTrainer/variants`, derive it from
`nnUNetTrainer`, and start it with `nnUNetv2_train DATASET CONFIGURATION FOLD -tr HalfstepTrainer`.
"""

from __future__ import annotations

import torch
from before import ToyTrainer

import halfstep


class HalfstepTrainer(ToyTrainer):
    def initialize(self) -> None:
        super().initialize()
        precision = "fp16" if self.device.type == "cuda" else "fp32"
        self.grad_scaler = halfstep.GradScaler(self.device.type, precision=precision)
        self.grad_scaler.include(self.network)


def main() -> dict[str, object]:
    return HalfstepTrainer(torch.device("cpu")).run_training()


if __name__ == "__main__":
    print(main())
