"""What a plan chooses, from arms whose times are known."""

from __future__ import annotations

import json

import pytest

from halfstep.errors import WrongUse
from halfstep.measure.plan.choice import PlanCell, choose_cell
from halfstep.measure.plan.race import MemoryFit
from halfstep.measure.plan.search import list_eager_settings
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed
from tests.measure.plan.clockwork import A100, PLAIN_CPU, World, cell, key, planned
from tests.support.devices import cuda

FAST = {"fp32": 3.0, "fp32 last": 2.5, "bf16": 1.8, "bf16 last": 1.0, "bf16 last compiled": 1.2, "bf16 compiled": 2.0,
        "bf16 last 2x8": 1.3}  # fmt: skip


def test_the_fastest_is_chosen_with_what_was_measured_of_it() -> None:
    world = World(FAST, noise=0.02)
    plan = planned(world)
    assert plan.choice.setting == StepSetting("bf16", channels_last=True, batch=16)
    assert not plan.stay
    assert plan.choice.speed is not None
    assert plan.choice.speed.speedup == pytest.approx(3.0, rel=0.03)
    assert plan.choice.speed.pairs >= 15
    assert plan.parity.verdict == "holds"
    assert plan.runner_up is not None
    assert key(plan.runner_up.setting) == "bf16 last compiled"
    assert plan.why_not.startswith("2.5")
    assert {key(c.setting) for c in plan.ladder} >= set(FAST)
    assert world.most_open <= 3
    assert plan.changes == {"precision": "bf16", "train.channels_last": True, "train.compile": False,
                            "train.batch_size": 16, "train.microbatches": 1}  # fmt: skip


def test_where_intervals_overlap_the_simpler_is_taken() -> None:
    plan = planned(World({**FAST, "bf16 last": 1.0, "bf16 last compiled": 0.97}, noise=0.2))
    assert key(plan.choice.setting) == "bf16 last"
    assert "overlap" in plan.why_not
    plan = planned(World({**FAST, "bf16 last": 1.0, "bf16 last compiled": 0.5}, noise=0.2))
    assert key(plan.choice.setting) == "bf16 last compiled"


def test_in_one_precision_a_clear_gain_of_the_median_is_enough_though_a_noisy_machine_gives_no_verdict() -> None:
    fp32 = PlanCell(StepSetting("fp32"), Speed(2.8, 1.0, 1.0, 1.0, 6))
    plain = PlanCell(StepSetting("bf16"), Speed(1.43, 1.86, 1.64, 2.00, 6))
    last = PlanCell(StepSetting("bf16", channels_last=True), Speed(1.29, 2.36, 1.98, 2.87, 6))
    compiled = PlanCell(StepSetting("bf16", channels_last=True, compile=True), Speed(1.2, 2.5, 1.82, 2.98, 6))
    assert choose_cell([fp32, plain, last, compiled]) is last
    faster = PlanCell(compiled.setting, Speed(1.05, 2.61, 1.82, 2.98, 6))
    assert choose_cell([fp32, plain, last, faster]) is faster
    few = PlanCell(last.setting, Speed(1.29, 2.36, 1.98, 2.87, 5))
    assert choose_cell([fp32, plain, few]) is plain
    overlapping = PlanCell(StepSetting("bf16"), Speed(1.43, 1.86, 0.99, 2.00, 6))
    assert choose_cell([fp32, overlapping]) is fp32


def test_fp32_is_kept_where_nothing_narrower_is_worth_it() -> None:
    plan = planned(World({"fp32": 1.0, "fp32 last": 1.0, "bf16": 1.5, "bf16 last": 1.4}))
    assert plan.stay
    assert plan.choice.setting == plan.baseline
    assert "0.71x" in plan.reasons["precision"]


def test_a_layout_may_change_where_the_precision_stays() -> None:
    plan = planned(World({"fp32": 2.0, "fp32 last": 1.0, "bf16": 2.5, "bf16 last": 0.95}))
    assert plan.stay
    assert key(plan.choice.setting) == "fp32 last"
    assert "1.1x" in plan.why_not  # bf16 gains five hundredths over what fp32 can do


def test_a_device_without_narrow_formats_stays_and_says_so() -> None:
    plan = planned(World({"fp32": 1.0}), device=PLAIN_CPU, has_images=False)
    assert plan.stay
    assert "no narrower native format" in plan.reasons["precision"]
    assert {cell.setting.precision for cell in plan.ladder} == {"fp32"}
    assert not any(cell.setting.channels_last for cell in plan.ladder)


