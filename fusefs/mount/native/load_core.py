"""The native core's module, where it was built: hatch_build.py."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Final

_NOT_BUILT: Final = (
    "it was not built when trashd was installed: apt install trashd-mount, or install trashd anew with gcc and "
    "python3-dev, and without TRASHD_NATIVE=0"
)


def load() -> ModuleType | str:
    """The module, or why there is none."""
    try:
        return import_module("fusefs.mount.native._core")
    except ModuleNotFoundError:
        return _NOT_BUILT
    except ImportError as error:
        return f"it can't be loaded: {error}"
