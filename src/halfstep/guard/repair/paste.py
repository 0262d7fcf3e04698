"""Write what to paste after a diagnosis: code for the loop of the step, in the words of the library that runs it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from halfstep.guard.verdict import (
    CODE,
    COMPILER,
    DATA,
    DIVERGENCE,
    NOT_REPRODUCIBLE,
    PRECISION,
    STATE,
    WARM_UP,
    Culprit,
    Verdict,
)
from halfstep.observe.nonfinite_origin import MINUS_INF

Loop = Literal["torch", "stepper", "lightning", "transformers", "accelerate"]
"""Who runs the loop: plain torch, `halfstep.Stepper`, or another library through its adapter."""

_PRECISIONS: dict[Loop, str] = {
    "torch": "with torch.autocast(device.type, dtype=torch.{dtype}):   # around the forward pass",
    "stepper": 'halfstep.Stepper(model, optimizer, precision="{name}")',
    "lightning": 'HalfstepPrecision("{name}")   # plugins= and callbacks= of the Trainer',
    "transformers": "TrainingArguments(output_dir, {name}=True)",
    "accelerate": 'Accelerator(mixed_precision="{name}")',
}
_FP32: dict[Loop, str] = {
    "torch": "with torch.autocast(device.type, enabled=False):   # around the forward pass: fp32",
    "transformers": "TrainingArguments(output_dir, bf16=False, fp16=False)",
    "accelerate": 'Accelerator(mixed_precision="no")',
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# By the function in the user's code: code with a finite result, for its first argument x and its second y.
_LOGS = ("log", "log2", "log10", "xlogy")
_CODE: tuple[tuple[tuple[str, ...], str], ...] = (
    (_LOGS, "torch.{name}({x}.clamp(min=1e-6))"),
    (("log1p",), "torch.log1p({x}.clamp(min=-1 + 1e-6))"),
    (("sqrt",), "torch.sqrt({x}.clamp(min=1e-12))"),
    (("rsqrt",), "torch.rsqrt({x}.clamp(min=1e-12))"),
    (("reciprocal",), "1 / {x}.clamp(min=1e-6)"),
    (("pow",), "{x}.clamp(min=1e-6).pow({y})"),
    (("div", "true_divide", "floor_divide", "remainder", "fmod"), "{x} / {y}.clamp(min=1e-6)"),
    (("exp", "expm1", "exp2"), "torch.{name}({x}.clamp(max=80))"),
    (("acos", "asin", "atanh", "erfinv"), "torch.{name}({x}.clamp(-1 + 1e-6, 1 - 1e-6))"),
    (("logit",), "torch.logit({x}, eps=1e-6)"),
    (("norm", "vector_norm", "linalg_vector_norm", "cdist", "_cdist_forward"), "({x}.square().sum(-1) + 1e-12).sqrt()"),
    (
        ("softmax", "_softmax", "log_softmax", "_log_softmax"),
        "{x}.nan_to_num(neginf=-1e4)   # a row without a mask of -inf",
    ),
    (("std", "std_mean", "var", "var_mean"), "{x}.var(unbiased=False).add(1e-6)   # .sqrt() for std"),
    (("mean",), "{x}.sum() / max({x}.numel(), 1)"),
    (("nll_loss", "nll_loss_forward", "nll_loss2d_forward"), "if (labels != -100).any():   # before the loss"),
    (("sinh", "cosh", "tan"), "torch.{name}({x}.clamp(-10, 10))"),
)


class _Call(NamedTuple):
    """A call or a division in the user's code."""

    name: str
    x: str = "x"
    y: str = "y"


def _list_calls(place: str | None) -> list[_Call]:
    """Return the calls and divisions in a line of the user's code, `file:line`; none where it cannot be parsed."""
    file, _, line = (place or "").rpartition(":")
    if not file or not line.isdigit():
        return []
    try:
        tree = ast.parse(linecache.getline(file, int(line)).strip())
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            own = isinstance(node.func, ast.Attribute) and not _is_namespace(node.func.value)
            arguments = [*([node.func.value] if own and isinstance(node.func, ast.Attribute) else []), *node.args]
            found.append(_Call(name, *map(_unparse, arguments[:2])))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            found.append(_Call("div", _unparse(node.left), _unparse(node.right)))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            found.append(_Call("pow", _unparse(node.left), _unparse(node.right)))
    return found


def _is_namespace(node: ast.expr) -> bool:
    """Return whether this is torch, a module of it, or what it is imported as."""
    return ast.unparse(node).split(".")[0] in ("torch", "F", "np", "nn", "math")


