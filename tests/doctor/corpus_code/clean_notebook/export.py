# %%
import torch

# %%
!pip install timm
%matplotlib inline
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")

# %%
for step in range(10):
    with torch.autocast("cuda"):
        loss = model(torch.randn(4, 4, device="cuda")).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
