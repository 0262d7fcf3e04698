import torch
import yaml

config = yaml.safe_load(open("config.yaml"))
with torch.autocast("cuda", dtype=torch.bfloat16):
    pass
