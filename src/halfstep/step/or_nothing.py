"""The end of a window that an error came into."""

from __future__ import annotations

from collections.abc import Callable


class OrNothing:
    """An error inside, whatever it is, ends the window as if it had never begun, and passes on."""

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._abandon = abandon

    def __enter__(self) -> None: ...

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._abandon()
