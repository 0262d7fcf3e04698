"""fp8 and mxfp8: what is converted and why not, right results on a CPU, and nothing left after a change."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import Stepper
from halfstep.errors import PrecisionRefused, StateMismatch, WrongUse
from halfstep.precision.conversion import count_rows, eligible_layers
from halfstep.precision.converted import find_converted_layers, restore_layers
from halfstep.precision.island import is_island, island, make_temporary_islands, remove_island
from halfstep.precision.names import FP8_KINDS, parse_precision
from halfstep.precision.policy import apply_policy, resolve_policy
from halfstep.precision.precision import resolve_precision_name

pytest.importorskip("torchao")

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rows: int = 48) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepper(precision: Any, model: nn.Module | None = None, **options: Any) -> Stepper:
    model = Model() if model is None else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = resolve_precision_name(parse_precision(precision).name)
        return Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=given, **options)


# -- eligibility ------------------------------------------------------------------------------------------------------


class Own(nn.Linear):
    pass


def prepared() -> nn.ModuleDict:
    tied = nn.Linear(64, 64)
    layers = nn.ModuleDict(
        {
            "plain": nn.Linear(64, 32),
            "without bias": nn.Linear(64, 32, bias=False),
            "frozen": nn.Linear(32, 64).requires_grad_(False),
            "half blocks": nn.Linear(48, 80),
            "odd inputs": nn.Linear(65, 32),
            "odd outputs": nn.Linear(64, 10),
            "tied": tied,
            "also tied": nn.Linear(64, 64),
            "subclass": Own(64, 64),
            "convolution": nn.Conv2d(16, 16, 3),
            "embedding": nn.Embedding(64, 64),
            "in an island": island(nn.Linear(64, 64)),
        }
    )
    layers["also tied"].weight = tied.weight
    return layers


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("fp8", {"plain", "without bias", "frozen", "half blocks"}), ("mxfp8", {"plain", "without bias", "frozen"})],
)
def test_what_can_be_converted_of_twelve_layers(kind: str, expected: set[str]) -> None:
    table = eligible_layers(prepared(), kind)
    assert len(table) == 12
    assert {row.path for row in table if row.kind == kind} == expected
    assert all(bool(row.reason) != bool(row.kind) for row in table)
    reasons = {row.path: row.reason for row in table}
    assert "K=65" in reasons["odd inputs"]
    assert "N=10" in reasons["odd outputs"]
    assert "tied" in reasons["tied"]
    assert "tied" in reasons["also tied"]
    assert "Own" in reasons["subclass"]
    assert "Conv2d" in reasons["convolution"]
    assert "Embedding" in reasons["embedding"]
    assert "island" in reasons["in an island"]
    assert (table[0].inputs, table[0].outputs) == (64, 32)


def test_shares_are_of_the_counted_work() -> None:
    model = Model()
    with count_rows(model) as rows:
        model(batch(48))
    table = eligible_layers(model, "fp8", rows)
    work = {row.path: 48 * row.inputs * row.outputs for row in table}
    assert {row.rows for row in table} == {48}
    assert {row.path: row.share for row in table} == {p: w / sum(work.values()) for p, w in work.items()}


@pytest.mark.wording
def test_a_model_without_such_a_layer_is_refused() -> None:
    with pytest.raises(PrecisionRefused, match="K=8"):
        stepper("fp8", nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("rows", [(48,), (3, 7)])
def test_an_emulated_layer_is_right_under_autocast(kind: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    x = torch.randn(*rows, 64, requires_grad=True)
    exact = F.linear(x, layer.weight, layer.bias)
    told = torch.randn_like(exact)
    wanted = torch.autograd.grad(exact, (x, layer.weight, layer.bias), told)
    apply_policy(layer, kind, ())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    found = torch.autograd.grad(output, (x, layer.weight, layer.bias), told.bfloat16())
    # A side in e4m3 is 2.6 % off by its roundings, both 3.7 %; a gradient in e5m2, which `fp8` has, 5.2 %, and with the
    # other side 5.9 %. bf16 alone gives 0.3 %.
    assert 0.02 < _distance(output, exact) < 0.045
    for got, right in zip(found[:2], wanted[:2], strict=True):
        in_bf16 = kind == "fp8-rowwise-gw-hp" and got is found[1]
        assert (1e-3 if in_bf16 else 0.02) < _distance(got, right) < (0.07 if kind == "fp8" else 0.045)
    assert _distance(found[2], wanted[2]) < 0.01
    if kind == "fp8-rowwise-gw-hp":
        assert _distance(found[1], wanted[1]) < 0.01


_SEEN: list[int] = []


def _noted(*_: object) -> None:
    _SEEN.append(1)


def _distance(got: Tensor, right: Tensor) -> float:
    return float((got.detach().float() - right.detach()).norm() / right.detach().norm())


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_transposed_input_and_weight_give_the_same(kind: str) -> None:
    x = torch.randn(WIDTH, 64)
    layer = nn.Linear(64, 96)
    turned = copy.deepcopy(layer)
    turned.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    for each in (layer, turned):
        apply_policy(each, kind, ())
    assert torch.equal(turned(x.T), layer(x.T.contiguous()))


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_gradients_of_gradients_are_refused(kind: str) -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).float().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + gradient.square().mean()

    with pytest.raises(WrongUse):
        stepper(kind).step(penalty, batch())


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_conversion_keeps_the_layer_and_is_undone(kind: str) -> None:
    model = Model()
    layer = model.blocks[0].up
    layer.register_forward_hook(_noted)
    _SEEN.clear()
    parameters, attributes = list(model.parameters()), {name: sorted(vars(m)) for name, m in model.named_modules()}
    with torch.no_grad():
        before = model(batch())
    apply_policy(model, kind, ())
    assert set(find_converted_layers(model).values()) == {kind}
    assert len(find_converted_layers(model)) == 5
    assert model.blocks[0].up is layer
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(Model().state_dict())
    with torch.no_grad():
        assert not torch.equal(model(batch()), before)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert all(find_converted_layers(twin) == find_converted_layers(model) for twin in twins)
    restore_layers(model)
    assert type(layer) is nn.Linear
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes
    with torch.no_grad():
        assert torch.equal(model(batch()), before)
    assert len(_SEEN) == 3


def test_one_change_of_precision_undoes_it_and_another_makes_it_again() -> None:
    run = stepper("fp8")
    run.step(loss_fn, batch())
    run.change_precision("fp32")
    assert find_converted_layers(run.model) == {}
    assert run.step(loss_fn, batch()).applied
    run.change_precision("fp8")
    assert len(find_converted_layers(run.model)) == 5


def test_an_island_of_a_converted_layer_is_in_fp32_until_it_is_lifted() -> None:
    model = Model()
    run = stepper("fp8", model)
    run.step(loss_fn, batch())
    x = batch(16)
    exact = F.linear(x, model.head.weight, model.head.bias)
    assert not torch.equal(model.head(x), exact)
    with make_temporary_islands(model, "head"):
        assert torch.equal(model.head(x), exact)
    assert list(find_converted_layers(model))[-1] == "head"
    island(model, "head")
    assert torch.equal(model.head(x), exact)
    run.step(loss_fn, batch())
    assert len(find_converted_layers(model)) == 4
    state = run.state_dict()
    # A resumed run makes its islands before its Stepper.
    other = Model()
    island(other, "head")
    stepper("fp8", other).load_state_dict(state)
    remove_island(model, "head")
    run.step(loss_fn, batch())
    assert len(find_converted_layers(model)) == 5


def test_a_layer_that_comes_later_is_converted() -> None:
    model = Model()
    run = stepper("fp8", model)
    run.step(loss_fn, batch())
    model.head = nn.Linear(WIDTH, 48)
    run.optimizers["loss"].add_param_group({"params": list(model.head.parameters())})
    run.step(loss_fn, batch())
    assert find_converted_layers(model)["head"] == "fp8"


def test_two_steppers_of_one_model_compute_each_in_its_precision() -> None:
    model = Model()
    runs = [stepper(name, model) for name in ("fp8", "bf16", "mxfp8")]
    seen: list[set[str]] = []
    for run in runs * 2:
        run.step(lambda m, x: seen.append(set(find_converted_layers(m).values())) or loss_fn(m, x), batch())  # type: ignore[func-returns-value]
    assert seen == [{"fp8"}, set(), {"mxfp8"}] * 2


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_resumed_run_is_the_same_to_the_bit(kind: str) -> None:
    first, second = stepper(kind), stepper(kind)
    for _ in range(2):
        first.step(loss_fn, batch())
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for run in (first, second):
        run.step(loss_fn, batch())
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_skip_changes_nothing(kind: str) -> None:
    run = stepper(kind)
    run.step(loss_fn, batch())
    before = copy.deepcopy((run.model.state_dict(), run.state_dict()["optimizers"]))
    assert not run.step(lambda model, x: loss_fn(model, x) * float("nan"), batch()).applied
    after = (run.model.state_dict(), run.state_dict()["optimizers"])
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), after[0].values(), strict=True))


@pytest.mark.wording
def test_another_conversion_is_refused() -> None:
    saved = {name: stepper(name).state_dict() for name in ("fp8", "fp8-rowwise", "bf16")}
    for name in saved:
        run = stepper(name)
        for other, state in saved.items():
            if other == name:
                run.load_state_dict(state)
            else:
                with pytest.raises(StateMismatch, match="trained in"):
                    run.load_state_dict(state)
    policy = stepper({"default": "bf16", "head": "fp8"})
    with pytest.raises(StateMismatch):
        policy.load_state_dict(saved["fp8"])


@pytest.mark.wording
def test_a_layer_that_the_user_converted_is_part_of_the_state() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True)
    own = convert_to_float8_training(Model(), config=config, module_filter_fn=lambda _, path: path == "head")
    state = stepper("fp32", own).state_dict()
    assert state["converted"] == {"head": "Float8Linear"}
    with pytest.raises(StateMismatch, match="head was trained in Float8Linear"):
        stepper("fp32").load_state_dict(state)


# -- observation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_the_converted_share_is_observed(kind: str) -> None:
    run = stepper({"default": "bf16", "blocks.*": kind})
    run.step(loss_fn, batch(64))
    seen = run.observed
    assert seen is not None
    # Two products of each block, forward, and two in backward; the first one's input needs a gradient, too.
    one = 2 * 64 * WIDTH * 128
    whole = 2 * 2 * 3 * one
    in_bf16 = 2 * 2 * one if kind.endswith("gw-hp") else 0
    assert sum(seen.fp8.values()) == pytest.approx(whole - in_bf16, rel=0.01)
    assert set(seen.fp8) == {"mxfp8" if kind == "mxfp8" else "fp8"}
    assert seen.flops["bf16"] == pytest.approx(3 * 2 * 64 * WIDTH * 32 + in_bf16, rel=0.01)


# -- policies ---------------------------------------------------------------------------------------------------------

POLICY = {"default": "bf16", "blocks.*": "fp8", "blocks.1.down": "bf16", "*.norm": "fp32", "head": "mxfp8"}


def test_the_last_pattern_that_matches_counts() -> None:
    run = stepper(POLICY)
    assert find_converted_layers(run.model) == {
        "blocks.0.up": "fp8",
        "blocks.0.down": "fp8",
        "blocks.1.up": "fp8",
        "head": "mxfp8",
    }
    assert [is_island(run.model.get_submodule(f"blocks.{i}.norm")) for i in range(2)] == [True, True]
    assert run.step(loss_fn, batch()).applied
    run.change_precision("fp32")
    assert find_converted_layers(run.model) == {}
    assert not is_island(run.model.get_submodule("blocks.0.norm"))


@pytest.mark.wording
@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"output": "fp8"}, "'output' of the policy matches no module"),
        ({"blocks.*.up": "fp8", "blocks.*": "bf16"}, "has no effect"),
        ({"blocks": "fp32", "blocks.0.up": "fp8"}, "inside of it"),
        ({"blocks.*": "fp16"}, "precision of 'blocks.*' is 'fp16'"),
        ({"default": "fp8", "*": "bf16"}, "no layer can be converted to fp8"),
    ],
)
def test_a_pattern_without_effect_is_refused(rules: dict[str, str], words: str) -> None:
    model = Model()
    with pytest.raises(PrecisionRefused, match=words.replace("*", r"\*")):
        stepper({"default": "bf16", **rules}, model)
    assert find_converted_layers(model) == {}


def test_a_policy_has_a_name_that_reads_back() -> None:
    named = resolve_precision_name(parse_precision(POLICY).name)
    assert resolve_precision_name(parse_precision(named.name).name) == named
    assert resolve_policy(Model(), named.converts, named.rules).islands == ("blocks.0.norm", "blocks.1.norm")


@pytest.mark.wording
def test_a_policy_without_a_default_is_refused() -> None:
    with pytest.raises(PrecisionRefused, match="default"):
        parse_precision({"head": "fp8"})


@pytest.mark.wording
def test_nvfp4_is_refused_with_the_reason() -> None:
    with pytest.raises(PrecisionRefused, match="SM100"):
        parse_precision("nvfp4")
