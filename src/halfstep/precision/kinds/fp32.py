from halfstep.formats import FP32
from halfstep.precision.precision import Precision

PRECISION = Precision(
    name="fp32",
    summary="fp32 throughout, with TF32 switched off: the strict baseline",
    computes=FP32,
)
