"""A small language model in transformers' Trainer, in bf16."""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS = 32


class Counting(Dataset):  # type: ignore[type-arg]
    """Sequences that count up from a random number, again and again."""

    def __init__(self, many: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(WORDS, (many, 1), generator=generator)
        self.tokens = (starts + torch.arange(length)) % WORDS

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def model() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=WORDS, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            bf16=True,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine",
            logging_steps=max(1, steps // 5),
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model(), arguments, train_dataset=Counting(2000, 24, 0), eval_dataset=Counting(64, 24, 1))
        trainer.train()
        print(f"evaluation loss {trainer.evaluate()['eval_loss']:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
