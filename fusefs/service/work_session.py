"""Work on an opened volume until no work is due: choose the next user, give orders to children, and set the speed."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from functools import partial

import trio

from fusefs.core.errors import NotFound, TrashdError, from_os
from fusefs.core.events import EventKind
from fusefs.core.human_units import format_duration
from fusefs.core.names import ContainerId, Name
from fusefs.core.pacing import HOLD, Backlog, Pressure, RateCaps, Speed, WorkTotals
from fusefs.core.policy import VolumePolicy
from fusefs.engine.pace import PressurePacer
from fusefs.linux.children import user_credentials, user_name
from fusefs.linux.mountinfo import relative_to
from fusefs.linux.user_ids import read_subordinates
from fusefs.reaper.server_outage import CUT_OFF
from fusefs.service import timers
from fusefs.service.fair_turns import FairTurns, by_number, order_of_node
from fusefs.service.forker import ChildGone, ChildHandle, ForkerLost
from fusefs.service.messages import Heartbeat, Measure, Order, ReadRecords, Reap, Tend
from fusefs.service.open_volume import OpenVolume, VolumeSpace, own_beat_name
from fusefs.service.orphan_schedule import OrphanSchedule, RootTakeover, Trouble
from fusefs.service.remembered_volumes import Grace
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.service.user_state import UserState
from fusefs.service.volume_figures import VolumeFigures
from fusefs.store.as_owner import seize
from fusefs.store.container import ClaimLost
from fusefs.store.layout import Store, open_store
from fusefs.store.mounted_paths import shown_in_mount
from fusefs.store.swap import open_own_folder
from fusefs.store.user_folders import open_user_folder

_LOG = logging.getLogger(__name__)
_MOST_HELD = 16
"""Maximum number of reaps on hold; beyond it, reaps are parked."""
_MOST_IDLE = 4
"""Maximum number of idle children."""
_ROOTS_MOST = 1000
"""Maximum number of root's orphans that are remembered in a store where root had none before."""


