"""The loops of `benchmarks/real_loops.py`: enough of them, each in a family, and a quick part of them holds."""

from __future__ import annotations

import ast
import sys
import warnings

import pytest

from benchmarks import real_loops
from benchmarks.loops.harness import Broken, Documented, Loop, limit

QUICK = (
    "adamw_fused",
    "sgd_fused_momentum_first_step_nan",
    "schedule_one_cycle",
    "ema_with_layers_frozen_for_a_while",
    "lbfgs_is_refused",
    "moco",
    "byol_through_data",
    "dino",
    "vq_vae_ema_codebook",
    "cycle_gan_chain_and_toggle",
    "wgan_gp_fp16_scale_in_use",
    "gpt_bf16",
    "lora_by_hand",
    "embedding_max_norm",
    "nan_batches_fp16",
    "buffer_minus_zero",
    "buffer_registered_in_forward",
    "ctrl_c_in_backward",
    "error_in_a_guard",
    "lambda_in_the_loop",
    "tuple_is_refused",
    "torchmetrics_in_the_loss_function",
    "unequal_counts_as_one",
    "three_call_form",
    "resume_fp16",
    "state_adamw_into_sgd_is_refused",
    "island_inside_the_model",
    "compile_eager_bf16",
    "checkpoint_not_reentrant_bf16",
    "maml_inner_loop",
    "gnn_with_sparse_adjacency",
    "gradual_unfreezing",
    "jit_load",
    "jit_load_in_three_calls",
)


def test_there_are_enough_loops_in_many_families() -> None:
    loops = real_loops.all_loops()
    assert len(loops) >= 150
    assert len({loop.family for loop in loops.values()}) >= 12


@pytest.mark.wording
def test_the_pages_state_every_limit_in_the_words_of_the_loops() -> None:
    real_loops.all_loops()
    stated = 0
    for path in sorted((real_loops.ROOT / "benchmarks" / "loops").glob("*.py")):
        page = getattr(sys.modules[f"benchmarks.loops.{path.stem}"], "PAGE", "step.md")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == limit.__name__:
                limit(ast.literal_eval(node.args[0]), path.name, page if len(node.args) > 2 else "step.md")
                stated += 1
    assert stated > 20


@pytest.mark.wording
def test_a_quick_part_of_them_holds() -> None:
    known = real_loops.all_loops()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [real_loops.outcome_of(known[name]) for name in QUICK]
    counts = real_loops.counted(rows)
    assert counts["failed"] == 0, [row for row in rows if row["outcome"] == "failed"]
    assert real_loops.in_words(counts) == f"loops={len(QUICK)} held={len(QUICK)} documented=0 failed=0"


def _breaks() -> str:
    raise Broken("2 differ: weight, bias")


def _runs_into() -> str:
    raise KeyError("weight")


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (lambda: "fine", "held"),
        (lambda: Documented("known"), "documented"),
        (_breaks, "failed"),
        (_runs_into, "failed"),
    ],
)
def test_an_outcome_is_what_was_seen(run: object, outcome: str) -> None:
    row = real_loops.outcome_of(Loop("one", "family", run))  # type: ignore[arg-type]
    assert row["outcome"] == outcome
    assert row["evidence"]
