"""Decides when orphans of a volume are reaped, measured, or warned about, and handles the answers of children. Selects
orphans that expire early, where space is low or a quota is exceeded.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import trio

from fusefs.core.events import EventKind
from fusefs.core.names import ContainerId
from fusefs.core.orphan_age import Clock
from fusefs.core.policy import (
    DeleteAs,
    KnownOrphan,
    OrphanSize,
    Quota,
    RetentionRules,
    SpaceWanted,
    VolumePolicy,
    age_s,
    beyond_quota,
    due_at_s,
    go_early,
    warning_in_s,
)
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.children import user_name
from fusefs.linux.mountinfo import DAEMON_GONE, is_inside
from fusefs.service import timers
from fusefs.service.known_volumes import NO_GRACE, Grace
from fusefs.service.messages import (
    Answer,
    DueContainer,
    Measure,
    Measured,
    Order,
    OrderDone,
    OrphanEnded,
    Page,
    ReadRecords,
    SeenContainer,
    Tend,
    Tended,
)
from fusefs.service.open_volume import OpenVolume, VolumeSpace
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.service.user_state import FolderPart, ReapProgress, UserState, note_once
from fusefs.service.volume_figures import VolumeFigures
from fusefs.store.container import ClaimLost
from fusefs.store.orphans import explain_first

_LOG = logging.getLogger(__name__)

_GONE = (errno.ESHUTDOWN, *DAEMON_GONE)
TROUBLE = frozenset({errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.ESTALE, *_GONE})
"""Errors that may mean a broken volume. Data written by a user can cause them too: see `OrphanSchedule.failed`."""
_MOST_IO_ERRORS = 3
"""Consecutive orphans of a user with such an error inside, after which a dying disk is left alone."""
_MOST_TRIES = 3
_MOST_KNOWN = 100_000
"""Most orphans of one user that count for a quota, or where space is low: some tens of megabytes."""
_KINDS = {
    Method.EXCHANGE: EventKind.SWAPPED,
    Method.TWO_RENAME: EventKind.SWAPPED,
    Method.REMOVED: EventKind.REMOVED,
    Method.DROPPED: EventKind.DROPPED,
    Method.SWEEP: EventKind.SWEPT,
}


class Trouble(Exception):
    """The volume is broken and is left alone for a while. The text gives the reason."""


class ForRoot(NamedTuple):
    """An orphan that its owner could not delete and root will: root takes it over first (store.as_owner).

    by_force  clear flags
    """

    uid: int
    base: bytes
    id: ContainerId
    by_force: bool


class OrphanSchedule:
    """Handles the answers of children."""

    def __init__(
        self,
        context: ServiceContext,
        opened: OpenVolume,
        policy: VolumePolicy,
        figures: VolumeFigures,
        new_parts: Callable[[], None],
        holder_of: Callable[[int], int],
        grace: Grace = NO_GRACE,
        *,
        is_local: bool,
    ) -> None:
        """Start empty.

        new_parts  called when a user has folders in stores that were not known
        holder_of  returns the user who has a subordinate uid
        grace      keeps orphans that expired while the volume was not served
        is_local   no other machine can have the filesystem mounted
        """
        self._grace = grace
        self._context = context
        self._volume = opened.store.base_path
        self._is_own = opened.own is not None
        self._is_local = is_local
        self._owner = opened.store.owner
        self._policy = policy
        self._figures = figures
        self._new_parts = new_parts
        self._holder_of = holder_of
        self._io_errors: Counter[int] = Counter()
        self.trouble = ""
        self.is_in_doubt = False
        self.for_root: list[ForRoot] = []

    def take(self, user: UserState, order: Order, answer: Answer) -> None:
        """Handle one answer to an order."""
        now_s = boot_s()
        match answer:
            case Tended():
                if user.tended(base for base in answer.bases if is_inside(base, self._volume)):
                    self._new_parts()
                user.has_problems(now_s, is_so=bool(answer.problems))
                for problem in answer.problems:
                    self._fault(user, "something in the user's directory was kept unchanged", problem)
            case Page():
                part = user.parts[answer.base]
                part.n_orphans, part.n_quarantined = answer.n_orphans, answer.n_quarantined
                clock = self._context.clock()
                for seen in answer.seen:
                    self._note(user, part, seen, clock)
                for seen in answer.quarantined:
                    if not seen.is_kept:  # the last service was killed before it could do this
                        self._hand_over(user, part, seen.id, seen.origin)
                if not (isinstance(order, ReadRecords) and order.ids is not None):
                    part.looked(answer.last, now_s, self._context.clock().wall_ns)
            case OrphanEnded():
                self._ended(user, _part_of(user, order), answer, now_s)
            case Measured():
                part = _part_of(user, order)
                known = part.known
                if isinstance(order, Measure) and order.when_idle:
                    if answer.id == part.measuring:
                        part.measuring = None  # the size is in its record now, if that could be written
                elif answer.id in known:
                    known[answer.id] = known[answer.id]._replace(size=OrphanSize(answer.n_inodes, answer.n_bytes))
            case OrderDone():
                pass

    def _note(self, user: UserState, part: FolderPart, seen: SeenContainer, clock: Clock) -> None:
        """Note a container from a page: its due time, size, warning and measurement; reports a new one."""
        if seen.problem:
            self._fault(user, f"a record (…{seen.id[-12:]}) can't be read", seen.problem)
            return
        if seen.id in part.left and not seen.is_claimed:
            return
        identifier, sight, origin = ContainerId(seen.id), part.sight(seen, clock), self._policy.usual(seen.origin)
        known = KnownOrphan(identifier, seen.created_ns, seen.retention_s, origin, seen.is_claimed, sight=sight)
        rules = self._policy.rules_for(origin)
        part.upcoming.add(DueContainer(seen.id, seen.retention_s), self._at_s(user, known, rules, clock))
        part.sizes.note(seen.id, seen.n_bytes)
        self._warn(user, part, known, rules, seen.origin, clock)
        self._measure_when_idle(part, seen, clock)
        before = part.known.get(seen.id)
        if self.must_measure() and (before is not None or len(part.known) * len(user.parts) < _MOST_KNOWN):
            # Measured sizes only: with a false size in a record, a user could have orphans of others expire.
            part.known[seen.id] = known if before is None else known._replace(size=before.size)
            if before is None:
                part.to_measure.append(seen.id)
        has_come = seen.id in user.came
        is_new = has_come or seen.created_ns > part.told_until_ns
        if is_new and not seen.is_claimed and seen.method is not None and note_once(user.told, seen.id):
            is_older = seen.created_ns < self._context.started_ns and not has_come
            kind = EventKind.FOUND if is_older else _KINDS[seen.method]
            self._context.tell(kind, volume=self._volume, uid=user.uid, identifier=seen.id, origin=seen.origin)

    def _measure_when_idle(self, part: FolderPart, seen: SeenContainer, clock: Clock) -> None:
        """Schedule the measurement of an orphan without a size. Not at once: many orphans are restored or deleted soon.

        Unnecessary where space may have to be freed: then all orphans are measured. Impossible on a filesystem that
        other machines have mounted: this node can't see whether it is idle.
        """
        is_wanted = self._is_local and not (self.must_measure() or seen.is_claimed) and seen.n_bytes is None
        age_s, pause_s = (clock.wall_ns - seen.created_ns) / 1e9, timers.current.unmeasured_pause_s
        wait_s = min(max(pause_s - age_s, 0.0), pause_s)
        part.measure_at(seen.id, boot_s() + wait_s if is_wanted else None)

    def _at_s(
        self, user: UserState, known: KnownOrphan, rules: RetentionRules, clock: Clock, *, early: bool = False
    ) -> float | None:
        """When an orphan may be reaped, by the service's clock; None: not without a request."""
        now_s = boot_s()
        wait_s = due_at_s(known, rules, clock, early=early)
        if wait_s is None:
            return None
        # A reap that has begun is due in any case; such an orphan expired after its creation.
        expired_s = now_s - age_s(known, clock) if known.is_claimed else now_s + wait_s
        return max(self._grace.at_s(now_s + wait_s, expired_s), user.tries(known.id).at_s)

    def _warn(
        self,
        user: UserState,
        part: FolderPart,
        known: KnownOrphan,
        rules: RetentionRules,
        origin: bytes | None,
        clock: Clock,
    ) -> None:
        """Report once that an orphan expires soon, or schedule that; only if a hook is configured."""
        hooks = self._context.config.hooks
        if hooks.on_expires_soon is None:
            return
        chosen = DueContainer(known.id, known.retention_s)
        wait_s = warning_in_s(known, rules, clock, hooks.warn_before_s)
        if wait_s is None or wait_s > 0:
            part.warnings.add(chosen, None if wait_s is None else boot_s() + wait_s)
            return
        part.warnings.add(chosen, None)
        # The last service has reported what it could; earlier reports need not be remembered.
        if clock.wall_ns + wait_s * 1e9 > part.told_until_ns and note_once(part.warned, chosen, part.most):
            left_s = wait_s + hooks.warn_before_s
            self._context.tell(
                EventKind.EXPIRES_SOON,
                volume=self._volume,
                uid=user.uid,
                identifier=known.id,
                origin=origin,
                seconds=left_s,
            )

    def _ended(self, user: UserState, part: FolderPart, ended: OrphanEnded, now_s: float) -> None:
        """Handle the outcome of one orphan."""
        chosen = part.pending.pop(ended.id, DueContainer(ended.id, None))
        if ended.error or ended.lost or ended.stopped or ended.n_failed:
            user.ours.pop(ended.id, None)  # another reaper may be the next to reap it
        if ended.error:
            part.upcoming.add(chosen, user.retry_at_s(ended.id, now_s))
            self.failed(user, ended.errno, f"an orphan (…{ended.id[-12:]}) can't be reaped", ended.error)
        elif ended.lost == ClaimLost.CHANGED.value:
            part.look_at(ended.id)  # its owner changed the retention or pinned it: read it again
        elif ended.lost == ClaimLost.GONE.value and user.tries(ended.id).n_failed >= _MOST_TRIES:
            user.forget(ended.id)
        elif ended.lost:
            # A container also seems gone while its owner's process replaces the record.
            part.upcoming.add(chosen, user.retry_at_s(ended.id, now_s))
        elif ended.stopped:
            user.parked(ended.id, _sofar(ended))
            part.upcoming.add(chosen, now_s)
        else:
            self._reaped(user, part, ended)
        user.begins(next(iter(part.pending), None))

    def _reaped(self, user: UserState, part: FolderPart, ended: OrphanEnded) -> None:
        all_of_it = user.sofar(ended.id).plus(_sofar(ended))
        user.forget(ended.id)
        part.n_orphans = max(part.n_orphans - 1, 0)
        why = explain_first(ended.failure, ended.n_failed)
        self._context.tell(
            EventKind.QUARANTINED if ended.n_failed else EventKind.REAPED,
            volume=self._volume,
            uid=user.uid,
            identifier=ended.id,
            origin=ended.origin,
            n_entries=all_of_it.n_removed,
            n_bytes=all_of_it.n_bytes,
            seconds=all_of_it.seconds,
            detail=why,
        )
        if not ended.n_failed:
            del self._io_errors[user.uid]
            self._figures.reaped(all_of_it.n_removed)
            return
        part.n_quarantined += 1
        if ended.failure is not None and ended.failure.errno in TROUBLE:
            self._io_errors[user.uid] += 1
            if self._io_errors[user.uid] >= _MOST_IO_ERRORS:
                del self._io_errors[user.uid]
                what = f"{_MOST_IO_ERRORS} orphans in a row could not be read or written"
                self.failed(user, ended.failure.errno, what, why)
        if not ended.is_kept:
            self._hand_over(user, part, ended.id, ended.origin)

    def must_measure(self) -> bool:
        """Whether orphans may have to expire early: then the service counts what each user holds."""
        return self._figures.hurries or self._policy.quota != Quota()

    def _hand_over(self, user: UserState, part: FolderPart, identifier: str, origin: bytes | None) -> None:
        """Have root take over a quarantined orphan into a store of root's own, if the configuration allows that."""
        if self._is_own:
            return
        rules = self._policy.rules_for(self._policy.usual(origin))
        # Ask for the user's name last: on some machines that is a request to a remote server.
        if user.uid and rules.delete_as is DeleteAs.ROOT and rules.gives_root(user.uid, user_name(user.uid)):
            self.for_root.append(ForRoot(user.uid, part.base, ContainerId(identifier), rules.clears_flags))

    async def make_room(self, space: VolumeSpace, users: Iterable[UserState], limiter: trio.CapacityLimiter) -> None:
        """Make orphans expire early where space is low, or the trash exceeds its quota. Checkpoint

        `go_early` selects them. If space is low and the measurements take too long, unmeasured orphans count as large
        enough.
        limiter  of the threads of this volume: sorting a hundred thousand orphans here would delay all other volumes
        """
        if not self.must_measure():
            return
        parts = [(user, part) for user in users for part in user.parts.values()]
        wanted = self._figures.wanted(self._policy) if self._figures.hurries else None
        is_measured = all(part.is_known() for _user, part in parts)
        if not is_measured and boot_s() < self._figures.hurries_since_s + timers.current.measure_limit_s:
            wanted = None
        trash: dict[int, list[KnownOrphan]] = {}
        for user, part in parts:
            trash.setdefault(self._holder_of(user.uid), []).extend(part.known.values())
        going = await in_thread(limiter, partial(_going, trash, wanted, self._policy, self._context.clock(), space))
        clock, now_s = self._context.clock(), boot_s()
        for user, part in parts:
            for identifier in going & part.known.keys() - part.pending.keys():
                known = part.known[identifier]
                at_s = self._at_s(user, known, self._policy.rules_for(known.origin), clock, early=True)
                part.upcoming.add(DueContainer(identifier, known.retention_s), max(at_s or now_s, now_s))

    def failed(self, user: UserState, number: int, what: str, detail: str) -> None:
        """Handle an error of one user's data: only that user waits.

        The volume pauses only for errors of objects that only the store's owner can write to. An error in another
        user's files that looks like a broken volume sets `is_in_doubt`; the caller then checks the owner's directories.
        """
        self._fault(user, what, detail)
        if number in TROUBLE and user.uid == self._owner:
            self.volume_failed(number, what)
            return
        user.retry.failed(boot_s())
        self.is_in_doubt |= number in TROUBLE

    def volume_failed(self, number: int, what: str) -> None:
        """Note that the volume is broken."""
        self.trouble = f"{what}: {os.strerror(number)}"

    def _fault(self, user: UserState, what: str, detail: str = "") -> None:
        """Log an error. Every user may read the status, so names appear in the log only."""
        if not self._context.lets_tell(user.uid):
            return
        _LOG.warning("%s: uid %d: %s%s", printable(self._volume), user.uid, what, f": {detail}" if detail else "")
        self._figures.fault(self._context.clock().wall_ns, f"uid {user.uid}: {what}")


def _going(
    trash: dict[int, list[KnownOrphan]],
    wanted: SpaceWanted | None,
    policy: VolumePolicy,
    clock: Clock,
    space: VolumeSpace,
) -> set[ContainerId]:
    """The orphans that expire early. wanted: None unless space is low and enough is measured"""
    excess = beyond_quota(trash, policy, space.total_bytes)
    going = set() if excess.is_met() else set(go_early(trash, excess, policy, clock))
    if wanted is not None and not wanted.is_met():
        large = OrphanSize(max(wanted.n_inodes, 0), max(wanted.n_bytes, 0))
        guessed = {uid: [one._replace(size=one.size or large) for one in known] for uid, known in trash.items()}
        going.update(go_early(guessed, wanted, policy, clock, all_of_it=False))
    return going


def _part_of(user: UserState, order: Order) -> FolderPart:
    assert not isinstance(order, Tend)
    return user.parts[order.base]


def _sofar(ended: OrphanEnded) -> ReapProgress:
    return ReapProgress(ended.n_removed, ended.n_bytes, ended.seconds)
