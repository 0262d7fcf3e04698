"""Random training programs that write tensors in many ways, each as the text of a plain script.

A program has a small model and up to three *items*: something that a step can write (a tensor, a plain attribute),
who holds it, and the writes themselves. Whether a write happens in a step is a field of the batch, so a run with bad
batches and one without them do the same in the steps that they share. Values follow from the batch and from what is
written, never from counters, so the two runs must end equal: `tests/support/write_promise.py` says where they may not.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALL = 4  # rows and columns
LARGE = 257, 1025  # rows of 256 columns: more than 65,536 elements


@torch.library.custom_op("write_programs::pull", mutates_args=("held",))
def pull(held: Tensor, value: Tensor) -> None:
    held.mul_(0.5).add_(value)


# -- the ways to write -------------------------------------------------------------------------------------------------

# {T} is what is written, {v} a number of the batch (a tensor without dimensions, NaN in a bad batch).
IN_PLACE = {
    "mul_ add_": "{T}.mul_(0.5).add_({v})",
    "lerp_": "{T}.lerp_({v}.expand_as({T}), 0.25)",
    "fill_": "{T}.fill_({v})",
    "copy_": "{T}.copy_({T} * 0.5 + {v})",
    "foreach": "torch._foreach_lerp_([{T}], [{v}.expand_as({T})], 0.25)",
    "slice of rows": "{T}[1:].mul_(0.5).sub_({v})",
    "transpose": "{T}.t()[1].mul_(0.5).add_({v})",
    "flat view": "{T}.view(-1)[::2].mul_(-0.5)",
    "detached": "{T}.detach().mul_(0.5).sub_({v})",
    "slice assignment": "{T}[1:3] = {v}",
    "index_put_": "{T}.index_put_((torch.tensor([0, 2]),), {v})",
    "index_add_": "{T}.index_add_(0, torch.tensor([1]), {v}.expand(1, {T}.shape[1]), alpha=0.5)",
    "scatter_": "{T}.scatter_(0, torch.tensor([[2, 1, 0]]), {v}.expand(1, 3))",
    "masked_fill_": "{T}.masked_fill_(torch.eye(*{T}.shape, dtype=torch.bool), {v})",
    "out=": "torch.add({T} * 0.5, {v}, out={T})",
    "out= of a view": "torch.mul({T}[0], -0.5, out={T}[0])",
    "custom operation": "pull({T}, {v})",
    "random": "{T}.uniform_()",
}
THROUGH_DATA = {
    ".data.mul_": "{T}.data.mul_(0.5).add_({v})",
    ".data.copy_": "{T}.data.copy_({T} * 0.5 + {v})",
    ".data[0]": "{T}.data[0] = {v}",
    ".data foreach": "torch._foreach_mul_([{T}.data], -0.5)",
    ".data custom operation": "pull({T}.data, {v})",
}
REPLACING = {
    "set_": "{T}.set_({T}.detach() * 0.5 + {v})",
    ".data =": "{T}.data = {T}.data * 0.5 + {v}",
    "resize_": "{T}.resize_({other_rows} - len({T}), {T}.shape[1]).fill_({v})",
}
REBINDING = {"rebind": "{T} = {T}.detach() * 0.5 + {v}"}
LOADING = {"load_state_dict": '{owner}.load_state_dict({{"{name}": {T} * 0.5 + {v}}})'}
WHOLE_NUMBERS = {"add_ 1": "{T}.add_(1)", "+= 1": "{T} += 1"}
VALUES = {
    "number": ("0.25", "{T} = {T} * 0.5 + float({v})"),
    "bool": ("False", "{T} = not {T}"),
    "string": ('"a"', '{T} = {T} + "b"'),
    "none": ("None", "{T} = {v} if {T} is None else None"),
    "tuple": ('(1, "a", None)', "{T} = (len({T}), {v}, ({v} * 2, True))"),
    "created": ("", "{T} = {v}"),
}
METRIC = {"update": "{T}.update({v})", "reset": "{T}.reset()", "forget": "{T}.forget()"}
METER = {"update": "{T}.update({v})", "update in place": "{T}.total.add_({v})"}
BATCH = {"x.mul_": "x.mul_(0.5)", "x[0] =": "x[0] = x[1]", "x.data.mul_": "x.data.mul_(0.5)"}

BACKWARD = ("tensor hook", "accumulated hook")
PLACES = ("before forward", "after forward", "forward pre-hook", "forward hook", *BACKWARD)


@dataclass(frozen=True)
class Action:
    """One statement, where it stands, and the attempts (of one micro-batch, or of each) in which it runs."""

    how: str
    place: str
    active: tuple[bool, ...]
    micro: int | None = None


@dataclass(frozen=True)
class Item:
    """
    `holder` is who holds it, such as "closure" or "model". `target` is what is held: "tensor" without a module around
    it; "parameter", "trained", "buffer", "attribute", "count" or a plain value of a module; a metric, a meter, a batch.
    `runs`: each step calls the module that holds it. `reads`: each step reads it.
    """

    number: int
    holder: str
    target: str
    actions: tuple[Action, ...]
    rows: int = SMALL
    runs: bool = False
    reads: bool = False

    @property
    def name(self) -> str:
        return f"held{self.number}"

    @property
    def large(self) -> bool:
        return self.rows != SMALL

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, 256 if self.large else SMALL

    @property
    def is_value(self) -> bool:
        return self.target in VALUES


@dataclass(frozen=True)
class Program:
    """`attempts` holds "" for a good step and the kind of failure for a bad one."""

    seed: int
    form: str
    micros: int
    attempts: tuple[str, ...]
    bad_micro: int
    items: tuple[Item, ...]
    precision: str = '"fp32"'
    optimizer: str = "SGD"
    dropout: bool = False
    batch_norm: bool = False
    wide: bool = False

    def __str__(self) -> str:
        options = [name for name in ("dropout", "batch_norm", "wide") if getattr(self, name)]
        lines = [f"program {self.seed}: {self.form} of {self.micros}, {self.precision}, {self.optimizer} {options}"]
        lines.append(f"  attempts {[bad or 'good' for bad in self.attempts]}, bad in micro-batch {self.bad_micro}")
        for item in self.items:
            size = f"large ({item.rows} x 256) " if item.large else ""
            lines.append(f"  {item.name}: {size}{item.target} of {item.holder}, runs={item.runs}, reads={item.reads}")
            for action in item.actions:
                when = "".join("x" if active else "." for active in action.active)
                of = "" if action.micro is None else f" of micro-batch {action.micro}"
                lines.append(f"    {action.how} at {action.place}{of}, active {when}")
        return "\n".join(lines)


# -- drawing a program -------------------------------------------------------------------------------------------------

OUTSIDE = ("closure", "global", "object", "slots", "class", "weakref", "imported", "list", "dict")
IN_MODEL = ("model list", "model dict")
SIDES = (
    "closure",
    "global",
    "object",
    "slots",
    "class",
    "weakref",
    "imported",
    "model list",
    "model hidden",
    "included",
)
FAILURES = ("nan", "nan", "nan", "gradient", "error", "error in backward")


def draw_program(seed: int) -> Program:
    rng = random.Random(seed)
    attempts = _draw_attempts(rng)
    form = rng.choice(("step", "step", "window", "context"))
    micros = 1 if form == "step" else rng.choice((1, 2)) if form == "context" else 2
    precision = rng.choices(('"fp32"', '"fp16"', 'resolve_precision_name("bf16")'), (92, 4, 4))[0]
    if precision == '"fp16"':  # an overflow would lower the loss scale, and other scales round differently
        attempts = tuple("nan" if bad == "gradient" else bad for bad in attempts)
    return Program(
        seed, form, micros, attempts, rng.randrange(micros),
        tuple(_draw_item(rng, number, attempts, micros) for number in range(rng.randint(1, 3))),
        precision, rng.choice(("SGD", "AdamW")),
        dropout=rng.random() < 0.2, batch_norm=rng.random() < 0.3, wide=rng.random() < 0.1,
    )  # fmt: skip


def _draw_attempts(rng: random.Random) -> tuple[str, ...]:
    """Some good steps with a failure among them, or two in a row, or two; in few programs more than ten updates."""
    attempts = [""] * (rng.randint(13, 14) if rng.random() < 0.08 else rng.randint(3, 7))
    failure, place = rng.choice(FAILURES), rng.randrange(len(attempts))
    number = rng.random()
    attempts[place:place] = [failure] if number < 0.7 else [failure, rng.choice(FAILURES)]
    if number > 0.9:
        attempts.insert(rng.randrange(len(attempts)), rng.choice(FAILURES))
    return tuple(attempts)


def _draw_item(rng: random.Random, number: int, attempts: Sequence[str], micros: int) -> Item:
    rows, runs, reads = rng.choices((SMALL, *LARGE), (70, 15, 15))[0], rng.random() < 0.6, rng.random() < 0.4
    family = rng.choices(("model", "side", "tensor", "criterion", "metric", "meter", "batch"), (8, 10, 7, 3, 2, 1, 1))[
        0
    ]
    holder = {
        "model": "model", "side": rng.choice(SIDES), "tensor": rng.choice(OUTSIDE + IN_MODEL), "criterion": "closure",
        "metric": "included", "meter": "included", "batch": "batch",
    }[family]  # fmt: skip
    if family == "model":
        target = rng.choice(("trained", "parameter", "buffer", "buffer", "attribute", "view", "count", "value"))
    elif family in ("side", "criterion"):
        target = rng.choice(("parameter", "buffer", "attribute", "value"))
        runs = runs or family == "criterion"
    else:
        target = family
    if target == "value":
        target = rng.choice(list(VALUES))
    small = target in ("trained", "parameter", "view", "count", "metric", "meter", "batch", *VALUES)
    item = Item(
        number, holder, target, (), SMALL if small else rows, runs and family in ("side", "criterion"),
        reads and target not in ("metric", "meter", "batch", *VALUES),
    )  # fmt: skip
    hows = ways_to_write(item)
    actions = []
    for _ in range(rng.choices((1, 2), (3, 1))[0]):
        group = rng.choice([group for group in hows if group])
        how, places = rng.choice(list(group)), _places(item)
        place = "own forward" if family == "criterion" and "own forward" in places else rng.choice(places)
        if how == "load_state_dict" and place == "own forward":
            place = "before forward"
        micro = rng.choice((None, None, 0, micros - 1))
        actions.append(Action(how, place, _draw_activity(rng, attempts), micro))
    return replace(item, actions=tuple(actions))


def ways_to_write(item: Item) -> tuple[dict[str, str], ...]:
    if item.is_value:
        return ({item.target: VALUES[item.target][1]},)
    if item.target in ("metric", "meter", "batch"):
        return ({"metric": METRIC, "meter": METER, "batch": BATCH}[item.target],)
    if item.target == "count":
        return (WHOLE_NUMBERS, {"rebind": "{T} = {T} + 1"})
    if item.target in ("parameter", "trained"):  # torch does not resize what may require a gradient, nor rebind it
        replacing = {how: text for how, text in REPLACING.items() if how != "resize_"}
        return IN_PLACE, THROUGH_DATA, replacing, LOADING if item.holder != "model" else {}
    if item.target == "view":
        return IN_PLACE, THROUGH_DATA, {".data =": REPLACING[".data ="]}
    loading = LOADING if item.target == "buffer" and item.holder != "model" else {}
    return (
        IN_PLACE,
        IN_PLACE,
        THROUGH_DATA,
        REPLACING,
        REBINDING if item.holder != "weakref" or is_side(item) else {},
        loading,
    )


def _places(item: Item) -> tuple[str, ...]:
    if item.target == "trained":  # not between its use and its gradient: autograd refuses that
        return "before forward", "forward", "forward pre-hook", "accumulated hook"
    if item.target == "batch":
        return ("before forward",)
    places = PLACES + (("forward",) if item.holder.startswith("model") else ())
    return places + (("own forward",) * 3 if item.runs else ())


def is_side(item: Item) -> bool:
    """Whether a module next to the model (or in it, unregistered) holds the item."""
    return item.holder in SIDES and item.target in ("parameter", "buffer", "attribute", *VALUES)


def _draw_activity(rng: random.Random, attempts: Sequence[str]) -> tuple[bool, ...]:
    kind = rng.choice(("always", "from", "from", "some", "bad only", "good only", "every other"))
    start = rng.randrange(len(attempts))
    parity = rng.randrange(2)
    active = {
        "always": lambda n: True,
        "from": lambda n: n >= start,
        "some": lambda n: rng.random() < 0.5,
        "bad only": lambda n: bool(attempts[n]),
        "good only": lambda n: not attempts[n],
        "every other": lambda n: n % 2 == parity,
    }[kind]
    return tuple(active(n) for n in range(len(attempts)))


# -- the script --------------------------------------------------------------------------------------------------------

SKELETON = '''\
"""{about}"""

import dataclasses
import types
import weakref

import torch
from torch import nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from tests.support.write_programs import pull

# For each step: how it fails, or "", and whether each write happens in it.
ATTEMPTS = {attempts}


class Failed(Exception):
    pass


{classes}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
{declared}
    def forward(self, x, active):
        v = x.detach().float().mean()
{forward}
        y = self.last({activation})
        return y{factors}


def build():
{globals}    torch.manual_seed(0)
    model = Net()
    keep, now = [model], {{}}
{setup}
{hooks}
    def loss_fn(model, batch):
{loss_scope}        x, active, bad = batch
        now["active"], now["bad"] = active, bad
        v = x.detach().float().mean()
{used}{before}
        y = model(x, active)
{after}
        if bad == "error":
            raise Failed
        {register}
        loss = y.float().square().mean() / 64
        return loss + (y.float() * 0).sqrt().sum() if bad == "gradient" else loss

    def look(kept=keep):
        return {{{looked}}}

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.{optimizer}(trained, lr={rate})
    stepper = halfstep.Stepper(model, optimizer, precision={precision})
{included}    return stepper, loss_fn, look


def make_batch(number, micro, active, bad):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + micro))
    return x.fill_(float("nan")) if bad == "nan" else x, active, bad


def run(with_bad):
    """Before each step and after the last: the number, the stepper, and a function that returns what may be written."""
    stepper, loss_fn, look = build()
    for number, (bad, flags) in enumerate(ATTEMPTS):
        if bad and not with_bad:
            continue
        yield number, stepper, look
        torch.default_generator.manual_seed(number)
        batches = [make_batch(number, m, flags[m], bad if m == {bad_micro} else "") for m in range({micros})]
        try:
{step}
        except Failed:
            pass
    yield len(ATTEMPTS), stepper, look


if __name__ == "__main__":
    for number, stepper, look in run(True):
        print(number, ATTEMPTS[number] if number < len(ATTEMPTS) else "", look())
    for finding in stepper.findings:
        print(finding)
'''

CLASSES = {
    "object": """
