"""A failed step from the disk: nothing of it is used before it was compared with what was written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.errors import BadData, HalfstepError, StateMismatch
from halfstep.files import LARGEST_JSON, strict_json
from halfstep.train.black_box.places import RECORD, TROUBLE, recorded_in
from halfstep.train.black_box.record import FORMAT, Record, record_from
from halfstep.train.checkpoint.manifest import is_sealed
from halfstep.train.checkpoint.reading import load_tensors, refuse_strangers
from halfstep.train.checkpoint.sealed import problem_with, read_bounded
from halfstep.train.recipe.changes import SAFE
from halfstep.train.recipe.sources import read_bounded as read_recipe_file
from halfstep.train.recipe.strict_yaml import read_yaml
from halfstep.train.recipe.written import flat
from halfstep.train.run_folder import RECIPE


def read(place: Path) -> Record:
    """What is known of a failed step. BadData where it is damaged or made up, Unsafe where it would run code."""
    try:
        refuse_strangers(place)
        return _read(place)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        if isinstance(error, HalfstepError):
            raise
        raise damaged(place, error) from error


def _read(place: Path) -> Record:
    text = read_bounded(place / RECORD, LARGEST_JSON)
    content = strict_json(text)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("no record of a failed step")
    if not is_sealed(text, content.get("seal")):
        raise ValueError("changed since it was written")
    if content["format"] > FORMAT:
        raise StateMismatch(
            f"{place} was written in form {content['format']} by a later halfstep",
            allowed=f"forms up to {FORMAT}",
            do="pip install --upgrade halfstep",
        )
    return record_from(content, place)


def tensors_of(record: Record, name: str) -> dict[str, Tensor]:
    """The tensors of one of its files, every byte of which is as it was written."""
    try:
        problem = problem_with(record.path, record.files[name])
        if problem is not None:
            raise ValueError(problem)
        return load_tensors(record.path / name)
    except Exception as error:
        # A file that was made up ends in whatever the reader stumbles over: TypeError, OverflowError, RuntimeError, ...
        if isinstance(error, HalfstepError):
            raise
        raise damaged(record.path, error) from error


def cut_off(record: Record) -> str | None:
    """A file of it that has another size than it was written with, without reading any."""
    for sealed in record.files.values():
        try:
            if (record.path / sealed.name).lstat().st_size != sealed.size:
                return f"{sealed.name} has another size than it was written with"
        except OSError as error:
            return f"{sealed.name}: {error.strerror}"
    return None


def damaged(place: Path, error: Any) -> BadData:
    words = str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
    return BadData(
        f"{place} cannot be used: {words}",
        allowed="a failed step as halfstep wrote it",
        do=_another(place),
    )


def _another(place: Path) -> str:
    """An older one, so that who follows this comes to an end."""
    run = run_of(place)
    older = [path.name for path in recorded_in(run) if path.name < place.name]
    if older:
        return f"choose another one: halfstep replay {run} --attempt {int(older[-1])}"
    return "nothing: no older one is recorded; the next step that fails is recorded anew"


def run_of(place: Path) -> Path:
    """The folder of the run that a failed step lies in."""
    place = place if len(place.parts) > 2 else place.absolute()
    return place.parent.parent if place.parent.name == TROUBLE else place


def recipe_digest(run: Path) -> str:
    """A SHA-256 of the settings of a run that change what is computed; empty where it has no recipe."""
    try:
        settings = read_yaml(read_recipe_file(run / RECIPE), RECIPE)
    except HalfstepError:
        return ""
    kept = {key: value for key, value in flat(settings) if not key.startswith(tuple(SAFE))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
