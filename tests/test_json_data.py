"""Results as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple

from halfstep.json_data import JsonResult, convert_to_json_data


class Kind(Enum):
    NEW = "new"


class Pair(NamedTuple):
    one: int
    two: int


@dataclass(frozen=True)
class Part:
    kind: Kind
    where: Path


@dataclass(frozen=True)
class Whole(JsonResult):
    json_keys: ClassVar = ("size", "part.kind", "parts", "place=part.where", "pair")
    part: Part
    parts: dict[str, tuple[Part, ...]]
    pair: Pair

    @property
    def size(self) -> int:
        return len(self.parts)


def test_a_result_becomes_the_keys_that_it_names_in_their_order() -> None:
    part = Part(Kind.NEW, Path("a/b"))
    found = Whole(part, {"all": (part,)}, Pair(1, 2)).as_dict()
    plain = {"size": 1, "kind": "new", "parts": {"all": [{"kind": "new", "where": "a/b"}]}}
    plain |= {"place": "a/b", "pair": {"one": 1, "two": 2}}
    assert json.dumps(found) == json.dumps(plain)


def test_plain_data_stays_as_it_is() -> None:
    plain = {"a": [1, None, True, 0.5, "text"], "b": {}}
    assert convert_to_json_data(plain) == plain
    assert convert_to_json_data((1, 2)) == [1, 2]
