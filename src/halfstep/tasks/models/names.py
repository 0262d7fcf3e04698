"""Check model names against libraries that have too many to list."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from halfstep.errors import UnknownName


def unknown_among_many(field: str, given: str, known: Collection[str], whose: str) -> UnknownName:
    """Return the error for a name a library does not have, with the closest known names."""
    near = difflib.get_close_matches(given, sorted(known), n=3, cutoff=0.5)
    usual = [name for name in ("resnet34", "resnet50") if name in known] or sorted(known)[:3]
    return UnknownName(
        f"{field} {given!r} is not known",
        allowed=f"the {len(known)} names of {whose}, such as {', '.join(near or usual)}",
        do=f"did you mean {near[0]!r}?" if near else f"look the name up in the documentation of {whose}",
    )


def check_timms_name(field: str, name: str, prefix: str = "") -> None:
    """Raise `UnknownName` for a model timm does not have, or for a weights tag it does not have for this model.

    `prefix` is written before timm's name in the recipe.
    """
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(name):
        raise unknown_among_many(field, prefix + name, [prefix + known for known in timm.list_models()], "timm")
    tagged = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and name not in tagged:
        names = [prefix + known for known in (architecture, *tagged)]
        raise unknown_among_many(field, prefix + name, names, f"timm for {architecture}")
