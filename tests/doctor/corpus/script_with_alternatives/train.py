from accelerate import Accelerator


def main(fast):
    if fast:
        return Accelerator(mixed_precision="fp16")
    return Accelerator(mixed_precision="bf16")
