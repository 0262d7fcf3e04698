"""Report the check of a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from halfstep.data.check import facts
from halfstep.data.check import rules as f
from halfstep.data.check.facts import ExaminedSet, examine_dataset
from halfstep.data.check.page import ClassShare, DataReport, Fault, ImageFacts
from halfstep.data.image_files import FORMATS, MOST_PIXELS
from halfstep.data.layout import RECIPES, Layout
from halfstep.data.mask_classes import NO_CLASS
from halfstep.finding import Severity
from halfstep.status_line import OnProgress

_PAIRS = "masks/NAME.png or masks/NAME_mask.png belongs to images/NAME.jpg"
_AGAIN = "copy each file again from its source, or delete it"
_UNTURN = "exiftool -Orientation=1 -n FILE"


class Rule(NamedTuple):
    """A fault, and how it is found. FILE in `do` stands for the file that has it."""

    id: str
    severity: Severity
    evidence: str | Callable[[ExaminedSet], str]
    do: str | Callable[[ExaminedSet], str]
    find: f.Find


def find_faults(found: ExaminedSet) -> list[Fault]:
    """Return everything that is wrong with a set, errors first."""
    there = []
    for rule in RULES:
        if files := tuple(rule.find(found)):
            evidence, do = (part if isinstance(part, str) else part(found) for part in (rule.evidence, rule.do))
            there.append(Fault(rule.id, rule.severity, evidence, do, files))
    if len(found.good) < 2:
        told = f"{len(found.good)} samples can be read"
        there.append(Fault("too-few", "error", told, "add samples: a run needs at least 2, and learns from dozens"))
    return sorted(there, key=lambda fault: ("error", "warning", "note").index(fault.severity))


def _describe_strange_values(found: ExaminedSet) -> str:
    values = f.find_strange_values(found)
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    return f"values outside the classes: {', '.join(map(str, values[:5]))}{more}"


def _suggest_mask_options(found: ExaminedSet) -> str:
    """Return the options with which every value has a class, where there are some."""
    values = f.find_strange_values(found)
    numbers, ignored = [value for value in values if value < NO_CLASS], NO_CLASS in values
    classes = max([found.classes or 0, *(value + 1 for value in numbers)]) if numbers else found.classes
    if not f.has_class_for_each_value(found, classes, NO_CLASS if ignored else found.ignore_index):
        return "correct them"
    options = [f"--classes {classes}"] if numbers else []
    options += [f"--ignore_index {NO_CLASS}"] if ignored else []
    meanings = ["give the number of classes"] if numbers else []
    meanings += ["leave these pixels out" if not numbers else f"leave {NO_CLASS} out"] if ignored else []
    return f"correct them, or {' and '.join(meanings)}: {' '.join(options)}"


def _describe_channel_kinds(found: ExaminedSet) -> str:
    kinds = f.group_by_channel_kind(found)
    return f"images are {', '.join(f'{len(paths)} {kind}' for kind, paths in kinds.items())}; all become color"


RULES = (
    # Names
    Rule("link-outside", "error", "link out of the folder, not followed",
         'cp --remove-destination "$(readlink -f FILE)" FILE', f.build_path_finder("outside")),
    Rule("link-broken", "error", "link to nothing", "delete them", f.build_path_finder("broken")),
    Rule("folder-closed", "error", "unreadable folder", "chmod -R u+rX FILE", f.build_path_finder("closed")),
    Rule("too-deep", "error", "folder too deep, or inside itself", "look for a link that leads back up",
         f.build_path_finder("deep")),
    Rule("no-file", "error", "pipe, socket or device in the folder", "delete them", f.build_path_finder("special")),
    Rule("hidden", "note", "hidden files, skipped",
         "nothing, if they belong to the system; rename your own", f.build_path_finder("hidden")),
    Rule("kind-not-read", "warning", f"image format that is not supported (only {', '.join(FORMATS)})",
         "magick mogrify -format png FILE, or remove them", f.find_unsupported_pictures),
    Rule("not-images", "note", "files that are not images, skipped", "nothing", f.find_other_files),
    # Partners
    Rule("no-mask", "error", "photograph without a mask", f"draw or rename them: {_PAIRS}",
         f.build_split_finder(lambda split: split.without_mask)),
    Rule("no-photograph", "error", "mask without a photograph", f"rename or remove: {_PAIRS}",
         f.build_split_finder(lambda split: split.without_image)),
    Rule("same-name", "error", "two files that differ only in their extension", "rename one of each",
         f.build_split_finder(lambda split: split.same_name, below=True)),
    Rule("class-empty", "error", "class folder without an image", "fill or delete them",
         f.build_split_finder(lambda split: split.empty_classes, below=True)),
    Rule("no-class", "error", "image outside the class folders", "move each into the folder of its class",
         f.build_split_finder(lambda split: split.loose, below=True)),
    # Files
    Rule("empty-file", "error", "empty file, 0 bytes", _AGAIN, f.build_fault_finder(facts.EMPTY)),
    Rule("no-permission", "error", "file that this user cannot open", "chmod u+r FILE",
         f.build_fault_finder(facts.CLOSED)),
    Rule("no-image", "error", "not an image, despite the file's name", "open one, and save or delete it",
         f.build_fault_finder(facts.NO_IMAGE)),
    Rule("damaged", "error", "truncated or damaged file", _AGAIN, f.build_fault_finder(facts.DAMAGED)),
    Rule("huge", "error", f"image with more than {MOST_PIXELS:,} pixels", "shrink both photograph and mask",
         f.build_fault_finder(facts.HUGE)),
    Rule("animated", "warning", "several pictures in one file; only the first is read", "magick FILE[0] FILE",
         f.build_file_finder(lambda look: look.frames > 1)),
    Rule("misnamed", "note", "file extensions do not match the contents; files are read by their contents",
         "nothing, or rename them", f.build_file_finder(lambda look: look.is_misnamed)),
    Rule("mixed-depth", "warning", "16 bits or more, and 8 bits in other images", "magick FILE -depth 8 FILE",
         f.find_deeper_images),
    Rule("tiny", "warning", f"image smaller than {f.TINY} pixels", "remove or enlarge them",
         f.build_file_finder(lambda look: min(look.size) < f.TINY, images_alone=True)),
    Rule("mixed-channels", "note", _describe_channel_kinds,
         "nothing, if intended: gray is repeated, transparency dropped", f.find_unusual_channels),
    # Pairs
    Rule("exif-rotation", "error", "EXIF rotates the photograph but not its mask",
         f"{_UNTURN}, so that the photograph is oriented like its mask", f.build_pair_finder(f.is_turned_alone)),
    Rule("size-mismatch", "error", "the mask and its photograph differ in size",
         "draw the mask again in the photograph's size, or run: magick MASK -filter point -resize WIDTHxHEIGHT! MASK",
         f.build_pair_finder(f.is_of_another_size)),
    Rule("exif-turned", "warning", "EXIF rotates the photograph and perhaps not its mask",
         f"check one with its mask; if they do not match: {_UNTURN}", f.build_pair_finder(f.may_be_turned_alone)),
    Rule("mask-turned", "error", "mask with an EXIF rotation, which is ignored",
         "magick FILE -auto-orient FILE",
         f.build_pair_finder(lambda image, mask: mask.orientation in range(2, 9), masks=True)),
    # Masks
    Rule("mask-blurred", "error", "values between the classes: saved as JPEG, resized or smoothed",
         "draw them again as PNG without smoothing; two classes: magick FILE -threshold 50% NAME.png",
         f.build_mask_finder("blurred")),
    Rule("mask-in-colour", "error", "mask in color, unlike the others",
         "save them like the others; or all of them in color", f.build_mask_finder("coloured")),
    Rule("mask-values", "error", _describe_strange_values, _suggest_mask_options, f.build_mask_finder("strange")),
    Rule("empty-mask", "warning", "mask without foreground",
         "nothing, if the photograph shows no object; else draw the mask", f.find_empty_masks),
    Rule("class-absent", "warning", "class without a pixel", "check the numbers of your classes",
         f.find_absent_classes),
    Rule("class-faint", "warning", "class with hardly a pixel", "add photographs that show them", f.find_faint_classes),
    # Classes
    Rule("one-class", "error", "there is only one class",
         "check that these are the right masks or folders, with the intended values",
         f.find_only_class),
    Rule("one-image", "warning", "class with a single image, used either for training or for validation",
         "add images, or delete the folder", f.find_single_image_classes),
    Rule("class-unknown", "error", "class in the validation folder but not in train",
         "add them to train, or delete them", f.find_unknown_classes),
    Rule("class-unjudged", "warning", "class without a validation image",
         "add images; without a validation folder, a hash of the file's name decides its split",
         f.find_unvalidated_classes),
    Rule("lopsided", "warning", "class with far fewer images than the largest",
         "add images of them, or remove some of the others", f.find_underrepresented_classes),
    # Copies
    Rule("same-on-both-sides", "error", "picture in both training and validation: metrics would be too good",
         "keep one of each", f.build_copy_finder(lambda sample: sample.split)),
    Rule("two-classes", "error", "picture in two classes", "keep each in one class only",
         f.build_copy_finder(lambda sample: sample.label)),
    Rule("copies", "warning", "duplicated picture", "keep one of each", f.build_copy_finder(None)),
)  # fmt: skip


def check_dataset(
    layout: Layout,
    on_progress: OnProgress = lambda done, of: None,
    classes: int | None = None,
    ignore_index: int | None = None,
) -> DataReport:
    """Check a set, and return its facts and findings."""
    found = examine_dataset(layout, on_progress, classes, ignore_index)
    faults = find_faults(found)
    sizes = sorted((sample.image.upright for sample in found.good), key=lambda size: size[0] * size[1])
    kinds = Counter(sample.image.format for sample in found.good)
    return DataReport(
        folder=layout.root,
        task=layout.task,
        recipe=RECIPES[layout.task],
        ok=all(fault.severity != "error" for fault in faults),
        samples=dict(sorted(Counter(sample.split for sample in found.samples).items())),
        readable=len(found.good),
        images=ImageFacts(sizes[len(sizes) // 2], sizes[0], sizes[-1], kinds) if sizes else None,
        masks={"read_as": found.reading.words, **found.reading.settings()} if found.reading else None,
        classes=tuple(_compute_class_shares(found)),
        findings=tuple(faults),
    )


def _compute_class_shares(found: ExaminedSet) -> list[ClassShare]:
    if found.reading is None:
        every = Counter(sample.label for sample in found.samples)
        return [ClassShare(name, count) for name, count in sorted(every.items())]
    pixels, images = f.count_class_pixels(found)
    total = max(sum(pixels.values()), 1)
    return [
        ClassShare(str(number), images[number], round(pixels[number] / total, 6))
        for number in range(found.reading.classes)
    ]
