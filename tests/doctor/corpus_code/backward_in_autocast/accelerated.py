from accelerate import Accelerator


def train(accelerator: Accelerator, model, loader, optimizer):
    for batch in loader:
        with accelerator.autocast():
            loss = model(batch)
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
