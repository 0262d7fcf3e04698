"""Find the files of a set that show a fault: a short function for each rule of `report`, over the same facts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from halfstep.data.check.facts import ExaminedSet, FileFacts, SampleFacts, SplitFiles
from halfstep.data.layout import CLASSIFICATION
from halfstep.data.mask_classes import MaskCounts, MaskReading, infer_mask_reading

Find = Callable[[ExaminedSet], Iterable[str]]
TINY = 32
"""Pixels; a smaller image is halved to nothing before a network's last level."""
LOPSIDED = 20
"""The ratio of the largest class to a class that counts as too small."""
FAINT = 0.001
"""The share of all pixels below which a class is hardly learned."""
PHOTOGRAPHS = (".heic", ".heif", ".gif", ".avif", ".jp2", ".raw", ".dng", ".cr2", ".nef", ".arw", ".jxl", ".svg")
"""Suffixes of pictures that are not supported."""


def build_path_finder(kind: str) -> Find:
    """Return a rule that finds the paths of this kind, in the folders of images and of masks."""

    def find(found: ExaminedSet) -> Iterator[str]:
        for split in found.splits:
            for folder, names in ((split.part.folder, split.names), (split.part.masks, split.mask_names)):
                yield from (found.shown(f"{folder}/{path}") for path in getattr(names, kind, ()))

    return find


def find_unsupported_pictures(found: ExaminedSet) -> list[str]:
    """Return pictures of unsupported formats."""
    return [path for path in build_path_finder("other")(found) if path.lower().endswith(PHOTOGRAPHS)]


def find_other_files(found: ExaminedSet) -> list[str]:
    """Return files that are no pictures."""
    return [path for path in build_path_finder("other")(found) if not path.lower().endswith(PHOTOGRAPHS)]


def build_split_finder(names: Callable[[SplitFiles], Sequence[str]], *, below: bool = False) -> Find:
    """Return a rule that finds what `names` lists for each split; with `below`, as paths below its folder."""

    def find(found: ExaminedSet) -> Iterator[str]:
        for split in found.splits:
            yield from (found.shown(f"{split.part.folder}/{name}" if below else name) for name in names(split))

    return find


def iterate_examined_files(found: ExaminedSet) -> Iterator[FileFacts]:
    """Yield every file that was examined."""
    for sample in found.samples:
        yield sample.image
        if sample.mask is not None:
            yield sample.mask
    yield from found.unpaired


def build_file_finder(true: Callable[[FileFacts], bool], *, images_alone: bool = False) -> Find:
    """Return a rule that finds files with this property; unreadable files have none but their fault."""

    def find(found: ExaminedSet) -> list[str]:
        chosen = (sample.image for sample in found.good) if images_alone else iterate_examined_files(found)
        return [found.shown(one.path) for one in chosen if true(one)]

    return find


def build_fault_finder(fault: str) -> Find:
    """Return a rule that finds files with this fault."""
    return build_file_finder(lambda look: look.fault == fault)


def find_deeper_images(found: ExaminedSet) -> list[str]:
    """Return images of more than 8 bits, where others have 8."""
    wide = [sample.image for sample in found.good if sample.image.bits > 8]
    return [found.shown(one.path) for one in wide] if len(wide) < len(found.good) else []


