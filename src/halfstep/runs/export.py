"""Export a run's weights to safetensors, ONNX or torch.export, and verify each file against the model."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.data.dataset import BadSample
from halfstep.errors import (
    BadData,
    HalfstepError,
    MissingExtra,
    NoCheckpoint,
    StateMismatch,
    WrongUse,
    build_unknown_name_error,
    choose_caller_wording,
    format_error_line,
    format_option,
    format_option_with_value,
)
from halfstep.files import replace_file
from halfstep.journal.events import EPOCH, SAVED, STEP
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from halfstep.runs.finished import load_saved_task, load_task_model
from halfstep.runs.printed_code import CodeComparison, check_code
from halfstep.runs.snippet import build_loading_code, name_class_to_build
from halfstep.status_line import OnProgress
from halfstep.step.saved_tensors import select_saved_parameters
from halfstep.train.outputs import BEST, LAST, LAST_AVERAGE
from halfstep.train.run_folder import is_finished
from halfstep.train.setup import remove_initial_weights
from halfstep.train.signature import Signature
from halfstep.train.state import State
from halfstep.train.task import MissingTaskMethod, Task, ignore_progress
from halfstep.train.weights import collect_saved_tensors, has_finite_weights, write_tensors

CHECKPOINT = "checkpoint"
SOURCES = ("best", "last", CHECKPOINT)


@dataclass(frozen=True)
class ExportedWeights:
    """Finite weights loaded into their model."""

    task: Task
    model: nn.Module
    source: str
    """The weights file or the checkpoint they come from."""
    averaged: bool
    step: int | None
    """Updates attempted before; None if the run's journal does not record it."""
    epoch: int | None
    """The epoch they were trained in, counted from 1."""
    value: float | None
    """The task's metric, where exactly these weights were evaluated."""

    @property
    def name(self) -> str:
        return str(getattr(self.task.recipe.model, "name", type(self.model).__name__))

    def signature(self) -> Signature | None:
        """Return inputs and outputs of the model; None if its task has no signature."""
        try:
            return self.task.signature()
        except MissingTaskMethod:
            return None

    def metadata(self) -> dict[str, str]:
        """Return the metadata of an exported file as strings: model, metric, preprocessing, classes."""
        known = {"step": self.step, "epoch": self.epoch, self.task.metric: self.value}
        words = {key: str(value) for key, value in known.items() if value is not None}
        facts = {"model": self.name, "metric": self.task.metric, "averaged": str(self.averaged).lower(), **words}
        signature = self.signature()
        if signature is None:
            return facts
        return {
            **facts,
            "preprocessing": json.dumps(signature.preprocessing.as_dict()),
            "classes": json.dumps(signature.classes),
            "output": signature.meaning,
        }


def load_export_weights(
    folder: Path, which: str | None, average: bool | None, own: type[Task] | None
) -> ExportedWeights:
    """Return the weights of a run: `best`, `last`, or its newest intact checkpoint; averaged ones where it has them.

    The default is the best of a finished run, and the checkpoint of any other. Raise `WrongUse` for weights it lacks.
    """
    task = load_saved_task(folder, own)
    chosen, averaged = choose_export_weights(folder, task, which, average)
    if chosen == CHECKPOINT:
        return _load_checkpoint_weights(folder, task, averaged)
    file = name_weights_file(chosen, averaged)
    model = load_task_model(task, folder / file)  # raises for non-finite weights
    step, epoch, value = _find_when_saved(folder, file, task.metric)
    # A run with an EMA evaluates the average, so its metric does not belong to the plain weights.
    evaluated = averaged or task.recipe.train.ema is None
    return ExportedWeights(task, model.eval(), file, averaged, step, epoch, value if evaluated else None)


def name_weights_file(chosen: str, averaged: bool) -> str:
    """Return the name of the file with a run's `best` or `last` weights."""
    return BEST if chosen == "best" else LAST_AVERAGE if averaged else LAST


