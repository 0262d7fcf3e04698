"""Write what to paste after a diagnosis: code for the loop of the step, in the words of the library that runs it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from halfstep.guard.diagnosis.explain import CLONE_FIRST, OTHER_LOSS
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
from halfstep.observe.nonfinite_origin import CONSTANT, MINUS_INF

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
# By the function in the user's code: code with a finite result, for its first argument x, its second y, and all that
# follow the first.
_LOGS = ("log", "log2", "log10", "xlogy")
_NORMS = ("norm", "vector_norm", "linalg_vector_norm")
_DIVISIONS = ("div", "true_divide", "floor_divide", "remainder", "fmod")
_CODE: tuple[tuple[tuple[str, ...], str], ...] = (
    (_LOGS, "torch.{name}({x}.clamp(min=1e-6))"),
    (("log1p",), "torch.log1p({x}.clamp(min=-1 + 1e-6))"),
    (("sqrt",), "torch.sqrt({x}.clamp(min=1e-12))"),
    (("rsqrt",), "torch.rsqrt({x}.clamp(min=1e-12))"),
    (("reciprocal",), "1 / {x}.clamp(min=1e-6)"),
    (("pow",), "{x}.clamp(min=1e-6).pow({rest})"),
    (_DIVISIONS, "{x} / {y}.clamp(min=1e-6)"),
    (("lgamma", "digamma"), "torch.{name}({x}.clamp(min=1e-6))"),
    (("exp", "expm1", "exp2"), "torch.{name}({x}.clamp(max=80))"),
    (("acos", "asin", "atanh", "erfinv"), "torch.{name}({x}.clamp(-1 + 1e-6, 1 - 1e-6))"),
    (("logit",), "torch.logit({x}, eps=1e-6)"),
    (_NORMS, "({x}.square().sum({dims}) + 1e-12).sqrt()"),
    (("cdist", "_cdist_forward"), "({x}[:, None] - {y}[None]).square().sum(-1).add(1e-12).sqrt()"),
    (
        ("softmax", "_softmax", "log_softmax", "_log_softmax"),
        "{x}.nan_to_num(neginf=-1e4)   # a row without a mask of -inf",
    ),
    (("std", "std_mean"), "({x}.var({rest}unbiased=False) + 1e-6).sqrt()"),
    (("var", "var_mean"), "{x}.var({rest}unbiased=False)"),
    (("mean",), "{x}.mean({rest}).nan_to_num()"),
    (("sinh", "cosh", "tan"), "torch.{name}({x}.clamp(-10, 10))"),
)


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "div", ast.FloorDiv: "div", ast.Mod: "div", ast.Pow: "pow", ast.Mult: "mul", ast.MatMult: "matmul",
    ast.Add: "add", ast.Sub: "sub",
}  # fmt: skip
_SAME = (_NORMS, ("matmul", "bmm", "mm", "addmm", "baddbmm", "linear", "einsum"))
"""Functions and the operations that torch runs for them."""
_LARGE_BASE = 1e3
"""The base above which a power overflows by its size."""


class _Call(NamedTuple):
    """A call or a division in the user's code."""

    name: str
    x: str = "x"
    y: str = "y"
    rest: str = ""
    """The arguments after the first, each with a comma."""

    @property
    def dims(self) -> str:
        """The dimensions of a norm, among the arguments after the first."""
        if not self.rest:
            return ""
        given = self.rest.removesuffix(", ").split(", ")
        places = [each for each in given if "=" not in each][1:]
        return ", ".join([*places, *(each for each in given if each.startswith(("dim=", "keepdim=")))])


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
            name = getattr(node.func, "attr", getattr(node.func, "id", "")).removesuffix("_")
            own = isinstance(node.func, ast.Attribute) and not _is_namespace(node.func.value)
            arguments = [*([node.func.value] if own and isinstance(node.func, ast.Attribute) else []), *node.args]
            others = [*map(ast.unparse, arguments[1:]), *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords
                    if k.arg not in (None, "unbiased", "correction"))]  # fmt: skip
            x, y = (
                [*map(_unparse, arguments[:2]), "x", "y"][:2] if len(arguments) != 1 else (_unparse(arguments[0]), "y")
            )
            found.append(_Call(name, x, y, "".join(f"{each}, " for each in others)))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            rest = f"{ast.unparse(node.right)}, "
            found.append(_Call(_OPERATORS[type(node.op)], _unparse(node.left), _unparse(node.right), rest))
        elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
            rest = f"{ast.unparse(node.value)}, "
            found.append(_Call(_OPERATORS[type(node.op)], _unparse(node.target), _unparse(node.value), rest))
    return found


