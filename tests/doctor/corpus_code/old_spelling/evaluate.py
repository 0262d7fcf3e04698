import torch


def evaluate(model, loader, amp):
    with torch.no_grad(), torch.cuda.amp.autocast(enabled=amp):
        return [model(x) for x in loader]