class WorkSession:
    """The work on a volume while it is open. The volume loop keeps all lasting state."""

    def __init__(
        self,
        context: ServiceContext,
        opened: OpenVolume,
        policy: VolumePolicy,
        users: dict[int, UserState],
        figures: VolumeFigures,
        limiter: trio.CapacityLimiter,
        note_space: Callable[[VolumeSpace], None],
        new_parts: Callable[[], None],
        check_around: Callable[[], Awaitable[None]],
        grace: Grace,
    ) -> None:
        """Start idle.

        users        the users to serve; new ones may be added during the session
        limiter      limits the threads that use this volume
        note_space   called with the free space every few seconds
        new_parts    called when a user has folders in additional stores
        check_around  called every few seconds, to find new users and changes by other nodes
        grace        keeps orphans that expired while the volume was not served
        """
        self._context = context
        self._opened = opened
        self._policy = policy
        self._users = users
        self._figures = figures
        self._limiter = limiter
        self._note_space = note_space
        self._check_around = check_around
        self._most = Speed(policy.node_share(policy.max_entries_per_s), policy.node_share(policy.max_bytes_per_s))
        caps = RateCaps(self._most.entries_per_s, self._most.bytes_per_s, policy.horizon_s)
        beat = None if opened.beat is None else opened.beat.write_again
        self._pacer = PressurePacer(context.kernel, opened.hold, caps, may_write=opened.own is None, write=beat)
        self.tempo = HOLD
        is_shared = opened.is_shared()
        order = order_of_node(own_beat_name()) if is_shared else by_number
        holder_of = read_subordinates().holder_of
        self._turns = FairTurns(holder_of, order)
        self._children: dict[int, ChildHandle] = {}
        self._busy: set[int] = set()
        self._measuring: set[int] = set()
        self._counted: dict[int, Heartbeat] = {}
        self._woken = trio.Event()
        self._check_requested = trio.Event()
        self._stale: set[int] = set()
        self._is_stopping = False
        self._is_probing = self._is_writing_back = False
        self._by_force: set[str] = set()
        self._schedule = OrphanSchedule(
            context, opened, policy, figures, new_parts, holder_of, grace, is_local=not is_shared
        )

    # Called from outside

    def wake(self) -> None:
        """Choose the next user again, because something has changed."""
        self._woken.set()

    def stop(self) -> None:
        """End the session soon, and park the orphans that are being reaped."""
        self._is_stopping = True
        self.wake()

    def renew(self, uid: int) -> None:
        """Use a new child for the user's next order, because the old child still uses a folder that was replaced."""
        self._stale.add(uid)

    def request_check(self) -> None:
        """Check for new users soon."""
        self._check_requested.set()

    def current(self) -> list[UserState]:
        """Return the users who have an orphan that is being reaped, including users on hold."""
        return [user for user in self._users.values() if user.current is not None]

    def why(self) -> str:
        """Return the reason for the current speed, as a short sentence for users."""
        away = self._away()
        return f"waiting for the server: {os.strerror(away)}" if away else self._pacer.why()

    def _away(self) -> int:
        """Return the errno of the server's failure for whose end a child is waiting; 0 if no child is waiting."""
        return next((child.sums.away for child in self._children.values() if child.sums.away), 0)

    def pressure(self) -> Pressure:
        """Return the load of the disk and the machine, as measured most recently."""
        return self._pacer.pressure()

    # Work

    async def work(self) -> None:
        """Do all work that is due; return when there is none, or when stopped.

        Raises  Trouble; ForkerLost
        Checkpoint  yes
        """
        lost: ForkerLost | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_regularly)
            try:
                await self._take_turns(nursery)
            except ForkerLost as error:
                lost = error
            finally:
                self._is_stopping = True
                with trio.move_on_after(timers.current.parking_limit_s, shield=True):
                    await self._park()
                await self._end_children()
                self._pacer.close()
                nursery.cancel_scope.cancel()
        if lost is not None:
            raise lost
        if self._schedule.trouble:
            raise Trouble(self._schedule.trouble)

    async def _take_turns(self, nursery: trio.Nursery) -> None:
        worked_at_s = boot_s()
        while not (self._is_stopping or self._schedule.trouble):
            if self._schedule.is_in_doubt:  # a child reported an error that may mean a broken volume
                self._schedule.is_in_doubt = False
                try:
                    await in_thread(self._limiter, self._opened.check)
                except (TrashdError, OSError) as error:
                    self._schedule.trouble = from_os(error, self._opened.store.base_path).message()
                continue
            await self._take_over_next()
            now_s = boot_s()
            wanting = [uid for uid, user in self._users.items() if uid in self._busy or user.has_work(now_s)]
            # Measurements on an idle disk wait for all other work.
            working = self._busy - self._measuring
            wanting = [uid for uid in wanting if uid in working or self._users[uid].is_urgent(now_s)] or wanting
            if wanting:
                uid = self._turns.next(wanting)
                began_s = boot_s()
                await self._turn(nursery, self._users[uid])
                worked_at_s = boot_s()
                self._turns.charge(uid, worked_at_s - began_s)
            elif now_s < worked_at_s + timers.current.linger_pause_s:
                soon_s = min((user.next_at_s() for user in self._users.values()), default=math.inf)
                await self._wait(max(min(worked_at_s + timers.current.linger_pause_s, soon_s) - now_s, 0.0))
            else:
                return

    async def _take_over_next(self) -> None:
        """Take over one orphan that its user could not delete, so that it belongs to root."""
        if self._schedule.for_root:
            takeover = self._schedule.for_root.pop()
            try:
                orphan_id = await in_thread(self._limiter, partial(take_over, self._opened, takeover))
            except (TrashdError, OSError) as error:
                _LOG.warning("%s stays in quarantine: %s", takeover.id, from_os(error, takeover.id).message())
                return
            if orphan_id is not None and takeover.by_force:
                self._by_force.add(orphan_id)
            if 0 not in self._users:
                self._users[0] = UserState(0, self._opened.store.path(), lambda: _ROOTS_MOST, self._context.since_ns)
            self._users[0].rescan()

    async def _wait(self, seconds: float) -> None:
        """Wait for a change, at most for the given time."""
        with trio.move_on_after(seconds):
            await self._woken.wait()
        self._woken = trio.Event()

    async def _turn(self, nursery: trio.Nursery, user: UserState) -> None:
        """Run one user's child until it has no work, or others have waited long enough."""
        child = await self._child(nursery, user)
        if child is None:
            return
        began_s = last_s = boot_s()
        while not (self._is_stopping or self._schedule.trouble or self._schedule.is_in_doubt):
            if user.uid not in self._busy:
                order = user.next_order(boot_s())
                if order is None:
                    break
                self._busy.add(user.uid)
                order = self._complete_order(order)
                if isinstance(order, Measure) and order.when_idle:
                    self._measuring.add(user.uid)
                nursery.start_soon(self._carry_out, user, child, order)
            child.set_speed(self._tick(nursery))
            await self._wait(self._pacer.next_tick_s() if self._policy.paced else timers.current.tick_s)
            now_s = boot_s()
            user.had_s, last_s = user.had_s + now_s - last_s, now_s
            for one in self._children.values():
                one.check_alive()
            if self._children.get(user.uid) is not child:
                return
            if user.should_park(now_s) or (user.uid in self._measuring and user.is_urgent(now_s)):
                child.park()
            others = (uid in self._busy or one.has_work(now_s) for uid, one in self._users.items() if uid != user.uid)
            if now_s - began_s >= timers.current.quantum_s and any(others):
                break
        if user.uid in self._busy:
            child.set_speed(HOLD)
            if len(self._busy) > _MOST_HELD:
                child.park()
        elif len(self._children) > _MOST_IDLE and not user.has_work(boot_s()):
            self._dismiss(child)

    def _complete_order(self, order: Order) -> Order:
        """Add the policy's settings to an order. Orphans whose flags root may clear are reaped first, in extra orders.

        If space is low, orphans are reaped one at a time, so that no more of them expire early than necessary.
        """
        if isinstance(order, Tend):
            return Tend(self._policy.takeover_s or 0)
        if not isinstance(order, Reap):
            return order
        forced = [one for one in order.chosen if one.id in self._by_force]
        chosen = forced or order.chosen
        return Reap(order.base, chosen[:1] if self._figures.hurries else chosen, by_force=bool(forced))

    async def _child(self, nursery: trio.Nursery, user: UserState) -> ChildHandle | None:
        """Return a user's child; None if the user's folder is gone, or no child can be started."""
        child = self._children.get(user.uid)
        if child is not None and user.uid in self._stale - self._busy:
            self._dismiss(child)
            user.rescan()  # the old child reported about the former folder
            child = None
        if child is None:
            self._stale.discard(user.uid)
            try:
                child = await self._fork_child(user)
            except (TrashdError, OSError) as error:
                self._schedule.note_user_failure(
                    user, error.errno or errno.EIO, "no process can be started for the user", str(error)
                )
            if child is None:
                return None
            self._children[user.uid] = child
            nursery.start_soon(_listen, child)
        return child

    async def _fork_child(self, user: UserState) -> ChildHandle | None:
        """Fork a child for a user; if the user's folder is gone, forget the user and return None."""
        folder = await in_thread(self._limiter, partial(self._opened.folder, user.uid))
        if folder is None:
            if self._users.get(user.uid) is user:  # no other task has done this in the meantime
                del self._users[user.uid]
            return None
        with folder:
            who = await in_thread(self._limiter, partial(user_credentials, user.uid))
            return await self._context.forker.fork(folder, who)

    def _dismiss(self, child: ChildHandle) -> None:
        self._count()
        self._counted.pop(child.uid, None)
        del self._children[child.uid]
        child.close()

    async def _park(self) -> None:
        for uid in self._busy:
            child = self._children.get(uid)
            if child is not None:
                child.park(now=True)
        while self._busy:
            await self._wait(timers.current.tick_s)

    async def _end_children(self) -> None:
        """End all children; the volume is busy until they have ended."""
        children = list(self._children.values())
        for child in children:
            child.kill("no longer needed")
        with trio.move_on_after(timers.current.dying_limit_s, shield=True):
            for child in children:
                await child.ended()
        for child in children:
            self._dismiss(child)

    async def _carry_out(self, user: UserState, child: ChildHandle, order: Order) -> None:
        """Make a child carry out an order, and handle all outcomes."""
        try:
            if isinstance(order, Reap):
                user.note_ordered(order.ids())
                user.set_current(order.chosen[0].id)
            # Report work done even if the service ends; the session then parks its children and closes their handles.
            with trio.CancelScope(shield=True):
                async with aclosing(child.answers(order)) as answers:
                    async for answer in answers:
                        self._schedule.handle_answer(user, order, answer)
            # Orphans that were read again are due when they expire, even if a quota had made them expire early.
            has_read = isinstance(order, Measure | ReadRecords) and user.parts[order.base].is_scanned()
            if has_read and self._schedule.must_measure():
                await self._check_space()
            elif isinstance(order, Reap) and self._figures.hurries:
                self._note_space(await in_thread(self._limiter, self._opened.space))
            user.note_success(boot_s())
        except ChildGone as lost:
            user.take_back_order(order)
            if not self._is_stopping:
                self._dismiss(child)
                pause_s = user.retry.note_failure(boot_s())
                detail = f"{lost}; a new one starts in {format_duration(round(pause_s))}"
                self._context.report(
                    EventKind.CHILD_LOST, volume=self._opened.store.base_path, uid=user.uid, detail=detail
                )
        except OSError as error:
            user.take_back_order(order)
            self._schedule.note_user_failure(
                user, error.errno or errno.EIO, "the user's directory in the store can't be used", error.strerror or ""
            )
        finally:
            user.put_back(boot_s())
            user.set_current(None)
            self._busy.discard(user.uid)
            self._measuring.discard(user.uid)
            self.wake()

    def _tick(self, nursery: trio.Nursery) -> Speed:
        """Return the speed for the child that is working now."""
        self._count()
        now_s = boot_s()
        self._figures.note_rates(now_s)
        if self._policy.paced:
            n_due = sum(user.n_due(now_s) for user in self._users.values())
            n_entries = int(n_due * self._figures.usual_entries / self._policy.n_nodes)
            overdue_s = max([0.0, *(now_s - user.due_at_s() for user in self._users.values())])
            backlog = Backlog(n_entries, overdue_s, self._figures.hurries)
            work = WorkTotals(self._figures.n_entries, self._figures.n_bytes, self._figures.busy_s)
            self.tempo = self._pacer.tick(work, backlog)
            if self._pacer.is_probe_due() and not self._is_probing:
                self._is_probing = True
                nursery.start_soon(self._probe)
            if self._pacer.is_write_back_due() and not self._is_writing_back:
                self._is_writing_back = True
                nursery.start_soon(self._write_back)
        else:
            self.tempo = self._most
        return self.tempo

    def _count(self) -> None:
        """Add the work that the children's heartbeats have reported since the last call."""
        for uid, child in self._children.items():
            last, sums = self._counted.get(uid, Heartbeat(0, 0, 0.0)), child.sums
            self._counted[uid] = sums
            if uid in self._users:
                self._users[uid].n_removed += sums.n_entries - last.n_entries
            self._figures.add(sums.n_entries - last.n_entries, sums.n_bytes - last.n_bytes, sums.busy_s - last.busy_s)

    async def _probe(self) -> None:
        try:
            await in_thread(self._limiter, self._pacer.probe)
        except OSError as error:
            self._schedule.note_volume_failure(error.errno or errno.EIO, "the latency probe failed")
        finally:
            self._is_probing = False

    async def _write_back(self) -> None:
        await in_thread(self._limiter, self._pacer.write_back)
        self._is_writing_back = False

    async def _check_regularly(self) -> None:
        """Check for low space, new users, and changes by other nodes, which no child reports."""
        has_failed = False
        while True:
            try:
                await self._check_space()
                await self._check_around()
                has_failed = False
            except OSError as error:
                # A child that reaps runs into the same outage at its next access, and waits for the server.
                is_waited_for = error.errno in CUT_OFF and (self._away() or (self._busy and not has_failed))
                has_failed = True
                if not is_waited_for:
                    self._schedule.note_volume_failure(error.errno or errno.EIO, "the volume can't be checked")
            self.wake()
            await trio.sleep(timers.current.around_least_pause_s)
            with trio.move_on_after(timers.current.around_pause_s - timers.current.around_least_pause_s):
                await self._check_requested.wait()
            self._check_requested = trio.Event()

    async def _check_space(self) -> None:
        """Check the free space, and whether orphans must expire early."""
        space = await in_thread(self._limiter, self._opened.space)
        self._note_space(space)
        await self._schedule.make_room(space, self._users.values(), self._limiter)