def choose_export_weights(folder: Path, task: Task, which: str | None, average: bool | None) -> tuple[str, bool]:
    """Return which of `SOURCES` is meant, and whether averaged weights; raise as `load_export_weights` does."""
    if which is not None and which not in SOURCES:
        raise build_unknown_name_error(choose_caller_wording("--weights", "weights"), which, SOURCES)
    has = task.recipe.train.ema is not None
    if average and not has:
        ema = format_option("ema")
        raise WrongUse(f"{ema} for a run without an average", allowed="a run with train.ema", do=f"leave {ema} out")
    averaged = has if average is None else average
    chosen = which or ("best" if is_finished(folder) else CHECKPOINT)
    if chosen == "best" and has and not averaged:
        plain = choose_caller_wording("--no-ema", "ema=False")
        both = choose_caller_wording(" ", ", ").join((format_option_with_value("weights", "last"), plain))
        raise WrongUse(
            f"{plain} with the best weights: this run saved them averaged, as evaluated",
            allowed="last and checkpoint, which have both",
            do=f"write {both}, or leave {plain} out",
        )
    return chosen, averaged


def _find_when_saved(folder: Path, file: str, metric: str) -> tuple[int | None, int | None, float | None]:
    """Return the step, the epoch and the metric at which a file was last written, from the journal."""
    at, saved_at, waiting = None, None, False
    found: tuple[int | None, int | None, float | None] = None, None, None
    if not (folder / JOURNAL).is_file():  # opening a named pipe would block forever
        return found
    for event in iterate_saved_events(folder / JOURNAL):
        if event["event"] == STEP:
            at = event.get("attempt")
        elif event["event"] == SAVED and event.get("file") == file:
            saved_at, waiting = at, True
        elif event["event"] == EPOCH and waiting:
            value = (event.get("val") or {}).get(metric)
            found, waiting = (saved_at, event.get("epoch"), None if value is None else float(value)), False
    return found


def _load_checkpoint_weights(folder: Path, task: Task, averaged: bool) -> ExportedWeights:
    generation = find_newest_checkpoint(folder)
    state = State.from_parts(*read_rank_state(generation, 0), where=str(generation.path))
    task.recipe = remove_initial_weights(task.recipe)
    model = task.model()
    parameters, buffers = dict(state.weights["parameters"]), dict(state.weights["buffers"])
    if averaged and state.ema is not None:
        parameters |= state.ema["averages"]
        buffers |= state.ema["buffers"]
    _load_saved_weights(select_saved_parameters(model), parameters, generation)
    _load_saved_weights(dict(model.named_buffers()), buffers, generation)
    if not has_finite_weights(model):
        raise BadData(
            f"{generation.name} has weights that are not finite",
            allowed="finite weights",
            do=f"write {format_option_with_value('weights', 'best')}, which was evaluated",
        )
    progress = state.position["progress"]
    epoch = progress["epoch"] + (progress["step_in_epoch"] > 0)
    return ExportedWeights(task, model.eval(), generation.name, averaged, generation.attempt, epoch, None)


def find_newest_checkpoint(folder: Path) -> CheckpointDir:
    """Return the newest checkpoint of a run that is intact; raise NoCheckpoint or BadData if there is none."""
    try:
        verdict, _ = find_newest_intact(folder / CHECKPOINTS)
    except NoCheckpoint as error:
        best, last = format_option_with_value("weights", "best"), format_option_with_value("weights", "last")
        files = f"write {best}, or {last}: separate files, written after each epoch"
        raise NoCheckpoint(error.given, allowed="an intact checkpoint", do=files) from None
    if verdict is None:
        raise BadData(
            f"{folder} has no checkpoints, and is not finished",
            allowed="a run with a checkpoint, saved every checkpoint.every_steps steps and after each epoch",
            do=f"start it with the same {choose_caller_wording('command', 'call')}, and export when it has been saved",
        )
    return verdict.generation


