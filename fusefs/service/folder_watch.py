"""inotify watches on users' folders, as things to look at: what came in, was restored, or was dropped."""

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
from fusefs.core.names import Name, is_container_id, join
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyEvent, InotifyMask
from fusefs.linux.mountinfo import below
from fusefs.linux.user_ids import read_subordinates
from fusefs.service import timers
from fusefs.service.shared_context import ServiceContext, boot_s
from fusefs.service.user_state import FolderPart, UserState
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.layout import DROP, Store, open_areas
from fusefs.store.standing import open_user

_LOG = logging.getLogger(__name__)
_ORPHANS, _RESTORING, _REAPING = (
    Name(state.value.encode()) for state in (State.ORPHANS, State.RESTORING, State.REAPING)
)
_MOST_WATCHED = 1000
"""Folders of one user's, and of his subordinate uids, in which inotify tells what happens; the others are polled."""


class FolderWatches:
    """Watches the folders of all users of a volume."""

    def __init__(self, context: ServiceContext, volume: bytes, wake: Callable[[], None]) -> None:
        """wake: called when there is something to do."""
        self._context = context
        self._volume = volume
        self._wake = wake
        self._watches: dict[int, FolderWatch] = {}
        self._areas: list[int] = []
        self._n_blind = 0
        self.next_at_s = math.inf  # when to try again what could not be watched; later each time

    def post(self, store: Store, users: Mapping[int, UserState]) -> None:
        """Watch the folders of all users that are not watched yet."""
        for uid in self._watches.keys() - users.keys():
            self.dismiss(uid)
        holder_of = read_subordinates().holder_of
        n_left: defaultdict[int, int] = defaultdict(lambda: _MOST_WATCHED)
        for uid, user in users.items():
            watch = self._watches.get(uid)
            if watch is None or watch.user is not user:
                self.dismiss(uid)
                watch = self._watches[uid] = FolderWatch(self._context, self._volume, user, self._wake)
            watch.post(store, n_left[holder_of(uid)])
            n_left[holder_of(uid)] -= len(watch)
        self._n_blind = 0 if all(one.is_full() for one in self._watches.values()) else self._n_blind + 1
        self.next_at_s = boot_s() + 2.0 ** min(self._n_blind, 20) if self._n_blind else math.inf

    def is_complete(self, uid: int) -> bool:
        """Whether all that happens in a user's folders will be told."""
        return uid in self._watches and self._watches[uid].is_complete()

    def dismiss(self, uid: int) -> None:
        """Watch nothing of a user's any more."""
        watch = self._watches.pop(uid, None)
        if watch is not None:
            watch.dismiss()

    def post_areas(self, store: Store, notice: Callable[[InotifyEvent], None]) -> None:
        """Watch where users' folders are made, as far as it can be, if that is not watched yet."""
        if self._areas:
            return
        wanted = InotifyMask.CREATE | InotifyMask.MOVED_TO | InotifyMask.MOVED_FROM | InotifyMask.DELETE
        for _name, area in store.areas.all():
            with suppress(OSError):
                self._areas.append(self._context.watcher.add(area, wanted, notice))

    def leave_areas(self) -> None:
        """Watch no more where they are made."""
        for number in self._areas:
            self._context.watcher.remove(number)
        self._areas.clear()


