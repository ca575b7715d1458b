"""Decide when a volume's orphans are reaped, measured or warned about, and handle the children's answers.

If space is low or a quota is exceeded, select orphans to expire early.
"""

from __future__ import annotations

import errno
import logging
import os
import time
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
    SpaceNeeded,
    VolumePolicy,
    age_s,
    beyond_quota,
    choose_early_deletions,
    due_in_s,
    warning_in_s,
)
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.children import user_name
from fusefs.linux.mountinfo import DAEMON_GONE, is_inside
from fusefs.service import timers
from fusefs.service.messages import (
    Answer,
    ContainerEntry,
    DueContainer,
    Measure,
    Measured,
    Order,
    OrderDone,
    OrphanEnded,
    Page,
    ReadRecords,
    Tend,
    Tended,
)
from fusefs.service.open_volume import OpenVolume, VolumeSpace
from fusefs.service.remembered_volumes import NO_GRACE, Grace
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.service.user_state import FolderPart, ReapProgress, UserState, note_once
from fusefs.service.volume_figures import VolumeFigures
from fusefs.store.container import ClaimLost
from fusefs.store.orphans import explain_first

_LOG = logging.getLogger(__name__)

_GONE = (errno.ESHUTDOWN, *DAEMON_GONE)
TROUBLE = frozenset({errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.ESTALE, *_GONE})
"""Errors that may mean a broken volume. Users' data can cause them, too: see `OrphanSchedule.note_user_failure`."""
_MOST_IO_ERRORS = 3
"""After this many consecutive orphans of one user with such an error inside, the disk may be failing."""
_MOST_TRIES = 3
_ORPHANS_MAX = 100_000
"""Maximum number of one user's orphans that count for a quota or for low space; they take some tens of megabytes."""
_DAY_S = 86_400
_KINDS = {
    Method.EXCHANGE: EventKind.SWAPPED,
    Method.TWO_RENAME: EventKind.SWAPPED,
    Method.REMOVED: EventKind.REMOVED,
    Method.DROPPED: EventKind.DROPPED,
    Method.SWEEP: EventKind.SWEPT,
}


class Trouble(Exception):
    """The volume is broken, so the service stops work on it for a while. The text gives the reason."""


class RootTakeover(NamedTuple):
    """An orphan that its owner could not delete, and that root takes over (store.as_owner) and deletes.

    by_force  whether root clears file flags
    """

    uid: int
    base: bytes
    id: ContainerId
    by_force: bool


