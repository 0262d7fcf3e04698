import deepspeed
import torch

model = torch.nn.Linear(8, 8)
model.half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer)
