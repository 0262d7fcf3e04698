import torch
import torch.nn.functional as F
from torch import nn

model = nn.Conv2d(3, 1, 1).cuda()
criterion = nn.BCELoss()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")


def dice_bce(probability, mask):
    bce = F.binary_cross_entropy(probability, mask)
    return bce + 1 - 2 * (probability * mask).sum() / (probability.sum() + mask.sum() + 1.0)


for image, mask in []:
    with torch.autocast("cuda"):
        logits = model(image)
        loss = criterion(torch.sigmoid(logits), mask)
        loss = loss + dice_bce(logits.sigmoid(), mask)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
