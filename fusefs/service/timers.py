"""All timers of the service as one value: pauses, turns, and limits for waiting."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.node_heartbeats import HEARTBEAT_S, LEAST_POLL_S
from fusefs.reaper.not_removed import DOUBT_PAUSES_S


class ServiceTimers(NamedTuple):
    """In seconds. A `pause` is between two attempts, a `limit` ends an operation that takes longer."""

    # Pauses
    find_pause_s: float = 5.0  # between two searches for volumes, and before a loop with a fault starts again
    session_pause_s: float = 1.0  # during a session, between two checks of its window and of waiting stores
    around_pause_s: float = 2.0  # between two checks of the free space and for new users during a session
    around_least_pause_s: float = 0.5  # the same at least: users may make names in u/ all day
    space_pause_s: float = 60.0  # between two checks of the free space of an idle volume
    window_pause_s: float = 1800.0  # outside its window a volume is checked at least that often: clocks are set
    linger_pause_s: float = 2.0  # a volume stays open this long after the last work: deletions often come in groups
    copy_pause_s: float = 30.0  # a copy in drop/ is adopted this long after its last change
    registries_pause_s: float = 2.0  # between two reads of users' registries, at least
    registries_pauses: int = 20  # and so many times the duration of a read: a twentieth of a core at most
    elsewhere_pause_s: float = 60.0  # before another attempt at a volume of another reaper
    status_pause_s: float = 1.0  # between two status files during work
    status_least_pause_s: float = 0.05  # between two status files, at least
    node_beat_pause_s: float = HEARTBEAT_S  # between two writes of this node's heartbeat file
    node_poll_pause_s: float = LEAST_POLL_S  # between two checks of what other nodes did, at least

    # Pauses after a failure; each doubles up to the last
    rest_pause_s: float = 60.0  # of a volume with errors
    last_rest_pause_s: float = 3600.0
    unread_pause_s: float = 2.0  # of a user whose folder is unreadable
    last_unread_pause_s: float = 600.0
    retry_pause_s: float = 1.0  # of an orphan: the swap may still hold its lock
    child_pause_s: float = 1.0  # of a user whose child or folder failed
    tend_pause_s: float = 5.0  # of a user's drop/ or stage/ with an unsolved problem
    last_pause_s: float = 3600.0  # of an orphan and of a user
    doubt_pauses_s: tuple[float, ...] = DOUBT_PAUSES_S  # before EIO or ESTALE of one entry counts as final
    grudge_s: float = 300.0  # after so long without a failure, the backoff of a user starts again

    # Sizes
    unmeasured_pause_s: float = 60.0  # before a new orphan is measured: much is restored or deleted by then
    measure_pause_s: float = 300.0  # before a size that the busy disk did not allow is measured again
    measure_limit_s: float = 10.0  # of measuring, before orphans expire early because space is low
    beside_others_limit_s: float = 5.0  # of waiting for an idle disk before a size is left for later

    # Turns
    tick_s: float = 0.1  # between two checks of a child that works at full speed
    quantum_s: float = 0.5  # of a user's turn while others wait
    patience_s: float = 2.0  # of one orphan while others of its user wait; doubles with each turn
    last_patience_s: float = 60.0
    own_turn_s: float = 30.0  # of a user's own store while others of that user wait
    heartbeat_s: float = 0.1  # between two heartbeats of a child that works
    held_heartbeat_s: float = 1.0  # between two heartbeats of a child on hold

    # Limits
    silent_limit_s: float = 5.0  # a child without heartbeats for so long is checked: it may be stopped
    lost_limit_s: float = 60.0  # of a single system call (a file of terabytes), before the child is killed
    parking_limit_s: float = 0.4  # of children that park when a session ends
    dying_limit_s: float = 0.2  # of killed children, until they are scheduled
    hook_dying_limit_s: float = 0.5  # of a killed hook
    mounts_limit_s: float = 3.0  # of all mount points, to answer
    own_store_limit_s: float = 10.0  # of a user's own store, to open
    registries_limit_s: float = 600.0  # of all users' registries: stopping their reader costs that user's time
    outage_limit_s: float = 600.0  # of a server that is away: longer than most reboots
    farewell_limit_s: float = 0.6  # of removing the heartbeat file of this node
    metrics_limit_s: float = 5.0  # of a client of the metrics socket


current = ServiceTimers()
"""The timers in use, inherited by the forker and the children. A test scales them before the service starts."""
