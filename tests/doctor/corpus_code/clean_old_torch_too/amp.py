import torch

try:
    from torch.amp import GradScaler
except ImportError:
    from torch.cuda.amp import GradScaler

if hasattr(torch, "autocast"):
    autocast = torch.autocast
else:
    autocast = torch.cuda.amp.autocast
scaler = GradScaler(enabled=torch.cuda.is_available())
