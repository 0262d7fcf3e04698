from lightning.fabric import Fabric

fabric = Fabric(
    devices=1,
    precision="bf16-mixed",
)
