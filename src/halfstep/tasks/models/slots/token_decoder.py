"""The autoregressive decoder: the tokens of a frame one after another, from its slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.tasks.models.slots.transformer import TellingBlock


class TokenDecoder(nn.Module):
    """Says each of `places` tokens from the slots and from the tokens before it."""

    def __init__(self, slot_width: int, vocabulary: int, places: int, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.told = nn.Sequential(nn.LayerNorm(slot_width), nn.Linear(slot_width, width))
        self.tokens = nn.Embedding(vocabulary, width)
        self.begin = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(places, width))
        for beginning in (self.tokens.weight, self.begin, self.places):
            nn.init.normal_(beginning, std=0.02)
        self.layers = nn.ModuleList(TellingBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.say = nn.Linear(width, vocabulary)

    def forward(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """How likely each token of the vocabulary is at each place, N × places × vocabulary, as logits."""
        told = self.told(slots)
        # The last token is only said, never heard.
        heard = torch.cat([self.begin.expand(len(tokens), -1, -1), self.tokens(tokens[:, :-1])], dim=1)
        x = heard + self.places
        for layer in self.layers:
            x = layer(x, told)
        out: Tensor = self.say(self.norm(x))
        return out
