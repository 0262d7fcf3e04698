"""The fault matrix: each file is a row, which breaks something on purpose and counts how often it was held."""

import os
import tempfile
from pathlib import Path

from tests.support.cpu import described_with_bf16

# Before halfstep is imported, here and in every process of a row, as tests do it: on a CPU without bf16 instructions a
# row that asks for bf16 would be given fp32, and would not have tried what it says.
if "HALFSTEP_CPUINFO" not in os.environ and (_description := described_with_bf16(Path("/proc/cpuinfo"))):
    _described = Path(tempfile.gettempdir()) / f"halfstep-cpuinfo-{os.getuid()}"
    _described.write_text(_description, encoding="utf-8")
    os.environ["HALFSTEP_CPUINFO"] = str(_described)
