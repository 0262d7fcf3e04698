"""The code that decides a project's precision: each form is found where it is, and nothing that only looks like one."""

from __future__ import annotations

import pytest

from halfstep.doctor.code.mixed_precision import find_mixed_precision

TORCH = "import torch\n"


def lines(code: str, file: str = "train.py") -> tuple[list[int], list[int]]:
    """Return the lines that decide, and those of casts that may be of anything."""
    found = find_mixed_precision({file: code})
    assert all(one.file == file for one in (*found.decisions, *found.casts))
    return [one.line for one in found.decisions], [one.line for one in found.casts]


@pytest.mark.parametrize(
    "code",
    [
        "with torch.autocast('cuda'): pass",
        "with torch.amp.autocast('cuda', dtype=torch.bfloat16, enabled=amp): pass",
        "with torch.cuda.amp.autocast(enabled=cfg.AMP_ENABLE): pass",
        "context = torch.autocast('cuda') if fast else nullcontext()",
        "context = functools.partial(torch.autocast, device_type='cuda')",
        "autocast = torch.cuda.amp.autocast",
        "make = {'amp': torch.autocast, 'fp32': nullcontext}",
        "scaler = torch.amp.GradScaler('cuda')",
        "scaler = torch.cuda.amp.GradScaler(enabled=use_amp)",
        "torch.set_default_dtype(torch.bfloat16)",
        "torch.set_default_dtype({'half': torch.float16, 'full': torch.float32}[kind])",
        "torch.set_default_dtype(DTYPES[kind]); DTYPES['half'] = torch.float16",
        "model = AutoModel.from_pretrained('a', torch_dtype=torch.bfloat16)",
        "model = AutoModel.from_pretrained('a', dtype='bfloat16')",
        "model.half()",
        "self.half()",
        "model = Net().cuda().half()",
        "model = build_model(args).bfloat16()",
        "student.to(device='cuda', dtype=torch.float16)",
        "self.unet.to(torch.bfloat16)",
        "layer.weight.data = layer.weight.data.half()",
    ],
)
def test_code_that_decides_is_found_on_its_line(code: str) -> None:
    assert lines(f"{TORCH}{code}\n") == ([2], [])


@pytest.mark.parametrize(
    "code",
    [
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer)",
        "from torch.distributed.fsdp import MixedPrecision\nMixedPrecision(param_dtype=kind)",
        "from fastai.vision.all import *\nlearner.to_fp16()",
        "from detectron2.config import get_cfg\nfast = get_cfg().SOLVER.AMP.ENABLED",
    ],
)
def test_code_of_other_libraries_is_found(code: str) -> None:
    assert lines(f"{code}\n") == ([2], [])


@pytest.mark.parametrize(
    "code", ["x = x.half()", "return_ = model(x).half()", "mask = (a > b).to(torch.float16)", "y = f(x).bfloat16()"]
)
def test_a_cast_of_what_may_be_any_tensor_is_kept_apart(code: str) -> None:
    assert lines(f"{TORCH}{code}\n") == ([], [2])
    assert lines(f"{TORCH}{code}\nmodel.half()\n") == ([3], [])
    assert lines(f"{TORCH}{code}\nmodel.half()\nwith torch.autocast('cuda'): pass\n") == ([4], [])


@pytest.mark.parametrize(
    "code",
    [
        "# with torch.autocast('cuda'): model.half()",
        "'''with torch.autocast('cuda'): model.half()'''",
        "print('torch.autocast and GradScaler(), model.half()')",
        "with torch.autocast('cuda', enabled=False): pass",
        "with torch.autocast('cuda', dtype=torch.float32): pass",
        "scaler = torch.amp.GradScaler('cuda', enabled=False)",
        "with accelerator.autocast(): pass",
        "def step(context: torch.autocast) -> None: ...",
        "isinstance(context, torch.autocast)",
        "model = AutoModel.from_pretrained('a', torch_dtype=args.dtype)",
        "model = AutoModel.from_pretrained('a', torch_dtype='auto')",
        "torch.set_default_dtype(torch.float64)\nassert torch.float16",
        "model.to(torch.float32).float()",
        "half(model)",
        "import paddle\nscaler = paddle.amp.GradScaler()",
    ],
)
def test_what_only_looks_like_it_is_not_found(code: str) -> None:
    assert lines(f"{TORCH}{code}\n") == ([], [])


@pytest.mark.parametrize("file", ["tests/a.py", "pkg/testing/a.py", "test_a.py", "a_test.py", "conftest.py", "a.md"])
def test_tests_and_other_files_decide_nothing(file: str) -> None:
    assert lines(f"{TORCH}with torch.autocast('cuda'): model.half()\n", file) == ([], [])


def test_a_file_that_trains_is_named_first_and_every_place_is_counted() -> None:
    opened = f"{TORCH}with torch.autocast('cuda'): pass\n"
    found = find_mixed_precision(
        {
            "bench.py": opened,
            "deep/er/loop.py": f"{opened}loss.backward()\n",
            "train_it.py": f"{opened}scaler = torch.amp.GradScaler('cuda')\nloss.backward()\n",
            "broken.py": "with torch.autocast('cuda':\n",
            "casts.py": "model.half()\n",
        }
    )
    assert [(one.file, one.line) for one in found.decisions] == [
        ("train_it.py", 2), ("deep/er/loop.py", 2), ("bench.py", 2), ("train_it.py", 3),
    ]  # fmt: skip
    assert found.casts == []


def test_a_long_call_shows_the_arguments_that_decide() -> None:
    long = "torch.autocast(device_type=find_the_type_of_this_device(0), dtype=torch.bfloat16, enabled=args.amp)"
    [one] = find_mixed_precision({"a.py": f"{TORCH}with {long}: pass\n"}).decisions
    assert one.code == "autocast(dtype=torch.bfloat16, enabled=args.amp)"
