import torch


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.matmul(weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad.matmul(weight), grad.t().matmul(x)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return Linear.apply(x, self.weight)


model = Layer().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 2, 4).cuda():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
