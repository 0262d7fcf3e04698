import torch

model = torch.nn.Linear(4, 1)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
    print(model(torch.randn(2, 4)))
