"""A causal language model of transformers whose forward returns the loss: summed over tokens, in fp32, in chunks.

Documents in a window do not attend to each other: each has its own positions, and a mask keeps it apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import WrongUse, format_error_line
from halfstep.precision.precision import widen

IGNORED = -100
"""The target of a position that predicts nothing, as torch and transformers have it."""
CHUNK = 2**23
"""Logits that are computed at a time: 32 MB in fp32."""


class LanguageModel(nn.Module):
    """A language model with its loss. `language` is transformers' own, or peft's around it."""

    def __init__(self, language: Any) -> None:
        super().__init__()
        self.language = language
        self.not_saved: frozenset[str] = frozenset()
        """Parameters of a frozen base, which no checkpoint of an adapter holds."""
        self.plain_head = True
        """Whether logits are the output layer's alone; some models scale or cap them after it."""

    @property
    def inner(self) -> Any:
        """The model of transformers, without an adapter around it."""
        return getattr(self.language, "base_model", self.language).model if self.has_adapter else self.language

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter of peft is around it."""
        return hasattr(self.language, "peft_config")

    def leave_out_base(self) -> None:
        """Keep the parameters that are frozen now out of checkpoints and files of weights."""
        self.not_saved = frozenset(name for name, p in self.named_parameters() if not p.requires_grad)
        self.register_state_dict_post_hook(_keep_trained_state)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Return the summed loss of a batch; all arguments are batch × length."""
        if self.plain_head:
            hidden = self.hidden(tokens, positions)
            return compute_summed_loss(
                hidden, targets, self.inner.get_output_embeddings(), self.inner.config.vocab_size
            )
        logits = self.logits(tokens, positions)
        return _sum_cross_entropy(logits.flatten(0, 1), targets.flatten())

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the outputs of the last layer, before the logits."""
        found: Tensor = self.inner.base_model(**self._inputs(tokens, positions))[0]
        return found

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of all positions, as the model itself computes them."""
        found: Tensor = self.inner(**self._inputs(tokens, positions)).logits
        return found

    def _inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._mask(positions),
            "use_cache": False,
        }

    def _mask(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask of all layers, or one for each kind; transformers uses a mask of four axes unchanged."""
        config = self.inner.config
        reach = getattr(config, "sliding_window", None)
        whole = self._expand_mask(build_attention_mask(positions))
        if reach is None or reach >= positions.shape[1]:
            return whole
        near = self._expand_mask(build_attention_mask(positions, reach))
        return {"full_attention": whole, "sliding_attention": near} if getattr(config, "layer_types", None) else near

    def _expand_mask(self, mask: Tensor) -> Tensor:
        # Plain attention adds its mask to the scores.
        if self.inner.config._attn_implementation != "eager":
            return mask
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)

    def activation_blocks(self) -> Iterator[nn.Module]:
        """Yield the layers, whose activations can be computed again in backward."""
        lists = [part for part in self.inner.base_model.modules() if isinstance(part, nn.ModuleList)]
        yield from max(lists, key=len, default=nn.ModuleList())


def _keep_trained_state(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    # A quantized base has more entries than parameters, such as scales.
    saved = {f"{prefix}{name}" for name, p in module.named_parameters() if p.requires_grad}
    for name in [name for name in state if name not in saved]:
        del state[name]


def build_attention_mask(positions: Tensor, reach: int | None = None) -> Tensor:
    """Return a mask, batch × 1 × length × length, that is true where a token sees another: before it, in its document.

    Positions start again with each document. With `reach`, a token sees so many tokens, of which it is the last.
    """
    documents = (positions == 0).cumsum(1)
    same = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()
    return (same if reach is None else same.triu(1 - reach)).unsqueeze(1)


def compute_summed_loss(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, most: int = CHUNK
) -> Tensor:
    """Return the summed cross-entropy of hidden states, batch × length × width, in chunks of at most `most` logits.

    Logits of more than one chunk are computed again in backward, so that those of one chunk are in memory at a time.
    """
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    chunk = max(1, most // vocabulary)
    if len(rows) <= chunk:
        return _sum_cross_entropy(head(rows), wanted)

    def loss_of(part: Tensor, target: Tensor) -> Tensor:
        return _sum_cross_entropy(head(part), target)

    # Nothing is drawn in a chunk, so that the generators need not be kept for the second time.
    again = partial(checkpoint, loss_of, use_reentrant=False, preserve_rng_state=False)
    parts = zip(rows.split(chunk), wanted.split(chunk), strict=True)
    return torch.stack([again(part, target) for part, target in parts]).sum()


def _sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(widen(logits), targets, ignore_index=IGNORED, reduction="sum")


# -- checks before the first step -------------------------------------------------------------------------------------


CHECKED = 12
"""Tokens of the window that is looked at."""


@torch.no_grad()
def check_document_separation(model: LanguageModel, vocabulary: int, end: int) -> list[str]:
    """Check what the loss relies on, with two short windows; return notes.

    Raise `WrongUse` if a document sees the one before it.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocabulary, (2, CHECKED), generator=draw)
        # The same second document after two others.
        tokens[:, CHECKED // 2 :] = tokens[0, CHECKED // 2 :]
        tokens[:, CHECKED // 2 - 1] = end
        positions = (torch.arange(CHECKED) % (CHECKED // 2)).expand(2, -1)
        hidden = _compute_hidden_states(model, tokens.to(device), positions.to(device))
        first, second = widen(hidden[:, CHECKED // 2 :]).unbind()
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max())):
            raise _build_separation_error(model, "lets a document see the one before it in the same window")
        whole = widen(model.logits(tokens.to(device), positions.to(device)))
        ours = widen(model.inner.get_output_embeddings()(hidden))
        # A cap changes large logits alone, and these may be small.
        capped = getattr(model.inner.config, "final_logit_softcapping", None) is not None
        close = torch.allclose(ours, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max()))
        model.plain_head = close and not capped
    finally:
        model.train(training)
    if model.plain_head:
        return []
    return [f"{type(model.inner).__name__} changes its logits after the output layer: the loss needs all of them"]


def _compute_hidden_states(model: LanguageModel, tokens: Tensor, positions: Tensor) -> Tensor:
    try:
        return model.hidden(tokens, positions)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:  # one that expects a mask of batch × length, or none
        raise _build_separation_error(
            model, f"cannot keep the documents of a window apart ({format_error_line(error)[:120]})"
        ) from error


def _build_separation_error(model: LanguageModel, why: str) -> WrongUse:
    return WrongUse(
        f"{type(model.inner).__name__} {why}",
        allowed="models that respect a mask of attention of batch × 1 × length × length",
        do="take another architecture",
        id="documents-attend",
    )


FARTHEST = 1e-3
"""The largest difference of logits, relative to the largest logit: the same weights in the same arithmetic."""


@torch.no_grad()
def compare_logits(model: LanguageModel, other: LanguageModel, vocabulary: int) -> str:
    """Return how far apart the logits of two models are, in words; raise `WrongUse` if they differ."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (2, CHECKED), generator=draw)
    positions = torch.arange(CHECKED).expand(2, -1)
    mine, theirs = (widen(one.eval().logits(tokens, positions)) for one in (model, other))
    difference, largest = float((mine - theirs).abs().max()), float(mine.abs().max())
    # Negated, so that a NaN difference fails too.
    if not difference <= FARTHEST * max(largest, 1.0):
        raise WrongUse(
            f"the folder and the model disagree: logits {difference:.2g} apart",
            allowed=f"at most {FARTHEST:g} of the largest, {largest:.2g}",
            do="report this with the recipe",
        )
    return f"checked: loaded again, logits at most {difference:.2g} apart"
