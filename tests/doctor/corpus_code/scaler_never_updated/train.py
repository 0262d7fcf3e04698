import torch

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for x in torch.randn(10, 2, 4).cuda():
    with torch.autocast("cuda"):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
