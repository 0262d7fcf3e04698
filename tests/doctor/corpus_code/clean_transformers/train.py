import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2")
frozen = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16)
arguments = TrainingArguments(output_dir="out", fp16=True, max_grad_norm=1.0, gradient_accumulation_steps=8)
Trainer(model=model, args=arguments).train()
with torch.no_grad():
    print(frozen(torch.ones(1, 4, dtype=torch.long)).logits.mean().item())
