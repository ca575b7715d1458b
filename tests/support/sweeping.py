"""Sweeps as the tests ask for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fusefs.core.selection import Selection
from fusefs.core.sweep_result import Swept
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import Act, Request, ToDelete, Wishes
from fusefs.sweep.run import run

ALL = Selection(names=("*",))
EVERY_KIND = Selection(types=frozenset("fdlpsbc"))


def sweep(
    directory: Path,
    selection: Selection = ALL,
    act: Act | None = None,
    *,
    kernel: Kernel | None = None,
    wishes: Wishes | None = None,
    **request: Any,
) -> Swept:
    """Sweep; delete, unless told otherwise."""
    asked = Request(os.fsencode(directory), selection, act or ToDelete(), **request)
    return run(kernel or Kernel(), asked, wishes or Wishes())


def names(directory: Path) -> set[str]:
    """All that is below a directory, as relative paths."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}
