"""halfstep's own cache: what is not finite is never kept, and latents of anything else have another name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from halfstep.errors import BadData
from halfstep.tasks.latent_cache.cache import CachedLatents, load_or_encode_latents
from halfstep.tasks.latent_cache.encoding import MomentEncoder
from halfstep.train.weights import compute_weights_digest
from zoo.outcome import Outcome
from zoo.p17b_stale_latent_cache.plain import another, first, images, in_fp16, in_fp32


class Pictures:
    """A source, as a task has one."""

    def __init__(self, pictures: list[Tensor]) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> dict[str, Tensor]:
        return {"image": self.pictures[index]}

    def name(self, index: int) -> str:
        return f"image {index}"


def run() -> Outcome:
    changed = [-images()[0], *images()[1:]]
    runs = [(first(), images()), (another(), images()), (another(), changed)]
    with _empty_cache():
        refusal = _refusal()
        kept = [_latents(in_fp32, "fp32", *given) for given in runs]
        own = sum(_are_of(latents, *given) for latents, given in zip(kept, runs, strict=True))
        found_again = "nothing encoded" in _latents(in_fp32, "fp32", *runs[0]).notes[0]
    return Outcome(
        good="not finite" in refusal and own == len(runs) and found_again,
        seen=f"in fp16: {refusal}; in fp32, then with another autoencoder, then with an image that was changed: "
        f"{own} of {len(runs)} runs have latents of their own",
    )


def _latents(
    encode: Callable[[AutoencoderKL, Tensor], Tensor], format: str, vae: AutoencoderKL, pictures: list[Tensor]
) -> CachedLatents:
    encoding = MomentEncoder(lambda batch: encode(vae, batch), _image, torch.device("cpu"))
    return load_or_encode_latents(
        encoding, Pictures(pictures), parts={"autoencoder": compute_weights_digest(vae), "format": format}
    )


def _image(sample: dict[str, Tensor]) -> Tensor:
    return sample["image"]


def _refusal() -> str:
    try:
        _latents(in_fp16, "fp16", first(), images())
    except BadData as error:
        return str(error).splitlines()[0]
    return "kept"


def _are_of(latents: CachedLatents, vae: AutoencoderKL, pictures: list[Tensor]) -> bool:
    right = in_fp32(vae, torch.stack(pictures))
    found = [latents.moments(number) for number in range(len(pictures))]
    return all(one is not None and torch.allclose(one, row, atol=1e-5) for one, row in zip(found, right, strict=True))


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
