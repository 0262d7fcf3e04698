# In[1]:
import torch
import torch.nn as nn
get_ipython().run_line_magic("matplotlib", "inline")
!nvidia-smi

# In[2]:
net = nn.Linear(4, 2).cuda()
optim = torch.optim.Adam(net.parameters(), lr=1e-3)
grad_scaler = torch.amp.GradScaler("cuda")

# In[3]:
for epoch in range(2):
    for x in torch.randn(10, 8, 4).cuda():
        with torch.amp.autocast("cuda"):
            l = net(x).pow(2).mean()
        grad_scaler.scale(l).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        grad_scaler.step(optim)
        optim.step()
        grad_scaler.update()
        optim.zero_grad()