class OrphanSchedule:
    """Handles the children's answers, and schedules orphans accordingly."""

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

        new_parts  called when a user has folders in additional stores
        holder_of  returns the user to whom a subordinate uid belongs
        grace      keeps orphans that expired while the volume was not served
        is_local   whether no other machine can have the filesystem mounted
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
        self.for_root: list[RootTakeover] = []

    def handle_answer(self, user: UserState, order: Order, answer: Answer) -> None:
        now_s = boot_s()
        match answer:
            case Tended():
                if user.set_stores(base for base in answer.bases if is_inside(base, self._volume)):
                    self._new_parts()
                user.note_problems(now_s, is_so=bool(answer.problems))
                for problem in answer.problems:
                    self._fault(user, "something in the user's trash directory was left unchanged", problem)
            case Page():
                part = user.parts[answer.base]
                part.n_orphans, part.n_quarantined = answer.n_orphans, answer.n_quarantined
                clock = self._context.clock()
                for entry in answer.entries:
                    self._note(user, part, entry, clock)
                for entry in answer.quarantined:
                    if not entry.is_kept:  # the previous service was killed before it could do this
                        self._hand_over(user, part, entry.id, entry.origin)
                if not (isinstance(order, ReadRecords) and order.ids is not None):
                    part.note_page(answer.last, now_s, self._context.clock().wall_ns)
            case OrphanEnded():
                self._handle_ended(user, _part_of(user, order), answer, now_s)
            case Measured():
                part = _part_of(user, order)
                orphans = part.orphans
                if isinstance(order, Measure) and order.when_idle:
                    if answer.id == part.measuring:
                        part.measuring = None  # the size is in its record now, if that could be written
                elif answer.id in orphans:
                    orphans[answer.id] = orphans[answer.id]._replace(size=OrphanSize(answer.n_inodes, answer.n_bytes))
            case OrderDone():
                pass

    def _note(self, user: UserState, part: FolderPart, entry: ContainerEntry, clock: Clock) -> None:
        """Note a container from a page: its size, and when to reap it, warn about it or measure it. Report new ones."""
        if entry.problem:
            self._fault(user, f"a record (…{entry.id[-12:]}) can't be read", entry.problem)
            return
        if entry.id in part.departed_ids and not entry.is_claimed:
            return
        identifier, sight, origin = (
            ContainerId(entry.id),
            part.sight(entry, clock),
            self._policy.usual_origin(entry.origin),
        )
        orphan = KnownOrphan(identifier, entry.created_ns, entry.retention_s, origin, entry.is_claimed, sight=sight)
        rules = self._policy.rules_for(origin)
        part.upcoming.add(DueContainer(entry.id, entry.retention_s), self._at_s(user, orphan, rules, clock))
        part.sizes.note(entry.id, entry.n_bytes)
        self._warn(user, part, orphan, rules, entry.origin, clock)
        self._measure_when_idle(part, entry, clock)
        before = part.orphans.get(entry.id)
        if self.must_measure() and (before is not None or len(part.orphans) * len(user.parts) < _ORPHANS_MAX):
            # Only measured sizes count: with a false size in a record, a user could make others' orphans expire.
            part.orphans[entry.id] = orphan if before is None else orphan._replace(size=before.size)
            if before is None:
                part.to_measure.append(entry.id)
        has_come = entry.id in user.arrived_ids
        is_new = has_come or entry.created_ns > part.reported_until_ns
        if is_new and not entry.is_claimed and entry.method is not None and note_once(user.reported_ids, entry.id):
            is_older = entry.created_ns < self._context.started_ns and not has_come
            kind = EventKind.FOUND if is_older else _KINDS[entry.method]
            self._context.report(kind, volume=self._volume, uid=user.uid, identifier=entry.id, origin=entry.origin)

    def _measure_when_idle(self, part: FolderPart, entry: ContainerEntry, clock: Clock) -> None:
        """Schedule the measurement of an orphan of unknown size, but not at once: many are restored or deleted soon.

        If space may have to be freed, this is unnecessary, because all orphans are measured anyway. On a filesystem
        that other machines have mounted, this node can't see whether the filesystem is idle, so nothing is scheduled.
        """
        needs_measurement = self._is_local and not (self.must_measure() or entry.is_claimed) and entry.n_bytes is None
        age_s, pause_s = (clock.wall_ns - entry.created_ns) / 1e9, timers.current.unmeasured_pause_s
        wait_s = min(max(pause_s - age_s, 0.0), pause_s)
        part.measure_at(entry.id, boot_s() + wait_s if needs_measurement else None)

    def _at_s(
        self, user: UserState, orphan: KnownOrphan, rules: RetentionRules, clock: Clock, *, early: bool = False
    ) -> float | None:
        """Return when an orphan may be reaped, by the service's clock; None: only on request."""
        now_s = boot_s()
        wait_s = due_in_s(orphan, rules, clock, early=early)
        if wait_s is None:
            return None
        # A reap that has begun is always due. Its orphan may have expired at any time since its creation.
        expired_s = now_s - age_s(orphan, clock) if orphan.is_claimed else now_s + wait_s
        return max(self._grace.at_s(now_s + wait_s, expired_s), user.tries(orphan.id).at_s)

    def _warn(
        self,
        user: UserState,
        part: FolderPart,
        orphan: KnownOrphan,
        rules: RetentionRules,
        origin: bytes | None,
        clock: Clock,
    ) -> None:
        """If there is a hook for it, report once that an orphan expires soon, or schedule this report."""
        hooks = self._context.config.hooks
        if hooks.on_expires_soon is None:
            return
        chosen = DueContainer(orphan.id, orphan.retention_s)
        wait_s = warning_in_s(orphan, rules, clock, hooks.warn_before_s)
        if wait_s is None or wait_s > 0:
            part.warnings.add(chosen, None if wait_s is None else boot_s() + wait_s)
            return
        part.warnings.add(chosen, None)
        # The previous service made the reports that were due while it ran, so these need not be remembered.
        if clock.wall_ns + wait_s * 1e9 > part.reported_until_ns and note_once(part.warned, chosen, part.most):
            remaining_s = wait_s + hooks.warn_before_s
            self._context.report(
                EventKind.EXPIRES_SOON,
                volume=self._volume,
                uid=user.uid,
                identifier=orphan.id,
                origin=origin,
                seconds=remaining_s,
            )

    def _handle_ended(self, user: UserState, part: FolderPart, ended: OrphanEnded, now_s: float) -> None:
        chosen = part.pending.pop(ended.id, DueContainer(ended.id, None))
        if ended.error or ended.lost or ended.stopped or ended.n_failed:
            user.reaping_ids.pop(ended.id, None)  # another reaper may be the next to reap it
        if ended.error:
            part.upcoming.add(chosen, user.retry_at_s(ended.id, now_s))
            self.note_user_failure(user, ended.errno, f"an orphan (…{ended.id[-12:]}) can't be reaped", ended.error)
        elif ended.lost == ClaimLost.CHANGED.value:
            part.mark_unread(ended.id)  # its owner changed the retention or pinned it: read it again
        elif ended.lost == ClaimLost.GONE.value and user.tries(ended.id).n_failed >= _MOST_TRIES:
            user.forget(ended.id)
        elif ended.lost:
            # A container also seems gone while its owner's process replaces the record.
            part.upcoming.add(chosen, user.retry_at_s(ended.id, now_s))
        elif ended.stopped:
            user.note_parked(ended.id, _sofar(ended))
            part.upcoming.add(chosen, now_s)
        else:
            self._reaped(user, part, ended)
        user.set_current(next(iter(part.pending), None))

    def _reaped(self, user: UserState, part: FolderPart, ended: OrphanEnded) -> None:
        all_of_it = user.sofar(ended.id).plus(_sofar(ended))
        user.forget(ended.id)
        part.n_orphans = max(part.n_orphans - 1, 0)
        why = explain_first(ended.failure, ended.n_failed)
        self._context.report(
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
            self._figures.count_reaped(all_of_it.n_removed)
            return
        part.n_quarantined += 1
        if ended.failure is not None and ended.failure.errno in TROUBLE:
            self._io_errors[user.uid] += 1
            if self._io_errors[user.uid] >= _MOST_IO_ERRORS:
                del self._io_errors[user.uid]
                what = f"{_MOST_IO_ERRORS} orphans in a row could not be read or written"
                self.note_user_failure(user, ended.failure.errno, what, why)
        if not ended.is_kept:
            self._hand_over(user, part, ended.id, ended.origin)

    def must_measure(self) -> bool:
        """Return whether orphans may have to expire early, so that the service must measure what each user holds."""
        return self._figures.hurries or self._policy.quota != Quota()

    def _hand_over(self, user: UserState, part: FolderPart, identifier: str, origin: bytes | None) -> None:
        """Request that root take over a quarantined orphan, if the configuration allows this."""
        if self._is_own:
            return
        rules = self._policy.rules_for(self._policy.usual_origin(origin))
        # Get the user's name last: on some machines, this takes a request to a remote server.
        if user.uid and rules.delete_as is DeleteAs.ROOT and rules.deletes_as_root(user.uid, user_name(user.uid)):
            self.for_root.append(RootTakeover(user.uid, part.base, ContainerId(identifier), rules.clears_flags))

    async def make_room(self, space: VolumeSpace, users: Iterable[UserState], limiter: trio.CapacityLimiter) -> None:
        """Make orphans expire early if space is low, or the trash exceeds its quota. Checkpoint

        `_select_early` selects them in a thread, because sorting a hundred thousand orphans here would delay all other
        volumes. If space is low and the measurements take too long, unmeasured orphans count as large enough.
        limiter  limits the threads of this volume
        """
        if not self.must_measure():
            self._figures.is_over_quota, self._figures.why_kept = False, ""
            return
        parts = [(user, part) for user in users for part in user.parts.values()]
        needed = self._figures.needed_space(self._policy) if self._figures.hurries else None
        is_measured = all(part.is_scanned() for _user, part in parts)
        if not is_measured and boot_s() < self._figures.hurries_since_s + timers.current.measure_limit_s:
            needed = None
        trash: dict[int, list[KnownOrphan]] = {}
        for user, part in parts:
            trash.setdefault(self._holder_of(user.uid), []).extend(part.orphans.values())
        early_ids, self._figures.is_over_quota, self._figures.why_kept = await in_thread(
            limiter, partial(_select_early, trash, needed, self._policy, self._context.clock(), space)
        )
        clock, now_s = self._context.clock(), boot_s()
        for user, part in parts:
            for identifier in early_ids & part.orphans.keys() - part.pending.keys():
                orphan = part.orphans[identifier]
                at_s = self._at_s(user, orphan, self._policy.rules_for(orphan.origin), clock, early=True)
                part.upcoming.add(DueContainer(identifier, orphan.retention_s), max(at_s or now_s, now_s))

    def note_user_failure(self, user: UserState, number: int, what: str, detail: str) -> None:
        """Handle an error in one user's data: only that user has to wait.

        The volume pauses only after errors in objects that only the store's owner can write to. An error in another
        user's files that may mean a broken volume sets `is_in_doubt`; the caller then checks the owner's directories.
        """
        self._fault(user, what, detail)
        if number in TROUBLE and user.uid == self._owner:
            self.note_volume_failure(number, what)
            return
        user.retry.note_failure(boot_s())
        self.is_in_doubt |= number in TROUBLE

    def note_volume_failure(self, number: int, what: str) -> None:
        self.trouble = f"{what}: {os.strerror(number)}"

    def _fault(self, user: UserState, what: str, detail: str = "") -> None:
        """Log an error, and add it to the status without `detail`, because every user may read the status."""
        if not self._context.allows_report(user.uid):
            return
        _LOG.warning("%s: uid %d: %s%s", printable(self._volume), user.uid, what, f": {detail}" if detail else "")
        self._figures.fault(self._context.clock().wall_ns, f"uid {user.uid}: {what}")


def _select_early(
    trash: dict[int, list[KnownOrphan]],
    needed: SpaceNeeded | None,
    policy: VolumePolicy,
    clock: Clock,
    space: VolumeSpace,
) -> tuple[set[ContainerId], bool, str]:
    """Return the orphans that must expire early, whether the trash exceeds its quota, and why no orphan must expire.

    needed  the space to be freed; None if space is not low, or not all orphans are measured yet
    """
    excess = beyond_quota(trash, policy, space.total_bytes)
    early_ids = set() if excess.is_met() else set(choose_early_deletions(trash, excess, policy, clock))
    is_low = needed is not None and not needed.is_met()
    if needed is not None and is_low:
        large = OrphanSize(max(needed.n_inodes, 0), max(needed.n_bytes, 0))
        guessed = {uid: [one._replace(size=one.size or large) for one in orphans] for uid, orphans in trash.items()}
        early_ids.update(choose_early_deletions(guessed, needed, policy, clock, is_urgent=True))
    is_over_quota, why = not excess.is_met(), ""
    if (is_low or is_over_quota) and not early_ids:
        why = _explain_kept("space is low" if is_low else "the quota is exceeded", trash, policy, clock)
    return early_ids, is_over_quota, why


def _explain_kept(problem: str, trash: dict[int, list[KnownOrphan]], policy: VolumePolicy, clock: Clock) -> str:
    """Return a sentence for the status: why no orphan expires early; empty if the orphans would free too little."""
    orphans = (orphan for each in trash.values() for orphan in each)
    waits_s = [due_in_s(orphan, policy.rules_for(orphan.origin), clock, early=True) for orphan in orphans]
    young_s = min((wait_s for wait_s in waits_s if wait_s is not None and wait_s > 0), default=None)
    if young_s is not None:
        at = time.strftime("%H:%M" if young_s < _DAY_S else "%Y-%m-%d %H:%M", time.localtime(time.time() + young_s))
        return f"{problem}; no orphan is deleted early before {at}, when the next one reaches the minimum age"
    is_all_pinned = bool(waits_s) and all(wait_s is None for wait_s in waits_s)
    return f"{problem}, but all orphans are pinned or named by keep" if is_all_pinned else ""


def _part_of(user: UserState, order: Order) -> FolderPart:
    assert not isinstance(order, Tend)
    return user.parts[order.base]


def _sofar(ended: OrphanEnded) -> ReapProgress:
    return ReapProgress(ended.n_removed, ended.n_bytes, ended.seconds)
