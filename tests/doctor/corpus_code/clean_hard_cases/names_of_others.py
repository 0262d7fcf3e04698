from sklearn.preprocessing import StandardScaler

import torch


def fit(x, optimizer, scheduler):
    scaler = StandardScaler()
    scaler.fit(x)
    x = torch.from_numpy(scaler.transform(x)).float()
    half = x.half()
    for _ in range(3):
        loss = x.mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return half
