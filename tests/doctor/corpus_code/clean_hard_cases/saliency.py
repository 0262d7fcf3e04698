import torch


def saliency(model, image):
    image.requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        score = model(image).max()
    score.backward()
    return image.grad.abs()
