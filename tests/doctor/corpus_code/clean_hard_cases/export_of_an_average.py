import copy

import torch


class Average:
    def __init__(self, model):
        self.ema = copy.deepcopy(model).eval()

    def update(self, model):
        for average, weight in zip(self.ema.parameters(), model.parameters()):
            average.mul_(0.999).add_(weight.detach(), alpha=0.001)

    def save(self, path):
        ema_half = copy.deepcopy(self.ema).half()
        torch.save(ema_half.state_dict(), path)