def _unparse(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"


def suggest_code(verdict: Verdict, *, loop: Loop, optimizers: Sequence[torch.optim.Optimizer] = ()) -> tuple[str, ...]:
    """Return the lines to paste; empty if the loss scale adjusts by itself."""
    if verdict.cause == WARM_UP:
        return ()
    if verdict.cause == PRECISION:
        return _suggest_precision(verdict, loop)
    if verdict.cause == COMPILER:
        return ('torch.compiler.set_stance("force_eager")   # before the loop',)
    if verdict.cause == DATA:
        return _suggest_data_check(verdict.culprit, loop)
    if verdict.cause == DIVERGENCE:
        return _suggest_rate(optimizers)
    if verdict.cause == STATE:
        return ('model.load_state_dict(torch.load("CHECKPOINT", weights_only=True))   # from before this step',)
    if verdict.cause == NOT_REPRODUCIBLE:
        return ("torch.use_deterministic_algorithms(True)   # before the loop: names an operation that is not",)
    return _suggest_change(verdict.culprit) if verdict.cause == CODE else ()


def _suggest_precision(verdict: Verdict, loop: Loop) -> tuple[str, ...]:
    for remedy in verdict.remedies:
        if remedy.works and remedy.kind == "island":
            target = f', "{remedy.target}"' if remedy.target else ""
            place = "after the model is built" if loop in ("torch", "stepper") else "before the trainer gets the model"
            return (f"halfstep.island(model{target})   # {place}: computes it in fp32",)
        if remedy.kind == "fix_code":
            return (f"# {remedy.target}",)
    culprit = verdict.culprit
    if culprit is not None and culprit.outside is None and culprit.line and not culprit.backward:
        return (f"loss = halfstep.island(criterion)(output, target)   # the function that contains {culprit.line}",)
    for remedy in verdict.remedies:
        if remedy.works and remedy.kind == "precision":
            if remedy.target == "fp32" and loop in _FP32:
                return (_FP32[loop],)
            return (_PRECISIONS[loop].format(name=remedy.target, dtype=_DTYPES.get(remedy.target, "float32")),)
    return ()


_VARIABLE = re.compile(r"\['([A-Za-z_][\w.]*)'\]")


def _suggest_data_check(culprit: Culprit | None, loop: Loop) -> tuple[str, ...]:
    outside = "" if culprit is None else culprit.outside or ""
    path = re.sub(r"^the batch(\[\d+\])?", "", outside) if outside.startswith("the batch") else ""
    if loop == "torch":
        variable = _VARIABLE.match(path)
        name = "x" if variable is None else variable.group(1) + path[variable.end() :]
    else:
        name = f"batch{path}"
    if loop in ("torch", "stepper"):
        return (f"if not torch.isfinite({name}).all(): continue   # before the forward pass",)
    return (f'assert torch.isfinite({name}).all(), "batch"   # in the data set: names the bad sample',)


def _suggest_rate(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, ...]:
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    rate = f"{max(rates) / 10:.3g}" if rates else 'group["lr"] / 10'
    return (f'for group in optimizer.param_groups: group["lr"] = {rate}   # with weights from before the divergence',)


def _suggest_change(culprit: Culprit | None) -> tuple[str, ...]:
    if culprit is None:
        return ("torch.autograd.set_detect_anomaly(True)   # before the loop: names the line in backward",)
    place = f"   # {culprit.line}" if culprit.line else ""
    operation = culprit.operation.rpartition(".")[2]
    name = operation.removesuffix("_").removesuffix("_backward")
    calls = _list_calls(culprit.line)
    # The backward of a function is made of others, such as the division by a root: the line shows which one it is.
    order = [call for call in calls if call.name == name or not culprit.backward]
    order = [call for call in calls if call.name != "div"] + order if culprit.backward else order
    wanted = [call for call in order if culprit.backward or _is_same_function(call.name, name)]
    for call in (*wanted, _Call(name), _Call(operation)):
        for names, code in _CODE:
            if call.name in names:
                written = code.format(name=call.name, x=call.x, y=call.y)
                return (f"{written}{'' if '#' in written else place}",)
    if culprit.kinds == (MINUS_INF,):
        return (f"x.clamp(min=-1e4){place}",)
    return (f"x = torch.nan_to_num(x)   # before {culprit.line}" if culprit.line else "x = torch.nan_to_num(x)",)


def _is_same_function(called: str, operation: str) -> bool:
    """Return whether an operation is what torch runs for a function."""
    return called == operation or (operation.strip("_").startswith(called) and called != "log")
