import torch
from torch.cuda.amp import GradScaler, autocast

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = GradScaler(init_scale=2.0**12)
for step in range(10):
    with autocast(True, dtype=torch.float16):
        loss = model(torch.randn(2, 4).cuda()).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
