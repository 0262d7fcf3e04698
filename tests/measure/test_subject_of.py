"""The first argument of every measuring tool: a model, a case, "module:callable", or a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.errors import WrongUse
from halfstep.measure.case import Case
from halfstep.measure.subject import Subject, resolve_subject
from halfstep.numbers import format_bytes
from tests.support.cases import linear

CASE = "tests.support.cases:linear"
RECIPE = "segmentation_tiny"
TOOLS = (halfstep.audit, halfstep.bench, halfstep.estimate, halfstep.plan, halfstep.profile, halfstep.survival)


def test_a_model_is_a_case_of_this_process_and_text_is_a_subject_for_any() -> None:
    model, loss_fn, batch = linear()
    live = resolve_subject(model, loss_fn, batch)
    assert isinstance(live, Case)
    assert (live.model, live.loss_fn, live.batch) == (model, loss_fn, batch)
    assert live.open() is live
    made = resolve_subject(linear)
    assert isinstance(made, Case)
    assert made.name == CASE
    assert resolve_subject(CASE) == Subject(CASE)
    assert resolve_subject(Path("a/mine.yaml"), settings=["--bf16"]) == Subject("a/mine.yaml", ("--bf16",))
    changed = resolve_subject(RECIPE, settings={"train.batch_size": 2, "precision": "fp32", "train.clip_norm": None})
    assert isinstance(changed, Subject)
    setting = changed.open().setting
    assert (setting.batch, setting.precision) == (2, "fp32")


@pytest.mark.wording
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((linear()[0],), "the model Linear without loss_fn and batch"),
        ((linear()[0], linear()[1]), "without batch"),
        ((CASE, linear()[1]), "a loss_fn or a batch together with 'tests.support.cases:linear'"),
        (({"task": "segmentation"},), "a dict as the subject of a measurement"),
        ((3,), "a int as the subject of a measurement"),
    ],
)
def test_every_tool_refuses_the_same_things(tool: Any, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(WrongUse) as caught:
        tool(*arguments)
    assert words in caught.value.given.replace("Sequential", "Linear")
    assert caught.value.do


@pytest.mark.parametrize("arguments", [linear(), (CASE,), (linear,), (RECIPE,)])
def test_estimate_audit_and_survival_take_each(arguments: tuple[Any, ...]) -> None:
    ledger = halfstep.estimate(*arguments, precision="fp32")
    assert ledger.peak > 0
    assert str(ledger).startswith(f"peak {format_bytes(ledger.peak)} in fp32 at batch {ledger.samples}")
    assert "Saved for backward" in str(ledger)
    assert all(word in ledger._repr_html_() for word in ("<svg", "weights", format_bytes(ledger.peak)))
    found = halfstep.audit(*arguments, precision="fp16")
    assert str(found).splitlines()[0] == f"fp16: {found.verdict}"
    assert str(halfstep.survival(*arguments)).startswith("fp16")


def test_estimate_takes_what_a_recipe_says() -> None:
    as_written = halfstep.estimate(RECIPE)
    assert as_written.setting.channels_last
    assert as_written.setting.precision in ("fp32", "bf16", "fp16")
    small = halfstep.estimate(RECIPE, settings=["train.batch_size=1"], channels_last=False)
    assert (small.samples, small.setting.channels_last) == (1, False)
    assert small.peak < as_written.peak


@pytest.mark.usefixtures("forked_python")
def test_bench_and_profile_take_a_model_and_a_case() -> None:
    model, loss_fn, batch = linear()
    before = [p.clone() for p in model.parameters()]
    found = halfstep.bench(model, loss_fn, batch, seeds=1, precisions=["fp32"])
    assert (found.name, [row.failed for row in found.rows]) == ("model", [""])
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    profile = halfstep.profile(CASE, seconds=0.5)
    assert f"  $ {profile.cause.command}" in str(profile).splitlines()
    assert profile.facts.subject == (CASE,)


@pytest.mark.usefixtures("forked_python")
def test_plan_prints_its_verdict() -> None:
    found = halfstep.plan(*linear(), seconds=2)
    assert str(found).splitlines()[0] == found.verdict == found.as_dict()["verdict"]


def test_only_public_names_are_listed() -> None:
    assert set(dir(halfstep)) == {*halfstep.__all__, "__version__"}
    # Completion that reads the module in place of asking it finds no name of another library either.
    foreign = [
        name for name, value in vars(halfstep).items() if "halfstep" not in getattr(value, "__name__", "halfstep")
    ]
    assert [name for name in foreign if not name.startswith("_")] == []
    assert len(str(halfstep.choose_precision("fp32"))) < 200
