"""All timers of the service as one value: pauses, turns, and time limits."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.node_heartbeats import HEARTBEAT_S, LEAST_POLL_S
from fusefs.reaper.server_outage import DOUBT_PAUSES_S


class ServiceTimers(NamedTuple):
    """Times in seconds. A `pause` lies between two attempts; a `limit` ends an operation that takes longer."""

    # Pauses
    find_pause_s: float = 5.0  # between two searches for volumes, and before a failed loop is restarted
    session_pause_s: float = 1.0  # during a session, between two checks of its window and of waiting stores
    around_pause_s: float = 2.0  # between two checks of the free space and for new users during a session
    around_least_pause_s: float = 0.5  # the minimum of this pause, since users may create names in u/ all day
    space_pause_s: float = 60.0  # between two checks of the free space of an idle volume
    window_pause_s: float = 1800.0  # at most, between checks of a volume outside its window, since clocks may be set
    linger_pause_s: float = 2.0  # a volume stays open this long after the last work: deletions often come in groups
    copy_pause_s: float = 30.0  # a copy in drop/ is adopted this long after its last change
    registries_pause_s: float = 2.0  # at least, between two reads of users' registries
    registries_pauses: int = 20  # this pause also lasts this many times as long as the last read
    elsewhere_pause_s: float = 60.0  # before another attempt to open a volume that another reaper serves
    status_pause_s: float = 1.0  # between two status files during work
    status_least_pause_s: float = 0.05  # at least, between two status files
    node_beat_pause_s: float = HEARTBEAT_S  # between two writes of this node's heartbeat file
    node_poll_pause_s: float = LEAST_POLL_S  # at least, between two checks of what other nodes did

    # Pauses after a failure; each doubles up to its maximum, last_*
    rest_pause_s: float = 60.0  # for a volume with errors
    last_rest_pause_s: float = 3600.0
    unread_pause_s: float = 2.0  # for a user whose folder is unreadable
    last_unread_pause_s: float = 600.0
    retry_pause_s: float = 1.0  # for an orphan, since the swap may still hold its lock
    child_pause_s: float = 1.0  # for a user whose child or folder failed
    tend_pause_s: float = 5.0  # for a user's drop/ or stage/ with an unresolved problem
    last_pause_s: float = 3600.0  # for an orphan, and for a user
    doubt_pauses_s: tuple[float, ...] = DOUBT_PAUSES_S  # before EIO or ESTALE for one entry counts as final
    grudge_s: float = 300.0  # after this long without a failure, a user's pauses start with the shortest again

    # Sizes
    unmeasured_pause_s: float = 60.0  # before a new orphan is measured: many are restored or deleted sooner
    measure_pause_s: float = 300.0  # before another attempt to measure an orphan, if the disk was busy
    measure_limit_s: float = 10.0  # for measuring, before orphans expire early because space is low
    beside_others_limit_s: float = 5.0  # for waiting until the disk is idle, before a measurement is postponed

    # Turns
    tick_s: float = 0.1  # between two checks of a child that works at full speed
    quantum_s: float = 0.5  # for a user's turn while others wait
    patience_s: float = 2.0  # for an orphan's turn while others of its user wait; doubles with each turn
    last_patience_s: float = 60.0
    own_turn_s: float = 30.0  # for a user's own store while others of that user wait
    heartbeat_s: float = 0.1  # between two heartbeats of a working child
    held_heartbeat_s: float = 1.0  # between two heartbeats of a child on hold

    # Limits
    silent_limit_s: float = 5.0  # a child without heartbeats for this long is checked, since it may be stopped
    lost_limit_s: float = 60.0  # for a single system call (a file of terabytes), before the child is killed
    parking_limit_s: float = 0.4  # for children to park when a session ends
    dying_limit_s: float = 0.2  # for killed children to be scheduled, and to end
    hook_dying_limit_s: float = 0.5  # for a killed hook to end
    mounts_limit_s: float = 3.0  # for all mount points to respond
    own_store_limit_s: float = 10.0  # for a user's own store to open
    registries_limit_s: float = 600.0  # for reading all users' registries, each of which may take seconds
    outage_limit_s: float = 600.0  # for a server that is away: longer than most reboots
    farewell_limit_s: float = 0.6  # for removing this node's heartbeat file
    metrics_limit_s: float = 5.0  # for a client of the metrics socket


current = ServiceTimers()
"""The timers in use, inherited by the forker and the children. A test scales them before the service starts."""