def test_all_native_formats_of_a_gpu_are_looked_at_and_a_tie_goes_to_the_one_without_a_scale() -> None:
    plan = planned(World({"fp32": 4.0, "tf32 last": 2.0, "bf16 last": 1.0, "fp16 last": 0.98}, noise=0.1), device=A100)
    assert {cell.setting.precision for cell in plan.ladder} == {"fp32", "tf32", "bf16", "fp16"}
    assert key(plan.choice.setting) == "bf16 last"


def test_a_first_step_that_takes_five_times_as_long_is_cut() -> None:
    plan = planned(World({**FAST, "bf16": 50.0}))
    assert cell(plan, "bf16").speed is None
    assert "first step took more than 15 s; strict fp32's took 3 s" in cell(plan, "bf16").cut
    assert key(plan.choice.setting) == "bf16 last"


def test_a_compiler_that_fails_is_a_reason_and_no_error() -> None:
    plan = planned(World(FAST, fails={"bf16 last compiled": "no C++ compiler"}))
    assert cell(plan, "bf16 last compiled").cut == "it does not compile: no C++ compiler"
    assert "a faster setting" in cell(plan, "bf16 compiled").cut
    assert key(plan.choice.setting) == "bf16 last"
    assert "no C++ compiler" in plan.reasons["compile"]


def test_compiling_ends_with_the_time_that_can_be_spared() -> None:
    world = World(FAST, compile_seconds=5000.0)
    plan = planned(world, seconds=400.0)
    assert "compiling took more than" in cell(plan, "bf16 last compiled").cut
    assert world.clock <= 400
    assert plan.choice.speed is not None
    assert plan.choice.speed.pairs >= 12, "there was time left for a final"


def test_what_recomputes_is_not_compiled() -> None:
    plan = planned(World(FAST), recompute=True)
    assert not any(cell.setting.compile for cell in plan.ladder)
    assert plan.choice.setting.recompute


def test_a_layout_that_was_not_measured_stays() -> None:
    plan = planned(World({"fp32 last": 30.0}), seconds=100.0, channels_last=True)
    assert "(not measured: no time was left)" in plan.reasons["layout"]
    assert plan.changes["train.channels_last"] is True


def test_a_layout_of_the_recipe_changes_where_another_one_is_faster() -> None:
    plan = planned(World({"fp32 last": 2.0, "fp32": 1.0}), device=PLAIN_CPU, channels_last=True)
    assert key(plan.choice.setting) == "fp32"


@pytest.mark.wording
def test_a_failing_setting_is_cut_and_a_failing_baseline_is_an_error() -> None:
    plan = planned(World(FAST, fails={"bf16 last": "RuntimeError: no kernel"}))
    assert cell(plan, "bf16 last").cut == "it does not run: RuntimeError: no kernel"
    assert key(plan.choice.setting) == "bf16"
    with pytest.raises(WrongUse, match="IndexError") as refused:
        planned(World(FAST, fails={"fp32": "IndexError: 99"}))
    assert refused.value.do


def test_micro_batches_are_chosen_where_they_gain() -> None:
    plan = planned(World({**FAST, "bf16 last 2x8": 0.8, "bf16 last 4x4": 0.9}))
    assert plan.choice.setting == StepSetting("bf16", channels_last=True, batch=8, microbatches=2)
    assert plan.parity.verdict == "holds"
    assert plan.changes["train.microbatches"] == 2
    assert any("halfstep.windows(loader, 2)" in line for line in plan.python)
    larger = planned(World({"fp32 4x4": 3.0, "bf16 4x4": 1.0, "bf16 2x8": 0.7, "bf16": 0.5, "bf16 8x2": 1.2}),
                     batch=4, microbatches=4, has_images=False)  # fmt: skip
    assert larger.choice.setting == StepSetting("bf16", batch=16)


def test_batch_normalisation_needs_more_than_a_little_gain() -> None:
    times = {**FAST, "bf16 last 2x8": 0.98}
    assert planned(World(times)).choice.setting.microbatches == 2
    assert planned(World(times), has_batch_norm=True).choice.setting.microbatches == 1
    plan = planned(World({**FAST, "bf16 last 2x8": 0.5}), has_batch_norm=True)
    assert plan.choice.setting.microbatches == 2
    assert "batch normalization" in plan.reasons["micro-batches"]


def test_two_pairs_are_no_verdict() -> None:
    base = PlanCell(StepSetting(), Speed(3.0, 1.0, 1.0, 1.0, 9))
    fast = PlanCell(StepSetting("bf16"), Speed(1.0, 3.0, 2.9, 3.1, 2))
    assert choose_cell([base, fast]) is base
    enough = PlanCell(StepSetting("bf16"), Speed(1.0, 3.0, 2.9, 3.1, 3))
    assert choose_cell([base, enough]) is enough


def test_the_most_promising_comes_first() -> None:
    settings = list_eager_settings(StepSetting(batch=4), A100, True)
    assert [key(setting) for setting in settings] == [
        "bf16 last", "fp16 last", "tf32 last", "bf16", "fp16", "tf32", "fp32 last",
    ]  # fmt: skip


