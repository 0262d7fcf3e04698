"""Windows of a fixed number of tokens, by number: the source of samples of a text run."""

from __future__ import annotations

import numpy as np
import torch

from halfstep.data.dataset import Files, Sample, Source
from halfstep.data.token_files import INDEX, TokenArray
from halfstep.errors import BadData

FILLER = -100
"""Fills the last window: no token, and no target."""


class TokenWindows(Source):
    """Consecutive windows of a split. Each has one token more than `length`, the first token of the next window.

    The first window begins with an end token, as if a document were before it: every token of the split is a target of
    one window. The last window is filled with `FILLER`. Without beginnings in the index, the first window begins with
    the first token, and the last one is filled with end tokens.
    """

    notices_changes = True

    def __init__(self, tokens: TokenArray, length: int, more_files: Files = ()) -> None:
        if len(tokens) < 2:
            raise BadData(
                f"the split {tokens.split} of {tokens.folder} has {len(tokens)} tokens",
                allowed="two tokens or more",
                do="add text, or hold out another share: halfstep data tokens FILES --val 0.1",
            )
        self.tokens, self.length, self._more_files = tokens, length, list(more_files)
        self._has_beginnings = tokens.index.begin is not None

    def __len__(self) -> int:
        targets = len(self.tokens) if self._has_beginnings else len(self.tokens) - 1
        return -(-targets // self.length)

    def read(self, index: int) -> Sample:
        """Return the tokens of a window; raise BadSample if its shard has changed."""
        end = self.tokens.index.end
        start = index * self.length - self._has_beginnings
        found = self.tokens.read(max(0, start), min(start + self.length + 1, len(self.tokens)))
        window = np.full(self.length + 1, FILLER if self._has_beginnings else end, np.int64)
        if start < 0:
            window[0] = end
            window[1 : 1 + len(found)] = found
        else:
            window[: len(found)] = found
        return {"tokens": torch.from_numpy(window)}

    def name(self, index: int) -> str:
        """Return the place of the window in its split."""
        return f"{self.tokens.folder}: {self.tokens.split} tokens from {index * self.length:,}"

    def key(self, index: int) -> str:
        """Return the place of the window without the folder."""
        return f"{self.tokens.split}#{index * self.length}"

    def files_of(self, index: int) -> Files:
        """Return the files of the split, the same for every window."""
        return self.every_file()

    def every_file(self) -> Files:
        """Return the index and the shards, and files that the run depends on otherwise."""
        own = (self.tokens.folder / INDEX, *self.tokens.paths)
        return [*((path.name, path) for path in own), *self._more_files]
