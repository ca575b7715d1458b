"""How old an orphan is, by clocks of which one may be set: a clock that is set makes nothing due early.

A record tells its time by the wall clock of the process that made it; the service watches that clock against one that
can't be set (CLOCK_BOOTTIME). An age is never told too high, so that it may be told too low for as long as a clock is
wrong.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

STEP_NS = 1_000_000_000
"""A difference below a second is no jump: the two clocks are not read at the same moment, and NTP corrects a little."""
ERAS_MAX = 3
"""Before a jump, until the clock was set right, and since. Of more the oldest two become one."""
_ERAS_READ = 32
"""0.2.0 and 0.3.0 saved up to so many, of three numbers each."""


class Era(NamedTuple):
    """A time in which the wall clock ran undisturbed.

    since_ns  the true time at which it may have begun, that of the last look before; the first began before all records
    ahead_ns  how far the wall clock was ahead of the true time in it, at least; negative if it was behind
    seen_ns   the true time at which it was noticed: the era before may have lasted until then
    spread_ns  by how much more it was ahead at most, where several eras became this one
    """

    since_ns: int
    ahead_ns: int
    seen_ns: int = 0
    spread_ns: int = 0


class Clock(NamedTuple):
    """Both clocks at the last look, and how the wall clock was set while a service watched.

    True time here means: as the wall clock would tell it if it had never been set since the first look.

    wall_ns    CLOCK_REALTIME
    boot_ns    CLOCK_BOOTTIME: runs through suspend, starts at 0 with each boot
    origin_ns  the true time at which boot_ns was 0
    eras       oldest first, never none
    boot       the boot's id: boot_ns of another boot says nothing
    """

    wall_ns: int
    boot_ns: int
    origin_ns: int
    eras: tuple[Era, ...]
    boot: str = ""

    def true_ns(self) -> int:
        """The true time at the last look."""
        return self.origin_ns + self.boot_ns

    def ahead_ns(self) -> int:
        """How far the wall clock is ahead of the true time; negative if it is behind."""
        return self.eras[-1].ahead_ns


class Now(NamedTuple):
    """Now, by both clocks, and what is remembered of the one that may be set.

    wall_ns  CLOCK_REALTIME
    boot_ns  CLOCK_BOOTTIME
    boot     the boot's id: boot_ns of another boot says nothing
    clocks   what services and commands before remember, brought up to now; the one that makes younger counts
    """

    wall_ns: int
    boot_ns: int
    boot: str
    clocks: tuple[Clock, ...] = ()

    def since(self, wall_ns: int, boot_ns: int | None, boot: str) -> int:
        """The time since something, negative for what is from the future: by the clock that can't be set, if that was
        noted in this boot; by the wall clock otherwise, as far as it is not known to have been set.
        """
        if boot_ns is not None and boot == self.boot and boot_ns <= self.boot_ns:
            return self.boot_ns - boot_ns
        return min([self.wall_ns - wall_ns, *(told_age_ns(clock, wall_ns) for clock in self.clocks)])

    def set_ns(self, wall_ns: int, boot_ns: int | None, boot: str) -> int:
        """By how much the wall clock was set forward since then, negative for back; 0 for less than a second."""
        set_ns = self.wall_ns - wall_ns - self.since(wall_ns, boot_ns, boot)
        return set_ns if abs(set_ns) >= STEP_NS else 0

    def cutoff_ns(self, span_ns: int) -> int:
        """The wall time before which all that has a time is so old at least, as far as is known."""
        return min([self.wall_ns - span_ns, *(cutoff_ns(clock, span_ns) for clock in self.clocks)])


class FirstSight(NamedTuple):
    """When the service first saw an orphan, and how old it held it to be then.

    boot_ns  CLOCK_BOOTTIME of this boot
    age_ns   at that moment
    """

    boot_ns: int
    age_ns: int


def started(wall_ns: int, boot_ns: int, boot: str = "", saved: Clock | None = None) -> Clock:
    """The clock at the start of a service.

    saved  what its predecessor saved, if it did. No service watches during a reboot: the wall clock is believed as
           it is, unless it went back: true time never does.
    """
    if saved is None:
        return Clock(wall_ns, boot_ns, wall_ns - boot_ns, (Era(0, 0),), boot)
    if saved.boot == boot and boot_ns >= saved.boot_ns:
        return jumped(saved, wall_ns, boot_ns)
    true_ns = max(saved.true_ns(), wall_ns - saved.ahead_ns())
    return jumped(saved._replace(origin_ns=true_ns - boot_ns, boot_ns=0, boot=boot), wall_ns, boot_ns)


def jumped(clock: Clock, wall_ns: int, boot_ns: int) -> Clock:
    """The clock at a later look of the same boot: in a new era if the wall clock was set meanwhile."""
    looked_ns = clock.true_ns()
    clock = clock._replace(wall_ns=wall_ns, boot_ns=boot_ns)
    ahead_ns = wall_ns - clock.true_ns()
    if abs(ahead_ns - clock.ahead_ns()) < STEP_NS:
        return clock
    return clock._replace(eras=_bounded((*clock.eras, Era(looked_ns, ahead_ns, clock.true_ns()))))


def _bounded(eras: tuple[Era, ...]) -> tuple[Era, ...]:
    """The eras that are remembered. The oldest two become one that makes their orphans as young as either would."""
    while len(eras) > ERAS_MAX:
        first, second, *others = eras
        least_ns = min(first.ahead_ns, second.ahead_ns)
        most_ns = max(first.ahead_ns + first.spread_ns, second.ahead_ns + second.spread_ns)
        eras = (first._replace(ahead_ns=least_ns, spread_ns=most_ns - least_ns), *others)
    return eras


def see(clock: Clock, created_ns: int) -> FirstSight:
    """The first sight of an orphan; keep it as long as the orphan is known."""
    return FirstSight(clock.boot_ns, told_age_ns(clock, created_ns))


class FirstSights:
    """The first sights that have to be remembered: of orphans whose records tell no age, those from the future.

    All others get older by what their records say, and may be looked at anew each time.
    """

    def __init__(self, most: int) -> None:
        """most: so many are remembered; of what is beyond, the wall clock has to come up to it."""
        self._most = most
        self._seen: dict[str, FirstSight] = {}

    def of(self, clock: Clock, identifier: str, created_ns: int) -> FirstSight:
        """The first sight of an orphan, or one that is as good."""
        sight = self._seen.get(identifier) or see(clock, created_ns)
        if sight.age_ns == 0 and len(self._seen) < self._most:
            self._seen[identifier] = sight
        return sight

    def forget(self, identifier: str) -> None:
        """It is gone; one that was not remembered is none."""
        self._seen.pop(identifier, None)


def age_ns(clock: Clock, created_ns: int, sight: FirstSight) -> int:
    """How old an orphan is at least; never negative.

    sight    as `see` gave it in this boot
    Returns  no more than its age at first sight and the time since. No more than its record tells now either, should
             the wall clock have been wrong at first sight and set back; but at least the time since the first sight,
             so that one from the future gets old too.
    """
    since_ns = max(0, clock.boot_ns - sight.boot_ns)
    return min(sight.age_ns + since_ns, max(told_age_ns(clock, created_ns), since_ns))


def told_age_ns(clock: Clock, created_ns: int) -> int:
    """The age by the record's wall time alone: the least of those that the eras allow, 0 if none does.

    None does for a record from the future, or from a time that the wall clock jumped over: another host's clock.
    """
    now_ns = clock.true_ns()
    ends = [*(era.seen_ns for era in clock.eras[1:]), now_ns]
    made = (created_ns - era.ahead_ns for era in clock.eras)  # at the latest
    ages = [
        now_ns - min(made_ns, end_ns)
        for made_ns, era, end_ns in zip(made, clock.eras, ends, strict=True)
        if made_ns - era.spread_ns <= end_ns and (made_ns >= era.since_ns or era is clock.eras[0])
    ]
    return min(ages, default=0)


def cutoff_ns(clock: Clock, span_ns: int) -> int:
    """The wall time before which all that has a time is so old at least, whenever the wall clock was set.

    Of an era that lasted into that span its files may be: where the wall clock was behind in it, they look older than
    they are. Of the eras before nothing is too young, whatever it says.
    """
    now_ns = clock.true_ns()
    ends = [*(era.seen_ns for era in clock.eras[1:]), now_ns]
    ahead = (era.ahead_ns for era, end_ns in zip(clock.eras, ends, strict=True) if end_ns >= now_ns - span_ns)
    return now_ns - span_ns + min(ahead)


def encode(clock: Clock) -> bytes:
    """The clock as a service saves it for the next one: a small JSON object."""
    return json.dumps(clock._asdict()).encode("ascii") + b"\n"


def decode(text: bytes) -> Clock | None:
    """The clock that `encode` wrote, or that of 0.2.0 or 0.3.0; None for anything else: the wall clock is believed."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != set(Clock._fields) or not isinstance(found["boot"], str):
        return None
    raw = found["eras"]
    if (
        not isinstance(raw, list)
        or not 0 < len(raw) <= _ERAS_READ
        or not all(_are_times(era, 3) or (_are_times(era, 4) and era[3] >= 0) for era in raw)
    ):
        return None
    numbers = [found["wall_ns"], found["boot_ns"], found["origin_ns"]]
    if not _are_times(numbers, 3):
        return None
    wall_ns, boot_ns, origin_ns = numbers
    return Clock(wall_ns, boot_ns, origin_ns, _bounded(tuple(Era(*era) for era in raw)), found["boot"])


def _are_times(found: Any, n: int) -> bool:
    """Whether it is a list of that many numbers as a clock has them."""
    return isinstance(found, list) and len(found) == n and all(type(x) is int and abs(x) < 1 << 63 for x in found)
