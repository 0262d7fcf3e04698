"""What `estimate` predicts for models of many libraries, next to what the allocator counts in a real second update.

    python benchmarks/estimate_models.py [--only lstm] [--record]

None of the models is one of benchmarks/estimate_accuracy.py. They are small: what is compared is the kind of code
(recurrent layers, mixtures of experts, masks, detection, complex weights, code that reads numbers), not its size. The
real loop is a plain one, in a process of its own. Models of libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RECORD = Path(__file__).with_suffix(".json")
PRECISIONS = ("fp32", "bf16")
CLOSE, NEAR = 0.02, 0.05
LONGEST = 900
Parts = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def timm_model(name: str, pixels: int, size: int) -> Callable[[], Parts]:
    def make() -> Parts:
        import timm

        images = torch.randn(size, 3, pixels, pixels)
        return timm.create_model(name, num_classes=10), classified, (images, torch.randint(0, 10, (size,)))

    return make


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def text_model(config: str, model: str, **options: Any) -> Callable[[], Parts]:
    def make() -> Parts:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=500, **options)).train()
        words = torch.randint(3, 500, (4, 64))
        return made, own_loss, {"input_ids": words, "labels": words.clone()}

    return make


def speech() -> Parts:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192,
        conv_dim=(64,) * 7, mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    batch = {"input_values": torch.randn(2, 8000), "labels": torch.randint(1, 32, (2, 8))}
    return Wav2Vec2ForCTC(config).train(), own_loss, batch


def detector() -> Parts:
    from torchvision.models.detection import retinanet_resnet50_fpn

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4, min_size=128, max_size=128)
    boxes = {"boxes": torch.tensor([[8.0, 8.0, 60.0, 70.0]]), "labels": torch.tensor([1])}
    loss = lambda model, batch: sum(model(*batch).values())  # noqa: E731
    return model.train(), loss, ([torch.rand(3, 128, 128)] * 2, [boxes, boxes])


def atrous() -> Parts:
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=3)
    loss = lambda model, batch: F.cross_entropy(model(batch[0])["out"], batch[1])  # noqa: E731
    return model, loss, (torch.randn(2, 3, 96, 96), torch.randint(0, 3, (2, 96, 96)))


def video() -> Parts:
    from torchvision.models.video import r3d_18

    return r3d_18(num_classes=5), classified, (torch.randn(2, 3, 8, 48, 48), torch.randint(0, 5, (2,)))


def image_autoencoder() -> Parts:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1,
    )  # fmt: skip
    return model, lambda model, images: F.mse_loss(model(images).sample, images), torch.randn(2, 3, 48, 48)


class Words(nn.Module):
    def __init__(self, inside: nn.Module, out: int) -> None:
        super().__init__()
        self.words, self.inside, self.head = nn.Embedding(300, 96), inside, nn.Linear(out, 300)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.inside(self.words(words))[0])
        return scores


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def recurrent(kind: Callable[..., nn.Module], ways: int = 1) -> Callable[[], Parts]:
    def make() -> Parts:
        inside = kind(96, 160, 2, batch_first=True, bidirectional=ways == 2)
        return Words(inside, 160 * ways), next_word, torch.randint(0, 300, (12, 41))

    return make


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(300, 96), nn.Linear(96, 300)
        self.inside = nn.Transformer(96, 4, 2, 2, 192, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        mask, seen = nn.Transformer.generate_square_subsequent_mask(words.shape[1]), self.words(words)
        scores: Tensor = self.head(self.inside(seen, seen, tgt_mask=mask))
        return scores


class Experts(nn.Module):
    """Words that choose two of six experts."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.head = nn.Linear(96, 6), nn.Linear(96, 10)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            share = expert(x[rows]) * weights[rows, places, None]
            total = total.index_add(0, rows, share.to(total.dtype))
        scores: Tensor = self.head(total)
        return scores


class Spectral(nn.Module):
    """A layer whose weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(1, 24, 1), nn.Conv2d(24, 1, 1)
        self.weight = nn.Parameter(torch.randn(24, 24, 8, 8, dtype=torch.cfloat) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.fft.rfft2(self.up(x).float())
        out = torch.zeros_like(seen)
        out[:, :, :8, :8] = torch.einsum("bixy,ioxy->boxy", seen[:, :, :8, :8], self.weight)
        answer: Tensor = self.down(torch.fft.irfft2(out, s=x.shape[-2:]))
        return answer


def logged(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that reads numbers of the model, as many do for a log, and drops what is not labeled."""
    scores, labels = model(batch[0]), batch[1]
    loss = F.cross_entropy(scores[labels >= 0], labels[labels >= 0])
    if not torch.isfinite(loss):
        raise ValueError("the loss is not finite")
    return loss * (1.0 if loss.item() < 1e9 else 0.5)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def compiled() -> Parts:
    model = perceptron()
    model.compile(backend="aot_eager")
    return model, classified, (torch.randn(128, 64), torch.randint(0, 10, (128,)))


