"""An autoencoder whose activations fp16 cannot hold, in fewer steps than benchmarks/latent_overflow.py takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.latent_overflow import autoencoder_folder, denoised

STEPS = 8
FORCED = "model.autoencoder_island=never"


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, made = autoencoder_folder(tmp_path_factory.mktemp("overflowing"))
    assert made["activations_times"] > 1e4
    assert made["latents_apart"] < 1e-4, "it must compute what it did before"
    return folder


@pytest.mark.wording
def test_forced_into_fp16_it_fails_and_the_guard_names_it_and_its_island(autoencoder: Path, tmp_path: Path) -> None:
    found = denoised(tmp_path, "without", autoencoder, STEPS, FORCED, "guard.mode=watch")
    assert found["ended"] == "diverged"
    assert "autoencoder.encoder.conv_in" in found["said"]
    assert "an island around autoencoder.encoder is finite" in found["said"]


def test_the_guard_places_the_island_by_itself(autoencoder: Path, tmp_path: Path) -> None:
    found = denoised(tmp_path, "repaired", autoencoder, STEPS, FORCED, "guard.mode=repair")
    assert found["ended"] == "trained"
    (remedy,) = found["remedies"]["placed"]
    assert (remedy["kind"], remedy["target"]) == ("island", "autoencoder.encoder")


def test_as_the_recipe_has_it_nothing_is_skipped(autoencoder: Path, tmp_path: Path) -> None:
    found = denoised(tmp_path, "with", autoencoder, STEPS)
    assert (found["ended"], found["steps"], found["skipped"]) == ("trained", STEPS, {})
