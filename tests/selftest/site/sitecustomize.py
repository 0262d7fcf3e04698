"""Python runs this at the start of every process that has this folder on its path: it puts a sabotage in."""

import os

if os.environ.get("SELFTEST_SABOTAGE"):
    from tests.selftest.sabotages import ALL

    ALL[os.environ["SELFTEST_SABOTAGE"]].apply(setattr)
