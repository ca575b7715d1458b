"""What stands below a mount's handlers, where all that goes wrong there is the point."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from fusefs.mount.hands import Hands
from fusefs.mount.lasting import Lasting

P = ParamSpec("P")
R = TypeVar("R")


class Broken:
    """A vfs of which nothing works."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.lasting = Lasting()

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error


class AtOnce(Hands):
    """No threads: there is no trio here."""

    async def wait_for(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """At once."""
        return act(*args, **kwargs)
