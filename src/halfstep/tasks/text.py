"""Causal language models of transformers, on tokens of one's own text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from halfstep.data.dataset import Sample, Source
from halfstep.data.gguf_base import hide_progress_bars
from halfstep.data.layout import resolve_data_path
from halfstep.data.token_files import (
    TOKENIZER,
    VERSION,
    VERSION_WITHOUT_BEGINNINGS,
    TokenArray,
    TokenIndex,
    read_token_index,
)
from halfstep.data.token_windows import TokenWindows
from halfstep.data.tokenizing import find_document_beginning, read_tokenizer, write_python_tokens
from halfstep.errors import BadData, WrongUse
from halfstep.precision.precision import Precision
from halfstep.status_line import OnProgress
from halfstep.step.loss import Counted
from halfstep.tasks.models.text import adapters, building, tokenizer_files
from halfstep.tasks.models.text.model import IGNORED, LanguageModel, check_document_separation, compare_logits
from halfstep.tasks.options.text import NO_ADAPTER, NO_BASE, SCHEMA, check
from halfstep.train.metrics import Metric, Metrics
from halfstep.train.process_group import resolve_device
from halfstep.train.task import Prediction, Split, Task, ignore_progress

NO_BEGINNINGS = (
    "the documents have no beginnings, as tokens of earlier versions: the model does not learn how a text begins; "
    "new tokens have them: halfstep data tokens FILES"
)
COMPARED = 64
"""Held-out windows that a merged model is compared on."""
TOGETHER = 4


class Text(Task):
    """A task that predicts the next token; windows hold several documents, which do not see each other."""

    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "bits_per_byte"
    higher_is_better: ClassVar[bool] = False
    reads: ClassVar[Literal["images", "text"]] = "text"
    tiny: ClassVar[Mapping[str, object]] = {
        "model": {"width": 32, "layers": 2, "heads": 2, "new_tokens": 8},
        "data": {"name": "python", "samples": 4, "vocabulary": 512, "length": 32},
        "loss": {},
    }

    def begin(self, recipe: Any) -> None:
        """Check the recipe. Raise `BadRecipe` for settings that exclude each other."""
        super().begin(recipe)
        check(recipe)
        self._index: TokenIndex | None = None
        self._folder: Path | None = None
        self._tokenizer: Any = None
        self._config: dict[str, Any] | None = None
        self._vocabulary = self._end = -1
        self._begin: tuple[int, ...] | None = None
        """The tokens that a document begins with; None where it has no beginning, as in runs of earlier versions."""
        self._run_has_beginnings: bool | None = None
        """Whether the documents of an earlier launch have beginnings; None in the first launch of a run."""
        self._tokens_per_byte: dict[str, float] = {}
        self._base = ""
        """The fingerprint of an adapter's base."""
        self._base_files: dict[str, bytes] | None = None
        """The files of a base that describe its tokenizer; None until they are read."""
        self._tokenizer_json = b""
        """The tokenizer as the base, the run or the tokens have it."""

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a window."""
        length: int = self.recipe.data.length
        return length

    def source(self, split: Split) -> Source:
        """Return the windows of a split."""
        self._read()
        assert self._folder is not None
        # A base that changes between two launches makes another run, as data that changes does.
        base = adapters.list_base_files(self.recipe.model.base) if split == "train" else []
        tokens = TokenArray(self._folder, split, self._index)
        return TokenWindows(tokens, self.recipe.data.length, [(f"base/{path.name}", path) for path in base])

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Return inputs, targets shifted by one, and positions, which start again with each document.

        A document starts at its beginning, which is no target. Its other tokens and its end token are targets once.
        """
        self._known()
        if self._begin is None:
            return self._transform_without_beginnings(sample)
        first, *others = self._begin
        tokens, targets = sample["tokens"][:-1], sample["tokens"][1:].clone()
        # The end token before a document is a target; where a document begins with it, only as that.
        for token in others if first == self._end else self._begin:
            targets[targets == token] = IGNORED
        targets[targets < 0] = IGNORED
        tokens = torch.where(tokens < 0, self._end, tokens)
        places = torch.arange(len(tokens))
        starts = torch.where(tokens == first, places, 0)
        return {"tokens": tokens, "targets": targets, "positions": places - starts.cummax(0).values}

    def _transform_without_beginnings(self, sample: Sample) -> Sample:
        tokens, targets = sample["tokens"][:-1], sample["tokens"][1:].clone()
        ends = tokens == self._end
        # After the end of a document comes another one, which it does not predict.
        targets[ends] = IGNORED
        places = torch.arange(len(tokens))
        starts = torch.zeros_like(places)
        starts[1:] = torch.where(ends[:-1], places[1:], 0)
        return {"tokens": tokens, "targets": targets, "positions": places - starts.cummax(0).values}

    # -- model ----------------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """Return a new model, or the base."""
        options = self.recipe.model
        if options.adapter.kind != NO_ADAPTER:
            return self._add_adapter()
        if self._config is not None:  # a finished run: its weights follow
            return LanguageModel(building.build_random_model(building.restore_model_config(self._config)))
        if options.base == NO_BASE:
            self._known()
            return LanguageModel(building.build_random_model(self._make_config()))
        language = building.load_base(options.base, options.download, dtype=torch.float32)
        self._fits(language.config)
        language.config.use_cache = False
        return LanguageModel(language)

    def store_frozen(self, model: nn.Module, precision: Precision) -> list[str]:
        """Store the base of an adapter in fp32 where the run computes in fp32."""
        assert isinstance(model, LanguageModel)
        return adapters.widen_base(model, self.recipe.model, precision) if model.has_adapter else []

    def ready(self, model: nn.Module, precision: Precision, on_progress: OnProgress = ignore_progress) -> list[str]:
        """Check that documents do not see each other, and how logits are computed."""
        assert isinstance(model, LanguageModel)
        lines = self.store_frozen(model, precision)
        lines += adapters.describe_model_parts(model, self.recipe.model, precision) if model.has_adapter else []
        with precision.inference(next(model.parameters()).device):
            lines += check_document_separation(model, self._vocabulary, self._end)
        return [*lines, *([] if self._begin is not None else [NO_BEGINNINGS])]

    def loss(self, model: nn.Module, batch: Sample, metrics: Metrics | None = None) -> Counted:
        """Return the cross-entropy of the next tokens, summed, and their number."""
        targets = batch["targets"]
        total, count = model(batch["tokens"], targets, batch["positions"]), (targets != IGNORED).sum()
        if metrics is not None:
            split = "train" if model.training else "val"
            metrics.update(total.detach(), count, self._tokens_per_byte.get(split, math.nan))
        return Counted(total, count)

    def metrics(self) -> Metrics:
        """Return perplexity and bits per byte."""
        return Metrics({"text": TextMetric()})

    # -- use ------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the config, the tokenizer and its end token."""
        self._known()
        config = self._config or building.convert_config_to_plain(self._load_or_make_config())
        return {
            "config": config,
            "tokenizer": tokenizer_files.pack_file(self._find_tokenizer_json()),
            "base_files": {name: tokenizer_files.pack_file(one) for name, one in self._find_base_files().items()},
            "end": self._end,
            "begin": None if self._begin is None else list(self._begin),
            "vocabulary": self._vocabulary,
            "tokens_per_byte": self._tokens_per_byte,
            **({"base": self._base} if self._base else {}),
        }

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts of a run."""
        if not facts:
            return
        self._config = facts["config"]
        self._tokenizer_json = tokenizer_files.unpack_file(facts["tokenizer"])
        self._tokenizer = tokenizer_files.parse_tokenizer(self._tokenizer_json)
        if "base_files" in facts:
            files = facts["base_files"].items()
            self._base_files = {name: tokenizer_files.unpack_file(one) for name, one in files}
        self._end, self._vocabulary = facts["end"], facts["vocabulary"]
        begin = facts.get("begin")
        self._begin, self._run_has_beginnings = None if begin is None else tuple(begin), begin is not None
        self._tokens_per_byte = dict(facts["tokens_per_byte"])
        self._base = str(facts.get("base", ""))

    def resume(self, facts: Mapping[str, Any]) -> None:
        """Keep documents without beginnings in a run that began with them."""
        if facts:
            self._run_has_beginnings = facts.get("begin") is not None

    @property
    def generates(self) -> bool:
        """Text needs no prompt."""
        return True

    def prompt(self, text: str) -> Tensor:
        """Return the tokens of a prompt, after the beginning of a document."""
        self._known()
        self._tokenizer.encode_special_tokens = True
        tokens = [*(self._begin or ()), *self._tokenizer.encode(text, add_special_tokens=False).ids]
        return torch.tensor(tokens or [self._end])

    @torch.no_grad()
    def predict(self, model: nn.Module, tokens: Tensor) -> Prediction:
        """Return the continuation of a prompt, as text; sampled from torch's default generator.

        The model reads all of the prompt: raise `BadData` for one that fills its context. The text ends where the
        context is full; `left_out` is the number of new tokens without a place in it.
        """
        assert isinstance(model, LanguageModel)
        self._known()
        options = self.recipe.model
        sampling: dict[str, Any] = {"do_sample": False}
        if options.temperature > 0:
            sampling = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k}
        room = self._find_context(model.inner.config) - len(tokens)
        if room < 1:
            raise _build_prompt_error(len(tokens), int(room))
        new_tokens, prompt = int(min(options.new_tokens, room)), tokens.unsqueeze(0)
        with adapters.use_inference_precision(model):
            found = model.language.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                pad_token_id=self._end,
                eos_token_id=self._end,
                use_cache=True,
                **sampling,
            )
        written = found[0, prompt.shape[1] :].tolist()
        ended = bool(written) and written[-1] == self._end
        text = self._decode_text(prompt[0].tolist(), written[:-1] if ended else written)
        left_out = 0 if ended else options.new_tokens - new_tokens
        return Prediction(values={"text": text, "tokens": len(written), "ended": ended, "left_out": left_out})

    def _decode_text(self, prompt: list[int], written: list[int]) -> str:
        """Return new tokens as text; many tokenizers write no space before the first token that they decode."""
        before, whole = (self._tokenizer.decode(tokens) for tokens in (prompt, [*prompt, *written]))
        return str(whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(written))

    def write_folder(self, model: nn.Module, folder: Path, merge: bool = False) -> list[str]:
        """Write the model and its tokenizer as a folder that transformers loads, and compare what it loads."""
        assert isinstance(model, LanguageModel)
        if merge and not model.has_adapter:
            raise WrongUse("a merge without an adapter", allowed="runs with model.adapter", do="leave --merge out")
        self._known()
        with hide_progress_bars():
            written, lines = self._merge_adapter(model) if merge else (model, [])
            written.inner.config.use_cache = True
            written.language.save_pretrained(folder)
            lines.append(self._write_tokenizer(folder, written.inner.config))
            if merge:
                return lines
            if model.has_adapter:
                base = self.recipe.model.base
                return [f"the adapter alone; its base is {base}, fingerprint {self._base}", *lines]
            again = LanguageModel(building.load_base(str(folder), False, dtype=torch.float32))
            return [compare_logits(model, again, self._vocabulary), *lines]

    def _write_tokenizer(self, folder: Path, config: Any) -> str:
        """Write the tokenizer and the base's own files, or a description; return how they agree with the config."""
        files = self._find_base_files()
        if not files:
            tokenizer_files.describe_tokenizer(self._tokenizer, self._first, self._end, folder)
        else:
            tokenizer_files.write_base_files({**files, TOKENIZER: self._find_tokenizer_json()}, folder)
        return tokenizer_files.compare_written_tokenizer(folder, self._tokenizer, config, of_base=bool(files))

    def _find_base_files(self) -> dict[str, bytes]:
        """Return the files of the base that describe its tokenizer: none without a base, or where it is gone.

        A run of an earlier version has not kept them: they are those that the base has now.
        """
        if self._base_files is None:
            folder = self._find_base_folder()
            self._base_files = {} if folder is None else tokenizer_files.read_base_files(folder)
        return self._base_files

    def _find_tokenizer_json(self) -> bytes:
        if not self._tokenizer_json:
            own = self._find_base_tokenizer()
            self._tokenizer_json = self._tokenizer.to_str().encode() if own is None else own.read_bytes()
        return self._tokenizer_json

    def _find_base_tokenizer(self) -> Path | None:
        folder = self._find_base_folder()
        return folder / TOKENIZER if folder is not None and (folder / TOKENIZER).is_file() else None

    def _find_base_folder(self) -> Path | None:
        options, finished = self.recipe.model, self._config is not None
        if options.base == NO_BASE:
            return None
        return tokenizer_files.find_base_folder(options.base, options.download and not finished)

    def _merge_adapter(self, model: LanguageModel) -> tuple[LanguageModel, list[str]]:
        """Return the merged model and its losses; raise `WrongUse` if it is worse."""
        whole = adapters.build_merged_model(
            model, building.restore_model_config(self._config or building.convert_config_to_plain(model.inner.config))
        )
        with model.language.disable_adapter():
            base = self._measure_held_out_loss(model)
        losses = adapters.MergeLosses(base, self._measure_held_out_loss(model), self._measure_held_out_loss(whole))
        losses.refuse_worse()
        return whole, [str(losses)]

    @torch.no_grad()
    def _measure_held_out_loss(self, model: LanguageModel) -> float:
        """Return the loss for each token of some held-out windows."""
        source = self.source("val")
        numbers = range(0, len(source), -(-len(source) // COMPARED))
        device, total, count = next(model.parameters()).device, 0.0, 0
        for first in range(0, len(numbers), TOGETHER):
            windows = (source.read(number) for number in numbers[first : first + TOGETHER])
            batch = self.collate("val", [self.transform("val", window) for window in windows])
            with adapters.use_inference_precision(model):
                loss = self.loss(model.eval(), {name: tensor.to(device) for name, tensor in batch.items()})
            total, count = total + float(loss.sum), count + int(loss.count)
        return total / max(count, 1)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._index is not None:
            return
        data = self.recipe.data
        version = VERSION_WITHOUT_BEGINNINGS if self._run_has_beginnings is False else VERSION
        self._folder = (
            write_python_tokens(data.samples, data.vocabulary, version)
            if data.name == "python"
            else resolve_data_path(data.path)
        )
        self._index = index = read_token_index(self._folder)
        own = read_tokenizer(self._folder)
        if self._tokenizer is not None and own.get_vocab() != self._tokenizer.get_vocab():
            raise BadData(
                f"the tokens of {self._folder} come from another tokenizer than those of the run",
                allowed="the tokens that the run was trained on, or others of its tokenizer",
                do=f"put them back at {self._folder}",
            )
        self._refuse_other_beginnings(index)
        self._tokenizer = own
        self._begin, self._end, self._vocabulary = index.begin, index.end, index.vocabulary
        self._tokens_per_byte = {s: index.count_targets(s) / max(index.split(s).bytes, 1) for s in ("train", "val")}

    def _refuse_other_beginnings(self, index: TokenIndex) -> None:
        """Raise `BadData` where the documents do not begin as those of the run do."""
        known = self._run_has_beginnings is not None
        if not known or (self._run_has_beginnings == (index.begin is not None) and self._begin in (None, index.begin)):
            return
        now = "no beginnings" if index.begin is None else f"the beginning {list(index.begin)}"
        raise BadData(
            f"the documents of {self._folder} have {now}, unlike those that the run began with",
            allowed="tokens whose documents begin as those of the run",
            do=f"put the tokens of the run back at {self._folder}",
        )

    @property
    def _first(self) -> int:
        """The token with which a text begins."""
        return self._end if self._begin is None else self._begin[0]

    def _known(self) -> None:
        """Read the tokens' index, unless a finished run has recorded its facts."""
        if self._end < 0:
            self._read()

    def _add_adapter(self) -> LanguageModel:
        options, device = self.recipe.model, resolve_device(self.recipe.train.device)
        if options.base == NO_BASE:
            self._known()
            return adapters.build_adapter_model(options, self._make_config(), device)
        is_here = bool(adapters.list_base_files(options.base))
        if is_here:
            self._base = adapters.compute_base_fingerprint(options.base, self._base)
        self._fits(building.read_base_config(options.base, options.download))
        model = adapters.build_adapter_model(options, None, device)
        if not is_here:  # downloaded by now
            self._base = adapters.compute_base_fingerprint(options.base, self._base)
        return model

    def _make_config(self) -> Any:
        options, length = self.recipe.model, self.recipe.data.length
        return building.build_model_config(options, self._vocabulary, length, self._first, self._end)

    def _load_or_make_config(self) -> Any:
        options = self.recipe.model
        return (
            self._make_config()
            if options.base == NO_BASE
            else building.read_base_config(options.base, options.download)
        )

    def _find_context(self, config: Any) -> float:
        """Return how many tokens the model sees at most, by its config."""
        return getattr(config, "max_position_embeddings", None) or math.inf

    def _fits(self, config: Any) -> None:
        """Raise `BadData` where tokens and base do not belong together."""
        self._known()
        base = self.recipe.model.base
        own = self._find_base_tokenizer()
        place = own or f"{base}/{TOKENIZER}"
        if config.vocab_size < self._vocabulary or (
            own is not None and read_tokenizer(own).get_vocab() != self._tokenizer.get_vocab()
        ):
            raise BadData(
                f"the tokens of {self._folder} are not those of {base}",
                allowed="tokens that the base's own tokenizer made",
                do=f"halfstep data tokens FILES --tokenizer {place} --out FOLDER",
            )
        begin = None if own is None else find_document_beginning(read_tokenizer(own), self._end)
        if begin is not None and self._run_has_beginnings is None and begin != (self._begin or (self._end,)):
            now, wanted = (
                " ".join(map(str, map(self._tokenizer.id_to_token, one))) or "nothing"
                for one in (self._begin or (), begin)
            )
            raise BadData(
                f"the documents of {self._folder} begin with {now}, and texts of {base} with {wanted}",
                allowed="tokens that the base's own tokenizer made",
                do=f"halfstep data tokens FILES --tokenizer {own} --out FOLDER",
            )
        most = self._find_context(config)
        if self.recipe.data.length > most:
            raise BadData(
                f"data.length={self.recipe.data.length} for {base}",
                allowed=f"at most {most}, the longest window that the base knows",
                do=f"write data.length={most}",
            )


def _build_prompt_error(tokens: int, room: int) -> BadData:
    context = tokens + room
    return BadData(
        f"a prompt of {tokens:,} tokens, {1 - room:,} more than a context of {context:,} has room for",
        allowed=f"a prompt of at most {context - 1:,} tokens, its beginning included: the model reads all of it",
        do="shorten the prompt",
    )


class TextMetric(Metric):
    """Perplexity and bits per byte over all tokens: of the mean loss, not a mean over batches."""

    loss: Tensor
    tokens: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        super().__init__(loss=zero, tokens=torch.zeros((), dtype=torch.int64), bytes=zero.clone())

    def update(self, loss: Tensor, tokens: Tensor, tokens_per_byte: float) -> None:
        """Add the summed loss of a batch, and the number of its tokens."""
        self.loss = self.loss + loss.to(self.loss.dtype)
        self.tokens = self.tokens + tokens
        self.bytes = self.bytes + tokens.to(self.bytes.dtype) / tokens_per_byte

    def compute(self) -> dict[str, Tensor]:
        loss = self.total("loss")
        return {
            "perplexity": (loss / self.total("tokens")).exp(),
            "bits_per_byte": loss / math.log(2) / self.total("bytes"),
        }
