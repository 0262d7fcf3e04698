import torch
from transformers import AutoModel

model = AutoModel.from_pretrained("bert-base-uncased", torch_dtype=torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
