"""The same in the task `text`: a mask by documents, and a model that ignores it is refused before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import WrongUse
from halfstep.tasks.models.text.model import LanguageModel, check_document_separation
from zoo.outcome import Outcome
from zoo.p74_packed_documents_attend_to_each_other.plain import POSITIONS, influence
from zoo.small_llama import WORDS, small_llama


class Leaky(LanguageModel):
    """A model that takes no mask."""

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = self.inner.base_model(input_ids=tokens, use_cache=False)[0]
        return found


def run() -> Outcome:
    model = LanguageModel(small_llama(torch.float32)).eval()
    moved = influence(lambda window: model.logits(window, POSITIONS))
    try:
        check_document_separation(Leaky(model.language), WORDS, 0)
        refused = False
    except WrongUse as error:
        refused = error.id == "documents-attend"
    return Outcome(
        good=moved < 1e-5 and refused, seen=f"the first document moves them by {moved:.2g}; a leak is refused"
    )