class FolderWatch:
    """Watches the folders of one user in all stores that he uses."""

    def __init__(self, context: ServiceContext, volume: bytes, user: UserState, wake: Callable[[], None]) -> None:
        """wake: called when there is something to do."""
        self._context = context
        self._volume = volume
        self.user = user
        self._wake = wake
        self._watches: dict[bytes, list[int]] = {}
        self._blind: set[bytes] = set()
        self._most = 0

    def post(self, store: Store, most: int) -> None:
        """Watch what is not watched yet, as far as it can be, in no more than so many stores."""
        self._most = most
        for base in self.user.parts.keys() - self._watches.keys():
            if len(self._watches) >= most:
                break
            self._watches[base] = []
            try:
                self._watch(store, self.user.parts[base])
            except OSError as error:
                if base not in self._blind:
                    _LOG.warning("a folder of uid %d can't be watched: %s", self.user.uid, error.strerror)
                self._blind.add(base)
                self._leave(base)
            else:
                if base in self._blind:
                    self._blind.discard(base)
                    self.user.look_again()  # anything may have happened meanwhile
        for base in self._watches.keys() - self.user.parts.keys():
            self._leave(base)

    def __len__(self) -> int:
        return len(self._watches)

    def is_complete(self) -> bool:
        """Whether all that happens will be told."""
        return self._watches.keys() == self.user.parts.keys()

    def is_full(self) -> bool:
        """Whether no more is to be watched: where not all of it is, the user has too many stores."""
        return len(self._watches) >= min(self._most, len(self.user.parts))

    def dismiss(self) -> None:
        """Watch nothing any more."""
        for base in list(self._watches):
            self._leave(base)

    def _leave(self, base: bytes) -> None:
        for number in self._watches.pop(base):
            self._context.watcher.remove(number)

    def _watch(self, store: Store, part: FolderPart) -> None:
        """Watch the folders in one store."""
        watched = (
            (_ORPHANS, InotifyMask.MOVED_TO | InotifyMask.MOVED_FROM | InotifyMask.ATTRIB, self._on_orphans),
            (_RESTORING, InotifyMask.DELETE, self._on_restoring),
            (_REAPING, InotifyMask.MOVED_TO | InotifyMask.DELETE, self._on_reaping),
            (DROP, InotifyMask.MOVED_TO | InotifyMask.CREATE, self._on_drop),
        )
        with open_part(store, part.base, self.user.uid) as folder:
            for name, wanted, notice in watched:
                with store.kernel.open_beneath(folder, name, DIRECTORY) as fd:
                    number = self._context.watcher.add(fd, wanted, partial(self._on, part, notice))
                self._watches[part.base].append(number)

    def _on(self, part: FolderPart, notice: Callable[[FolderPart, InotifyEvent], None], event: InotifyEvent) -> None:
        if event.happened & InotifyMask.OVERFLOW:
            self.user.look_again()
        elif event.happened & (
            InotifyMask.IGNORED | InotifyMask.DELETE_SELF | InotifyMask.MOVE_SELF | InotifyMask.UNMOUNT
        ):
            if part.base in self._watches:
                self._leave(part.base)
                self.user.look_again()  # which watches again what is still there
        else:
            notice(part, event)
        self._wake()

    def _on_orphans(self, part: FolderPart, event: InotifyEvent) -> None:
        identifier = _id(event)
        if identifier is None:
            return
        if event.happened & InotifyMask.MOVED_TO:
            self.user.came(identifier)
        if event.happened & (InotifyMask.MOVED_TO | InotifyMask.ATTRIB):
            part.look_at(identifier)  # new, or somebody gave it another term (`trashd keep`)
        else:
            part.leaves(identifier)

    def _on_restoring(self, part: FolderPart, event: InotifyEvent) -> None:
        identifier = _id(event)
        if identifier is not None:
            self.user.forget(identifier)
            part.look_at(identifier)  # so that it is known how many there are now
            self._context.tell(EventKind.RESTORED, volume=self._volume, uid=self.user.uid, identifier=identifier)

    def _on_reaping(self, part: FolderPart, event: InotifyEvent) -> None:
        identifier = _id(event)
        if identifier is None or self.user.is_ours(identifier):
            return
        if event.happened & InotifyMask.MOVED_TO:
            part.look_at(identifier)  # somebody left it to us (`trashd swap --wait`), or reaps it himself
            return
        self.user.forget(identifier)
        part.look_at(identifier)
        detail = "not by this service"
        self._context.tell(
            EventKind.REAPED, volume=self._volume, uid=self.user.uid, identifier=identifier, detail=detail
        )

    def _on_drop(self, _part: FolderPart, event: InotifyEvent) -> None:
        now_s = boot_s()
        if event.happened & InotifyMask.MOVED_TO:
            self.user.tend_at_s = now_s
        elif self.user.tend_at_s > now_s:  # what was moved there waits for no copy
            self.user.tend_at_s = now_s + timers.current.copy_pause_s


def open_part(store: Store, path: bytes, uid: int) -> Fd:
    """A user's folder in the store with that path: this one, or one below it.

    The user's own pointer leads there: through no link.

    Raises  OSError
    """
    kernel = store.kernel
    base, name = os.path.split(path)
    with kernel.open_beneath(store.base.fd, join(below(base, store.base_path), name), DIRECTORY) as fd:
        areas = open_areas(kernel, fd, Name(name))
    with areas:
        found = open_user(store._replace(areas=areas), uid)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "he has no folder there")
    return found.fd


def _id(event: InotifyEvent) -> str | None:
    text = event.name.decode("ascii", "replace")
    return text if is_container_id(text) else None
