"""Watch users' folders with inotify, to notice orphans that arrive, are restored or are reaped."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from fusefs.core.container_states import State
from fusefs.core.events import EventKind
from fusefs.core.names import Name, is_container_id, join_path
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyEvent, InotifyMask
from fusefs.linux.mountinfo import relative_to
from fusefs.linux.user_ids import read_subordinates
from fusefs.service import timers
from fusefs.service.shared_context import ServiceContext, boot_s
from fusefs.service.user_state import FolderPart, UserState, note_once
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.layout import DROP, Store, open_areas
from fusefs.store.user_folders import open_user_folder

_LOG = logging.getLogger(__name__)
_ORPHANS, _RESTORING, _REAPING = (
    Name(state.value.encode()) for state in (State.ORPHANS, State.RESTORING, State.REAPING)
)
_MOST_WATCHED = 1000
"""Maximum number of folders watched with inotify for one user, including subordinate uids; others are polled."""


class FolderWatches:
    """Watches the folders of all users of a volume, in all stores that they use."""

    def __init__(self, context: ServiceContext, volume: bytes, wake: Callable[[], None]) -> None:
        """wake: called when there is work to do."""
        self._context = context
        self._volume = volume
        self._wake = wake
        self._users: dict[int, UserState] = {}
        self._watches: dict[int, dict[bytes, list[int]]] = {}  # by uid, and by the path of the store
        self._blind: defaultdict[int, set[bytes]] = defaultdict(set)  # by uid: stores that could not be watched
        self._areas: list[int] = []
        self._n_blind = 0
        self.next_at_s = math.inf  # next attempt to watch the remaining folders; the interval grows

    def watch_users(self, store: Store, users: Mapping[int, UserState]) -> None:
        """Watch all users' folders that are not watched yet, up to a maximum number of stores for each user."""
        for uid in [uid for uid, user in self._users.items() if users.get(uid) is not user]:
            self.unwatch_user(uid)
        self._users = dict(users)
        holder_of = read_subordinates().holder_of
        n_allowed: defaultdict[int, int] = defaultdict(lambda: _MOST_WATCHED)
        is_full = True
        for uid, user in users.items():
            watches, most = self._watches.setdefault(uid, {}), n_allowed[holder_of(uid)]
            for base in user.parts.keys() - watches.keys():
                if len(watches) < most:
                    self._try_to_watch(store, user, base)
            for base in watches.keys() - user.parts.keys():
                self._unwatch_store(uid, base)
            n_allowed[holder_of(uid)] -= len(watches)
            # A user who reached the limit has too many stores, so trying again would not help.
            is_full &= len(watches) >= min(most, len(user.parts))
        self._n_blind = 0 if is_full else self._n_blind + 1
        self.next_at_s = boot_s() + 2.0 ** min(self._n_blind, 20) if self._n_blind else math.inf

    def is_complete(self, uid: int) -> bool:
        """Return whether every change in a user's folders will be reported."""
        return uid in self._watches and self._watches[uid].keys() == self._users[uid].parts.keys()

    def unwatch_user(self, uid: int) -> None:
        self._users.pop(uid, None)
        self._blind.pop(uid, None)
        for base in list(self._watches.get(uid, ())):
            self._unwatch_store(uid, base)
        self._watches.pop(uid, None)

    def watch_areas(self, store: Store, notice: Callable[[InotifyEvent], None]) -> None:
        """Watch the areas where users' folders are created, as far as possible, unless they are already watched."""
        if self._areas:
            return
        mask = InotifyMask.CREATE | InotifyMask.MOVED_TO | InotifyMask.MOVED_FROM | InotifyMask.DELETE
        for _name, area in store.areas.all():
            with suppress(OSError):
                self._areas.append(self._context.watcher.add(area, mask, notice))

    def unwatch_areas(self) -> None:
        for number in self._areas:
            self._context.watcher.remove(number)
        self._areas.clear()

    def _unwatch_store(self, uid: int, base: bytes) -> None:
        for number in self._watches[uid].pop(base):
            self._context.watcher.remove(number)

    def _try_to_watch(self, store: Store, user: UserState, base: bytes) -> None:
        self._watches[user.uid][base] = []
        try:
            self._watch(store, user, user.parts[base])
        except OSError as error:
            if base not in self._blind[user.uid]:
                _LOG.warning("the trash directory of uid %d can't be watched: %s", user.uid, error.strerror)
            self._blind[user.uid].add(base)
            self._unwatch_store(user.uid, base)
        else:
            if base in self._blind[user.uid]:
                self._blind[user.uid].remove(base)
                user.rescan()  # changes in the unwatched time are unknown

    def _watch(self, store: Store, user: UserState, part: FolderPart) -> None:
        watched = (
            (_ORPHANS, InotifyMask.MOVED_TO | InotifyMask.MOVED_FROM | InotifyMask.ATTRIB, self._on_orphans),
            (_RESTORING, InotifyMask.DELETE, self._on_restoring),
            (_REAPING, InotifyMask.MOVED_TO | InotifyMask.DELETE, self._on_reaping),
            (DROP, InotifyMask.MOVED_TO | InotifyMask.CREATE, self._on_drop),
        )
        with open_part(store, part.base, user.uid) as folder:
            for name, mask, notice in watched:
                with store.kernel.open_beneath(folder, name, DIRECTORY) as fd:
                    number = self._context.watcher.add(fd, mask, partial(self._on, user, part, notice))
                self._watches[user.uid][part.base].append(number)

    def _on(
        self,
        user: UserState,
        part: FolderPart,
        notice: Callable[[UserState, FolderPart, InotifyEvent], None],
        event: InotifyEvent,
    ) -> None:
        if event.kinds & InotifyMask.OVERFLOW:
            user.rescan()
        elif event.kinds & (
            InotifyMask.IGNORED | InotifyMask.DELETE_SELF | InotifyMask.MOVE_SELF | InotifyMask.UNMOUNT
        ):
            if part.base in self._watches.get(user.uid, ()):
                self._unwatch_store(user.uid, part.base)
                user.rescan()  # this also watches the remaining directories again
        else:
            notice(user, part, event)
        self._wake()

    def _on_orphans(self, user: UserState, part: FolderPart, event: InotifyEvent) -> None:
        identifier = _id(event)
        if identifier is None:
            return
        if event.kinds & InotifyMask.MOVED_TO:
            note_once(user.arrived_ids, identifier)
        if event.kinds & (InotifyMask.MOVED_TO | InotifyMask.ATTRIB):
            part.mark_unread(identifier)  # new, or its retention was changed (`trashd keep`)
        else:
            part.note_departed(identifier)

    def _on_restoring(self, user: UserState, part: FolderPart, event: InotifyEvent) -> None:
        identifier = _id(event)
        if identifier is not None:
            user.forget(identifier)
            part.mark_unread(identifier)  # to update the number of orphans
            self._context.report(EventKind.RESTORED, volume=self._volume, uid=user.uid, identifier=identifier)

    def _on_reaping(self, user: UserState, part: FolderPart, event: InotifyEvent) -> None:
        identifier = _id(event)
        if identifier is None or identifier in user.reaping_ids:
            return
        if event.kinds & InotifyMask.MOVED_TO:
            part.mark_unread(identifier)  # left to us (`trashd swap --wait`), or claimed by another process of the user
            return
        user.forget(identifier)
        part.mark_unread(identifier)
        detail = "by another process"
        self._context.report(EventKind.REAPED, volume=self._volume, uid=user.uid, identifier=identifier, detail=detail)

    def _on_drop(self, user: UserState, _part: FolderPart, event: InotifyEvent) -> None:
        now_s = boot_s()
        if event.kinds & InotifyMask.MOVED_TO:
            user.tend_at_s = now_s
        elif user.tend_at_s > now_s:  # a directory moved into drop/ need not wait, but a copy must be completed first
            user.tend_at_s = now_s + timers.current.copy_pause_s


def open_part(store: Store, path: bytes, uid: int) -> Fd:
    """Open a user's folder in the store with the given path, which is `store` or a store below it.

    The path comes from the user's own pointer, so no link in it is followed.

    Raises  OSError
    """
    kernel = store.kernel
    base, name = os.path.split(path)
    with kernel.open_beneath(store.base.fd, join_path(relative_to(base, store.base_path), name), DIRECTORY) as fd:
        areas = open_areas(kernel, fd, Name(name))
    with areas:
        folder = open_user_folder(store._replace(areas=areas), uid)
    if folder is None:
        raise FileNotFoundError(errno.ENOENT, "the user has no directory in this trash store")
    return folder.fd


def _id(event: InotifyEvent) -> str | None:
    text = event.name.decode("ascii", "replace")
    return text if is_container_id(text) else None
