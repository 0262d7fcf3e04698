"""Weights in files: what is written is read back, what does not fit is reported, what could run code is refused."""

from __future__ import annotations

import copy
import io
import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from halfstep.errors import BadData, BadRecipe, StateMismatch, UnknownName, Unsafe
from halfstep.train.freezing import freeze_parts
from halfstep.train.weights import (
    MOST_LINES,
    compute_weights_digest,
    find_infinite_buffers,
    has_finite_weights,
    load_weights,
    save_weights,
)


def network(classes: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, classes))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    model, other = network().to(memory_format=torch.channels_last), network(seed=1)
    assert compute_weights_digest(model) != compute_weights_digest(other)
    save_weights(model, tmp_path / "new" / "a.safetensors", {"epoch": "3"})
    report = load_weights(other, tmp_path / "new" / "a.safetensors")
    assert same(model, other)
    assert compute_weights_digest(model) == compute_weights_digest(other)
    assert (report.fitted, report.complete) == (len(model.state_dict()), True)
    with safetensors.safe_open(tmp_path / "new" / "a.safetensors", "pt") as file:
        assert file.metadata()["epoch"] == "3"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.safetensors"]


def test_a_file_that_others_may_read(tmp_path: Path) -> None:
    save_weights(network(), tmp_path / "a.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_shared_sliced_and_empty_tensors(tmp_path: Path) -> None:
    tied = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": tied, "b": nn.Linear(4, 4)})
    model["b"].weight = tied.weight
    whole = torch.arange(10.0)
    state = {**model.state_dict(), "part": whole[2:5], "turned": whole.view(2, 5).t(), "none": torch.empty(0, 3)}
    save_weights(state, tmp_path / "a.safetensors")
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_names_of_wrappers_are_never_written(tmp_path: Path) -> None:
    model = network()
    state = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    save_weights(state, tmp_path / "a.safetensors")
    assert safetensors.torch.load_file(tmp_path / "a.safetensors").keys() == model.state_dict().keys()
    compiled = nn.Module()
    compiled._orig_mod = model  # as torch.compile wraps it
    save_weights(compiled, tmp_path / "b.safetensors")
    assert safetensors.torch.load_file(tmp_path / "b.safetensors").keys() == model.state_dict().keys()


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_weights(network(), path)
    before = path.read_bytes()

    def full(tensor: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfstep.train.weights.content", full)
    with pytest.raises(OSError, match="No space left"):
        save_weights(network(seed=1), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model.", "model.module."])
@pytest.mark.parametrize("nested", ["", "state_dict", "model", "model_state_dict"])
def test_other_peoples_checkpoints(tmp_path: Path, prefix: str, nested: str) -> None:
    model, other = network(), network(seed=1)
    state: dict[str, Any] = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    content = {"epoch": 3, nested: state, "optimizer": {"lr": 0.1}} if nested else state
    torch.save(content, tmp_path / "a.pth")
    assert load_weights(other, tmp_path / "a.pth").complete
    assert same(model, other)


def test_a_model_whose_part_is_named_like_a_wrapper(tmp_path: Path) -> None:
    model, other = (nn.ModuleDict({"model": network(seed=s)}) for s in (0, 1))
    save_weights(model, tmp_path / "a.safetensors")
    assert load_weights(other, tmp_path / "a.safetensors").complete
    assert same(model, other)


class Around(nn.Module):
    """All of it is one part, of a name that wrappers use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.module = network(seed=seed)


class PartlyCompiled(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body, self.head = nn.Module(), nn.Linear(2, 2)
        self.body._orig_mod = network(seed=seed)  # as torch.compile wraps it


@pytest.mark.parametrize("kind", [Around, PartlyCompiled])
def test_a_model_with_the_names_of_wrappers_loads_what_it_saved(tmp_path: Path, kind: type[nn.Module]) -> None:
    model, other = kind(0), kind(1)
    save_weights(model, tmp_path / "a.safetensors")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        other = kind(1)
        assert load_weights(other, tmp_path / name).complete
        assert same(model, other)


class Causal(nn.Module):
    """With a mask of infinities, and with words in its state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.part = network(seed=seed)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(seed))

    def get_extra_state(self) -> dict[str, str]:
        return {"version": "3"}

    def set_extra_state(self, state: dict[str, str]) -> None: ...


def test_infinite_buffers_and_words_in_the_state(tmp_path: Path) -> None:
    model, other = Causal(0), Causal(1)
    assert has_finite_weights(model)
    save_weights(model, tmp_path / "a.safetensors")
    report = load_weights(other, tmp_path / "a.safetensors")
    assert report.complete
    assert report.fitted == len(model.state_dict()) - 1
    assert compute_weights_digest(model) == compute_weights_digest(other)
    assert torch.equal(model.mask, other.mask)


@pytest.mark.wording
@pytest.mark.parametrize(("place", "bad"), [("mask", "nan"), ("weight", "nan"), ("weight", "inf")])
def test_what_is_not_sound_is_known_before_it_is_saved(tmp_path: Path, place: str, bad: str) -> None:
    model = Causal()
    spoiled = model.mask if place == "mask" else model.part[0].weight
    with torch.no_grad():
        spoiled[0, 0] = float(bad)
    assert not has_finite_weights(model)
    save_weights(model, tmp_path / "a.safetensors")
    with pytest.raises(BadData, match=place):
        load_weights(Causal(), tmp_path / "a.safetensors")


@pytest.mark.wording
@pytest.mark.parametrize("bad", ["inf", "-inf"])
def test_a_buffer_that_was_finite_when_the_model_was_built_stays_so(tmp_path: Path, bad: str) -> None:
    """Statistics of batches that overflowed; a mask beside them is infinite on purpose."""
    model = nn.Sequential(Causal(), nn.BatchNorm1d(3))
    infinite = find_infinite_buffers(model)
    assert infinite == {"0.mask"}
    assert has_finite_weights(model, infinite)
    model[1].running_var[1] = float(bad)
    assert not has_finite_weights(model, infinite)
    save_weights(model, tmp_path / "a.safetensors")
    with pytest.raises(BadData, match=r"1\.running_var"):
        load_weights(nn.Sequential(Causal(), nn.BatchNorm1d(3)), tmp_path / "a.safetensors")


def test_narrow_weights_are_widened(tmp_path: Path) -> None:
    torch.save({k: v.to(torch.bfloat16) for k, v in nn.Linear(3, 2).state_dict().items()}, tmp_path / "a.pt")
    model = nn.Linear(3, 2)
    load_weights(model, tmp_path / "a.pt")
    assert model.weight.dtype is torch.float32


@pytest.mark.wording
def test_another_number_of_classes(tmp_path: Path) -> None:
    model, other = network(4), network(7, seed=1)
    save_weights(model, tmp_path / "a.safetensors")
    head = other[3].weight.clone()
    report = load_weights(other, tmp_path / "a.safetensors", partial=True)
    assert "3.weight is 4×8 in the file, 7×8 in the model" in str(report)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[3].weight, head)
    with pytest.raises(StateMismatch, match=r"3\.weight is 4×8"):
        load_weights(network(7), tmp_path / "a.safetensors")


def test_an_encoder_finds_its_place(tmp_path: Path) -> None:
    encoder = network()
    save_weights(encoder, tmp_path / "a.safetensors")
    model = nn.ModuleDict({"encoder": network(seed=1), "decoder": nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))})
    report = load_weights(model, tmp_path / "a.safetensors", partial=True)
    assert report.fitted == len(encoder.state_dict())
    assert same(model["encoder"], encoder)


