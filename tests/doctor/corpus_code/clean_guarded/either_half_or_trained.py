import torch


def build(inference):
    model = torch.nn.Linear(8, 8)
    if inference:
        model.half()
        return model, None
    return model, torch.optim.AdamW(model.parameters())


def build_too(inference):
    model = torch.nn.Linear(8, 8)
    if inference:
        model.half()
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer
    return model, None


def half_in_the_end(loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
    model.half()
    return model


def widened(weights):
    model = torch.nn.Linear(8, 8).half()
    model.load_state_dict(weights)
    model.float()
    return torch.optim.AdamW(model.parameters())
