"""The pace of a removal: how much a slice may do, and how fast slices follow each other beside others.

All reapers on a machine rest by the same clock. What stalls or reads or flushes in a rest are others; what they wait
longer for outside the rests than in them is our doing. So nothing has to be known about the disk, and all is a share:
of the time in which the kernel works for us, whether an unlink takes ten microseconds or ten milliseconds.

    alone          everything, with a short rest now and then to hear whether that is still so
    beside others  a share of the time, in small slices with pauses, each begun when the device has nothing to do
                   (engine.pace). Less if others wait longer while we work, a little more if they don't

Pure: engine/pace.py measures.
"""

from __future__ import annotations

import math
from enum import Enum
from math import exp, floor
from operator import add, sub
from typing import NamedTuple

SLICE_S = 0.05
"""Of work in one slice: short enough to stop and step back at once, long enough that handing it out costs nothing."""
SMALL_SLICE_S = 0.00015
"""A slice where others work on the disk: what they wait for is never behind more than a few of our calls (twice as
long is felt by one in a hundred of theirs on xfs, measured; half as long is mostly overhead).
"""
NAMES_AT_ONCE = 512
"""Between two looks at the clock, at most: two or three milliseconds' work on a local disk."""
_FEW_AT_ONCE = 128
_LOOK_S = SLICE_S / 10
"""By so much a slice may be longer than it is to be, if its entries cost what they did so far."""
_GROWS = 4
_STEP_BACK = 8
"""A slice begins with that part of what the last one came to: its entries may take longer."""
CUT_BYTES = 64 << 20
"""A large file is cut by as much at a time when paced (RocksDB and Pebble found the same step)."""


class SliceBudget(NamedTuple):
    """The limits of one slice; whichever is reached first ends it.

    n_entries, n_bytes  None: no limit of that kind. With a limit of either kind the work is paced: files are looked
                        at before they go, and large ones are cut in steps.
    """

    seconds: float = SLICE_S
    n_entries: int | None = None
    n_bytes: int | None = None

    def is_paced(self) -> bool:
        """Whether files are looked at."""
        return self.n_entries is not None or self.n_bytes is not None