class Box:
    pass
""",
    "metric": '''
class Metric(nn.Module):
    """The states of a torchmetrics metric: tensors that are rebound, and containers."""

    def __init__(self):
        super().__init__()
        self.total, self.updates = torch.zeros(()), 0
        self.values, self.latest, self.lengths = [], {}, set()

    def update(self, value):
        self.total, self.updates = self.total + value, self.updates + 1
        self.values.append(value.clone())
        self.latest["value"] = value.clone()
        self.lengths.add(len(self.values))

    def reset(self):
        self.total, self.values = torch.zeros(()), []

    def forget(self):
        self.values.clear()
        self.latest.clear()
''',
    "meter": '''
class Meter:
    """Not a module; it has a state."""

    def __init__(self):
        self.total, self.updates = torch.zeros(4), 0

    def update(self, value):
        self.total, self.updates = self.total + value, self.updates + 1

    def state_dict(self):
        return {"total": self.total, "updates": self.updates}

    def load_state_dict(self, state):
        self.total, self.updates = state["total"], state["updates"]
''',
}

FORMS = {
    "step": "stepper.step(loss_fn, batches[0])",
    "window": "stepper.step(loss_fn, halfstep.Window(batches))",
    "context": """\
for m, batch in enumerate(batches):
    with stepper.forward(last=m == len(batches) - 1):
        loss = loss_fn(stepper.model, batch)
    stepper.backward(loss)
