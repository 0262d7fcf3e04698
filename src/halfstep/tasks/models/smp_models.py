"""Build segmentation models by name: halfstep's U-Net, or one of segmentation-models-pytorch."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfstep.errors import BadRecipe, MissingExtra, build_unknown_name_error
from halfstep.tasks.models.unet import UNet
from halfstep.tasks.shared.pretrained import build_unknown_model_error, build_with_fetched_weights, check_timm_name

OWN = "unet"
PREFIX = "smp-"
"""An optional prefix of smp's names; it is required for `unet`, which otherwise means halfstep's own."""
TIMM = "tu-"
"""The prefix of encoders that smp takes from timm; there are too many to list."""


def build_segmentation_model(options: Any, channels: int, outputs: int) -> nn.Module:
    """Return the model that a recipe names, for images with `channels` and `outputs` logits per pixel.

    Raise `BadRecipe`, `UnknownName` or `MissingExtra` where it cannot be built.
    """
    if options.name != OWN:
        return _build_smp_model(options, channels, outputs)
    if options.weights == "pretrained":
        raise BadRecipe(
            "model.weights=pretrained with model.name=unet",
            allowed="none or a path; smp models have pretrained encoders",
            do=f"write model.name={PREFIX}unet, or model.weights=none",
        )
    return UNet(channels, outputs, options.width, options.depth)


def _build_smp_model(options: Any, channels: int, outputs: int) -> nn.Module:
    smp = _import_smp()
    kind = options.name.removeprefix(PREFIX)
    if kind not in smp.MODEL_ARCHITECTURES_MAPPING:
        names = [PREFIX + name if name == OWN else name for name in smp.MODEL_ARCHITECTURES_MAPPING]
        raise build_unknown_name_error("model.name", options.name, [OWN, *names])
    known = smp.encoders.encoders
    timms = options.encoder.startswith(TIMM)
    if timms:
        check_timm_name("model.encoder", options.encoder.removeprefix(TIMM), TIMM)
    elif options.encoder not in known:
        raise build_unknown_model_error("model.encoder", options.encoder, known, "segmentation-models-pytorch")

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
    return build_with_fetched_weights(lambda: build(True if timms else "imagenet"), options.encoder, repository)


def _import_smp() -> Any:
    try:
        import segmentation_models_pytorch  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra(
            "a model of segmentation-models-pytorch, which is not installed",
            allowed="model.name=unet, or halfstep with the extra vision",
            do="pip install 'halfstep[train,vision]'",
        ) from error
    return segmentation_models_pytorch
