"""The module of calls for many names, where it was built: hatch_build.py."""

from __future__ import annotations

import os
import sys
from types import ModuleType


def load() -> ModuleType | None:
    """The module; None where it was not built, is not wanted, or takes names for something else than this Python."""
    if os.environ.get("TRASHD_NATIVE") == "0" or sys.getfilesystemencoding() != "utf-8":
        return None
    try:
        from fusefs.linux.native import _bulk
    except ImportError:
        return None
    return _bulk
