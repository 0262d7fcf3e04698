"""The clips that a recipe's data section names, for training and for validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.errors import BadData
from halfstep.tasks._sources import both, for_validation, shared, to_share
from halfstep.train.data.clips import FrameFolders, Windows, mask_folder, split_recordings
from halfstep.train.data.listing import existing, files, image_files
from halfstep.train.data.moving import Moving, ShapeStamps, Stamps
from halfstep.train.data.place import data_place
from halfstep.train.data.source import Source
from halfstep.train.data.sprites import SpriteStamps
from halfstep.train.data.videos import SUFFIXES, VideoFiles
from halfstep.train.task import Split

CLIPS = f"a folder of frames or of such folders; a video or a folder of them ({', '.join(SUFFIXES)})"
"""What `clips_in` takes, in words."""


def clips(data: Any) -> dict[Split, Source]:
    """`image`, frames × 3 × height × width as read, and `mask` where things are known: their numbers, 0 for none."""
    if data.name in ("sprites", "shapes"):
        stamps: Stamps = ShapeStamps() if data.name == "shapes" else SpriteStamps(data_place(data.path))
        return shared(Moving(stamps, data.samples, data.size, data.frames, data.objects), data.val)
    if isinstance(data.val, str):
        return both(data, lambda root: _windows(root, data, data.name == "videos"))
    windows = _windows(to_share(data_place(data.path), data), data, data.name == "videos")
    train, val = split_recordings(windows, data.val)
    return {"train": train, "val": val}


def has_masks(data: Any) -> bool:
    """Whether it is known what is where in the clips that a model is judged by; no sample is read for it."""
    if data.name in ("sprites", "shapes"):
        return True
    if data.name == "videos":
        return False
    root = data_place(data.path)
    judged = for_validation(root, data.val) if isinstance(data.val, str) else to_share(root, data)
    return mask_folder(judged) is not None


def clips_in(place: Path, data: Any) -> Windows:
    """What a person points at: a video or a folder of them, a folder of frames, or a folder of such folders."""
    are_videos = _is_video(place) if place.is_file() else bool(files(existing(place, "the folder"), SUFFIXES))
    if not are_videos and (place.is_file() or not image_files(place)):
        raise BadData(f"{place} holds no clip", allowed=CLIPS, do="give the path of one of these")
    return _windows(place, data, are_videos)


def _is_video(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _windows(root: Path, data: Any, are_videos: bool) -> Windows:
    recordings = VideoFiles(root) if are_videos else FrameFolders(root)
    return Windows(recordings, data.frames, data.every)