def _load_saved_weights(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], generation: CheckpointDir) -> None:
    unlike = sorted(own.keys() ^ saved.keys()) + [n for n in own if n in saved and own[n].shape != saved[n].shape]
    if unlike:
        raise StateMismatch(
            f"{generation.name} does not fit the model: {', '.join(unlike[:5])}{', ...' if len(unlike) > 5 else ''}",
            allowed=f"the model that was trained; this one has {len(own)} tensors",
            do="restore the task and the packages of the training",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


IMAGES = 3
SIDE = 256
"""Larger images are cropped to their upper left corner."""
FARTHEST = 1e-3
"""The largest difference, relative to the largest output: formats sum in different orders."""
ENOUGH = 0.999
"""The least share of images or pixels with the same class."""


@dataclass(frozen=True)
class RunnableFile:
    """A file that can be run, and the sizes it accepts."""

    forward: Callable[[Tensor], Tensor]
    any_batch: bool = True
    any_size: bool = True


@dataclass(frozen=True)
class FileComparison:
    """The result of the comparison."""

    images: int
    source: str
    """The origin of the images, in words."""
    sizes: list[str]
    """The shapes of the batches that were computed."""
    takes: str
    """The sizes the file accepts, in words."""
    max_difference: float
    agreement: float
    """The share of images or pixels with the same class, for the same input tensors."""
    code: CodeComparison | None = None
    """The comparison of the printed code with `halfstep predict`, on image files."""


def collect_model_inputs(task: Task, signature: Signature) -> tuple[list[Tensor], str]:
    """Return model inputs, each 1 × channels × height × width, and their origin in words."""
    found = _read_validation_images(task, signature)
    if found:
        return found, "validation images"
    size = signature.preprocessing.crop or SIDE
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, signature.preprocessing.channels, size, size, generator=draw) for _ in range(IMAGES)]
    return drawn, "images of noise, as the run's data is not here"


