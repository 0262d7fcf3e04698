import torch

half = torch.cuda.get_device_capability() < (8, 0)
scaler = None
if half:
    scaler = torch.amp.GradScaler("cuda")
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 2, 4).cuda():
    if half:
        with torch.autocast("cuda"):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        continue
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
