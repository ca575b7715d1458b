"""The module of calls for many names, where it was built: hatch_build.py."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType


def load() -> ModuleType | None:
    """The module; None where it was not built, is not wanted, or takes names for something else than this Python."""
    if os.environ.get("TRASHD_NATIVE") == "0" or sys.getfilesystemencoding() != "utf-8":
        return None
    try:
        return import_module("fusefs.linux.native._bulk")
    except ImportError:
        return None
