import torch

model = torch.nn.Linear(8, 8)
model.to("cpu").to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model(torch.randn(2, 8).bfloat16()).mean().backward()
optimizer.step()
