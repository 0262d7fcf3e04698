import torch


def penalty(critic, mixed):
    with torch.autocast("cuda", enabled=False):
        scores = critic(mixed.float())
        return torch.autograd.grad(scores.sum(), mixed, create_graph=True)[0]


def scaled_penalty(critic, mixed, scaler):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = scaler.scale(critic(mixed).sum())
        return torch.autograd.grad(scores, mixed, create_graph=True)[0]


def train(model, optimizer, loader, args, other, ema_loss):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x)
            if not args.amp:
                loss.backward()
        if args.amp:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ema_loss.update(loss.item())
    other.load_state_dict(optimizer.state_dict())
    torch.save({"optimizer": optimizer.state_dict(), "loss_scale": scaler.state_dict()}, "checkpoint.pt")


@torch.autocast("cuda", dtype=torch.float16)
def evaluate(model, loader):
    model.eval()
    return sum(model(x) for x in loader)
