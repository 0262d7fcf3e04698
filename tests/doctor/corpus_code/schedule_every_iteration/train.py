import torch
from torch.optim.lr_scheduler import OneCycleLR

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
one_cycle = OneCycleLR(optimizer, 1e-3, total_steps=1000)
scaler = torch.amp.GradScaler("cuda")
for batch in torch.randn(1000, 8, 4):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    one_cycle.step()
    scaler.update()
