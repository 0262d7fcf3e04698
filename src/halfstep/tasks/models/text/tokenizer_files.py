"""The files of a base that describe its tokenizer and how it writes: kept in a run, and written back by an export."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.data.token_files import TOKENIZER
from halfstep.data.tokenizing import find_known_text, prepare_tokenizer
from halfstep.errors import WrongUse, format_error_line

NAMES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATES = "additional_chat_templates"
"""A folder of further chat templates."""
PATTERNS = (TOKENIZER, *NAMES, f"{TEMPLATES}/*.jinja")
MARKS = ("bos", "eos", "pad")
LARGEST = 2**23
"""Bytes of a description; anything larger is none."""


def find_base_folder(name: str, download: bool) -> Path | None:
    """Return the folder of a base, or the copy of its tokenizer files from the hub; None if there is none."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*PATTERNS], local_files_only=not download))
    except (OSError, ValueError):  # not downloaded, no network, or no name of the hub
        return None


def read_base_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a base that describe its tokenizer and how it writes, by their names in the folder."""
    found = [folder / name for name in NAMES] + sorted((folder / TEMPLATES).glob("*.jinja"))
    present = [path for path in found if path.is_file() and path.stat().st_size <= LARGEST]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in present}


def write_base_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of a base into an exported folder, byte for byte."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def pack_file(content: bytes) -> str:
    """Return the content of a file as a short text: the JSON of a tokenizer may take megabytes."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


def unpack_file(text: str) -> bytes:
    """Return the content that `pack_file` was given."""
    return zlib.decompress(base64.b64decode(text))


def parse_tokenizer(content: bytes) -> Any:
    """Return the tokenizer in the content of a tokenizer.json."""
    from tokenizers import Tokenizer

    return prepare_tokenizer(Tokenizer.from_str(content.decode()))


def describe_tokenizer(tokenizer: Any, begin: int, end: int, folder: Path) -> None:
    """Write a tokenizer without a description of its own as transformers' AutoTokenizer reads it."""
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": tokenizer.id_to_token(begin), "eos_token": tokenizer.id_to_token(end)}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def compare_written_tokenizer(folder: Path, tokenizer: Any, config: Any, of_base: bool) -> str:
    """Load the tokenizer of an exported folder, and return how it agrees with the model's config and the run.

    The files of a base are what they are: a difference is reported. Raise `WrongUse` for a difference in files that
    this package wrote.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a base's own files: any error, as in `load_base`
        if not of_base:
            raise
        return f"not checked: transformers cannot load the base's tokenizer: {format_error_line(error)[:200]}"
    differ = list(_iterate_differences(loaded, tokenizer, config))
    if not differ:
        return "checked: tokenizer loaded again, its bos, eos and pad tokens are those of the config"
    if not of_base:
        raise WrongUse(
            f"the folder and the tokenizer disagree: {'; '.join(differ)}",
            allowed="a tokenizer that is loaded as it was written",
            do="report this with the recipe",
        )
    return f"the base's own files disagree: {'; '.join(differ)}"


def _iterate_differences(loaded: Any, tokenizer: Any, config: Any) -> Any:
    for mark in MARKS:
        theirs, ours = getattr(config, f"{mark}_token_id", None), getattr(loaded, f"{mark}_token_id", None)
        # Several tokens may end a text.
        allowed = theirs if isinstance(theirs, list) else [theirs]
        if theirs is not None and ours is not None and ours not in allowed:
            yield f"{mark} is token {theirs} in config.json, and {ours} in the tokenizer"
    text = find_known_text(tokenizer)
    if loaded(text).input_ids != (found := tokenizer.encode(text, add_special_tokens=True).ids):
        yield f"the tokens of {text!r} are {loaded(text).input_ids}, and {found} by tokenizer.json"
