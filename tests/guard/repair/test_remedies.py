"""Remedies are plain data that a resumed run can be given again."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from halfstep import Stepper
from halfstep.guard.repair.remedies import Remedies, Remedy, RemedyApplier, drop_compiled_calls
from halfstep.guard.verdict import Culprit, ProposedRemedy, Verdict
from halfstep.precision.island import find_islands
from tests.support.models import Coder


def verdict(*remedies: ProposedRemedy, module: str = "encoder") -> Verdict:
    culprit = Culprit("aten.addmm", module, False, None, "fp16", ("inf",), 1e3, 1e5, 65504.0)
    return Verdict("precision", "precision: it overflows", culprit, (), remedies)


def surgery(precision: str = "fp16", most_islands: int = 8) -> RemedyApplier:
    model = Coder()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, observe=False)
    return RemedyApplier(stepper, most_islands)


def test_the_first_cure_that_works_is_placed_and_no_other() -> None:
    treated = surgery()
    remedy = treated.apply_first(
        verdict(
            ProposedRemedy("island", "decoder", False),
            ProposedRemedy("island", "encoder", True),
            ProposedRemedy("precision", "bf16", True),
        )
    )
    assert remedy is not None
    assert (remedy.kind, remedy.target) == ("island", "encoder")
    assert list(find_islands(treated._stepper.model)) == treated.remedies.islands == ["encoder"]
    assert treated._stepper.precision.name == "fp16"


def test_what_was_not_tried_is_not_placed() -> None:
    treated = surgery()
    assert (
        treated.apply_first(
            verdict(ProposedRemedy("island", "encoder", None), ProposedRemedy("precision", "fp32", False))
        )
        is None
    )
    assert find_islands(treated._stepper.model) == {}


def test_islands_are_bounded_and_the_precision_comes_after_them() -> None:
    treated = surgery(most_islands=1)
    remedies = (ProposedRemedy("island", "encoder", True), ProposedRemedy("precision", "bf16", True))
    treated.apply_first(verdict(*remedies))
    treated.apply_first(
        verdict(ProposedRemedy("island", "decoder", True), ProposedRemedy("precision", "bf16", True), module="decoder")
    )
    assert treated.remedies.islands == ["encoder"]
    assert treated.remedies.precision == treated._stepper.precision.name == "bf16"


def test_what_is_in_place_is_not_placed_again() -> None:
    treated = surgery()
    remedies = (ProposedRemedy("island", "encoder", True), ProposedRemedy("precision", "fp16", True))
    assert treated.apply_first(verdict(*remedies)) is not None
    assert treated.apply_first(verdict(*remedies)) is None
    assert len(treated.remedies.placed) == 1


def test_a_module_that_cannot_be_an_island_is_passed_over() -> None:
    treated = surgery()
    encoder = treated._stepper.model.encoder
    encoder.forward = encoder.forward
    remedy = treated.apply_first(
        verdict(ProposedRemedy("island", "encoder", True), ProposedRemedy("precision", "fp32", True))
    )
    assert remedy is not None
    assert remedy.kind == "precision"


def test_the_newest_is_lifted_first_and_comes_back_for_good() -> None:
    treated = surgery()
    island, precision = ProposedRemedy("island", "encoder", True), ProposedRemedy("precision", "bf16", True)
    treated.apply_first(verdict(island))
    treated.apply_first(verdict(precision, module="decoder"))
    assert str(treated.lift_newest()) == "the run computes in bf16"
    assert treated._stepper.precision.name == "fp16"
    assert str(treated.lift_newest()) == "encoder computes in fp32"
    assert find_islands(treated._stepper.model) == {}
    assert treated.lift_newest() is None
    assert treated.apply_first(verdict(island)).for_good
    assert treated.lift_newest() is None
    assert list(find_islands(treated._stepper.model)) == ["encoder"]


def test_as_data_and_back_and_onto_a_model() -> None:
    remedies = Remedies(
        [
            Remedy("island", "encoder", "encoder aten.addmm", 12),
            Remedy("precision", "bf16", "decoder aten.mul", 30, "fp16", True),
        ],
        ["encoder aten.mul"],
    )
    again = Remedies.from_dict(json.loads(json.dumps(remedies.as_dict())))
    assert again == remedies
    model = Coder()
    again.apply_to(model)
    again.apply_to(model)
    assert list(find_islands(model)) == again.islands == ["encoder"]
    assert again.precision == "bf16"
    assert Remedies().precision is None


def test_a_resumed_run_gets_what_it_lacks() -> None:
    treated = surgery()
    treated.resume(Remedies([Remedy("island", "decoder", "x", 1), Remedy("precision", "bf16", "y", 2, "fp16")]))
    assert list(find_islands(treated._stepper.model)) == ["decoder"]
    assert treated._stepper.precision.name == "bf16"


@pytest.mark.parametrize("how", ["module", "wrapper", "method"])
def test_compiled_calls_are_dropped_and_put_back(how: str) -> None:
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        def run(*args: object) -> object:
            ran.append("compiled")
            return graph.forward(*args)

        return run

    inner = Coder()
    model: nn.Module = inner
    if how == "module":
        inner.compile(backend=backend)
    elif how == "wrapper":
        model = torch.compile(inner, backend=backend)  # type: ignore[assignment]
    else:
        inner.encoder.forward = torch.compile(inner.encoder.forward, backend=backend)
    x = torch.randn(2, 4)
    expected = model(x)
    assert ran == ["compiled"]
    put_back = drop_compiled_calls(model)
    assert torch.equal(model(x), expected)
    assert ran == ["compiled"]
    put_back()
    model(x)
    assert ran == ["compiled", "compiled"]


def test_an_older_precision_lifted_under_a_newer_one_changes_nothing_that_runs() -> None:
    treated = surgery()
    older, newer = Remedy("precision", "bf16", "a", 1, "fp16"), Remedy("precision", "fp32", "b", 5, "bf16", True)
    treated.resume(Remedies([older, newer], ["b"]))
    assert treated.lift_newest() == older
    assert treated._stepper.precision.name == treated.remedies.precision == "fp32"
    # What the newer one replaced is what the older one had.
    assert [remedy.before for remedy in treated.remedies.placed] == ["fp16"]


def test_a_newer_precision_lifted_goes_back_to_the_older_one() -> None:
    treated = surgery()
    treated.resume(Remedies([Remedy("precision", "bf16", "a", 1, "fp16"), Remedy("precision", "fp32", "b", 5, "bf16")]))
    treated.lift_newest()
    assert treated._stepper.precision.name == treated.remedies.precision == "bf16"
    treated.lift_newest()
    assert treated._stepper.precision.name == "fp16"


def test_a_state_without_remedies_lifts_those_that_are_placed() -> None:
    treated = surgery()
    own = treated._stepper.model
    own.compile(backend="aot_eager")
    compiled = own._compiled_call_impl
    placed = [
        Remedy("island", "encoder", "x", 1),
        Remedy("precision", "bf16", "y", 2, "fp16"),
        Remedy("eager", "", "z", 3),
    ]
    treated.resume(Remedies(placed[:]))
    assert own._compiled_call_impl is None
    treated.resume(Remedies(placed[:1]))
    assert list(find_islands(own)) == ["encoder"]
    assert treated._stepper.precision.name == "fp16"
    assert own._compiled_call_impl is compiled
    treated.resume(Remedies())
    assert find_islands(own) == {}