stepper.apply()""",
}

# How a holder other than the model holds {content} under {name}: the lines that set it up, and how to reach it.
HOLDERS = {
    "closure": ("{name} = {content}", "{name}"),
    "included": ("{name} = {content}", "{name}"),
    "global": ("{name} = {content}", "{name}"),
    "object": ("{name}_box = Box()\n{name}_box.{name} = {content}", "{name}_box.{name}"),
    "slots": (
        '{name}_box = dataclasses.make_dataclass("Slotted", ["{name}"], slots=True)({content})',
        "{name}_box.{name}",
    ),
    "class": ('{name}_box = type("Box", (), {{"{name}": {content}}})', "{name}_box.{name}"),
    "weakref": ("keep.append({content})\n{name} = weakref.ref(keep[-1])", "{name}()"),
    "imported": (
        'globals()["{name}_module"] = types.ModuleType("{name}_module")\n{name}_module.{name} = {content}',
        "{name}_module.{name}",
    ),
    "list": ("{name} = [{content}]", "{name}[0]"),
    "dict": ('{name} = {{"key": {content}}}', '{name}["key"]'),
}
MODEL_HOLDERS = {
    "model list": ("self.{name} = [{content}]", "{name}[0]"),
    "model dict": ('self.{name} = {{"key": {content}}}', '{name}["key"]'),
    "model hidden": ('object.__setattr__(self, "{name}", {content})', "{name}"),
}


def _outer_name(item: Item) -> str:
    """The name under which the holder has it: of the module around it, if there is one."""
    return f"side{item.number}" if is_side(item) else item.name


def reach(item: Item, model: str = "model") -> str:
    """The expression for what is written, outside of the module that holds it."""
    name = _outer_name(item)
    if item.holder == "batch":
        return "x"
    if item.holder == "model":
        return f"{model}.{item.name}"
    if item.holder in MODEL_HOLDERS:
        outer = f"{model}." + MODEL_HOLDERS[item.holder][1].format(name=name)
    else:
        outer = HOLDERS[item.holder][1].format(name=name)
    return f"{outer}.{item.name}" if is_side(item) else outer


def _declare(item: Item) -> str:
    """The line in a module's `__init__`."""
    name, filled = item.name, f"torch.full({item.shape}, 0.5)"
    if item.is_value:
        first = VALUES[item.target][0]
        return f"self.{name} = {first}" if first else "pass"
    return {
        "trained": f"self.{name} = nn.Parameter({filled})",
        "parameter": f"self.{name} = nn.Parameter({filled}, requires_grad=False)",
        "buffer": f'self.register_buffer("{name}", {filled})',
        "view": f'self.register_buffer("{name}", {filled})',
        "count": f'self.register_buffer("{name}", torch.zeros((), dtype=torch.int64))',
        "attribute": f"self.{name} = {filled}",
        "tensor": filled,
    }[item.target]


