"""Read settings from every place that a precision can come from, a file for each kind. Imports no torch."""

from halfstep.doctor.sources.accelerate import (
    DISTRIBUTED,
    NOT_GIVEN,
    POLICIES,
    WORDS,
    find_default_config,
    from_accelerate,
    has_unquoted_boolean,
)
from halfstep.doctor.sources.deepspeed import from_deepspeed
from halfstep.doctor.sources.environment import MIXED_PRECISION, ON, TORCH_TF32, USE_CPU, from_environment
from halfstep.doctor.sources.reading import CLIPPING, LEARNING_RATE
from halfstep.doctor.sources.recipe import from_recipe

__all__ = [
    "CLIPPING",
    "DISTRIBUTED",
    "LEARNING_RATE",
    "MIXED_PRECISION",
    "NOT_GIVEN",
    "ON",
    "POLICIES",
    "TORCH_TF32",
    "USE_CPU",
    "WORDS",
    "find_default_config",
    "from_accelerate",
    "from_deepspeed",
    "from_environment",
    "from_recipe",
    "has_unquoted_boolean",
]