async def _listen(child: ChildHandle) -> None:
    """Receive a child's messages until its handle is closed, even if cancelled. Checkpoint"""
    with trio.CancelScope(shield=True):
        await child.listen()


def take_over(opened: OpenVolume, takeover: RootTakeover) -> ContainerId | None:
    """Move an orphan from a user's quarantine to root's folder, to be reaped at once; return its new id.

    This is done for orphans that their owner could not delete, if an administrator configured `delete_as = "root"`.
    Returns None if another process holds the orphan.
    Raises  TrashdError; OSError
    """
    with ExitStack() as owned:
        store = _store_of(owned.enter_context(shown_in_mount(opened.store)), takeover.base, owned)
        folder = open_user_folder(store, takeover.uid)
        if folder is None:
            raise NotFound(takeover.id)
        owned.enter_context(folder)
        root_folder = owned.enter_context(open_own_folder(store))
        note = f"{user_name(takeover.uid)} could not delete it; the configuration lets root delete it"
        seized = seize(folder, takeover.id, root_folder, note, 0)
        return None if isinstance(seized, ClaimLost) else seized.id


def _store_of(upper: Store, path: bytes, owned: ExitStack) -> Store:
    """Return the store with the given path: `upper`, or a store below it, which `owned` closes."""
    if path == upper.path():
        return upper
    base, name = os.path.split(path)
    relative = relative_to(base, upper.base_path)
    sides = upper.base.beneath(upper.kernel, relative)
    lower = open_store(upper.kernel, sides, base, Name(name))
    if lower is None:
        raise NotFound(base)
    return owned.enter_context(lower)
