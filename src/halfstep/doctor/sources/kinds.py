"""Recognize what a file is by its content, and read it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from halfstep.doctor.settings import Kind, SettingsFile, SettingSource
from halfstep.doctor.sources.accelerate import read_accelerate_settings
from halfstep.doctor.sources.deepspeed import read_deepspeed_settings
from halfstep.doctor.sources.hydra import read_hydra_settings
from halfstep.doctor.sources.lightning import SUBCOMMANDS, read_lightning_settings
from halfstep.doctor.sources.reading import parse_document, parse_foreign_document
from halfstep.doctor.sources.recipe import read_project_settings, read_recipe_settings
from halfstep.doctor.sources.training_arguments import ARGUMENTS, read_arguments_settings

SPEAKS = re.compile(
    r"\b(amp|use_amp|amp_dtype|fp16|bf16|bfloat16|fp32|mixed_precision|precision|precision_type|tf32|lr|learning_rate|"
    r"\w{0,20}clip\w{0,20}|max_grad_norm|distributed_type|compute_environment|defaults|logging_nan_inf_filter)[\"']?\s*[:=]"
)
"""Keys without which a configuration has no setting; files without them are not parsed."""
_ACCELERATE = ("compute_environment", "distributed_type", "downcast_bf16", "machine_rank")
"""Not `fsdp_config`, which transformers and axolotl have, too."""
_DEEPSPEED = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "zero_allow_untested_optimizer",
    "wall_clock_breakdown",
)
_LIGHTNING = frozenset(
    {
        "accelerator",
        "devices",
        "strategy",
        "num_nodes",
        "max_epochs",
        "max_steps",
        "accumulate_grad_batches",
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "limit_train_batches",
        "val_check_interval",
        "log_every_n_steps",
        "enable_checkpointing",
        "precision",
    }
)
_TASKS = ("classification", "diffusion", "segmentation")
"""Tasks of halfstep, without an import of them: a task of one's own is named with a colon."""
_ENOUGH = 2
"""The number of a tool's keys that identify its file."""


_OTHER_PROGRAMS = (
    frozenset({"base_model", "datasets"}),  # axolotl
    frozenset({"base_model", "sequence_len"}),
    frozenset({"base_model", "adapter"}),
    frozenset({"base_model", "fsdp"}),
    frozenset({"max_duration", "precision"}),  # Composer
    frozenset({"checkpoint_dir", "precision"}),  # litgpt
)
"""Keys by which a file of a program is known whose words are its own, although it has keys of transformers."""


def find_config_kind(content: Mapping[str, object], text: str, json: bool) -> Kind:
    """Return what a configuration is; `recipe` is also the YAML of any project."""
    if any(keys <= set(content) for keys in _OTHER_PROGRAMS) or "_component_:" in text:
        return "recipe"
    for kind, is_one in _KINDS.items():
        if is_one(content, text, json):
            return kind
    return "recipe"


def _is_accelerate(content: Mapping[str, object], text: str, json: bool) -> bool:
    own = [key for key in _ACCELERATE if key in content]
    return bool(own) and not {"trainer", "model", "train_batch_size"} & set(content)


def _is_deepspeed(content: Mapping[str, object], text: str, json: bool) -> bool:
    switches = [content.get(key) for key in ("fp16", "bf16", "bfloat16")]
    return json and (
        any(key in content for key in _DEEPSPEED) or any(isinstance(s, Mapping) and "enabled" in s for s in switches)
    )


def _is_hydra(content: Mapping[str, object], text: str, json: bool) -> bool:
    return not json and (
        isinstance(content.get("defaults"), list)
        or "hydra" in content
        or "_target_:" in text
        or "# @package" in text
        or "${" in text
    )


def _is_lightning(content: Mapping[str, object], text: str, json: bool) -> bool:
    holders = [content, *(one for name in SUBCOMMANDS if isinstance(one := content.get(name), Mapping))]
    trainers = [holder.get("trainer") for holder in holders]
    # Keys of other projects' trainers that Lightning's lacks, as in `trainer: {amp: True, lr: 1e-5}`.
    own = [set(t) & _LIGHTNING for t in trainers if isinstance(t, Mapping) and not {"amp", "fp16", "lr"} & set(t)]
    told = "seed_everything" in content or "class_path:" in text
    return any(len(keys) >= _ENOUGH or (keys and told) for keys in own)


def _is_training_arguments(content: Mapping[str, object], text: str, json: bool) -> bool:
    return len(ARGUMENTS & set(content)) >= _ENOUGH


_KINDS: dict[Kind, Callable[[Mapping[str, object], str, bool], bool]] = {
    "accelerate": _is_accelerate,
    "deepspeed": _is_deepspeed,
    "hydra": _is_hydra,
    "lightning": _is_lightning,
    "transformers": _is_training_arguments,
}
_READERS: dict[Kind, Callable[[SettingsFile], SettingSource]] = {
    "recipe": read_project_settings,
    "accelerate": read_accelerate_settings,
    "deepspeed": read_deepspeed_settings,
    "hydra": read_hydra_settings,
    "lightning": read_lightning_settings,
    "transformers": read_arguments_settings,
}


def from_configuration(place: str, text: str) -> SettingSource | None:
    """Return the settings of a YAML, JSON or TOML file, None if it has none.

    Raise the reader's errors for anything but plain data, and for a word that the reading program does not know.
    """
    if not SPEAKS.search(text):
        return None
    json = place.lower().endswith(".json")
    document = parse_foreign_document(place, text)
    if json and _is_vocabulary(document.content):
        return None
    task = document.content.get("task")
    if isinstance(task, str) and (task in _TASKS or ":" in task) and not json:
        # A recipe of halfstep, which is read as `halfstep train` reads it.
        source = read_recipe_settings(parse_document("recipe", place, text))
    else:
        kind = find_config_kind(document.content, text, json)
        source = _READERS[kind](SettingsFile(kind, place, document.content, document.lines, text))
    return source if source.precision or source.training or source.names or source.halfstep else None


def _is_vocabulary(content: Mapping[str, object]) -> bool:
    """Return whether all values are numbers of tokens, or all are types of columns."""
    values = list(content.values())
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        return any(number > 1 for number in numbers)
    return len(values) > 1 and all(isinstance(value, str) for value in values)
