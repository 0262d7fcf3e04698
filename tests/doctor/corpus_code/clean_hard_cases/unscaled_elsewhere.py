import torch


class Loop:
    def update(self, loss):
        self.scaler.scale(loss).backward()
        self.unscale_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def unscale_gradients(self):
        self.scaler.unscale_(self.optimizer)
