"""The speed of each format on this device, and the precision that `auto` makes of it."""

from __future__ import annotations

from halfstep.precision.probe import measure_speedups
from halfstep.precision.select import choose_precision
from halfstep.selftest.part import PartContext, PartFailed, PartResult, require


def check(place: PartContext) -> PartResult:
    """Measure anew, and hold the choice against it."""
    # Not `fresh=True` in the choice as well: two measurements may differ, and this is about one.
    found = measure_speedups(place.described, fresh=True)
    native = [precision.name for precision in place.native()]
    broken = {name: why for name, why in found.failures.items() if name in native}
    if broken:
        raise PartFailed("; ".join(f"{name} is native here, but {why}" for name, why in broken.items()))
    speeds = {name: found.combined(name) for name in native}
    missing = [name for name, speed in speeds.items() if speed is None and len(native) > 1]
    require(not missing, f"no speed was measured for {', '.join(missing)}")
    chosen = choose_precision(device=place.described, measured=found).precision.name
    require(chosen in native, f"auto chose {chosen}, which is not native here")
    best = max((speed or 1.0 for speed in speeds.values()), default=1.0)
    # The choice prefers bf16 to a slightly faster fp16; anything slower than fp32 would be wrong.
    require((speeds[chosen] or 1.0) >= min(1.0, best), f"auto chose {chosen}, which is slower than fp32 here")
    words = ", ".join(f"{name} {speed:.2f}x" for name, speed in speeds.items() if speed and name != "fp32")
    figures = {"chosen": chosen, "speedups": {name: dict(each) for name, each in found.speedups.items()}}
    return PartResult(f"auto: {chosen}" + (f"; {words}" if words else ""), figures)
