import torch

if __name__ == "__main__":
    net = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=True)
    for x in torch.randn(3, 2, 4).cuda():
        with torch.autocast("cuda", enabled=True, dtype=torch.bfloat16):
            loss = net(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
