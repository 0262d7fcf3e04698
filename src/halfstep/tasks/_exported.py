"""A run's weights for others: in the model that they belong to, with what is known of them, and how to load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import BadData, NoCheckpoint, StateMismatch, WrongUse, unknown_name
from halfstep.files import replacing
from halfstep.tasks._finished import model_with, task_of
from halfstep.tasks.models.pixelwise import PREFIX
from halfstep.tasks.models.unet import UNet
from halfstep.tensor_header import content, header
from halfstep.train.checkpoint.generation import CHECKPOINTS, Generation
from halfstep.train.checkpoint.reading import newest_whole, read_state
from halfstep.train.journal.cutting import JOURNAL
from halfstep.train.journal.journal import EPOCH, SAVED, STEP
from halfstep.train.journal.jsonl import kept_events
from halfstep.train.keeping import BEST, LAST, LAST_AVERAGE
from halfstep.train.run_folder import is_finished
from halfstep.train.setup import without_weights
from halfstep.train.state import State
from halfstep.train.task import Task
from halfstep.train.weights import as_saved, finite

CHECKPOINT = "checkpoint"
SOURCES = ("best", "last", CHECKPOINT)


@dataclass(frozen=True)
class Exported:
    """Weights that are finite, in their model."""

    task: Task
    model: nn.Module
    source: str
    """The file or the checkpoint that they come from."""
    averaged: bool
    step: int | None
    """Updates attempted before; None where the run's journal does not tell."""
    epoch: int | None
    """The epoch that they were trained in, counted from 1."""
    value: float | None
    """The task's metric, where these very weights were evaluated."""

    @property
    def name(self) -> str:
        return str(getattr(self.task.recipe.model, "name", type(self.model).__name__))

    def metadata(self) -> dict[str, str]:
        known = {"step": self.step, "epoch": self.epoch, self.task.metric: self.value}
        words = {key: str(value) for key, value in known.items() if value is not None}
        return {"model": self.name, "metric": self.task.metric, "averaged": str(self.averaged).lower(), **words}


def exported(folder: Path, which: str | None, average: bool | None, own: type[Task] | None) -> Exported:
    """The weights of a run: `best`, `last` or those of its newest whole checkpoint; averaged ones where it has them.

    Left open, it is the best of a finished run, and the checkpoint of another.
    """
    if which is not None and which not in SOURCES:
        raise unknown_name("--weights", which, SOURCES)
    task = task_of(folder, own)
    has = task.recipe.train.ema is not None
    if average and not has:
        raise WrongUse("--ema for a run that kept no average", allowed="a run with train.ema", do="leave --ema out")
    averaged = has if average is None else average
    chosen = which or ("best" if is_finished(folder) else CHECKPOINT)
    if chosen == CHECKPOINT:
        return _from_checkpoint(folder, task, averaged)
    if chosen == "best" and has and not averaged:
        raise WrongUse(
            "--no-ema with the best weights: those of this run are averaged, as they were evaluated",
            allowed="last and checkpoint, which have both",
            do="write --weights last --no-ema, or leave --no-ema out",
        )
    return _from_file(folder, task, BEST if chosen == "best" else LAST_AVERAGE if averaged else LAST, averaged)


# -- from a file ------------------------------------------------------------------------------------------------------


def _from_file(folder: Path, task: Task, file: str, averaged: bool) -> Exported:
    model = model_with(task, folder / file)  # refuses what is not finite
    step, epoch, value = _told(folder, file, task.metric)
    # Where there is an average, it is what was evaluated.
    evaluated = averaged or task.recipe.train.ema is None
    return Exported(task, model, file, averaged, step, epoch, value if evaluated else None)


def _told(folder: Path, file: str, metric: str) -> tuple[int | None, int | None, float | None]:
    """When a file was last written, as the journal has it: the step, the epoch, and the metric of that epoch."""
    at, saved_at, waiting = None, None, False
    found: tuple[int | None, int | None, float | None] = None, None, None
    if not (folder / JOURNAL).is_file():  # a pipe would wait for ever for somebody to write
        return found
    for event in kept_events(folder / JOURNAL):
        if event["event"] == STEP:
            at = event.get("attempt")
        elif event["event"] == SAVED and event.get("file") == file:
            saved_at, waiting = at, True
        elif event["event"] == EPOCH and waiting:
            value = (event.get("val") or {}).get(metric)
            found, waiting = (saved_at, event.get("epoch"), None if value is None else float(value)), False
    return found


# -- from a checkpoint ------------------------------------------------------------------------------------------------


