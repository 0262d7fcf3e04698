"""A U-Net on your own images and masks: edit `config`, run the file.

    python train_unet.py data            # data/images/*.png, data/masks/*.png

The words are the usual ones; halfstep says what it took each for. What this run comes to is in `runs/unet`: the best
and the last weights, the recipe as it was resolved, train.log, the journal, curves and pictures.
"""

from __future__ import annotations

import sys

import halfstep

config = {
    # Data
    "data.path": "data",
    "data.val": 0.2,
    "data.crop": 512,
    # Training
    "batch_size": 8,
    "num_epochs": 100,
    "learning_rate": 1e-3,
    "early_stopping_patience": 20,
    "compile_model": False,
    # Mixed precision
    "use_amp": True,  # False trains in fp32
    "amp_dtype": "bfloat16",  # 'bfloat16' or 'float16'
}


def main() -> None:
    data = {"data.path": sys.argv[1]} if len(sys.argv) > 1 else {}
    run = halfstep.fit("unet", settings={**config, **data}, new=True)
    print(f"best {run.best['metric']}: {run.best['value']} in epoch {run.best['epoch']}, weights in {run.dir}")
    print(f"predict with: halfstep predict {run.dir} FOLDER")


if __name__ == "__main__":
    main()
