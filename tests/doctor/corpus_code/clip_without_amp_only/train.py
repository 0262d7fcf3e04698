import torch


def train(model, loader, optimizer, args):
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x)
        optimizer.zero_grad()
        if args.amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
