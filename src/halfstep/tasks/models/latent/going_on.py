"""A run that was interrupted goes on with its own parts, whatever became of the folders that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError, StateMismatch, in_one_line
from halfstep.files import read_json
from halfstep.tasks.models.latent.autoencoder import autoencoder_from
from halfstep.tasks.models.latent.kept import AUTOENCODER, KeptAutoencoder, kept_autoencoder
from halfstep.train.checkpoint.generation import CHECKPOINTS, generations
from halfstep.train.checkpoint.reading import newest_whole, read_state
from halfstep.train.keeping import FACTS
from halfstep.train.state import State

ORIGIN = "autoencoder_origin"
"""In a run's facts: the digest of the autoencoder that it was begun with, and the scale that it came with."""


@dataclass(frozen=True)
class Begun:
    """A run with a checkpoint to go on from."""

    folder: Path
    facts: Mapping[str, Any]
    """What it wrote down about its parts."""


def begun(folder: str | None) -> Begun | None:
    """None where nothing was saved yet: such a run begins with what its recipe names."""
    if folder is None or not generations(Path(folder) / CHECKPOINTS):
        return None
    facts = read_json(Path(folder) / FACTS)
    return Begun(Path(folder), facts) if isinstance(facts, dict) else None


def own_autoencoder(where: str, run: Begun | None) -> tuple[KeptAutoencoder, list[str]]:
    """The one in the folder `where`, or for a run that goes on, the one it has; with a line where these are two.

    A checkpoint brings the weights back only after the data was encoded: with another autoencoder's latents, the
    denoiser would go on learning what its own autoencoder cannot decode.
    """
    origin = run.facts.get(ORIGIN) if run is not None else None
    if run is None or not isinstance(origin, dict):
        return kept_autoencoder(where), []
    try:
        kept = kept_autoencoder(where)
    except HalfstepError:
        became = "is gone, or cannot be used any more"
    else:
        if kept.digest == origin.get("digest"):
            return kept, []
        became = "holds another one now"
    return _from_checkpoint(run, origin), [f"the autoencoder is that of the checkpoint: {where} {became}"]


def _from_checkpoint(run: Begun, origin: Mapping[str, Any]) -> KeptAutoencoder:
    newest, _ = newest_whole(run.folder / CHECKPOINTS)
    assert newest is not None, "a run that was begun has one"
    place, config, prefix = newest.generation, run.facts.get(AUTOENCODER), f"{AUTOENCODER}."
    saved = State.from_parts(*read_state(place, 0), where=str(place.path)).weights["parameters"]
    try:
        module = autoencoder_from(config)  # type: ignore[arg-type]
        module.load_state_dict({n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)})
    except Exception as error:  # facts that were edited end in whatever stumbles over them
        raise StateMismatch(
            f"{place.path} does not hold the autoencoder that {FACTS} describes: {in_one_line(error)[:200]}",
            allowed="the checkpoint and the facts of one run",
            do="bring both back from a copy, or add --new to begin again in a folder of its own",
        ) from error
    return KeptAutoencoder(module.eval(), origin.get("scale"), str(origin.get("digest")), dict(config or {}))
