"""Public data sets for `halfstep data get`. Each module named in `NAMES` is a set.

A module has `ABOUT` (a sentence), `COUNTS` (samples of each split), `fetch(folder, on_progress)`, which downloads into
a folder, `make(downloads, into, on_sample)`, which fills the folder `into`, and `count(folder)`, which opens it as a
recipe would. Torch is imported inside these functions: listing the sets should not wait for it.
"""

NAMES = ("cifar10", "fashion_mnist", "oxford_pets")
