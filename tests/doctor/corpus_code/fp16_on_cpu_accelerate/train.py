from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="fp16")
