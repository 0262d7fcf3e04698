"""Turn the configuration of another trainer into a recipe of halfstep, as far as it maps. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from halfstep.doctor.linking import ProjectRun
from halfstep.doctor.project import Project
from halfstep.doctor.settings import format_safe_text
from halfstep.doctor.sources.kinds import find_config_kind
from halfstep.doctor.sources.launch import iterate_commands, iterate_flag_values
from halfstep.doctor.sources.reading import parse_document
from halfstep.errors import WrongUse
from halfstep.precision.names import PRECISION_KEYS


class StatedSetting(NamedTuple):
    """A key of another trainer's configuration with its value and place."""

    key: str
    value: object
    place: str
    line: int | None
    kind: str = ""
    """The kind of its file."""

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]

    def __str__(self) -> str:
        where = f"{self.place}:{self.line}" if self.line else self.place
        return f"{format_safe_text(self.key)}: {format_safe_text(str(self.value))}  ({where})"


def _parse_number(value: object) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(str(value))


def _parse_integer(value: object) -> int:
    number = _parse_number(value)
    if not number.is_integer():
        raise ValueError(value)
    return int(number)


def _parse_schedule(value: object) -> str:
    return {"cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}[str(value)]


def _parse_optimizer(value: object) -> str:
    word = str(value).lower().removeprefix("torch.optim.")
    return {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}.get(word, word)


def _parse_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


_Reader = Callable[[object], Any]
_KEYS: dict[str, tuple[_Reader, tuple[str, ...]]] = {
    "optimizer.name": (_parse_optimizer, ("optim", "optimizer")),
    "optimizer.lr": (_parse_number, ("learning_rate", "lr", "base_lr")),
    "optimizer.weight_decay": (_parse_number, ("weight_decay",)),
    "schedule.name": (_parse_schedule, ("lr_scheduler_type", "lr_scheduler", "scheduler")),
    "schedule.warmup_steps": (
        _parse_integer,
        ("warmup_steps", "num_warmup_steps", "lr_warmup_steps", "warmup_num_steps"),
    ),
    "loss_scale.init_scale": (lambda value: 2.0 ** _parse_integer(value), ("initial_scale_power",)),
    "loss_scale.growth_interval": (_parse_integer, ("loss_scale_window", "growth_interval")),
    "loss_scale.floor": (_parse_number, ("min_loss_scale",)),
    "train.steps": (_parse_integer, ("max_steps", "max_train_steps", "train_num_steps", "num_steps")),
    "train.epochs": (_parse_integer, ("num_train_epochs", "max_epochs", "num_epochs", "epochs")),
    "train.batch_size": (
        _parse_integer,
        ("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "train_batch_size", "batch_size"),
    ),
    "train.global_batch": (_parse_integer, ("global_batch_size",)),
    "train.microbatches": (
        _parse_integer,
        ("gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulate_every", "accumulation_steps"),
    ),
    "train.clip_norm": (
        _parse_number,
        ("max_grad_norm", "gradient_clip_val", "gradient_clipping", "grad_clip", "clip_grad", "clip_grad_norm"),
    ),
    "train.clip_value": (_parse_number, ("clip_value",)),
    "train.seed": (_parse_integer, ("seed", "seed_everything", "random_seed")),
    "train.ema": (_parse_number, ("ema_decay",)),
    "train.checkpoint_activations": (_parse_boolean, ("gradient_checkpointing",)),
    "train.compile": (_parse_boolean, ("torch_compile",)),
    "train.num_workers": (_parse_integer, ("dataloader_num_workers", "num_workers")),
}
"""What maps: our key, how its value is read, and the names of others."""
_OURS = {name: key for key, (_, names) in _KEYS.items() for name in names}
_MOST_COMMENTS = 100


ExplainRefusal = Callable[[str, object], str | None]
"""Returns why a recipe refuses a value of a setting; None if it accepts it."""


def convert_to_recipe(
    project: Project, runs: Sequence[ProjectRun], precision: str | None, explain_refusal: ExplainRefusal
) -> str:
    """Return a recipe without task, model and data, as YAML; what does not map is a comment with its place.

    Raise `WrongUse` if the project has nothing to convert.
    """
    said = (one for run in runs for one in _iterate_stated_settings(project, run))
    stated = list({(s.key, str(s.value), s.place, s.line): s for s in said}.values())
    if not stated and precision is None:
        raise WrongUse(
            f"--write, but {project.root} has no settings of a trainer",
            allowed="a file of accelerate, DeepSpeed, Lightning, Hydra or TrainingArguments, or a launch line",
            do="halfstep recipes lists recipes to start from",
        )
    taken, left = _map_to_recipe(stated)
    for key in [key for key in taken if key.startswith("loss_scale.") and precision != "fp16"]:
        left.append((taken.pop(key)[1], f"{precision or 'auto'} needs no loss scale"))
    _drop_invalid(taken, left, explain_refusal)
    return _format_recipe(project, precision, taken, left)


def _iterate_stated_settings(project: Project, run: ProjectRun) -> Iterator[StatedSetting]:
    """Yield what a run says, flags first: they win over files."""
    for source in sorted(run.sources, key=lambda source: source.kind != "launch"):
        text = project.texts.get(source.place, "")
        if source.kind == "launch" and run.launch:
            for words in iterate_commands(text):
                if words and words[0].line == run.launch.line:
                    yield from (
                        StatedSetting(key.lstrip("-").replace("-", "_"), v, source.place, word.line)
                        for key, v, word in iterate_flag_values(words)
                    )
        elif source.kind == "code":
            yield from (StatedSetting(s.key, s.value, source.place, s.line) for s in source.training)
        elif text:
            yield from _read_stated_settings(source.place, text)


def _read_stated_settings(place: str, text: str) -> Iterator[StatedSetting]:
    from halfstep.recipe.strict_yaml import iterate_dotted_keys

    document = parse_document("recipe", place, text)
    kind = find_config_kind(document.content, text, place.endswith(".json"))
    for key, value in iterate_dotted_keys(document.content):
        if isinstance(value, (bool, int, float, str)) and not (kind == "hydra" and key.startswith("defaults")):
            yield StatedSetting(key, value, place, document.lines.get(key), kind)


def _map_to_recipe(
    stated: Sequence[StatedSetting],
) -> tuple[dict[str, tuple[Any, StatedSetting]], list[tuple[StatedSetting, str]]]:
    """Return our keys with their values, and the remaining settings with the reason."""
    taken: dict[str, tuple[Any, StatedSetting]] = {}
    left: list[tuple[StatedSetting, str]] = []
    by_value = any(one.leaf == "gradient_clip_algorithm" and one.value == "value" for one in stated)
    for one in stated:
        key = _find_recipe_key(one, by_value)
        if key is None:
            if one.leaf not in PRECISION_KEYS and not one.key.endswith((".enabled", "distributed_type")):
                left.append((one, "not mapped"))
        elif (value := _parse_recipe_value(key, one.value)) is None:
            left.append((one, f"not a value of {key}"))
        elif key in taken and taken[key][0] != value:
            left.append((one, f"{key} is taken from {taken[key][1].place}"))
        else:
            taken.setdefault(key, (value, one))
    for kept, dropped in _ONE_OF_TWO.items():
        if kept in taken and dropped in taken:
            left.append((taken.pop(dropped)[1], f"{kept} decides"))
    return taken, left


# TrainingArguments obey max_steps where both are given, and a recipe may have one of the two; micro-batches follow from
# a global batch.
_ONE_OF_TWO = {"train.steps": "train.epochs", "train.global_batch": "train.microbatches"}


def _find_recipe_key(one: StatedSetting, by_value: bool) -> str | None:
    if one.kind == "deepspeed" and one.key == "train_batch_size":
        # DeepSpeed's is over all ranks and micro-batches; other projects give the name to that of one device.
        return "train.global_batch"
    if one.leaf == "gradient_clip_val" and by_value:
        return "train.clip_value"
    return _OURS.get(one.leaf)


def _parse_recipe_value(key: str, value: object) -> Any:
    try:
        read = _KEYS[key][0](value)
    except (ValueError, KeyError, OverflowError):
        return None
    # -1 and 0 are others' words for "not set".
    return None if isinstance(read, (int, float)) and not isinstance(read, bool) and read < 0 else read


def _drop_invalid(
    taken: dict[str, tuple[Any, StatedSetting]], left: list[tuple[StatedSetting, str]], explain_refusal: ExplainRefusal
) -> None:
    """Move what the recipe's schema refuses to the comments."""
    for key in list(taken):
        why = explain_refusal(key, taken[key][0])
        if why is not None:
            left.append((taken.pop(key)[1], f"{key}: {why}"))


def _format_recipe(
    project: Project,
    precision: str | None,
    taken: dict[str, tuple[Any, StatedSetting]],
    left: Sequence[tuple[StatedSetting, str]],
) -> str:
    lines = [
        f"# From {format_safe_text(str(project.root.resolve().name))}, by halfstep doctor --write.",
        "# task, model and data are yours to add; `halfstep recipes` lists complete recipes.",
        f"precision: {precision or 'auto'}",
    ]
    for section in dict.fromkeys(key.partition(".")[0] for key in _KEYS):
        own = {key: taken[key] for key in _KEYS if key in taken and key.startswith(f"{section}.")}
        lines += [f"{section}:"] if own else []
        for key, (value, one) in own.items():
            lines.append(f"  {key.partition('.')[2]}: {json.dumps(value)}  # {one}")
    if left:
        lines += ["", "# Without a place in a recipe:"]
        lines += [f"#   {one}: {why}" for one, why in left[:_MOST_COMMENTS]]
        more = len(left) - _MOST_COMMENTS
        lines += [f"#   and {more} more"] if more > 0 else []
    return "\n".join(lines) + "\n"