def test_fp8_is_measured_where_the_device_has_it_and_a_layer_can_be_converted() -> None:
    h100 = cuda("H100", 9, 0)
    names = {
        (device.name, layers): [
            setting.precision for setting in list_eager_settings(StepSetting(batch=4), device, False, layers)
        ]
        for device in (A100, h100)
        for layers in (0, 5)
    }
    assert [place for place, found in names.items() if "fp8" in found] == [("H100", 5)]


@pytest.mark.parametrize(("seconds", "taken"), [(0.7, "bf16"), (0.25, "fp8")])
def test_fp8_is_taken_only_where_it_is_faster(seconds: float, taken: str) -> None:
    world = World({"fp32": 1.0, "bf16": 0.5, "fp8": seconds})
    plan = planned(world, device=cuda("H100", 9, 0), has_images=False, fp8_layers=5)
    assert plan.choice.setting.precision == taken
    assert plan.reasons["fp8"].startswith("eligible: 5 linear layers; ")
    assert cell(plan, "fp8").speed.speedup == pytest.approx(1.0 / seconds, rel=0.1)


def needs(setting: StepSetting) -> int:
    return (setting.batch or 1) * (200 if setting.precision == "fp32" else 120)


@pytest.mark.wording
def test_what_does_not_fit_is_never_opened() -> None:
    world = World(FAST, fails={"fp32": "must not be opened"})
    plan = planned(world, room=MemoryFit(3500, needs))  # 16 x 200 fits alone, but not with a tenth to spare
    assert "are free" in cell(plan, "fp32").cut
    assert plan.baseline == StepSetting("fp32", batch=8, microbatches=2)
    assert plan.choice.setting.precision == "bf16"
    assert plan.choice.setting.batch in (8, 16)
    with pytest.raises(WrongUse, match="does not fit"):
        planned(World(FAST), room=MemoryFit(100, needs))


def test_a_setting_that_does_not_fit_says_how_much_it_lacks() -> None:
    def greedy(setting: StepSetting) -> int:
        return 30 * 2**30 if key(setting) == "bf16 last" else 2**30

    world = World(FAST)
    plan = planned(world, room=MemoryFit(20 * 2**30, greedy))
    assert cell(plan, "bf16 last").cut == "it would take 30.00 GiB, and 20.00 GiB are free"
    assert "bf16 last" not in world.opened
    assert key(plan.choice.setting) == "bf16"


def test_arms_that_are_open_together_fit_together() -> None:
    world = World(FAST)
    planned(world, room=MemoryFit(6000, needs))  # the baseline and one other, not two
    assert world.most_open == 2


def test_a_prediction_that_fails_cuts_nothing() -> None:
    def unable(setting: StepSetting) -> int:
        raise NotImplementedError

    plan = planned(World(FAST), room=MemoryFit(1, unable))
    assert key(plan.choice.setting) == "bf16 last"
    assert plan.choice.peak is None


def test_memory_that_runs_out_in_the_baseline_makes_it_smaller() -> None:
    plan = planned(World({"fp32 2x8": 3.0, "bf16 2x8": 1.0}, fails={"fp32": "OutOfMemoryError: CUDA out of memory"}),
                   has_images=False)  # fmt: skip
    assert plan.baseline.microbatches == 2
    assert "memory" in cell(plan, "fp32").cut


def test_larger_batches_come_with_a_learning_rate_and_a_warning() -> None:
    plan = planned(World(FAST | {"bf16 last": 1.0}), grow_batch=True, seconds=3000)
    assert plan.growth is not None  # a clockwork update takes as long with 128 samples as with 16
    assert plan.growth.setting.batch == 128
    assert plan.growth.learning_rate == 0.283
    assert plan.growth.speed.speedup == pytest.approx(24, rel=0.01)
    assert "changes the optimization" in plan.growth.note
    assert plan.changes["train.batch_size"] == 128
    assert plan.changes["schedule.warmup_steps"] > 0
    tight = planned(World(FAST), grow_batch=True, optimizer="SGD", room=MemoryFit(8000, needs), seconds=3000)
    assert tight.growth is not None  # 32 samples in bf16 take 3840 beside the baseline's 3200; 64 would take 7680
    assert tight.growth.setting.batch == 32
    assert tight.growth.learning_rate == 0.2
    assert planned(World(FAST)).growth is None


def test_a_plan_is_plain_data() -> None:
    found = json.loads(json.dumps(planned(World(FAST)).as_dict()))
    assert found["choice"]["name"] == "bf16, channels last"
    assert found["interrupted"] is False
    assert len(found["ladder"]) >= 6
