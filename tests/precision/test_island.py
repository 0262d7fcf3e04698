"""Islands: fp32 on every way in, and a module that stays what it was."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from halfstep import Ema, Stepper, island, widen
from halfstep.errors import WrongUse
from halfstep.precision.island import find_islands, is_island, mark_inner_islands
from tests.support.models import Coder

HALVES = [torch.float16, torch.bfloat16]


def seen_dtypes(module: nn.Module) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    module.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    return seen


@pytest.mark.parametrize("dtype", HALVES)
def test_casting_a_module_protects_nothing_and_an_island_does(dtype: torch.dtype) -> None:
    plain, protected = nn.Linear(4, 4).float(), island(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype):
        assert plain(torch.ones(1, 4)).dtype is dtype
        out = protected(torch.full((1, 4), 1e30))
    assert out.dtype is torch.float32
    assert torch.isfinite(out).all()


def test_inputs_that_arrive_in_16_bits_are_cast_up() -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor, *, y: dict[str, list[Tensor]], n: Tensor) -> Tensor:
            seen.extend([x.dtype, y["a"][0].dtype, n.dtype])
            return x

    half = torch.ones(2, dtype=torch.float16)
    island(Looks())(half, y={"a": [half]}, n=torch.ones(2, dtype=torch.int64))
    assert seen == [torch.float32, torch.float32, torch.int64]
    assert half.dtype is torch.float16


@pytest.mark.parametrize("entry", ["__call__", "encode", "decode", "forward"])
def test_every_way_in_is_protected(entry: str) -> None:
    coder = island(Coder())
    seen = seen_dtypes(coder.encoder) + seen_dtypes(coder.decoder)
    inner = [seen_dtypes(coder.encoder), seen_dtypes(coder.decoder)]
    with torch.autocast("cpu", torch.bfloat16):
        getattr(coder, entry)(torch.ones(1, 4, dtype=torch.bfloat16))
    assert {d for some in inner for d in some} == {torch.float32}
    assert (coder.name(), coder.width, seen) == ("coder", 4, [])


def test_the_real_autoencoder_of_diffusers() -> None:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=2,
        layers_per_block=1,
    )
    inner = seen_dtypes(vae.encoder.conv_in), seen_dtypes(vae.decoder.conv_in)
    image = torch.randn(1, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        vae.encode(image)
        assert inner[0] == [torch.bfloat16]
        island(vae)
        latents = vae.encode(image).latent_dist.mean
        vae.decode(latents)
        vae(image)
    assert inner[0][1:] == [torch.float32] * 2
    assert inner[1] == [torch.float32] * 2
    assert latents.dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_inside_a_model_the_output_returns_to_what_came_in(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    island(model, "1")
    seen = seen_dtypes(model[1])
    with torch.autocast("cpu", dtype):
        model(torch.randn(2, 4))
        model[1](torch.randn(2, 4))
    assert seen == [dtype, torch.float32]


def test_a_free_standing_loss_stays_wide_and_a_part_of_the_model_settles() -> None:
    class Dice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).sum()

    pixels = torch.full((512, 512), 2.0, dtype=torch.float16)
    assert island(Dice())(pixels).item() == 4 * 512 * 512
    assert torch.isinf(Dice()(pixels))

    model = nn.Sequential(nn.Linear(4, 4), island(nn.LayerNorm(4)), nn.MSELoss())
    island(model[2])
    assert model[1](torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.float32
    mark_inner_islands(model)
    assert model[1](torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    half = torch.ones(2, dtype=torch.float16)
    assert model[2](half, half).dtype is torch.float32


def test_a_function_may_be_an_island() -> None:
    @island
    def dice(x: Tensor, y: Tensor) -> Tensor:
        """Two times the overlap."""
        return 2 * (x @ y) / (x.sum() + y.sum())

    half = torch.ones(300_000, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert dice(half, half).item() == 1.0
    assert dice.__doc__ == "Two times the overlap."


def test_objects_with_insides_of_their_own_are_left_alone() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Pair(NamedTuple):
        a: Tensor
        b: Any

    class Boxes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Pair(x, Box(x)), [x], {"x": x, "i": torch.ones(1, dtype=torch.int64)}

    model = nn.Sequential(Boxes())
    island(model, "0")
    pair, many, named = model(torch.ones(2, dtype=torch.bfloat16))
    assert pair.a.dtype is torch.bfloat16
    assert pair.b.value.dtype is torch.float32
    assert (many[0].dtype, named["x"].dtype, named["i"].dtype) == (torch.bfloat16, torch.bfloat16, torch.int64)


def test_deepcopy_runs_its_own_weights() -> None:
    model = nn.Sequential(island(nn.Linear(4, 4)))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert twin(torch.ones(1, 4)).abs().sum().item() == 0.0
    assert model(torch.ones(1, 4)).abs().sum().item() > 0.0
    assert is_island(twin[0])


def test_pickle_and_torch_save_and_isinstance() -> None:
    model = nn.Sequential(island(nn.Linear(4, 4)), nn.Linear(4, 2))
    for twin in (pickle.loads(pickle.dumps(model)), _saved_and_loaded(model)):
        assert list(find_islands(twin)) == ["0"]
        assert isinstance(twin[0], nn.Linear)
        assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert type(model[0]) is type(island(nn.Linear(2, 2)))


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_nesting_and_exceptions_leave_autocast_as_it_was() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    outer = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Fails()))
    island(outer, "1", "1.1")
    assert list(find_islands(outer)) == ["1"]
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ZeroDivisionError):
            outer(torch.ones(1, 4))
        assert torch.is_autocast_enabled("cpu")
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype is torch.bfloat16


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    graphs = []
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    island(model, "1")

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(model, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(torch.ones(2, 4)), model(torch.ones(2, 4)))
        fast(torch.ones(2, 4))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_gradients_pass_and_weights_stay_wide() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half(), nn.Linear(4, 4))
    island(model, "1")
    assert model[1].weight.dtype is torch.float32
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="bf16", ema=Ema(model))
    before = model[1].weight.detach().clone()
    assert stepper.step(lambda m, x: m(x).float().square().mean(), torch.randn(3, 4)).applied
    assert not torch.equal(model[1].weight, before)


@pytest.mark.wording
def test_modules_that_would_silently_not_be_islands_are_refused() -> None:
    with pytest.raises(WrongUse, match="no weights yet"):
        island(nn.LazyLinear(4))
    hooked = nn.Linear(4, 4)
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    for module in (hooked, torch.compile(nn.Linear(4, 4), backend="eager")):
        with pytest.raises(WrongUse, match="forward set on the instance"):
            island(module)


def test_ordered_dicts_are_containers_too() -> None:
    from collections import OrderedDict

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return OrderedDict(y=self.linear(x["x"]))

    model = nn.Sequential(Reads())
    island(model, "0")
    out = model(OrderedDict(x=torch.ones(1, 4, dtype=torch.float16)))
    assert type(out) is OrderedDict
    assert out["y"].dtype is torch.float16


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4, batch_first=True), lambda: nn.GRU(4, 4)])
def test_recurrent_islands(make: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = island(make())(torch.ones(2, 3, 4, dtype=torch.bfloat16))
    assert out.dtype is torch.float32


@pytest.mark.wording
def test_twice_is_once_and_a_scripted_module_is_refused() -> None:
    linear = island(island(nn.Linear(2, 2)))
    assert type(linear).__mro__[2] is nn.Linear
    with pytest.raises(AttributeError):
        island(nn.Sequential(), "no.such.module")
    with pytest.raises(WrongUse, match="scripted"):
        island(_scripted())


def _scripted() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float8_e4m3fn])
def test_widen(dtype: torch.dtype) -> None:
    assert widen(torch.ones(2).to(dtype)).dtype is torch.float32
    wide = torch.ones(2, dtype=torch.float64)
    assert widen(wide) is wide
