"""What follows RECIPE on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from halfstep.errors import BadRecipe
from halfstep.recipe.names import parse_typed_settings
from halfstep.recipe.resolve import apply_overrides
from halfstep.recipe.schema import Also, DataOptions, LossOptions, ModelOptions, Recipe


class Data(DataOptions):
    path: Annotated[str, Also("data_dir")] = "data"
    classes: list[int] | None = None


SCHEMA: Any = Recipe[ModelOptions, Data, LossOptions]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train.batch_size=4", [("train.batch_size", 4)]),
        ("optimizer.lr=1e-4", [("optimizer.lr", 1e-4)]),
        ("batch_size=4", [("train.batch_size", 4)]),
        ("--batch_size 64", [("train.batch_size", 64)]),
        ("--batch-size 64", [("train.batch_size", 64)]),
        ("--batch_size=64", [("train.batch_size", 64)]),
        ("--train.batch_size 64", [("train.batch_size", 64)]),
        ("--lr 0.1 --epochs 100", [("optimizer.lr", 0.1), ("train.epochs", 100)]),
        ("--num_epochs 3", [("train.epochs", 3)]),
        ("--num_workers 8", [("train.num_workers", 8)]),
        ("--num_workers auto", [("train.num_workers", "auto")]),
        ("--data_dir /path/to/x", [("data.path", "/path/to/x")]),
        ("--data_dir 2024", [("data.path", "2024")]),
        ("data.path=a=b:c", [("data.path", "a=b:c")]),
        ("data.classes=[1,2]", [("data.classes", [1, 2])]),
        ("--compile", [("train.compile", True)]),
        ("--compile false", [("train.compile", False)]),
        ("--compile --lr 1", [("train.compile", True), ("optimizer.lr", 1)]),
        ("--compile_model lr=1", [("train.compile", True), ("optimizer.lr", 1)]),
        ("--optimizer sgd", [("optimizer.name", "sgd")]),
        ("--early_stopping_patience 20", [("evaluate.patience", 20)]),
        ("evaluate.patience=null", [("evaluate.patience", None)]),
        ("--dir 2024", [("run.dir", "2024")]),
        ("run.dir='2024'", [("run.dir", "2024")]),
        ("--dir null", [("run.dir", None)]),
        ("--freeze encoder", [("model.freeze", ["encoder"])]),
        ("--freeze 1", [("model.freeze", ["1"])]),
        ("--freeze [a,b]", [("model.freeze", ["a", "b"])]),
        ("--bf16", [("bf16", True)]),
        ("--bf16 yes --fp16 off", [("bf16", True), ("fp16", False)]),
        ("--use_amp 1", [("use_amp", True)]),
        ("--amp bf16", [("amp", "bf16")]),
        ("--fp32 --lr 1", [("fp32", True), ("optimizer.lr", 1)]),
        ("--precision 16-mixed", [("precision", "16-mixed")]),
        ("--precision 16", [("precision", "16")]),
        ("--mixed_precision", [("mixed_precision", True)]),
        ("--mixed_precision bf16", [("mixed_precision", "bf16")]),
        ("--mixed_precision --precision_type fp16", [("mixed_precision", True), ("precision_type", "fp16")]),
        ("--mixed_precision batch_size=4", [("mixed_precision", True), ("train.batch_size", 4)]),
        ("use_amp=True amp_dtype=x", [("use_amp", True), ("amp_dtype", "x")]),
    ],
)
def test_settings_and_flags(line: str, meant: list[tuple[str, Any]]) -> None:
    found = parse_typed_settings(line.split(), SCHEMA)
    assert found == meant
    assert [type(value) for _, value in found] == [type(value) for _, value in meant]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.batchsize=4", ["train.batchsize", "did you mean train.batch_size?"]),
        ("--batchsize 4", ["did you mean train.batch_size?"]),
        ("trian.epochs=4", ["did you mean train.epochs?"]),
        ("--patience 4", ["schedule.patience, evaluate.patience"]),
        ("--lr", ["--lr has no value", "a number above 0"]),
        ("word", ["'word' is no setting"]),
        ("-x", ["two dashes"]),
        ("--", ["is no flag"]),
        ("=4", ["there is no setting ''"]),
        ("train=4", ["there is no setting 'train'"]),
        ("--minutes=1", ["there is no option or setting --minutes", "the options listed by --help", "with --help; or"]),
    ],
)
def test_mistakes_name_what_was_meant(line: str, words: list[str]) -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_typed_settings(line.split(), SCHEMA)
    assert all(word in str(caught.value) for word in words), caught.value


def test_overrides_leave_what_they_were_given_alone() -> None:
    raw = {"train": {"epochs": 1}, "optimizer": None, "loss": 5}
    changed = apply_overrides(raw, parse_typed_settings(["train.epochs=2", "optimizer.lr=1", "run.dir=x"], SCHEMA))
    assert changed == {"train": {"epochs": 2}, "optimizer": {"lr": 1}, "loss": 5, "run": {"dir": "x"}}
    assert raw == {"train": {"epochs": 1}, "optimizer": None, "loss": 5}
    assert apply_overrides({"train": 5}, parse_typed_settings(["train.epochs=2"], SCHEMA)) == {"train": 5}
