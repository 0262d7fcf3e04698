import torch
from torch.amp import GradScaler, autocast

model = torch.nn.Conv2d(3, 1, 3).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = GradScaler("cuda")
accumulation_steps = 4
for i, (images, masks) in enumerate([]):
    with autocast(device_type="cuda", dtype=torch.bfloat16):
        outputs = model(images)
        loss = torch.nn.functional.mse_loss(outputs, masks) / accumulation_steps

    scaler.scale(loss).backward()

    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
