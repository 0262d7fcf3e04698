from halfstep.formats import BF16
from halfstep.precision.precision import Precision

PRECISION = Precision(
    name="bf16",
    summary="fp32 weights, bf16 compute, fp32 reduce; fp32's range, so no loss scale",
    computes=BF16,
    falls_to="fp16",
)
