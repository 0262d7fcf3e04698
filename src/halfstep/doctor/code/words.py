"""The words that a file has, each searched for once: most files of a project have none that matters to the doctor."""

from __future__ import annotations

from functools import cache, lru_cache

_STEMS: tuple[str, ...] = (
    "caler", "recision", "RECISION", "TF32", "tf32", "autocast", "backward", "float16", ".half", "scale", "Train",
    "POConfig", "accum", "allow_", ".json", ".yaml", ".yml",
)  # fmt: skip
"""Parts that several words share: where a part is missing, none of its words is searched for."""


class TextWords:
    """The words of a text, as `word in words` asks for them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[str, bool] = {}

    def __contains__(self, word: str) -> bool:
        known = self._known.get(word)
        if known is None:
            stem = _find_stem(word)
            known = self._known[word] = (stem == word or stem in self) and word in self._text
        return known

    def has_any(self, *words: str) -> bool:
        """Return whether the text has one of these."""
        return any(word in self for word in words)


@lru_cache(maxsize=1)
def collect_words(text: str) -> TextWords:
    """Return the words of a text. The last ones are kept: settings and mistakes are looked for one after the other."""
    return TextWords(text)


@cache
def _find_stem(word: str) -> str:
    return next((stem for stem in _STEMS if stem in word), word)
