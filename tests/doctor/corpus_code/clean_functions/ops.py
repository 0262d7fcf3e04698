import torch
from torch.nn import functional as F


class Linear(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def loss_of(x, weight, target):
    with torch.autocast("cuda"):
        logits = Reverse.apply(Linear.apply(x, weight))
        with torch.autocast("cuda", enabled=False):
            return F.binary_cross_entropy(logits.float().sigmoid(), target)
