import torch
import torch.nn.functional as F


def step(net, mel, wave, fp16, scaler, optimizer):
    with torch.autocast("cuda", dtype=torch.float16, enabled=fp16):
        guess = net(mel)
    if fp16:
        guess = guess.half()
    loss = F.l1_loss(wave, guess) * 45
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def wide_again(net, mel, wave, scaler, optimizer):
    guess = net(mel).half()
    guess = guess.float()
    loss = F.l1_loss(wave, guess)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