def _read_validation_images(task: Task, signature: Signature) -> list[Tensor]:
    """Return images spread over the validation set; neighbors often look the same."""
    try:
        source = task.source("val")
        numbers = sorted({n * (len(source) - 1) // max(IMAGES - 1, 1) for n in range(IMAGES)})
        samples = [task.transform("val", source.read(number)) for number in numbers]
    except (HalfstepError, BadSample, OSError):
        return []
    return [_crop_image(sample["image"].unsqueeze(0), signature) for sample in samples]


def _crop_image(image: Tensor, signature: Signature, side: int = SIDE) -> Tensor:
    """Crop to at most `side` × `side` in sizes the model accepts; inputs of fixed-size models stay as they are."""
    if not signature.variable_size:
        return image
    multiple = signature.preprocessing.multiple
    lengths = (min(length, side) for length in image.shape[-2:])
    high, wide = (max(length - length % multiple, multiple) for length in lengths)
    short = (0, max(0, wide - image.shape[-1]), 0, max(0, high - image.shape[-2]))
    return torch.nn.functional.pad(image, short, mode="replicate")[..., :high, :wide].contiguous()


@torch.no_grad()
def compare_with_model(
    model: nn.Module, written: RunnableFile, signature: Signature, images: list[Tensor], source: str
) -> FileComparison:
    """Compare file and model in all sizes the file accepts. Raise `WrongUse` if they differ."""
    difference, scale, same, decided = 0.0, 0.0, 0, 0
    inputs = _build_comparison_inputs(signature, images, written)
    for batch in inputs:
        expected, got = model(batch), written.forward(batch)
        difference = max(difference, float((expected - got).abs().max()))
        scale = max(scale, float(expected.abs().max()))
        agreeing = _compute_predicted_classes(expected) == _compute_predicted_classes(got)
        same, decided = same + int(agreeing.sum()), decided + agreeing.numel()
    sizes = ["×".join(map(str, batch.shape)) for batch in inputs]
    found = FileComparison(len(images), source, sizes, _describe_sizes(signature, written), difference, same / decided)
    # Negated, so that a NaN difference fails too.
    if not difference <= FARTHEST * max(scale, 1.0) or found.agreement < ENOUGH:
        raise WrongUse(
            f"the file and the model disagree: {difference:.2g} apart, {found.agreement:.2%} of the same class",
            allowed=f"at most {FARTHEST:g} of the largest number, and {ENOUGH:.1%} of the same class",
            do=f"write {format_option_with_value('format', 'safetensors')}",
        )
    return found


def _build_comparison_inputs(signature: Signature, images: list[Tensor], written: RunnableFile) -> list[Tensor]:
    """Return each image alone, several in a batch, and a smaller one where sizes are dynamic."""
    if not written.any_batch:
        # The program was traced with a batch of two.
        return [torch.cat([image] * 2) for image in images]
    like = [image for image in images if image.shape == images[0].shape]
    # With a static size, only images of that size can be tested.
    alone = images if written.any_size else like
    inputs = [*alone, torch.cat([*like, images[0]])]
    if written.any_size and signature.variable_size:
        inputs.append(_crop_image(images[0], signature, side=max(images[0].shape[-2:]) * 2 // 3))
    return inputs


def _compute_predicted_classes(logits: Tensor) -> Tensor:
    return logits > 0 if logits.shape[1] == 1 else logits.argmax(1)


def _describe_sizes(signature: Signature, written: RunnableFile) -> str:
    multiple, crop = signature.preprocessing.multiple, signature.preprocessing.crop
    steps = f" in multiples of {multiple}" if multiple > 1 else ""
    size = f"{crop} × {crop} pixels" if crop else "one height and width"
    size = f"any height and width{steps}" if written.any_size and signature.variable_size else size
    return f"{'any' if written.any_batch else 'one'} batch size, {size}"


NOTES = "halfstep.json"
"""The file inside a .pt2 archive that holds what an ONNX file has in its metadata."""
LARGEST_ONNX = 2 * 10**9
"""Bytes of weights in one ONNX file, which as a protobuf message is limited to 2 GB."""


def write_verified_file(
    found: ExportedWeights, file: Path, format: str, notes: Mapping[str, str], on_progress: OnProgress = ignore_progress
) -> FileComparison | None:
    """Replace `file` once it is verified; return the comparison, None if the task has no signature.

    An error leaves the old file in place. Raise `WrongUse` if a format cannot hold the model.
    """
    signature = found.signature()
    if signature is None:
        _write_weights_alone(found, file, format, notes)
        return None
    images, source = collect_model_inputs(found.task, signature)
    on_progress(1, 4)
    with replace_file(file) as draft:
        written = WRITERS[format](found, images[0], notes, draft)
        on_progress(2, 4)
        same = compare_with_model(found.model, written, signature, images, source)
        on_progress(3, 4)
        return replace(same, code=_check_printed_code(found, signature, draft, format))


def _check_printed_code(found: ExportedWeights, signature: Signature, draft: Path, format: str) -> CodeComparison:
    missing = name_class_to_build(found.model, format)
    if missing is not None:
        return CodeComparison(0, "", None, f"it leaves {missing}(...) to you")

    def code(photo: str) -> str:
        return build_loading_code(found.task, found.model, signature, draft.resolve(), format, photo)

    return check_code(found.task, found.model, signature, code)


def _write_weights_alone(found: ExportedWeights, file: Path, format: str, notes: Mapping[str, str]) -> None:
    if format != "safetensors":
        raise WrongUse(
            f"{format_option_with_value('format', format)} for the task {found.task.recipe.task}, which does not "
            "describe its "
            "model's input",
            allowed="segmentation, classification, or your own task with a `signature`",
            do=f"write {format_option_with_value('format', 'safetensors')}: its weights alone",
        )
    tensors = collect_saved_tensors(found.model)
    with replace_file(file) as draft:
        write_tensors(tensors, notes, draft)
        again = load_file(draft)
        if again.keys() != tensors.keys() or not all(torch.equal(again[name], tensors[name]) for name in tensors):
            raise OSError(errno.EIO, "the data read back differ from the data written")


def write_safetensors(found: ExportedWeights, image: Tensor, notes: Mapping[str, str], file: Path) -> RunnableFile:
    """Write the weights and return the model loaded from them."""
    write_tensors(collect_saved_tensors(found.model), notes, file)
    again = found.task.model()
    again.load_state_dict(load_file(file))
    return RunnableFile(again.eval())


def write_program(found: ExportedWeights, image: Tensor, notes: Mapping[str, str], file: Path) -> RunnableFile:
    """Write a torch.export program and return the one read back."""
    program, any_batch, any_size = _trace_model(found, image)
    with file.open("wb") as written, _silence_export_warnings():
        # torch would save the example inputs as a pickle.
        program.example_inputs = None
        torch.export.save(program, written, extra_files={NOTES: json.dumps(notes, sort_keys=True)})
    with _silence_export_warnings():
        again = torch.export.load(io.BytesIO(file.read_bytes())).module()
    return RunnableFile(again, any_batch, any_size)


def write_onnx(found: ExportedWeights, image: Tensor, notes: Mapping[str, str], file: Path) -> RunnableFile:
    """Write an ONNX file and return an onnxruntime session of it. Raise `MissingExtra` or `WrongUse`."""
    runtime = _import_onnx_runtime()
    _check_onnx_size(found.model)
    program, any_batch, any_size = _trace_model(found, image)
    with _silence_export_warnings():
        made: Any = torch.onnx.export(
            program, (), dynamo=True, verbose=False, input_names=["image"], output_names=["logits"]
        )
        made.model.metadata_props.update(dict(sorted(notes.items())))
        made.save(file, external_data=False)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def forward(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"image": images.numpy()})[0])

    return RunnableFile(forward, any_batch, any_size)


WRITERS = {"safetensors": write_safetensors, "onnx": write_onnx, "torch_export": write_program}


def _trace_model(found: ExportedWeights, image: Tensor) -> tuple[Any, bool, bool]:
    """Return the exported program with as many dynamic sizes as it allows: batch and image, batch, or none."""
    signature, example = found.signature(), torch.cat([image] * 2)  # torch.export specializes on sizes of 1
    trials = [(True, True), (True, False), (False, False)]
    reason: Exception | None = None
    for any_batch, any_size in trials if signature and signature.variable_size else trials[1:]:
        try:
            return _export_program(found.model, example, any_batch, any_size), any_batch, any_size
        except Exception as error:  # tracing may raise anything
            reason = error
    raise WrongUse(
        f"torch.export cannot follow {found.name}: {format_error_line(reason) if reason else ''}",
        allowed="models without decisions that depend on numbers",
        do=f"write {format_option_with_value('format', 'safetensors')}",
    )


def _export_program(model: nn.Module, example: Tensor, any_batch: bool, any_size: bool) -> Any:
    open_sizes = {**({0: torch.export.Dim.DYNAMIC} if any_batch else {})}
    open_sizes |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC} if any_size else {}
    with torch.no_grad(), _keep_sizes_dynamic(), _silence_export_warnings():
        return torch.export.export(model, (example,), dynamic_shapes=(open_sizes or None,), strict=False)


@contextlib.contextmanager
def _keep_sizes_dynamic() -> Iterator[None]:
    """Keep dynamic sizes from being specialized to the example: otherwise the program rejects odd sizes."""
    from torch.fx.experimental import _config

    if not hasattr(_config, "backed_size_oblivious"):
        yield
        return
    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def _import_onnx_runtime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # type: ignore[import-not-found,import-untyped]
        import onnxscript  # type: ignore[import-not-found,import-untyped]  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"{format_option_with_value('format', 'onnx')} without the package {error.name}",
            allowed="halfstep with its extra onnx: onnx, onnxscript and onnxruntime, which checks the file",
            do=f"pip install 'halfstep[onnx]', or write {format_option_with_value('format', 'torch_export')}",
        ) from error
    return onnxruntime


def _check_onnx_size(model: nn.Module) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if total > LARGEST_ONNX:
        raise WrongUse(
            f"{total / 1e9:.1f} GB of weights in one ONNX file",
            allowed=f"at most {LARGEST_ONNX / 1e9:.0f} GB",
            do=f"write {format_option_with_value('format', 'torch_export')}",
        )


@contextlib.contextmanager
def _silence_export_warnings() -> Iterator[None]:
    """Silence warnings of the export packages about their internals, which no user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
