"""What the rules look at: a script, its autocast, its scalers and its optimizers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from halfstep.doctor.code.autocasts import Autocasts
from halfstep.doctor.code.scalers import Scalers
from halfstep.doctor.code.script import Script, find_receiver, format_variable, parse_script

_OPTIMIZER = re.compile(r"optim|(^|_)opt(_|\d*$)", re.IGNORECASE)
_OWNERS = re.compile(r"accelerator|fabric", re.IGNORECASE)


@dataclass(frozen=True)
class ScriptFacts:
    """A file as the rules see it; the parts are made when the first rule asks."""

    script: Script

    @cached_property
    def autocasts(self) -> Autocasts:
        return Autocasts(self.script)

    @cached_property
    def scalers(self) -> Scalers:
        return Scalers(self.script)

    @cached_property
    def optimizer_steps(self) -> list[tuple[str, ast.Call]]:
        """Return every `optimizer.step()` with its optimizer, scalers' own steps left out."""
        scaled = {one.call for one in self.scalers.calls}
        found = [(find_receiver(call), call) for call in self.script.calls_of_methods("step") if not call.args]
        return [(path, call) for path, call in found if path and call not in scaled and self._is_optimizer(path, call)]

    @cached_property
    def backwards(self) -> list[ast.Call]:
        """Return every call that runs a backward pass."""
        return [call for call in self.script.calls_of_methods("backward") if self._is_backward(call)]

    @property
    def count(self) -> int:
        """Return how many calls there are that rules compare with each other."""
        scaler_calls = len(self.scalers.calls) + len(self.scalers.clips) + len(self.scalers.made)
        return scaler_calls + len(self.backwards) + len(self.autocasts.all)

    def _is_optimizer(self, path: str, call: ast.Call) -> bool:
        assert isinstance(call.func, ast.Attribute)
        made = [one for one in self.script.bindings(call.func.value) if isinstance(one, ast.Call)]
        if any(name.startswith("torch.optim.lr_scheduler.") for one in made for name in self.script.names(one.func)):
            return False
        if any(name.startswith("torch.optim.") for one in made for name in self.script.names(one.func)):
            return True
        return bool(_OPTIMIZER.search(re.split(r"[.\[]", path.replace("]", ""))[-1])) or "optim" in path.lower()

    def _is_backward(self, call: ast.Call) -> bool:
        assert isinstance(call.func, ast.Attribute)
        if "torch.autograd.backward" in self.script.names(call.func):
            return True
        # The backward of a layer of one's own takes gradients; that of a tensor is called with names at most.
        if not call.args:
            return format_variable(call.func.value) not in ("self", "ctx")
        return bool(_OWNERS.search(format_variable(call.func.value) or ""))


@lru_cache(maxsize=1)
def build_script_facts(file: str, text: str) -> ScriptFacts:
    """Return a file as the rules see it; raise the errors of `parse_script`.

    The last one is kept: settings and mistakes are looked for in the same file, one after the other.
    """
    return ScriptFacts(parse_script(file, text))
