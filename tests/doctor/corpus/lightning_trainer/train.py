import lightning as L

trainer = L.Trainer(precision="bf16-mixed", max_epochs=1)