def group_by_channel_kind(found: ExaminedSet) -> dict[str, list[str]]:
    """Return the images by kind of channels."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for sample in found.good:
        mode = sample.image.mode
        gray = mode in ("1", "L", "I", "F") or mode.startswith("I;16")
        channels = "with transparency" if mode in ("RGBA", "LA", "PA") else "gray" if gray else "in color"
        kinds[channels].append(found.shown(sample.image.path))
    return dict(kinds)


def find_unusual_channels(found: ExaminedSet) -> list[str]:
    """Return images whose channels are not of the most frequent kind."""
    kinds = group_by_channel_kind(found)
    usual = max(kinds, key=lambda kind: len(kinds[kind]), default="")
    return [path for kind, paths in kinds.items() if kind != usual for path in paths]


def build_pair_finder(true: Callable[[FileFacts, FileFacts], bool], *, masks: bool = False) -> Find:
    """Return a rule that finds readable pairs with this property, by image or by mask."""

    def find(found: ExaminedSet) -> Iterator[str]:
        for sample in found.good:
            if sample.mask is not None and true(sample.image, sample.mask):
                yield found.shown((sample.mask if masks else sample.image).path)

    return find


def is_turned_alone(image: FileFacts, mask: FileFacts) -> bool:
    """Return whether EXIF rotates the image and not its mask."""
    return image.upright != mask.size and image.size == mask.size


def is_of_another_size(image: FileFacts, mask: FileFacts) -> bool:
    """Return whether the mask fits the image neither as stored nor upright."""
    return mask.size not in (image.upright, image.size)


def may_be_turned_alone(image: FileFacts, mask: FileFacts) -> bool:
    """Return whether EXIF may rotate the image alone: a square or a flip does not show in the sizes."""
    return image.orientation in range(2, 9) and image.upright == mask.size == image.size


def find_mask_trouble(look: FileFacts, reading: MaskReading) -> str:
    """Return the problem with the values of a mask; empty if each has a class."""
    mask = look.mask
    if mask is None or not reading.strange(mask):
        return ""
    soft_edges = not mask.in_color and {0, 255} <= set(mask.pixels) and len(mask.pixels) > 4
    if look.format == "JPEG" or mask.form == "shades" or soft_edges:
        return "blurred"
    return "coloured" if mask.in_color and reading.palette is None else "strange"


def build_mask_finder(trouble: str) -> Find:
    """Return a rule that finds masks with this fault."""

    def find(found: ExaminedSet) -> list[str]:
        reading = found.reading
        masks = [sample.mask for sample in found.samples if sample.mask is not None]
        return [found.shown(one.path) for one in masks if reading and find_mask_trouble(one, reading) == trouble]

    return find


def find_strange_values(found: ExaminedSet) -> list[int]:
    """Return the values of masks without a class."""
    reading, values = found.reading, set[int]()
    for sample in found.samples:
        if reading and sample.mask and sample.mask.mask and find_mask_trouble(sample.mask, reading) == "strange":
            values.update(reading.strange(sample.mask.mask))
    return sorted(values)


def has_class_for_each_value(found: ExaminedSet, classes: int | None, ignore_index: int | None) -> bool:
    """Return whether these settings give a class to each value of the masks that are neither blurred nor in color."""
    masks = [sample.mask for sample in found.samples if sample.mask is not None and sample.mask.mask is not None]
    usable = [one for one in masks if found.reading and find_mask_trouble(one, found.reading) in ("", "strange")]
    reading = infer_mask_reading([one.mask for one in masks if one.mask is not None], classes, ignore_index)
    return not any(reading.strange(one.mask) for one in usable if one.mask is not None)


def count_class_pixels(found: ExaminedSet) -> tuple[Counter[int], Counter[int]]:
    """Return the pixels of each class, and the number of images that show it."""
    pixels: Counter[int] = Counter()
    images: Counter[int] = Counter()
    for _, mask in _iterate_readable_masks(found):
        assert found.reading is not None
        numbers = {value: found.reading.class_of(value, mask) for value in mask.pixels}
        for value, number in numbers.items():
            if number is not None:
                pixels[number] += mask.pixels[value]
        images.update({number for number in numbers.values() if number is not None})
    return pixels, images


def find_empty_masks(found: ExaminedSet) -> list[str]:
    """Return masks that are all background, unless all are."""
    reading = found.reading
    if reading is None or len(count_class_pixels(found)[0]) < 2:
        return []
    return [
        found.shown(look.path)
        for look, mask in _iterate_readable_masks(found)
        if not reading.strange(mask) and not any(reading.class_of(v, mask) for v in mask.pixels)
    ]


def find_absent_classes(found: ExaminedSet) -> list[str]:
    """Return classes without a pixel."""
    pixels, _ = count_class_pixels(found)
    classes = found.reading.classes if found.reading and len(pixels) > 1 else 0
    return [f"class {number}" for number in range(classes) if not pixels[number]]


def find_faint_classes(found: ExaminedSet) -> list[str]:
    """Return classes with hardly any pixel."""
    pixels, _ = count_class_pixels(found)
    total = sum(pixels.values())
    return [f"class {n}: {count / total:.3%}" for n, count in sorted(pixels.items()) if 0 < count < FAINT * total]


def _iterate_readable_masks(found: ExaminedSet) -> Iterator[tuple[FileFacts, MaskCounts]]:
    for sample in found.good:
        if found.reading is not None and sample.mask is not None and sample.mask.mask is not None:
            yield sample.mask, sample.mask.mask


def _count_labels(found: ExaminedSet, split: str | None = None) -> Counter[str]:
    if found.layout.task != CLASSIFICATION:
        return Counter()
    return Counter(sample.label for sample in found.samples if split in (None, sample.split))


def find_only_class(found: ExaminedSet) -> list[str]:
    """Return the only class, where there is just one."""
    if found.reading is not None:
        pixels, _ = count_class_pixels(found)
        return [f"class {number}" for number in pixels] if len(pixels) == 1 else []
    labels = _count_labels(found)
    return list(labels) if len(labels) == 1 else []


def find_single_image_classes(found: ExaminedSet) -> list[str]:
    """Return classes with a single image."""
    return sorted(label for label, count in _count_labels(found).items() if count == 1)


def find_unknown_classes(found: ExaminedSet) -> list[str]:
    """Return classes of the validation folder that the training folder lacks."""
    if found.layout.val is None:
        return []
    return sorted(set(_count_labels(found, found.layout.val)) - set(_count_labels(found, "train")))


def find_unvalidated_classes(found: ExaminedSet) -> list[str]:
    """Return classes without a validation image."""
    every, judged = _count_labels(found), _count_labels(found, found.layout.val or "val")
    # A class with a single image is reported by `find_single_image_classes`.
    return sorted(label for label in _count_labels(found, "train") if label not in judged and every[label] > 1)


def find_underrepresented_classes(found: ExaminedSet) -> list[str]:
    """Return classes with far fewer images than the largest."""
    train = _count_labels(found, "train")
    most = max(train.values(), default=0)
    return [f"{label}: {count:,} of {most:,}" for label, count in train.items() if most > LOPSIDED * count]


def build_copy_finder(across: Callable[[SampleFacts], str] | None) -> Find:
    """Return a rule that finds copies that differ in `across`; without it, copies in one split and class."""

    def find(found: ExaminedSet) -> Iterator[str]:
        groups: defaultdict[str, list[SampleFacts]] = defaultdict(list)
        for sample in found.samples:
            if not sample.image.fault:
                groups[sample.image.digest].append(sample)
        for group in groups.values():
            is_plain = len({(sample.split, sample.label) for sample in group}) == 1
            differs = is_plain if across is None else len({across(sample) for sample in group}) > 1
            if len(group) > 1 and differs:
                yield " = ".join(found.shown(sample.image.path) for sample in group)

    return find
