"""The age of an orphan, computed so that setting the wall clock never makes an orphan expire early.

A record contains the wall time of the process that wrote it. The service compares the wall clock with a clock that
can't be set (CLOCK_BOOTTIME). A computed age is never too high. While the wall clock is wrong, it may be too low.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

STEP_NS = 1_000_000_000
"""A smaller change is not a jump: the two clocks are not read at the same moment, and NTP makes small corrections."""
ERAS_MAX = 3
"""One era before a jump, one until the correction, and one since then. If there are more, the oldest two are merged."""
_ERAS_READ = 32
"""Versions 0.2.0 and 0.3.0 saved up to this many eras, of three numbers each."""


class Era(NamedTuple):
    """A period in which nobody set the wall clock.

    since_ns  the earliest true time at which the era may have begun, that is, the time of the previous check; 0 for
              the first era, which began before all records
    ahead_ns  how far the wall clock was ahead of true time, at least; negative if it was behind
    seen_ns   the true time at which the era was noticed: the era before may have lasted until then
    spread_ns  how much further ahead the wall clock may have been, if several eras were merged into this one
    """

    since_ns: int
    ahead_ns: int
    seen_ns: int = 0
    spread_ns: int = 0


class Clock(NamedTuple):
    """Both clocks at the last check, and the known changes of the wall clock.

    True time here means the wall time as it would be if nobody had set the clock since the first check.

    wall_ns    CLOCK_REALTIME
    boot_ns    CLOCK_BOOTTIME: includes suspend, starts at 0 with each boot
    origin_ns  the true time at which boot_ns was 0
    eras       oldest first, never empty
    boot       the boot id: boot_ns values of different boots can't be compared
    """

    wall_ns: int
    boot_ns: int
    origin_ns: int
    eras: tuple[Era, ...]
    boot: str = ""

    def true_ns(self) -> int:
        """Return the true time at the last check."""
        return self.origin_ns + self.boot_ns

    def ahead_ns(self) -> int:
        """Return how far the wall clock is ahead of the true time; the result is negative if it is behind."""
        return self.eras[-1].ahead_ns


class Now(NamedTuple):
    """The present time of both clocks, and the saved history of the wall clock.

    wall_ns  CLOCK_REALTIME
    boot_ns  CLOCK_BOOTTIME
    boot     the boot id: boot_ns values of different boots can't be compared
    clocks   histories saved by earlier services and commands, updated to now; the one that gives the lowest age is used
    """

    wall_ns: int
    boot_ns: int
    boot: str
    clocks: tuple[Clock, ...] = ()

    def since(self, wall_ns: int, boot_ns: int | None, boot: str) -> int:
        """Return the nanoseconds since an event; the result is negative for an event in the future.

        If the event's boot_ns is from this boot, this uses the clock that can't be set. Otherwise it uses the wall
        clock, corrected for its known changes.
        """
        if boot_ns is not None and boot == self.boot and boot_ns <= self.boot_ns:
            return self.boot_ns - boot_ns
        return min([self.wall_ns - wall_ns, *(record_age_ns(clock, wall_ns) for clock in self.clocks)])

    def clock_change_ns(self, wall_ns: int, boot_ns: int | None, boot: str) -> int:
        """Return how far the wall clock was set forward since an event (negative: back); 0 if less than a second."""
        set_ns = self.wall_ns - wall_ns - self.since(wall_ns, boot_ns, boot)
        return set_ns if abs(set_ns) >= STEP_NS else 0

    def cutoff_ns(self, span_ns: int) -> int:
        """Return a wall time such that, as far as is known, every timestamp before it is at least span_ns old."""
        return min([self.wall_ns - span_ns, *(cutoff_ns(clock, span_ns) for clock in self.clocks)])


class FirstSight(NamedTuple):
    """The moment at which the service first saw an orphan, and the age that it computed then.

    boot_ns  CLOCK_BOOTTIME of this boot
    age_ns   the orphan's age at first sight
    """

    boot_ns: int
    age_ns: int


def start_clock(wall_ns: int, boot_ns: int, boot: str = "", saved: Clock | None = None) -> Clock:
    """Return the clock at the start of a service.

    saved  the clock that an earlier service saved, if any. No service watches the clocks during a reboot, so the wall
           clock is trusted then, unless it went back: true time never goes back
    """
    if saved is None:
        return Clock(wall_ns, boot_ns, wall_ns - boot_ns, (Era(0, 0),), boot)
    if saved.boot == boot and boot_ns >= saved.boot_ns:
        return advance_clock(saved, wall_ns, boot_ns)
    true_ns = max(saved.true_ns(), wall_ns - saved.ahead_ns())
    return advance_clock(saved._replace(origin_ns=true_ns - boot_ns, boot_ns=0, boot=boot), wall_ns, boot_ns)


def advance_clock(clock: Clock, wall_ns: int, boot_ns: int) -> Clock:
    """Return the clock at a later check in the same boot. A new era begins if the wall clock was set in between."""
    checked_ns = clock.true_ns()
    clock = clock._replace(wall_ns=wall_ns, boot_ns=boot_ns)
    ahead_ns = wall_ns - clock.true_ns()
    if abs(ahead_ns - clock.ahead_ns()) < STEP_NS:
        return clock
    return clock._replace(eras=_bounded((*clock.eras, Era(checked_ns, ahead_ns, clock.true_ns()))))


def _bounded(eras: tuple[Era, ...]) -> tuple[Era, ...]:
    """Merge the oldest two eras until ERAS_MAX remain. A merged era gives the lower of the ages that the two give."""
    while len(eras) > ERAS_MAX:
        first, second, *others = eras
        least_ns = min(first.ahead_ns, second.ahead_ns)
        most_ns = max(first.ahead_ns + first.spread_ns, second.ahead_ns + second.spread_ns)
        eras = (first._replace(ahead_ns=least_ns, spread_ns=most_ns - least_ns), *others)
    return eras


def first_sight(clock: Clock, created_ns: int) -> FirstSight:
    """Return the first sight of an orphan, which the caller must keep as long as the orphan exists."""
    return FirstSight(clock.boot_ns, record_age_ns(clock, created_ns))


class FirstSights:
    """First sights that must be remembered: those of orphans whose records are from the future and so imply no age.

    The age of all other orphans follows from their records, and can be computed anew each time.
    """

    def __init__(self, most: int) -> None:
        """most: how many to remember; other orphans have age 0 until the wall clock reaches the time in their record"""
        self._most = most
        self._sights: dict[str, FirstSight] = {}

    def get(self, clock: Clock, identifier: str, created_ns: int) -> FirstSight:
        """Return the remembered first sight of an orphan, or one computed now, from which the same age follows."""
        sight = self._sights.get(identifier) or first_sight(clock, created_ns)
        if sight.age_ns == 0 and len(self._sights) < self._most:
            self._sights[identifier] = sight
        return sight

    def forget(self, identifier: str) -> None:
        """Forget an orphan that is gone; do nothing if it was not remembered."""
        self._sights.pop(identifier, None)


def age_ns(clock: Clock, created_ns: int, sight: FirstSight) -> int:
    """Return the lowest age that an orphan can have; never negative.

    sight    as `first_sight` or `FirstSights.get` returned it in this boot
    Returns  its age at first sight plus the time since then. If the wall clock was wrong at first sight and has been
             set back, the present age according to the record may be lower, and is returned. The result is at least the
             time since first sight, so that an orphan from the future ages, too.
    """
    since_ns = max(0, clock.boot_ns - sight.boot_ns)
    return min(sight.age_ns + since_ns, max(record_age_ns(clock, created_ns), since_ns))


def record_age_ns(clock: Clock, created_ns: int) -> int:
    """Return the age according to the record's wall time: the lowest that any era allows, or 0 if none allows one.

    No era allows an age if the record is from the future, or from a time that our wall clock jumped over (it was
    written by another host's clock).
    """
    now_ns = clock.true_ns()
    ends = [*(era.seen_ns for era in clock.eras[1:]), now_ns]
    made = (created_ns - era.ahead_ns for era in clock.eras)  # the latest times that are possible
    ages = [
        now_ns - min(made_ns, end_ns)
        for made_ns, era, end_ns in zip(made, clock.eras, ends, strict=True)
        if made_ns - era.spread_ns <= end_ns and (made_ns >= era.since_ns or era is clock.eras[0])
    ]
    return min(ages, default=0)


def cutoff_ns(clock: Clock, span_ns: int) -> int:
    """Return a wall time such that every timestamp before it is at least span_ns old, even if the clock was set.

    Files that were written in an era in which the wall clock was behind seem older than they are. So this considers
    each era that overlaps the span. Files from earlier eras are old enough, whatever their timestamps are.
    """
    now_ns = clock.true_ns()
    ends = [*(era.seen_ns for era in clock.eras[1:]), now_ns]
    ahead = (era.ahead_ns for era, end_ns in zip(clock.eras, ends, strict=True) if end_ns >= now_ns - span_ns)
    return now_ns - span_ns + min(ahead)


def encode_clock(clock: Clock) -> bytes:
    """Encode the clock as a small JSON object, which a service saves for the next service."""
    return json.dumps(clock._asdict()).encode("ascii") + b"\n"


def decode_clock(text: bytes) -> Clock | None:
    """Decode a clock that this version, 0.2.0 or 0.3.0 saved, or return None to trust the wall clock."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != set(Clock._fields) or not isinstance(fields["boot"], str):
        return None
    raw = fields["eras"]
    if (
        not isinstance(raw, list)
        or not 0 < len(raw) <= _ERAS_READ
        or not all(_are_times(era, 3) or (_are_times(era, 4) and era[3] >= 0) for era in raw)
    ):
        return None
    numbers = [fields["wall_ns"], fields["boot_ns"], fields["origin_ns"]]
    if not _are_times(numbers, 3):
        return None
    wall_ns, boot_ns, origin_ns = numbers
    return Clock(wall_ns, boot_ns, origin_ns, _bounded(tuple(Era(*era) for era in raw)), fields["boot"])


def _are_times(value: Any, n: int) -> bool:
    """Whether the value is a list of n integers that a clock can have."""
    return isinstance(value, list) and len(value) == n and all(type(x) is int and abs(x) < 1 << 63 for x in value)
