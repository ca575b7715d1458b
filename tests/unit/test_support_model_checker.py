"""The explorer of late calls plays each fault in all ways, and nothing else."""

import pytest

from tests.support.model_checker import Call, Explorer, Faults, Program, disk_of


def remover() -> Program:
    yield Call("mkdir", ("D", "mine", "M"))
    yield Call("rmdir", ("D", "mine"))


@pytest.mark.parametrize(
    ("faults", "n_states"),
    [(Faults(), 3), (Faults(lost=1), 5), (Faults(late=1), 9), (Faults(twice=1), 9), (Faults(stale=1), 3)],
    ids=["none", "lost", "late", "twice", "stale"],
)
def test_a_fault_adds_its_histories_and_no_others(faults: Faults, n_states: int) -> None:
    disk = disk_of({"/": {"d": "D"}, "D": {}})
    assert Explorer([remover], disk, faults, lambda _before, _after: "").explore() == n_states
