"""Sweeps as the tests ask for them: carried out, or only told."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusefs.core.names import join_path
from fusefs.core.results import Swept
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel, RefusedNames
from fusefs.sweep.request import ActionPlace, ActionRequest, Request, SweepOptions, ToDelete, ToPrint
from fusefs.sweep.run_sweep import run_request

ALL = Selection(names=("*",))
EVERY_KIND = Selection(types=frozenset("fdlpsbc"))


def sweep(
    directory: Path,
    selection: Selection = ALL,
    act: ActionRequest | None = None,
    *,
    kernel: Kernel | None = None,
    wishes: SweepOptions | None = None,
    **request: Any,
) -> Swept:
    """Sweep; delete, unless told otherwise."""
    asked = Request(os.fsencode(directory), selection, act or ToDelete(), **request)
    return run_request(kernel or Kernel(), asked, wishes or SweepOptions())


def names(directory: Path) -> set[str]:
    """All that is below a directory, as relative paths."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def give(top: Path, uid: int) -> Path:
    """Make a user the owner of a tree."""
    for path in (top, *top.rglob("*")):
        os.lchown(path, uid, uid)
    return top


def printed(top: Path, selection: Selection) -> list[bytes]:
    """Return the relative paths below a directory that a sweep prints, each as often as it prints it."""
    paths: list[bytes] = []

    def collect(here: ActionPlace, names: Sequence[str]) -> RefusedNames:
        paths.extend(join_path(here.upper, os.fsencode(name)) for name in names)
        return []

    swept = run_request(Kernel(), Request(os.fsencode(top), selection, ToPrint(collect)))
    assert not swept.failures
    assert swept.sums.n_matched == len(paths)
    return paths
