import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
with torch.autocast("cuda", enabled=args.amp, dtype=torch.bfloat16):
    pass
