from transformers import TrainingArguments

arguments = TrainingArguments("out", fp16=True)