@pytest.mark.wording
def test_another_model_is_refused_in_few_lines_and_nothing_moves(tmp_path: Path) -> None:
    save_weights(nn.Sequential(*(nn.Linear(3, 3) for _ in range(50))), tmp_path / "a.safetensors")
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    before = compute_weights_digest(model)
    with pytest.raises(StateMismatch) as caught:
        load_weights(model, tmp_path / "a.safetensors", partial=True)
    assert len(str(caught.value).splitlines()) <= MOST_LINES + 3
    assert compute_weights_digest(model) == before


@pytest.mark.wording
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_whole(tmp_path: Path, bad: float) -> None:
    spoiled, model = network(), network(seed=1)
    with torch.no_grad():
        spoiled[3].weight[0, 0] = bad
    save_weights(spoiled, tmp_path / "a.safetensors")
    before = compute_weights_digest(model)
    with pytest.raises(BadData, match=r"first in 3\.weight"):
        load_weights(model, tmp_path / "a.safetensors")
    assert compute_weights_digest(model) == before


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def poisoned(kind: str, canary: Path) -> bytes:
    if kind == "plain pickle":
        return pickle.dumps({"weight": Canary(canary)})
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2), "extra": Canary(canary)}, file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.safetensors"])
@pytest.mark.parametrize("kind", ["plain pickle", "torch zip"])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path, name: str, kind: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(poisoned(kind, canary))
    with pytest.raises(Unsafe) as caught:
        load_weights(nn.Linear(2, 2), tmp_path / name)
    assert caught.value.exit_code == 77
    assert not canary.exists()
    if kind == "plain pickle":
        pickle.loads(poisoned(kind, canary))  # the canary does sing where it is let to
        assert canary.exists()


