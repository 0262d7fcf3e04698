import torch
from torch import autocast
from torch.amp import GradScaler


class Trainer:
    def __init__(self, network, device):
        self.network, self.device = network, device
        self.grad_scaler = GradScaler("cuda") if device.type == "cuda" else None
        self.optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
        self.lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, 1000)

    def train_step(self, data, target):
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device.type, enabled=True):
            output = self.network(data)
            l = self.loss(output, target)
        if self.grad_scaler is not None:
            self.grad_scaler.scale(l).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        else:
            l.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.optimizer.step()
        return {"loss": l.detach().cpu().numpy()}

    def on_epoch_end(self):
        self.lr_scheduler.step()
