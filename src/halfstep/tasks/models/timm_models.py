"""Build timm's classification models by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfstep.errors import BadRecipe, HalfstepError, MissingExtra
from halfstep.tasks.shared.images import PixelNormalization, choose_normalization
from halfstep.tasks.shared.pretrained import build_with_fetched_weights, check_timm_name


def build_timm_model(options: Any, channels: int, outputs: int, size: int) -> nn.Module:
    """Return the timm model that a recipe names, for images of `channels` and `size`, with `outputs` logits.

    Raise `BadRecipe`, `UnknownName` or `MissingExtra` where it cannot be built.
    """
    timm = import_timm("model.name", options.name)
    settings = timm.get_pretrained_cfg(options.name)
    arguments: dict[str, object] = {"in_chans": channels, "num_classes": outputs, "drop_rate": options.drop_rate}
    # Only models with a fixed input size accept img_size; others raise TypeError for it.
    if settings is not None and settings.fixed_input_size:
        arguments["img_size"] = size

    def build() -> nn.Module:
        model: nn.Module = timm.create_model(options.name, pretrained=options.weights == "pretrained", **arguments)
        return model

    try:
        model = _build_pretrained(build, options, settings) if options.weights == "pretrained" else build()
    # Some of halfstep's errors derive from ValueError too, and must not be wrapped again.
    except HalfstepError:
        raise
    except (TypeError, AssertionError, ValueError) as error:
        raise BadRecipe(
            f"{options.name} cannot be built for images of {size} pixels and {channels} channels: {error}",
            allowed="the sizes and options that this model has in timm",
            do="change data.size or model.name",
        ) from error
    if options.small_stem:
        _shrink_stem(model, channels, options.name)
    return model


def choose_pixel_normalization(options: Any, channels: int) -> PixelNormalization:
    """Return the normalization that pretrained weights were trained with; the usual one for random weights."""
    if options.weights == "none" or channels != 3:
        return choose_normalization(channels)
    settings = import_timm("model.name", options.name).get_pretrained_cfg(options.name)
    return PixelNormalization(tuple(settings.mean), tuple(settings.std)) if settings else choose_normalization(channels)


def _build_pretrained(build: Any, options: Any, settings: Any) -> nn.Module:
    if settings is None or not (settings.hf_hub_id or settings.url):
        raise BadRecipe(
            f"model.weights=pretrained with model.name={options.name}",
            allowed="models that timm has weights for",
            do="write model.weights=none, or choose another model",
        )
    return build_with_fetched_weights(build, options.name, settings.hf_hub_id or "", settings.url or "")


def _shrink_stem(model: nn.Module, channels: int, name: str) -> None:
    """Replace the stem by one 3 × 3 convolution of stride 1 without pooling. Raise `BadRecipe` for other stems."""
    first = getattr(model, "conv1", None)
    if not (isinstance(first, nn.Conv2d) and isinstance(getattr(model, "maxpool", None), nn.Module)):
        raise BadRecipe(
            f"model.small_stem with model.name={name}",
            allowed="ResNets with one convolution as their stem, such as resnet18 and resnet50",
            do="leave model.small_stem out, or write model.name=resnet18",
        )
    model.conv1 = nn.Conv2d(channels, first.out_channels, 3, padding=1, bias=False)
    # As timm initializes the convolution that is replaced.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def import_timm(field: str, name: str) -> Any:
    """Return timm. Raise `MissingExtra` if it is not installed, `UnknownName` for a model it does not have."""
    try:
        import timm
    except ImportError as error:
        raise MissingExtra(
            "a model of timm, which is not installed",
            allowed="halfstep with the extra vision",
            do="pip install 'halfstep[train,vision]'",
        ) from error
    check_timm_name(field, name)
    return timm
