"""Build segmentation models by name: halfstep's U-Net, or one of segmentation-models-pytorch."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfstep.errors import BadRecipe, MissingExtra, unknown_name
from halfstep.tasks.models.unet import UNet
from halfstep.tasks.shared.pretrained import check_timms_name, fetched, unknown_among_many

OWN = "unet"
PREFIX = "smp-"
"""An optional prefix of smp's names; it is required for `unet`, which otherwise means halfstep's own."""
TIMM = "tu-"
"""The prefix of encoders that smp takes from timm; there are too many to list."""


def pixelwise_model(options: Any, channels: int, outputs: int) -> nn.Module:
    """Return the model that a recipe names, for images with `channels` and `outputs` logits per pixel.

    Raise `BadRecipe`, `UnknownName` or `MissingExtra` where it cannot be built.
    """
    if options.name != OWN:
        return _theirs(options, channels, outputs)
    if options.weights == "pretrained":
        raise BadRecipe(
            "model.weights=pretrained with model.name=unet",
            allowed="none or a path; smp models have pretrained encoders",
            do=f"write model.name={PREFIX}unet, or model.weights=none",
        )
    return UNet(channels, outputs, options.width, options.depth)


def _theirs(options: Any, channels: int, outputs: int) -> nn.Module:
    smp = _package()
    kind = options.name.removeprefix(PREFIX)
    if kind not in smp.MODEL_ARCHITECTURES_MAPPING:
        names = [PREFIX + name if name == OWN else name for name in smp.MODEL_ARCHITECTURES_MAPPING]
        raise unknown_name("model.name", options.name, [OWN, *names])
    known = smp.encoders.encoders
    timms = options.encoder.startswith(TIMM)
    if timms:
        check_timms_name("model.encoder", options.encoder.removeprefix(TIMM), TIMM)
    elif options.encoder not in known:
        raise unknown_among_many("model.encoder", options.encoder, known, "segmentation-models-pytorch")

    def build(weights: str | bool | None) -> nn.Module:
        try:
            model: nn.Module = smp.create_model(kind, options.encoder, weights, in_channels=channels, classes=outputs)
        # smp raises any of these for an encoder without the feature maps an architecture needs.
        except (TypeError, AssertionError, ValueError) as error:
            raise BadRecipe(
                f"{options.name} cannot be built with model.encoder={options.encoder}: {error}",
                allowed="encoders that give features in several sizes, as this model needs them",
                do="write model.encoder=resnet34",
            ) from error
        return model

    if options.weights != "pretrained":
        return build(None)
    settings = known.get(options.encoder, {}).get("pretrained_settings") or {}
    if "imagenet" not in settings and not timms:
        raise BadRecipe(
            f"model.weights=pretrained with model.encoder={options.encoder}",
            allowed="encoders that were trained on imagenet, such as resnet34",
            do="write model.weights=none, or choose another encoder",
        )
    if timms:
        import timm

        found = timm.get_pretrained_cfg(options.encoder.removeprefix(TIMM), allow_unregistered=True)
        repository = (found.hf_hub_id or "") if found else ""
    else:
        repository = settings["imagenet"]["repo_id"]
    return fetched(lambda: build(True if timms else "imagenet"), options.encoder, repository)


def _package() -> Any:
    try:
        import segmentation_models_pytorch  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra(
            "a model of segmentation-models-pytorch, which is not installed",
            allowed="model.name=unet, or halfstep with the extra vision",
            do="pip install 'halfstep[train,vision]'",
        ) from error
    return segmentation_models_pytorch