def wave() -> Parts:
    layers = [nn.Conv1d(48, 48, 3, padding=2**k, dilation=2**k) for k in range(5)]
    model = nn.Sequential(
        nn.Conv1d(1, 48, 1), *(m for layer in layers for m in (layer, nn.Tanh())), nn.Conv1d(48, 64, 1)
    )
    return model, classified, (torch.randn(2, 1, 2000), torch.randint(0, 64, (2, 2000)))


MODELS: dict[str, tuple[str, Callable[[], Parts]]] = {
    "efficientnet": ("timm", timm_model("efficientnet_b0", 96, 4)),
    "regnet": ("timm", timm_model("regnety_004", 96, 4)),
    "swin": ("timm", timm_model("swin_tiny_patch4_window7_224", 224, 1)),
    "mixer": ("timm", timm_model("mixer_s32_224", 224, 4)),
    "detector": ("torchvision", detector),
    "atrous": ("torchvision", atrous),
    "video": ("torchvision", video),
    "bert": ("transformers", text_model("BertConfig", "BertForMaskedLM", hidden_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, intermediate_size=256)),
    "llama, grouped": ("transformers", text_model("LlamaConfig", "LlamaForCausalLM", hidden_size=128,
                                                  intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                                                  num_key_value_heads=2, use_cache=False)),
    "t5": ("transformers", text_model("T5Config", "T5ForConditionalGeneration", d_model=128, d_ff=256, d_kv=32,
                                      num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False)),
    "mixtral": ("transformers", text_model("MixtralConfig", "MixtralForCausalLM", hidden_size=128,
                                           intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                                           num_key_value_heads=2, num_local_experts=4, use_cache=False)),
    "speech": ("transformers", speech),
    "image autoencoder": ("diffusers", image_autoencoder),
    "lstm": ("torch", recurrent(nn.LSTM)),
    "lstm, both ways": ("torch", recurrent(nn.LSTM, 2)),
    "gru": ("torch", recurrent(nn.GRU)),
    "rnn": ("torch", recurrent(nn.RNN)),
    "masked transformer": ("torch", lambda: (Masked(), next_word, torch.randint(0, 300, (8, 49)))),
    "experts": ("torch", lambda: (Experts(), classified, (torch.randn(384, 96), torch.randint(0, 10, (384,))))),
    "complex weights": ("torch", lambda: (Spectral(), lambda m, x: F.mse_loss(m(x), x), torch.randn(4, 1, 48, 48))),
    "logged loss": ("torch", lambda: (perceptron(), logged, (torch.randn(128, 64), torch.randint(-2, 10, (128,))))),
    "compiled": ("torch", compiled),
    "wave": ("torch", wave),
}  # fmt: skip


def measure(name: str, precision: str) -> int:
    """Return the peak of a real second update."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the loop of the tests can be imported by name
    from halfstep.measure.case import adamw
    from tests.support.peaks import peak_of_update

    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name][1]()
    return peak_of_update(model, loss_fn, batch, adamw(model), precision)


def predict(name: str, precision: str) -> dict[str, Any]:
    import halfstep

    torch.manual_seed(0)
    ledger = halfstep.estimate(*MODELS[name][1](), precision=precision)
    return {"predicted": ledger.peak, "verified": ledger.verified, "assumptions": len(ledger.assumptions)}


def cell(which: tuple[str, str]) -> dict[str, Any]:
    name, precision = which
    try:
        found = predict(name, precision)
    except Exception as error:
        return {"model": name, "precision": precision, "refused": str(error).splitlines()[0]}
    measured = measure(name, precision)
    error = round(found["predicted"] / measured - 1, 5)
    return {"model": name, "precision": precision, **found, "measured": measured, "error": error}


def show(row: dict[str, Any]) -> None:
    if "refused" in row:
        print(f"{row['model']:<20} {row['precision']}  refused: {row['refused']}", flush=True)
        return
    state = "" if row["verified"] else "  not verified"
    state += f", {row['assumptions']} assumptions" if row["assumptions"] else ""
    sizes = f"{row['predicted'] / 2**20:>9.1f}  {row['measured'] / 2**20:>9.1f} MiB  {row['error']:>+7.2%}"
    print(f"{row['model']:<20} {row['precision']}  {sizes}{state}", flush=True)


def summary(rows: list[dict[str, Any]]) -> str:
    known = [row for row in rows if "error" in row]
    wrong = [row for row in known if row["verified"] and abs(row["error"]) > CLOSE]
    near = sum(abs(row["error"]) <= NEAR for row in known)
    return f"estimated={len(known)}/{len(rows)} within_5%={near}/{len(known)} verified_and_off_by_2%={len(wrong)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS), action="append", help="these models")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    from halfstep.measure.conditions import collect_conditions, describe_conditions

    found = collect_conditions("cpu")
    print(describe_conditions(found))
    names = [n for n in options.only or MODELS if importlib.util.find_spec(MODELS[n][0])]
    rows = []
    # A process for each: the allocator's events of one model must not meet those of another.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=8) as pool:
        for which in [(name, precision) for name in names for precision in PRECISIONS]:
            rows.append(pool.apply_async(cell, (which,)).get(LONGEST))
            show(rows[-1])
    if options.record:
        command = f"python benchmarks/{Path(__file__).name} --record"
        report = {"command": command, "conditions": found, "cells": rows, "summary": summary(rows)}
        RECORD.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
