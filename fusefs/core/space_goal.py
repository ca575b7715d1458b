"""What a command that gives space back waits for: all that can come, a part of what the trees took, or an amount."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fusefs.core import freed_space
from fusefs.core.freed_space import SpaceCourse, SpaceKeeper, SpaceKept, Survey, Waited, WaitStep
from fusefs.core.sizes import format_size, parse_size

_THOUSANDS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
_SETTLE_S = 3.0
"""How much longer than the blocks the inodes of a reaped tree may take (xfs)."""


class SpaceGoal(NamedTuple):
    """What has to be back before a waiting command ends. With nothing named: all that can come.

    text      as it was typed
    share     of the bytes that the trees took, above 0, at most 1
    n_bytes   so many bytes
    n_inodes  so many inodes
    """

    text: str = "done"
    share: float | None = None
    n_bytes: int | None = None
    n_inodes: int | None = None

    def is_all(self) -> bool:
        """Whether it takes the last of the trees to be gone."""
        return self.share is None and self.n_bytes is None and self.n_inodes is None


ALL = SpaceGoal()


class SpaceCourses(NamedTuple):
    """How the bytes and the inodes of a volume went; None for inodes where the filesystem doesn't count them."""

    space: SpaceCourse
    inodes: SpaceCourse | None

    def came_inodes(self) -> int | None:
        """The most that were free at a time, above those before."""
        return None if self.inodes is None else max(self.inodes.came(), 0)


class GoalReached(NamedTuple):
    """What became of a goal.

    waited       of the space: what came, and what keeps the rest
    came_inodes  None where the filesystem doesn't count them
    """

    goal: SpaceGoal
    is_reached: bool
    waited: Waited
    came_inodes: int | None


def parse_goal(text: str) -> SpaceGoal:
    """A goal from `done`, `50%`, `100G` (as sizes are typed) or `inodes:1M` (counted in thousands).

    Raises  ValueError with a message for the person who typed it
    """
    typed = text.strip().lower()
    if typed == "done":
        return ALL
    import re  # who waits for all has no need of it

    if share := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", typed, re.ASCII):
        percent = float(share[1])
        if not 0 < percent <= 100:
            raise ValueError(f"{text!r} is not a part of the space: write 1% to 100%")
        return SpaceGoal(typed, share=percent / 100)
    if count := re.fullmatch(r"inodes:([0-9]{1,15}(?:\.[0-9]{1,6})?)([kmg]?)", typed, re.ASCII):
        n_inodes = int(float(count[1]) * _THOUSANDS[count[2]])
        if n_inodes > 0:
            return SpaceGoal(typed, n_inodes=n_inodes)
    else:
        try:
            n_bytes = parse_size(typed)
        except ValueError:
            n_bytes = 0
        if n_bytes > 0:
            return SpaceGoal(typed, n_bytes=n_bytes)
    raise ValueError(f"{text!r} is nothing to wait for: write 50%, 100G, inodes:1M or done")


def wanted_bytes(goal: SpaceGoal, survey: Survey) -> int | None:
    """The bytes that a goal asks for; None if it asks for none in particular.

    survey  of the trees before they were reaped
    """
    return goal.n_bytes if goal.share is None else math.ceil(goal.share * survey.n_bytes)


def is_reached(goal: SpaceGoal, survey: Survey, courses: SpaceCourses) -> bool:
    """Whether what is waited for is there; never for a goal of all: that takes the end of the trees."""
    wanted = wanted_bytes(goal, survey)
    if wanted is not None:
        return courses.space.came() >= wanted
    return goal.n_inodes is not None and (courses.came_inodes() or 0) >= goal.n_inodes


def decide_goal(
    goal: SpaceGoal,
    survey: Survey,
    courses: SpaceCourses,
    reasons: Sequence[SpaceKept],
    now_s: float,
    patience_s: float,
) -> WaitStep:
    """Say whether to wait on when the trees are gone; arguments as for `freed_space.decide`."""
    if is_reached(goal, survey, courses):
        return WaitStep.DONE
    step = freed_space.decide(courses.space, survey.n_bytes, reasons, now_s, patience_s)
    if step is WaitStep.DONE and goal.n_inodes is not None:
        grown_at_s = max(course.grown_at_s for course in courses if course is not None)
        return WaitStep.KEEP_WAITING if now_s - grown_at_s < min(patience_s, _SETTLE_S) else WaitStep.GIVE_UP
    return step


def conclude_goal(goal: SpaceGoal, survey: Survey, courses: SpaceCourses, waited: Waited) -> GoalReached:
    """What became of a goal when the waiting for it has ended; a part of the space is there if all of it is."""
    came_inodes = courses.came_inodes()
    if goal.is_all() or (goal.share is not None and waited.is_complete):
        return GoalReached(goal, waited.is_well(), waited, came_inodes)
    if is_reached(goal, survey, courses):
        return GoalReached(goal, True, waited._replace(reasons=()), came_inodes)
    if waited.is_complete:
        less = SpaceKept(SpaceKeeper.LESS, 0, f"what was swapped away is gone, and took {format_size(survey.n_bytes)}")
        waited = waited._replace(reasons=(less,))
    return GoalReached(goal, False, waited, came_inodes)


def explain_impossible(goal: SpaceGoal, survey: Survey) -> SpaceKept | None:
    """Why these trees can't give what a goal asks for; None if they can, or if that is not known.

    Its bytes are those that will be missing at least; 0 of inodes
    """
    if survey.n_failed or survey.is_at_least:
        return None  # there is more in them than could be counted
    most = survey.n_bytes - survey.linked_bytes
    wanted = wanted_bytes(goal, survey)
    if wanted is not None and wanted - freed_space.tolerance_bytes(wanted) > most:
        what = f"what was swapped away takes {format_size(survey.n_bytes)}"
        if survey.linked_bytes:
            what += f", and other names outside keep {format_size(survey.linked_bytes)}"
        return SpaceKept(SpaceKeeper.LESS, wanted - most, what)
    if goal.n_inodes is not None and goal.n_inodes > survey.n_entries:
        return SpaceKept(SpaceKeeper.LESS, 0, f"what was swapped away has {survey.n_entries:,} entries")
    return None
