from accelerate import Accelerator

accelerator = Accelerator()
with accelerator.autocast():
    pass