def _content(item: Item) -> str:
    if is_side(item):
        return f"Side{item.number}()"
    return {"metric": "Metric()", "meter": "Meter()"}.get(item.target) or _declare(item)


class Script:
    """The parts of one program's script."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flags = {}
        for item in program.items:
            for action in item.actions:
                self.flags[id(action)] = len(self.flags)

    def writes(self, place: str, own: Item | None = None) -> str:
        """The statements at a place; for "own forward", those of one module."""
        lines: list[str] = []
        for item in self.program.items:
            if place == "own forward" and item is not own:
                continue
            for action in item.actions:
                if action.place == place:
                    target = (
                        f"self.{item.name}"
                        if place == "own forward"
                        else reach(item, "self" if place == "forward" else "model")
                    )
                    lines += self.statement(item, action, target)
        return "\n".join(lines)

    def statement(self, item: Item, action: Action, target: str) -> Iterator[str]:
        text = next(group[action.how] for group in ways_to_write(item) if action.how in group)
        written = text.format(
            T=target, v="v", name=item.name, owner=target.rpartition(".")[0], other_rows=2 * item.rows + 1
        )
        yield f"if active[{self.flags[id(action)]}]:"
        yield "    with torch.no_grad():"
        yield f"        {written}"

    def scope(self, place: Sequence[str]) -> str:
        """What a function must declare to rebind it."""
        words = {"closure": "nonlocal", "global": "global"}
        return "".join(
            f"{words[item.holder]} {item.name}\n"
            for item in self.program.items
            if item.target == "tensor" and item.holder in words
            if any(action.how == "rebind" and action.place in place for action in item.actions)
        )

    def hook(self, place: str) -> str:
        written = self.writes(place)
        head, value, registered = {
            "forward pre-hook": ("module, args", "args[0]", "model.first.register_forward_pre_hook(before_first)"),
            "forward hook": ("module, args, output", "output", "model.first.register_forward_hook(after_first)"),
            "tensor hook": ("gradient", "gradient", ""),
            "accumulated hook": ("p", "p.grad", "model.last.weight.register_post_accumulate_grad_hook(accumulated)"),
        }[place]
        name = {
            "forward pre-hook": "before_first", "forward hook": "after_first", "tensor hook": "in_backward",
            "accumulated hook": "accumulated",
        }[place]  # fmt: skip
        raises = 'if now["bad"] == "error in backward":\n    raise Failed' if place == "tensor hook" else ""
        if not written and not raises:
            return ""
        body = "\n".join(filter(None, [
            self.scope([place]), f'v, active = {value}.detach().float().mean(), now["active"]', written, raises,
        ]))  # fmt: skip
        return f"def {name}({head}):\n{_indented(body, 1)}\n{registered}\n"

    def side(self, item: Item) -> str:
        return (
            f"\nclass Side{item.number}(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n        {_declare(item)}\n\n"
            f"    def forward(self, x, active):\n        v = x.detach().float().mean()\n"
            f"{_indented(self.writes('own forward', item), 2)}\n        return x + 1\n"
        )

    def attempts(self) -> str:
        """The flags of each micro-batch of each attempt."""
        program = self.program
        actions = [action for item in program.items for action in item.actions]
        lines = []
        for number, bad in enumerate(program.attempts):
            flags = [
                tuple(int(a.active[number] and a.micro in (None, micro)) for a in actions)
                for micro in range(program.micros)
            ]
            lines.append(f"    ({bad!r}, {flags}),")
        return "[\n" + "\n".join(lines) + "\n]"

    def used(self) -> str:
        """The lines that read what each step reads, and call the modules that each step calls."""
        lines = [f"{reach(item)}.sum()" for item in self.program.items if item.reads]
        for item in self.program.items:
            if item.runs:
                lines.append(f"{reach(item).rpartition('.')[0]}(x.detach(), active)")
        return "\n".join(lines)

    def looked(self, item: Item) -> str:
        expression = reach(item)
        if item.target == "created":
            expression = f'getattr({expression.rpartition(".")[0]}, "{item.name}", "missing")'
        if item.target == "view":
            expression = f"({expression}, {item.name}_view)"
        if item.target in ("metric", "meter"):
            expression = f"{{k: v for k, v in vars({expression}).items() if k[0] != '_'}}"
        return f'"{item.name}": {expression}'

    def text(self) -> str:
        program = self.program
        near = [item for item in program.items if item.holder not in ("model", "batch")]
        declared = [_declare(item) for item in program.items if item.holder == "model"]
        setup = []
        for item in near:
            table = MODEL_HOLDERS if item.holder in MODEL_HOLDERS else HOLDERS
            line = table[item.holder][0].format(name=_outer_name(item), content=_content(item))
            (declared if item.holder in MODEL_HOLDERS else setup).append(line)
        setup += [f"{item.name}_view = model.{item.name}[1:]" for item in program.items if item.target == "view"]
        if program.batch_norm:
            declared.append("self.norm = nn.BatchNorm1d(4)")
        if program.wide:
            declared.append("self.rest = nn.ParameterList(nn.Parameter(torch.zeros(2), False) for _ in range(30))")
        activation = "torch.tanh(self.first(x))"
        activation = f"self.norm({activation})" if program.batch_norm else activation
        activation = f"nn.functional.dropout({activation}, 0.25)" if program.dropout else activation
        kinds = {kind for item in near for kind in (item.holder, item.target)}
        classes = [text for kind, text in CLASSES.items() if kind in kinds]
        classes += [self.side(item) for item in near if is_side(item)]
        global_names = [_outer_name(item) for item in near if item.holder == "global"]
        return SKELETON.format(
            about=str(program),
            attempts=self.attempts(),
            classes="\n".join(classes),
            declared=_indented("\n".join(declared), 2),
            forward=_indented(self.writes("forward"), 2),
            activation=activation,
            factors="".join(f" * self.{item.name}" for item in program.items if item.target == "trained"),
            globals=_indented("".join(f"global {name}\n" for name in global_names), 1),
            setup=_indented("\n".join(setup), 1),
            hooks=_indented("\n".join(filter(None, map(self.hook, PLACES[2:]))), 1),
            loss_scope=_indented(self.scope(PLACES[:2]), 2),
            used=_indented(self.used() + "\n", 2),
            before=_indented(self.writes("before forward"), 2),
            after=_indented(self.writes("after forward"), 2),
            register="y.register_hook(in_backward)",
            looked=", ".join(self.looked(item) for item in program.items if item.target != "batch"),
            optimizer=program.optimizer,
            rate="0.5, momentum=0.9" if program.optimizer == "SGD" else "0.05",
            precision=program.precision,
            included=_indented(
                "".join(f"stepper.include({_outer_name(item)})\n" for item in near if item.holder == "included"), 1
            ),
            bad_micro=program.bad_micro,
            micros=program.micros,
            step=_indented(FORMS[program.form], 3),
        )


def _indented(text: str, depth: int) -> str:
    return textwrap.indent(text, "    " * depth)


def script_of(program: Program) -> str:
    return Script(program).text()
