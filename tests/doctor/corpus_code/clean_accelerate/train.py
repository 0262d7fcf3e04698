import torch
from accelerate import Accelerator


def main(model, optimizer, loader, lr_scheduler):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
    print(torch.cuda.max_memory_allocated())
