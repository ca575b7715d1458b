"""What a sweep chooses, told by its engine and changing nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fusefs.core.names import join
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel, Refused
from fusefs.sweep.request import Here, Request, ToPrint
from fusefs.sweep.run import run


def printed(top: Path, selection: Selection) -> list[bytes]:
    """What is chosen below a directory: relative paths, as often as they are told."""
    told: list[bytes] = []

    def tell(here: Here, names: Sequence[str]) -> Refused:
        told.extend(join(here.upper, os.fsencode(name)) for name in names)
        return []

    swept = run(Kernel(), Request(os.fsencode(top), selection, ToPrint(tell)))
    assert not swept.failures
    assert swept.sums.n_matched == len(told)
    return told