class NamesPerLook:
    """How many entries a worker takes between two looks at the clock: few where each is a server's answer.

    It lasts from slice to slice: each begun with one entry would go several times around before it has found its size.
    """

    def __init__(self) -> None:
        self.n, self._most = 1, NAMES_AT_ONCE

    def begin(self, slice_s: float) -> None:
        """A slice of that length begins; in a small one the number of its entries is what ends it."""
        if slice_s > SMALL_SLICE_S:
            self.n, self._most = max(1, self.n // _STEP_BACK), NAMES_AT_ONCE
        else:
            self.n = self._most = _FEW_AT_ONCE

    def took(self, n: int, seconds: float) -> None:
        """So many took so long."""
        fits = int(n * _LOOK_S / max(seconds, 1e-6))
        self.n = max(1, min(fits, _GROWS * self.n, self._most))


class Speed(NamedTuple):
    """How fast a removal may be at the moment.

    entries_per_s, bytes_per_s  None: as fast as the kernel; 0: wait
    is_alone  no other process uses the disk: several workers beside each other, and slices as long as they like to be
    rests     slices end before the common rests (core.pacing), in which that is looked for
    share     of the time in which the kernel may work for us, whatever a call takes
    """

    entries_per_s: int | None = None
    bytes_per_s: int | None = None
    is_alone: bool = True
    rests: bool = False
    share: float = 1.0

    def is_limited(self) -> bool:
        """Whether entries or bytes are counted."""
        return self.entries_per_s is not None or self.bytes_per_s is not None

    def holds(self) -> bool:
        """Whether nothing may be done."""
        return self.entries_per_s == 0 or self.bytes_per_s == 0


AT_ONCE = Speed()
HOLD = Speed(entries_per_s=0, is_alone=False)


class TokenBucket:
    """A rate as a bucket: it fills as time goes by, gives out a slice's worth or more, and may be overdrawn.

    Overdrawn, because a file's size is known only when it goes: the debt is waited for before the next slice.
    """

    def __init__(self, per_s: int, now_s: float, slice_s: float = SLICE_S) -> None:
        self._at_s = now_s
        self._set(per_s, slice_s)
        self._left = self._least

    def _set(self, per_s: int, slice_s: float) -> None:
        self._per_s = per_s
        self._least = max(per_s * slice_s, 1.0)
        self._most = 2 * self._least

    def change(self, per_s: int, now_s: float, slice_s: float = SLICE_S) -> None:
        """Fill at another rate from now on; what was saved up at the old one, or is owed, stays."""
        self._fill(now_s)
        self._set(per_s, slice_s)

    def _fill(self, now_s: float) -> None:
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s

    def take(self, now_s: float) -> int:
        """All that may be spent now; 0 if it is not worth a slice yet. What is not spent comes back by `give_back`."""
        self._fill(now_s)
        if self._left < self._least:
            return 0
        taken = int(self._left)
        self._left -= taken
        return taken

    def give_back(self, n: int) -> None:
        """Return what was taken and not spent; negative if more was spent."""
        self._left += n

    def wait_s(self) -> float:
        """Seconds until something can be taken; 0 if it can now; infinite at a rate of 0."""
        missing = max(0.0, self._least - self._left)
        if not self._per_s:
            return math.inf if missing else 0.0
        return missing / self._per_s


TICK_S = 0.1
"""The load is looked at at least so often."""
PERIOD_S, REST_S = 0.25, 0.02
"""Alone on the disk: a rest in each period. A neighbour is noticed after the second, or the third."""
LONG_PERIOD_S, LONG_REST_S = 0.5, 0.06
"""Beside others: their pace without us is to be known too."""
SETTLE_S = 0.004
"""What the kernel still does for us when a rest begins is not listened to."""
FIRST_LOOK_S = 0.05
"""Nothing is done before the load was measured that long."""
LEAST_SHARE, FIRST_SHARE, MOST_SHARE = 0.005, 0.3, 0.4
"""Of the time, beside others: never nothing; what we begin with; and never so much that it would be felt before it
could be measured."""
_MOST_DEAF = 0.9
"""Where nothing tells whether there are others."""
_FAR_BACK, _BACK, _FORTH = 0.5, 0.8, 1.05
_DECIDE_S = 2.0
_MEMORY_S = 12.0
_HARM, _MUCH_HARM = 1.3, 2.0
"""The mean of others' requests is so many times as long while we work: too much. Below it is what chance makes of a few
seconds; and the mean of reads moves a third before their 99th percentile moves by 15 % (measured).
"""
_ENOUGH_REQUESTS, _ENOUGH_PROBES = 150, 4
_NOTHING_S = 1e-6
"""So many requests can't have taken less."""
_KEPT_PROBES = 8
_STALL_IO, _STALL_MEMORY, _STALL_CPU = 0.02, 0.05, 0.5
"""Shares of a rest in which others stalled: then there are others. Processors are shared by the scheduler already,
so that only a crowd on them counts."""
_REQUESTS = 2
"""Reads and flushes of others in a rest; one alone may be the journal's own."""
_COME, _OF_RESTS = 2, 3
"""One rest of three may be the journal's own."""
_GONE_RESTS = 4
"""So many long rests, at most one of them with others in it: they are gone."""
_PLANNED, _LAST_PART = 0.9, 0.01
"""Parts of the horizon: when all is to be done, as what comes in between needs time too; and over which that is spread
which is late already.
"""


class RateCaps(NamedTuple):
    """What an administrator allows: never more than so many a second; all done in so long, if that can be."""

    entries_per_s: int | None = None
    bytes_per_s: int | None = None
    horizon_s: int | None = None


class Backlog(NamedTuple):
    """What there is to do.

    n_entries         about
    oldest_overdue_s  how long the oldest has been due
    hurries           space is short: others come second
    """

    n_entries: int = 0
    oldest_overdue_s: float = 0.0
    hurries: bool = False


class WorkDone(NamedTuple):
    """What all workers did since the beginning, and how long that took them together."""

    n_entries: int = 0
    n_bytes: int = 0
    busy_s: float = 0.0


class Pressure(NamedTuple):
    """How the machine is, for people: shares of the last rest in which a task stalled (None: this kernel does not
    tell), what a small durable write took, and an unlink of ours.
    """

    io: float | None = None
    memory: float | None = None
    cpu: float | None = None
    probe_ms: float | None = None
    unlink_us: float | None = None


class Requests(NamedTuple):
    """Of a device: reads and flushes, and the seconds that they took together."""

    n_reads: float = 0
    reads_s: float = 0.0
    n_flushes: float = 0
    flushes_s: float = 0.0

    def since(self, before: Requests) -> Requests:
        """What came after `before`."""
        return Requests(*map(sub, self, before))

    def faded(self, seconds: float) -> Requests:
        """What they count after so long: the older the less."""
        by = exp(-seconds / _MEMORY_S)
        return Requests(*(one * by for one in self))

    def plus(self, sample: Sample) -> Requests:
        """With those of one sample more."""
        return Requests(*map(add, self, sample.requests or Requests()))


class Sample(NamedTuple):
    """What happened in a span of time that was all rest, or all work.

    io, memory, cpu  shares of it in which a task stalled; None where the kernel does not tell
    requests         None where the volume is on no block device
    """

    is_rest: bool
    seconds: float
    io: float | None = None
    memory: float | None = None
    cpu: float | None = None
    requests: Requests | None = None


class OtherUsers(Enum):
    """Who else works on the disk."""

    UNKNOWN = "measuring how much others use the disk"
    NONE = "nobody else uses the disk"
    SOME = "yielding"


class PacingState(NamedTuple):
    """What is remembered from one sample to the next; only the functions of this file make one.

    share        of the time, beside others; kept for the next time that others come
    heard        of the last rests: whether others were there
    last         the last rest
    resting, working  what others asked of the device in rests and outside, since they came
    rest_probes, work_probes  seconds of the last small durable writes
    undecided_s  since the share was last thought about
    busy_s_each  seconds of the kernel's work for an entry; None before the first
    is_deaf      neither stalls nor requests are told here
    """

    others: OtherUsers = OtherUsers.UNKNOWN
    share: float = FIRST_SHARE
    heard: tuple[bool, ...] = ()
    last: Sample | None = None
    resting: Requests = Requests()
    working: Requests = Requests()
    rest_probes: tuple[float, ...] = ()
    work_probes: tuple[float, ...] = ()
    undecided_s: float = 0.0
    busy_s_each: float | None = None
    is_deaf: bool = False


def rest_at(now_s: float, *, is_alone: bool) -> tuple[float, float]:
    """When the rest begins and ends that is now, or comes next; seconds of CLOCK_MONOTONIC."""
    period_s, rest_s = (PERIOD_S, REST_S) if is_alone else (LONG_PERIOD_S, LONG_REST_S)
    begins_s = floor(now_s / period_s) * period_s
    if now_s >= begins_s + rest_s:
        begins_s += period_s
    return begins_s, begins_s + rest_s


def is_somebody(sample: Sample) -> bool:
    """Whether others worked in a rest."""
    requests = sample.requests
    return (
        (sample.io or 0.0) >= _STALL_IO
        or (sample.memory or 0.0) >= _STALL_MEMORY
        or (sample.cpu or 0.0) >= _STALL_CPU
        or (requests is not None and requests.n_reads + requests.n_flushes >= _REQUESTS)
    )


def hear(state: PacingState, sample: Sample) -> PacingState:
    """The state after a sample."""
    if sample.io is None and sample.requests is None:
        state = state._replace(is_deaf=True, others=OtherUsers.SOME)
    if sample.is_rest:
        state = state._replace(heard=(*state.heard, is_somebody(sample))[-_GONE_RESTS:], last=sample)
    match state.others:
        case OtherUsers.UNKNOWN:
            return _with(state, OtherUsers.SOME if state.heard[-1] else OtherUsers.NONE) if sample.is_rest else state
        case OtherUsers.NONE:
            return _with(state, OtherUsers.SOME) if sum(state.heard[-_OF_RESTS:]) >= _COME else state
        case OtherUsers.SOME:
            if not state.is_deaf and len(state.heard) == _GONE_RESTS and sum(state.heard) <= 1:
                return _with(state, OtherUsers.NONE)
            return _decide(_added(state, sample))


def _with(state: PacingState, others: OtherUsers) -> PacingState:
    """Somebody came, or went: what was measured before is about another situation."""
    return _forgetful(state)._replace(others=others, heard=())


def _forgetful(state: PacingState) -> PacingState:
    return state._replace(resting=Requests(), working=Requests(), rest_probes=(), work_probes=(), undecided_s=0.0)


def _added(state: PacingState, sample: Sample) -> PacingState:
    resting, working = state.resting.faded(sample.seconds), state.working.faded(sample.seconds)
    if sample.is_rest:
        resting = resting.plus(sample)
    else:
        working = working.plus(sample)
    return state._replace(resting=resting, working=working, undecided_s=state.undecided_s + sample.seconds)


def harm(state: PacingState) -> float | None:
    """How many times as long others wait while we work; None if it can't be said.

    By what the device tells of their requests; where it tells nothing, by probes. Stalls would not do: ours are
    among them while we work.
    """
    from statistics import geometric_mean, median  # as long to load as a short sweep takes

    resting, working = state.resting, state.working
    ratios = []
    n_reads, n_flushes = min(resting.n_reads, working.n_reads), min(resting.n_flushes, working.n_flushes)
    if n_reads >= _ENOUGH_REQUESTS and min(resting.reads_s, working.reads_s) > _NOTHING_S:
        ratios.append(working.reads_s / working.n_reads / (resting.reads_s / resting.n_reads))
    if n_flushes >= _ENOUGH_REQUESTS and min(resting.flushes_s, working.flushes_s) > _NOTHING_S:
        ratios.append(working.flushes_s / working.n_flushes / (resting.flushes_s / resting.n_flushes))
    if not ratios and min(len(state.rest_probes), len(state.work_probes)) >= _ENOUGH_PROBES:
        ratios.append(median(state.work_probes) / median(state.rest_probes))
    # Each is blurred by chance, the one not as the other.
    return geometric_mean(ratios) if ratios else None


def needs_probes(state: PacingState) -> bool:
    """Whether only small writes of our own can tell what others feel."""
    few = min(state.resting.n_reads + state.resting.n_flushes, state.working.n_reads + state.working.n_flushes)
    return state.others is OtherUsers.SOME and few < _ENOUGH_REQUESTS


def felt(state: PacingState) -> PacingState:
    """The state after a probe of a server, whose other clients nothing here tells.

    Alone on this machine it goes at full speed until our own small writes take longer while we work than while we rest.
    From then on these are what it goes by.
    """
    found = harm(state)
    if state.others is not OtherUsers.NONE or found is None or found < _HARM:
        return state
    return _forgetful(state)._replace(others=OtherUsers.SOME, is_deaf=True, heard=())


def _decide(state: PacingState) -> PacingState:
    """Step back, or a little forth, now and then."""
    found = harm(state)
    if state.undecided_s < _DECIDE_S or found is None:
        return state
    if found >= _HARM:
        # The same evidence must not count twice: what comes now is about the smaller share.
        by = _FAR_BACK if found >= _MUCH_HARM else _BACK
        return _forgetful(state)._replace(share=max(state.share * by, LEAST_SHARE))
    most = MOST_SHARE if not state.is_deaf else _MOST_DEAF
    return state._replace(share=min(state.share * _FORTH, most), undecided_s=0.0)


def probed(state: PacingState, seconds: float, *, in_rest: bool) -> PacingState:
    """The state after a small durable write."""
    if in_rest:
        return state._replace(rest_probes=(*state.rest_probes, seconds)[-_KEPT_PROBES:])
    return state._replace(work_probes=(*state.work_probes, seconds)[-_KEPT_PROBES:])


def progressed(state: PacingState, n_entries: int, busy_s: float) -> PacingState:
    """The state after so many entries, which took the workers together so long."""
    if n_entries <= 0 or busy_s <= 0:
        return state
    before = state.busy_s_each
    each = busy_s / n_entries
    return state._replace(busy_s_each=each if before is None else before + (each - before) / 4)


def tempo(state: PacingState, caps: RateCaps, backlog: Backlog) -> Speed:
    """How fast it may be now."""
    entries, n_bytes = caps.entries_per_s, caps.bytes_per_s
    if backlog.hurries:
        return Speed(entries, n_bytes)
    if state.others is OtherUsers.UNKNOWN:
        return HOLD
    share = max(state.share, _share_needed(state, caps, backlog))
    is_alone = state.others is OtherUsers.NONE or share >= 1.0
    return Speed(entries, n_bytes, is_alone=is_alone, rests=True, share=1.0 if is_alone else share)


def _share_needed(state: PacingState, caps: RateCaps, backlog: Backlog) -> float:
    """What it takes to be done within the horizon, spread evenly over what is left of it."""
    if caps.horizon_s is None or state.busy_s_each is None:
        return 0.0
    left_s = max(caps.horizon_s * _PLANNED - backlog.oldest_overdue_s, caps.horizon_s * _LAST_PART, 1.0)
    return min(backlog.n_entries * state.busy_s_each / left_s, 1.0)


def describe(state: PacingState, caps: RateCaps, backlog: Backlog) -> str:
    """Why it is so fast as it is, in a short sentence."""
    if backlog.hurries:
        return "hurrying: free space is low"
    if state.others is not OtherUsers.SOME:
        return str(state.others.value)
    share = max(state.share, _share_needed(state, caps, backlog))
    if share > state.share:
        return f"using {share:.0%} of the time to finish within the horizon"
    if state.is_deaf:
        return f"no pressure information (PSI), pacing by latency: using {share:.0%} of the time"
    return f"yielding: {_whom(state.last)}; using {share:.0%} of the time"


def _whom(sample: Sample | None) -> str:
    """What others do, as far as a rest has shown it."""
    if sample is None:
        return "others use the disk"
    shares = (("io", "the disk", _STALL_IO), ("memory", "memory", _STALL_MEMORY), ("cpu", "a processor", _STALL_CPU))
    for kind, what, least in shares:
        stalled: float | None = getattr(sample, kind)
        if stalled is not None and stalled >= least:
            return f"others wait {stalled:.0%} of the time for {what}"
    return "others use the disk"
