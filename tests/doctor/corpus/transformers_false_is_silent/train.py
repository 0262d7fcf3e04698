from transformers import TrainingArguments

arguments = TrainingArguments("out", bf16=False, fp16=False)