def _is_namespace(node: ast.expr) -> bool:
    """Return whether this is torch, a module of it, or what it is imported as."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "np", "nn", "math")


def _unparse(node: ast.expr) -> str:
    text = ast.unparse(node)
    plain = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    return text if isinstance(node, plain) else f"({text})"


def suggest_code(verdict: Verdict, *, loop: Loop, optimizers: Sequence[torch.optim.Optimizer] = ()) -> tuple[str, ...]:
    """Return the lines to paste; empty if the loss scale adjusts by itself."""
    if verdict.cause == WARM_UP:
        return ()
    if verdict.cause == PRECISION:
        return _suggest_precision(verdict, loop)
    if verdict.cause == COMPILER:
        return ('torch.compiler.set_stance("force_eager")   # before the loop',)
    if verdict.cause == DATA:
        return _suggest_data_change(verdict, loop)
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
    for remedy in verdict.remedies:
        if remedy.works and remedy.kind == "island_function":
            where = f", which contains {culprit.line}" if culprit is not None else ""
            return (f"{remedy.target} = halfstep.island({remedy.target})   # after its def{where}: fp32",)
        if remedy.works and remedy.kind == "float_output":
            return (f"{remedy.target}   # in place of model(x), before the loss: fp32",)
    is_tried = any(remedy.kind == "island_function" for remedy in verdict.remedies)
    alone = culprit is not None and culprit.outside is None and not culprit.backward and culprit.in_fp32 is not None
    if culprit is not None and culprit.line and alone and not is_tried:
        return (f"with torch.autocast(device.type, enabled=False):   # around {culprit.line}, on x.float()",)
    for remedy in verdict.remedies:
        if remedy.works and remedy.kind == "precision":
            if remedy.target == "fp32" and loop in _FP32:
                return (_FP32[loop],)
            return (_PRECISIONS[loop].format(name=remedy.target, dtype=_DTYPES.get(remedy.target, "float32")),)
    return ()


_VARIABLE = re.compile(r"\['([A-Za-z_][\w.]*)'\]")


def _suggest_data_change(verdict: Verdict, loop: Loop) -> tuple[str, ...]:
    targets = [remedy.target for remedy in verdict.remedies if remedy.kind == "fix_code"]
    if CLONE_FIRST in targets:
        return ("x = x.clone()   # x: the tensor of the batch, before the first operation that writes into it",)
    if OTHER_LOSS not in targets:
        return _suggest_data_check(verdict.culprit, loop)
    if loop == "stepper":
        return ("guardian.step(loss_fn, batch, again=loss_fn)   # again=: one that can be called twice with a batch",)
    return ("torch.autograd.set_detect_anomaly(True)   # before the loop: names the line in backward",)


_LARGE_INPUT = 10_000.0
"""The limit above which no number of a normalized batch lies."""


def _suggest_data_check(culprit: Culprit | None, loop: Loop) -> tuple[str, ...]:
    outside = "" if culprit is None else culprit.outside or ""
    path = re.sub(r"^the batch(\[\d+\])?", "", outside) if outside.startswith("the batch") else ""
    is_large = culprit is not None and bool(culprit.batch_path)
    path = culprit.batch_path if culprit is not None and is_large else path
    if loop == "torch":
        variable = _VARIABLE.match(path)
        name = "x" if variable is None else variable.group(1) + path[variable.end() :]
    else:
        name = f"batch{path}"
    good = f"{name}.abs().max() < {_LARGE_INPUT:g}" if is_large else f"torch.isfinite({name}).all()"
    if loop in ("torch", "stepper"):
        where = "before the forward pass"
        if outside == CONSTANT and culprit is not None and culprit.line:
            where = f"x: what {culprit.line} uses"
        return (f"if not {good}: continue   # {where}",)
    return (f'assert {good}, "batch"   # in the data set: names the bad sample',)


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
    if name.startswith("nll_loss"):
        return (_write_label_check(calls),)
    if culprit.in_fp32 is not None and culprit.in_fp32 > culprit.limit:
        x = next((call.x for call in calls if _is_same_function(call.name, name)), "x")
        return (f"{x}.float()   # in place of {x} at {culprit.line}: in fp32 the result is in range",)
    if culprit.forward:
        # The backward of a function is made of others, such as a division by its root.
        name = culprit.forward.rpartition(".")[2].removesuffix("_")
        calls = [call for call in calls if _is_same_function(call.name, name)] or calls
    # Of the backward of other functions, the line shows which one it is.
    order = [call for call in calls if call.name == name or not culprit.backward]
    order = [call for call in calls if call.name != "div"] + order if culprit.backward else order
    wanted = [call for call in order if culprit.backward or _is_same_function(call.name, name)]
    for call in (*wanted, _Call(name), _Call(operation)):
        for names, code in _CODE:
            if call.name in names:
                written = _write_call(call, code, culprit)
                return (f"{written}{'' if '#' in written else place}",)
    if culprit.kinds == (MINUS_INF,):
        return (f"x.clamp(min=-1e4){place}",)
    x = _find_target(culprit.line)
    return (f"{x} = torch.nan_to_num({x})   # {f'after {culprit.line}' if culprit.line else 'x: its result'}",)


def _write_call(call: _Call, code: str, culprit: Culprit) -> str:
    """Return code with a finite result for a call, from its template."""
    if call.name in _DIVISIONS:
        code = _write_division(call.y, culprit)
    elif call.name == "pow" and not culprit.backward and culprit.largest_input > _LARGE_BASE:
        code = "{x}.clamp(-1e4, 1e4).pow({rest})"
    elif call.name == "mean" and call.x.isidentifier() and not call.rest:
        code = "{x}.sum() / max({x}.numel(), 1)"
    rest = call.rest or ("y" if call.name == "pow" else "")
    return code.format(name=call.name, x=call.x, y=call.y, rest=rest, dims=call.dims).replace(", )", ")")


def _find_target(place: str | None) -> str:
    """Return the variable that a line of the user's code writes; x if it writes none, or several."""
    file, _, line = (place or "").rpartition(":")
    try:
        tree = ast.parse(linecache.getline(file, int(line or 0)).strip())
    except SyntaxError:
        return "x"
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AugAssign)]
    return ast.unparse(targets[0]) if len(targets) == 1 and not isinstance(targets[0], ast.Tuple) else "x"


_IGNORED = re.compile(r"\bignore_index=([^,]+),")


def _write_label_check(calls: Sequence[_Call]) -> str:
    """Return a condition that a label is not ignored."""
    call = next((call for call in calls if call.name in ("cross_entropy", "nll_loss")), _Call("", y="labels"))
    ignored = _IGNORED.search(call.rest)
    return f"if ({call.y} != {'-100' if ignored is None else ignored.group(1)}).any():   # before the loss"


def _write_division(divisor: str, culprit: Culprit) -> str:
    """Return a division by a divisor that is not 0: a clamp would change negative numbers, and numbers have none."""
    if culprit.divisor == "number" or divisor.startswith("len(") or divisor.endswith(".numel()"):
        return "{x} / max({y}, 1e-6)"
    if culprit.divisor == "count":
        return "{x} / {y}.clamp(min=1)"
    return "{x} / {y}.where({y}.abs() > 1e-6, 1e-6)" if culprit.divisor == "signed" else "{x} / {y}.clamp(min=1e-6)"


def _is_same_function(called: str, operation: str) -> bool:
    """Return whether an operation is what torch runs for a function."""
    if called == operation or any(called in names and operation in names for names in _SAME):
        return True
    return operation.strip("_").startswith(called) and called != "log"
