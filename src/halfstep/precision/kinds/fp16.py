from halfstep.formats import FP16
from halfstep.precision.precision import Precision

PRECISION = Precision(
    name="fp16",
    summary="fp32 weights, fp16 compute, fp32 reduce, loss scaled so that small gradients survive",
    computes=FP16,
    scaled=True,
    falls_to="tf32",
)
