"""Fetch pretrained weights through the library that knows them, or explain which file to place where."""

from __future__ import annotations

import difflib
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch import nn

from halfstep.errors import BadData, UnknownName
from halfstep.files import find_cache_folder


def build_unknown_model_error(field: str, given: str, known: Collection[str], whose: str) -> UnknownName:
    """Return the error for a name a library does not have, with the closest known names."""
    near = difflib.get_close_matches(given, sorted(known), n=3, cutoff=0.5)
    usual = [name for name in ("resnet34", "resnet50") if name in known] or sorted(known)[:3]
    return UnknownName(
        f"{field} {given!r} is not known",
        allowed=f"the {len(known)} names of {whose}, such as {', '.join(near or usual)}",
        do=f"did you mean {near[0]!r}?" if near else f"look the name up in the documentation of {whose}",
    )


def check_timm_name(field: str, name: str, prefix: str = "") -> None:
    """Raise `UnknownName` for a model timm does not have, or for a weights tag it does not have for this model.

    `prefix` is written before timm's name in the recipe.
    """
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(name):
        raise build_unknown_model_error(field, prefix + name, [prefix + known for known in timm.list_models()], "timm")
    tagged = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and name not in tagged:
        names = [prefix + known for known in (architecture, *tagged)]
        raise build_unknown_model_error(field, prefix + name, names, f"timm for {architecture}")


PATIENCE = 5.0
"""Seconds to reach the hub. Its own client retries for 45 seconds before it gives up."""


def build_with_fetched_weights(
    build: Callable[[], nn.Module], name: str, repository: str, other: str = "", setting: str = "model.weights"
) -> nn.Module:
    """Return the result of `build`, which fetches weights from the hub's `repository` or from the address `other`.

    Raise `BadData` with the file to place by hand where they cannot be fetched.
    """
    try:
        with _limit_hub_retries():
            return build()
    # The hub's own errors derive from OSError; timm and torch.hub also raise RuntimeError.
    except (OSError, RuntimeError) as error:
        # The first sentence of the error; the others are about the client's own options.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0][:160]
        place = find_cache_folder() / "weights" / f"{name}.safetensors"
        address = other
        if repository:
            from huggingface_hub import constants

            address = f"{constants.ENDPOINT}/{repository}/resolve/main/model.safetensors"
        raise BadData(
            f"the pretrained weights of {name} are not on this machine and cannot be fetched: {reason}",
            allowed=f"a connection to the hub, or the file itself: {setting} may be a path",
            do=f"place {address or 'the file'} at {place} and set {setting}={place}",
        ) from error


@contextmanager
def _limit_hub_retries() -> Iterator[None]:
    from huggingface_hub import constants

    # huggingface_hub reads its environment variable at import, so the constant itself must be set.
    before = constants.HF_HUB_OFFLINE
    # In offline mode the client still uses its cache and does not retry.
    constants.HF_HUB_OFFLINE = before or not _is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_reachable(address: str) -> bool:
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True  # an HTTP error is an answer: the hub is reachable
    except (OSError, ValueError):
        return False
    return True
