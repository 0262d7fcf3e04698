"""`halfstep.load` returns a trained model: `halfstep.load("runs/unet").predict("photo.jpg")`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import BadData, WrongUse
from halfstep.runs.finished import TrainedModel, open_finished
from halfstep.train.signature import Preprocessing, Signature
from halfstep.train.task import MissingTaskMethod, Prediction, Task


@dataclass(frozen=True)
class LoadedModel(TrainedModel):
    """The model of a run with its preprocessing, its classes and its precision."""

    @property
    def signature(self) -> Signature:
        """Return inputs and outputs of the model. Raise `WrongUse` if its task has no signature."""
        try:
            return self.task.signature()
        except MissingTaskMethod:
            raise WrongUse(
                f"the input of the model of {self.folder}, which its task {self.task.recipe.task} does not describe",
                allowed="segmentation, classification, or your own task with a `signature`",
                do="use .predict(image), or .task and .model",
            ) from None

    @property
    def preprocessing(self) -> Preprocessing:
        """Return the callable that turns a path, a Pillow image, an array or a tensor into model input."""
        return self.signature.preprocessing

    @property
    def classes(self) -> list[str]:
        """Return the class names, in the order of the outputs."""
        return self.signature.classes

    @property
    def precision(self) -> str:
        """Return the name of the precision `predict` computes in: the run's own, unless another was requested."""
        return self.choice.precision.name

    def predict(self, image: Any) -> Prediction:
        """Return the prediction for a path, a Pillow image, an array (height × width × channels) or a tensor.

        A language model takes a text, and continues it. Raise `BadData` for an unreadable image, `WrongUse` for a task
        that predicts nothing about images.
        """
        if self.task.reads == "text":
            return self.predict_tensor(self.task.prompt(str(image)), allowed="a text", do="give a text")
        from halfstep.data.dataset import BadSample
        from halfstep.data.image_io import convert_to_image_tensor

        try:
            read = convert_to_image_tensor(image, self.channels())
        except BadSample as error:
            raise BadData(f"{error.name}: {error.reason}", allowed="an image", do="give another file") from None
        do = f"use .task.sample(...), as `halfstep predict {self.folder}` does"
        return self.predict_tensor(read, allowed="runs whose task predicts", do=do)


def load(
    run: str | os.PathLike[str], *, weights: str = "best", precision: str | None = None, task: type[Task] | None = None
) -> LoadedModel:
    """Load the model of a run.

    Args:
        run: The folder of the run.
        weights: `best`, `last`, or the path of a .safetensors file.
        precision: The precision; by default that of the run.
        task: The class of your own task, as given to `fit`.

    Returns:
        The model with its task, ready to predict.

    Raises:
        BadData: The weights are not usable.
    """
    found = open_finished(Path(os.path.expanduser(run)), weights=str(weights), precision=precision, own=task)
    return LoadedModel(found.folder, found.task, found.model, found.choice, found.device)
