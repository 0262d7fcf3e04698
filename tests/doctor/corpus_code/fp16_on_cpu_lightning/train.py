import pytorch_lightning as pl
from lightning.pytorch import Trainer

trainer = Trainer(accelerator="cpu", precision="16-mixed", max_epochs=1)
old = pl.Trainer(precision=16, accelerator="cpu")