def _from_checkpoint(folder: Path, task: Task, averaged: bool) -> Exported:
    generation = _newest(folder)
    state = State.from_parts(*read_state(generation, 0), where=str(generation.path))
    task.recipe = without_weights(task.recipe)
    model = task.model()
    average = (state.average if averaged else None) or {"averages": {}, "buffers": {}}
    _put(dict(model.named_parameters()), {**state.weights["parameters"], **average["averages"]}, generation)
    _put(dict(model.named_buffers()), {**state.weights["buffers"], **average["buffers"]}, generation)
    if not finite(model):
        raise BadData(
            f"{generation.name} has weights that are not finite",
            allowed="finite weights",
            do="write --weights best, which was evaluated",
        )
    progress = state.cursor["progress"]
    epoch = progress["epoch"] + (progress["in_epoch"] > 0)
    return Exported(task, model, generation.name, averaged, generation.attempt, epoch, None)


def _newest(folder: Path) -> Generation:
    try:
        verdict, _ = newest_whole(folder / CHECKPOINTS)
    except NoCheckpoint as error:
        files = "write --weights best, or --weights last: files of their own, written after each epoch"
        raise NoCheckpoint(error.given, allowed="a checkpoint as it was written", do=files) from None
    if verdict is None:
        raise BadData(
            f"{folder} has no checkpoints, and is not finished",
            allowed="a run that has been saved: every checkpoint.every_steps steps, and after each epoch",
            do="start it with the same command, and export when it has been saved",
        )
    return verdict.generation


def _put(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], generation: Generation) -> None:
    unlike = sorted(own.keys() ^ saved.keys()) + [n for n in own if n in saved and own[n].shape != saved[n].shape]
    if unlike:
        raise StateMismatch(
            f"{generation.name} does not fit the model: {', '.join(unlike[:5])}{', ...' if len(unlike) > 5 else ''}",
            allowed=f"the model that was trained; this one has {len(own)} tensors",
            do="bring the task and the packages back that the run was trained with",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


# -- into a file ------------------------------------------------------------------------------------------------------


def write_weights(found: Exported, file: Path) -> None:
    """Replace `file`, by the same bytes each time: the package safetensors writes metadata in any order."""
    # The wider numbers first, as a reader wants each tensor to begin at a multiple of its width.
    ordered = sorted(as_saved(found.model).items(), key=lambda item: (-item[1].element_size(), item[0]))
    tensors = dict(ordered)
    metadata = dict(sorted({"format": "pt", **found.metadata()}.items()))
    with replacing(file) as draft, draft.open("wb") as written:
        written.write(header(tensors, metadata))
        for tensor in tensors.values():
            written.write(content(tensor))


# -- how to load them -------------------------------------------------------------------------------------------------


def loading(found: Exported, file: Path) -> str:
    """One line of Python, with nothing of halfstep in it where the model is another library's."""
    modules, built = _built(found)
    imports = "".join(f"import {module}; " for module in modules)
    return (
        f"{imports}from safetensors.torch import load_file; "
        f"model = {built}; model.load_state_dict(load_file({json.dumps(str(file))}))"
    )


def remark(found: Exported) -> str | None:
    """What the line does not say."""
    if getattr(found.task.recipe.model, "small_stem", False):
        return "its stem is small (model.small_stem), which timm does not build by itself: the line puts it in"
    return None


def _built(found: Exported) -> tuple[list[str], str]:
    """What to import, and the expression that builds the model."""
    options, data, model = found.task.recipe.model, found.task.recipe.data, found.model
    home = type(model).__module__.partition(".")[0]
    if home == "timm":
        return _timms(options, data, model)
    if home == "segmentation_models_pytorch":
        kind, outputs = options.name.removeprefix(PREFIX), 1 if data.classes == 2 else data.classes
        shape = f"in_channels={data.channels}, classes={outputs}"
        return ["segmentation_models_pytorch as smp"], f'smp.create_model("{kind}", "{options.encoder}", None, {shape})'
    if type(model) is UNet:
        outputs = 1 if data.classes == 2 else data.classes
        arguments = f"{data.channels}, {outputs}, {options.width}, {options.depth}"
        return ["halfstep.tasks.models.unet"], f"halfstep.tasks.models.unet.UNet({arguments})"
    return [], f"{type(model).__name__}(...)"


def _timms(options: Any, data: Any, model: Any) -> tuple[list[str], str]:
    import timm

    settings = timm.get_pretrained_cfg(options.name)
    size = f", img_size={data.size}" if settings is not None and settings.fixed_input_size else ""
    built = f'timm.create_model("{options.name}", in_chans={data.channels}, num_classes={model.num_classes}{size})'
    if not options.small_stem:
        return ["timm"], built
    stem = f"torch.nn.Conv2d({data.channels}, {model.conv1.out_channels}, 3, padding=1, bias=False)"
    # setattr gives None, so `or` goes on to the next one.
    parts = f'setattr(m, "conv1", {stem}) or setattr(m, "maxpool", torch.nn.Identity()) or m'
    return ["torch", "timm"], f"(lambda m: {parts})({built})"
