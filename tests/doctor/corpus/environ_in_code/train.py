import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"

from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
