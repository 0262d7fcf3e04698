import torch
from torch import nn
from torch.nn import functional as F

model = nn.Linear(8, 8).cuda().half().eval()
optimizer_of_prompt = torch.optim.Adam([torch.zeros(4, requires_grad=True)], eps=1e-8)


@torch.inference_mode()
def predict(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        for x in loader:
            yield F.softmax(model(x.half()), dim=-1).float()