@pytest.mark.wording
def test_a_compressed_file_is_not_unfolded(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.namelist():
            new.writestr(member, old.read(member))
    with pytest.raises(Unsafe, match="compressed"):
        load_weights(nn.Linear(2, 2), tmp_path / "b.pt")


@pytest.mark.wording
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("cut", ["empty", "short", "garbage"])
def test_damaged_files_are_data_errors(tmp_path: Path, name: str, cut: str) -> None:
    model = nn.Linear(64, 64)
    save_weights(model, tmp_path / "a.safetensors")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    whole = (tmp_path / name).read_bytes()
    damaged = {"empty": b"", "short": whole[: len(whole) // 2], "garbage": b"\x00\xff" * 500}[cut]
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises((BadData, Unsafe)) as caught:
        load_weights(model, tmp_path / name)
    assert caught.value.exit_code in (65, 77)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.wording
def test_a_tensor_that_claims_to_be_huge_costs_nothing(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1).expand(10**6, 10**6), "bias": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(StateMismatch, match="1000000×1000000"):
        load_weights(nn.Linear(2, 2), tmp_path / "a.pt")


@pytest.mark.wording
def test_places_without_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "a.onnx").write_bytes(b"x")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    for name in ("missing.safetensors", "pipe.pt", "a.onnx", "list.pt", "none.pt"):
        with pytest.raises(BadData, match=name):
            load_weights(nn.Linear(2, 2), tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe.pt").stat().st_mode)


def test_a_frozen_part_does_not_move_and_the_rest_does() -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model.add_module("head", nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))
    assert freeze_parts(model, ["encoder"]) == ["encoder is frozen: 120 parameters"]
    average = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    for each in (model, average):
        each.train()
        each(torch.randn(4, 3, 8, 8) + 3).square().mean().backward()
    optimizer.step()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert not {name for name in moved if name.startswith("encoder")}
    assert {"head.0.running_mean", "head.0.num_batches_tracked", "head.1.weight"} <= moved
    assert torch.equal(average.encoder[1].running_mean, before["encoder.1.running_mean"])
    assert isinstance(model.encoder[1], nn.BatchNorm2d)
    assert model.state_dict().keys() == before.keys()


def test_freezing_a_single_parameter_or_a_part_of_a_part() -> None:
    model = network()
    freeze_parts(model, ["0.bias", "1"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.weight", "3.weight", "3.bias"]


@pytest.mark.wording
@pytest.mark.parametrize("name", ["encodr", "", "enc", "encoder.7"])
def test_a_part_that_is_not_there(name: str) -> None:
    model = nn.ModuleDict({"encoder": network(), "decoder": network()})
    with pytest.raises(UnknownName) as caught:
        freeze_parts(model, ["decoder", name])
    assert "encoder, decoder" in caught.value.allowed
    assert all(p.requires_grad for p in model.parameters())
    if name == "encodr":
        assert "did you mean 'encoder'?" in caught.value.do


@pytest.mark.wording
def test_freezing_everything_is_refused() -> None:
    model = nn.ModuleDict({"a": network(), "b": network()})
    with pytest.raises(BadRecipe, match="nothing to train"):
        freeze_parts(model, ["a", "b"])
    assert freeze_parts(model, []) == []
    assert all(p.requires_grad for p in model.parameters())
