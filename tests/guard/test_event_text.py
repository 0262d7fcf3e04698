"""The warnings of a guard: the step, the cause and code to paste; each cause once, and then its count."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.guard.event_text import describe_event, wrap_text
from halfstep.guard.repair.paste import suggest_code
from halfstep.guard.verdict import Culprit, GuardEvent, ProposedRemedy, Verdict


def warned_by(bad: set[int], steps: int) -> tuple[list[str], nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    guardian = halfstep.Guardian(stepper, limits=halfstep.Limits(skip_share=1.0))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).square().mean() + torch.log(batch[1]).mean() * model(batch[0]).mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(steps):
            guardian.step(loss_fn, (torch.randn(3, 4), torch.zeros(3) if n in bad else torch.ones(3)))
    return [str(warning.message) for warning in caught], model


@pytest.mark.wording
def test_a_warning_ends_in_something_to_paste() -> None:
    (text,), model = warned_by({2}, 4)
    first, cause, paste = text.splitlines()
    assert first.startswith("attempt 3 was skipped, and nothing was lost")
    assert "aten.log" in cause
    assert "test_event_text.py:" in cause
    assert paste.startswith("  paste: torch.log(batch[1].clamp(min=1e-6))")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_cause_is_written_once_and_then_counted() -> None:
    texts, _ = warned_by({1, 3, 5, 7, 9}, 11)
    assert len(texts) == 3, "the first, the second and the fourth"


def verdict(cause: Any, culprit: Culprit | None = None, *remedies: ProposedRemedy) -> Verdict:
    return Verdict(cause, f"{cause}: a sentence", culprit, (), remedies)


def operation(name: str, line: str | None = None, *, backward: bool = False) -> Culprit:
    return Culprit(name, "attention", backward, line, "fp16", ("inf",), 1.0, 66397.0, 65504.0)


@pytest.mark.wording
@pytest.mark.parametrize("loop", ["torch", "stepper", "lightning", "transformers", "accelerate"])
@pytest.mark.parametrize(
    "found",
    [
        verdict("precision", operation("aten.bmm"), ProposedRemedy("island", "attention", True)),
        verdict("precision", operation("aten.bmm"), ProposedRemedy("precision", "bf16", True)),
        verdict("data"),
        verdict("code", operation("aten.div")),
        verdict("code"),
        verdict("state"),
        verdict("divergence"),
        verdict("compiler"),
        verdict("not_reproducible"),
    ],
    ids=lambda found: found.cause if isinstance(found, Verdict) else "",
)
def test_each_cause_has_code_in_each_loop(loop: Any, found: Verdict) -> None:
    lines = suggest_code(found, loop=loop)
    assert lines
    for line in lines:
        code = line.partition("   #")[0]
        if not code.startswith("{"):
            compile(f"{code} pass" if code.endswith(":") else code.replace(" continue", " pass"), "pasted", "exec")


def test_an_island_is_pasted_by_its_path() -> None:
    found = verdict("precision", operation("aten.bmm"), ProposedRemedy("island", "attention", True))
    assert suggest_code(found, loop="torch")[0].startswith('halfstep.island(model, "attention")')


def test_nothing_is_pasted_for_a_scale_that_adjusts() -> None:
    assert suggest_code(verdict("warm_up"), loop="torch") == ()


def test_other_events_keep_their_text() -> None:
    assert describe_event(GuardEvent("alarm", "warning", "a text", {"attempt": 3})) == "a text"


@pytest.mark.wording
def test_a_step_without_a_loss_function_is_written_with_its_attempt_and_counted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    guardian = halfstep.Guardian(stepper, limits=halfstep.Limits(skip_share=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(6):
            with stepper.forward(last=True):
                loss = model(torch.full((3, 4), float("nan") if n in (1, 3) else 1.0)).square().mean()
            stepper.backward(loss)
            guardian.look(stepper.apply())
    first, second = (str(warning.message) for warning in caught)
    assert first.startswith("attempt 2 was skipped, and nothing was lost")
    assert first.splitlines()[-1].startswith("  paste: report = guardian.step(loss_fn, batch)")
    assert second == "attempt 4 was skipped: the same cause, 2 times so far"


def test_a_terminal_gets_lines_of_its_width_and_code_in_one_line() -> None:
    code = "torch.log(" + "x" * 90 + ".clamp(min=1e-6))"
    text = "\n".join(
        ["step 3: the loss is nan", f"  cause: {'word ' * 40}", f"  paste: {code}", f"  step:  {'word ' * 30}"]
    )
    lines = wrap_text(text, 80).splitlines()
    assert f"  paste: {code}" in lines
    assert all(len(line) <= 80 for line in lines if code not in line)
    assert " ".join(wrap_text(text, 80).split()) == " ".join(text.split())
