import torch

if hasattr(torch.amp, "GradScaler"):
    scaler = torch.amp.GradScaler("cuda")
else:
    scaler = torch.cuda.amp.GradScaler()
autocast = torch.amp.autocast("cuda") if torch.__version__ >= "2.4" else torch.cuda.amp.autocast()
