from halfstep.formats import TF32
from halfstep.precision.precision import Precision

PRECISION = Precision(
    name="tf32",
    summary="fp32 weights, products rounded to tf32 inside the tensor cores",
    computes=TF32,
    falls_to="fp32",
)
