import torch


def build():
    net = torch.nn.Linear(4, 4)
    net = net.to("cuda", dtype=torch.float16)
    return net, torch.optim.Adam(net.parameters(), lr=1e-4, eps=1e-8)
