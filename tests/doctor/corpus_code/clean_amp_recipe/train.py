"""torch's own recipe for automatic mixed precision."""
import torch

use_amp = True
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.001)
loss_fn = torch.nn.MSELoss().cuda()
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(10)]

for epoch in range(3):
    for input, target in data:
        with torch.autocast(device_type="cuda", dtype=torch.float16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "filename")
