import lightning as L

from module import Net

trainer = L.Trainer(precision="16-mixed", accelerator="gpu", gradient_clip_val=1.0)
evaluator = L.Trainer(precision="bf16-mixed", accelerator="cpu")
trainer.fit(Net())
