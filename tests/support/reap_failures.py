"""Why entries stayed, as a reap and its quarantine say it."""

from __future__ import annotations

from pathlib import Path

from fusefs.core.lifecycle import State
from fusefs.core.record_decoding import decode
from fusefs.core.report import Reaped
from tests.support.reap_process import state_of
from tests.support.store_verbs import place


def reasons(reaped: Reaped) -> dict[bytes, int]:
    """The errno of each entry that could not be removed, without the directories above it: those are not empty."""
    told = {failure.name: failure.errno for failure in reaped.report.failures}
    assert reaped.report.n_failed >= len(told)
    return {
        name: number
        for name, number in told.items()
        if not any(other.startswith(name + b"/") for other in told if other != name)
    }


def assert_quarantined(volume: Path, reaped: Reaped) -> None:
    """It is in quarantine, and its record says what the report says."""
    assert state_of(volume, reaped.id) is State.QUARANTINE
    record = decode((place(volume, reaped.id) / "record.json").read_bytes())
    assert record.partial
    assert {(one.name, one.errno) for one in record.failures} == {(f.name, f.errno) for f in reaped.report.failures}


def left_in(volume: Path, identifier: str) -> set[str]:
    """What is left of a tree: paths from it, directories that only lead there too."""
    tree = place(volume, identifier) / "tree"
    return {str(path.relative_to(tree)) for path in tree.rglob("*")}
