"""Waiting for a part of the space, or for inodes: it ends when that is there, or with the reason why it will not be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fusefs.core.freed_space import SpaceKeeper, SpaceKept, Survey
from fusefs.core.names import ContainerId
from fusefs.core.space_goal import GoalReached, SpaceGoal, parse_goal
from fusefs.linux.kernel import Kernel
from fusefs.waiting.wait_for_space import FreeSpaceGauge, wait_for_goal

MIB = 1 << 20
TREE = Survey(1000, 64 * MIB, 0, 0, 0, False)


class Volume(Kernel):
    """A kernel that tells the next of some figures at each look, the last one for ever; its clock is moved by pauses.

    The first of each is what was free before.
    """

    def __init__(self, free_mib: Sequence[int] = (100,), free_inodes: Sequence[int] | None = (500,)) -> None:
        self.calls: list[str] = []
        super().__init__(self.calls.append)
        self._mib = list(free_mib)
        self._inodes = None if free_inodes is None else list(free_inodes)
        self.now_s = 0.0

    def free_bytes(self, _fd: int) -> int:
        return _next(self._mib) * MIB

    def free_inodes(self, _fd: int) -> int | None:
        return None if self._inodes is None else _next(self._inodes)

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, goal: str | SpaceGoal, known: Sequence[SpaceKept] = ()) -> GoalReached:
        with self.open_path(b"/dev/shm") as fd:
            return wait_for_goal(
                self,
                fd,
                FreeSpaceGauge(self, fd, clock=lambda: self.now_s),
                goal if isinstance(goal, SpaceGoal) else parse_goal(goal),
                TREE,
                known=known,
                containers=[ContainerId("nobody-has-this-id")],
                clock=lambda: self.now_s,
                pause=self.pause,
            )


def _next(figures: list[int]) -> int:
    return figures.pop(0) if len(figures) > 1 else figures[0]


def test_a_part_that_is_there_is_not_waited_for() -> None:
    volume = Volume([100, 132])
    met = volume.wait("50%")
    assert (met.is_reached, met.waited.came_bytes, met.waited.reasons) == (True, 32 * MIB, ())
    assert (volume.now_s, volume.calls.count("syncfs")) == (0.0, 0)


@pytest.mark.parametrize(("goal", "came_mib"), [("25%", 16), ("20M", 20), ("100%", 62), ("done", 62)])
def test_it_ends_as_soon_as_enough_has_come(goal: str, came_mib: int) -> None:
    met = Volume(range(100, 165)).wait(goal)
    assert met.is_reached
    assert came_mib * MIB <= met.waited.came_bytes <= (came_mib + 2) * MIB


def test_inodes_are_waited_for_by_their_number() -> None:
    volume = Volume([100, 164], [500, 600, 900, 1500])
    met = volume.wait("inodes:1000")
    assert (met.is_reached, met.came_inodes) == (True, 1000)


def test_inodes_that_do_not_come_are_given_up_soon_after_the_blocks() -> None:
    volume = Volume([100, 164], [500, 600])
    met = volume.wait("inodes:1000")
    assert (met.is_reached, met.came_inodes) == (False, 100)
    assert 3 <= volume.now_s < 6


def test_what_nobody_counts_is_not_told() -> None:
    assert Volume([100, 164], None).wait("done").came_inodes is None


def test_what_is_known_to_keep_space_is_a_reason_and_not_waited_for() -> None:
    volume = Volume([100, 110])
    left = SpaceKept(SpaceKeeper.LEFT, 54 * MIB, "in quarantine")
    met = volume.wait("50%", [left])
    assert (met.is_reached, met.waited.reasons) == (False, (left,))
    assert volume.now_s < 5


def test_a_part_that_does_not_come_has_the_reasons_of_the_whole() -> None:
    volume = Volume([100, 110])
    met = volume.wait("50%")
    assert [(reason.kind, reason.n_bytes) for reason in met.waited.reasons] == [(SpaceKeeper.UNKNOWN, 54 * MIB)]
    assert 30 <= volume.now_s < 35
