"""Matches moved by a copy: made whole, read back, on disk and under its name before the original goes.

What a kill leaves is the original, or both; the next sweep finds a copy that is complete, and only removes the
original. A copy that has its name is never taken away again: another sweep may have relied on it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fusefs.core.freed_space import STAT_BLOCK_BYTES
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.linux.copy_inode import CopySource, UnnamedCopy, is_copy, make_copy, open_like, open_original, verify
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE
from fusefs.linux.private_directory import PrivateDirectory
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import COPY_PREFIX
from fusefs.store.make_store import discard_abandoned
from fusefs.sweep.move_destination import ArrivedNames, MoveDestination, candidates
from fusefs.sweep.request import ActionPlace, ActionResult, IfExists

_MOST_BYTES = 64 << 20
_MOST_FILES = 64
"""Of one batch, whose copies are made durable together: three fds each."""
_NO_LINK = frozenset({errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP})


class Copier:
    """Copies matches to a destination. For one process and one thread alone: it remembers hard links."""

    def __init__(self, destination: MoveDestination, if_exists: IfExists, arrivals: ArrivedNames) -> None:
        self._destination = destination
        self._if_exists = if_exists
        self._arrivals = arrivals
        self._links: dict[Identity, bytes] = {}
        """Where the copy of a file with more names is, from the destination."""
        self._tidied: bytes | None = None

    def take(self, here: ActionPlace, names: Sequence[str], target: Fd) -> ActionResult:
        """Copy some names of a directory into another, and remove them where they were."""
        if here.are_dirs:
            return ActionResult([(name, errno.EISDIR) for name in names], "copy")
        with here.kernel.open_dir(target) as readable, PrivateDirectory(here.kernel, readable, COPY_PREFIX) as private:
            if _is_shown_by_another(here, readable, private):
                return ActionResult([(name, errno.EINVAL) for name in names], "copy")
            self._tidy(here, readable)
            batch = _CopyBatch(here, readable, private, self._destination, self._if_exists, self._arrivals, self._links)
            try:
                return batch.run(names)
            finally:
                batch.close()

    def _tidy(self, here: ActionPlace, target: Fd) -> None:
        """Remove what copies that were killed have left in a directory, when we come to it: nothing else looks there.

        Where others may give names to what is ours nothing is removed.
        """
        place = self._destination.place(here.upper, b"")
        if place == self._tidied:
            return
        self._tidied = place
        with suppress(OSError):
            st = here.kernel.fstat(target)
            if st.st_uid in (0, os.geteuid()) and (st.st_mode & stat.S_ISVTX or not st.st_mode & OTHERS_WRITE):
                discard_abandoned(here.kernel, BackingAndMount(target), COPY_PREFIX)


def _is_shown_by_another(here: ActionPlace, target: Fd, private: PrivateDirectory) -> bool:
    """Whether the directory that names go to is the one that they are in, as another mount shows it.

    Numbers and times say nothing where a server, or a filesystem below, gives others (sshfs: ctime is mtime): the
    original would pass for its own copy. What is made in one appears in the other.
    """
    sides = (here.sides.fd, target)
    return not all(map(here.kernel.answers_at_once, sides)) and private.is_in(here.sides.fd)


@dataclass(eq=False, slots=True)
class _CopyUnderWay:
    """One name on its way.

    names     names that its copy may get; `new` is the one that is tried, or given
    made      its copy without a name; None if `other` is to be used
    other     a copy that has a name already: this one, if `is_there`, or that of another link to the same file
    mate      the same as `other`, of this batch
    identity  of an original that has, or had, more names
    is_put    `made` has its name
    replaces  what had the name when it was found, and gives way; None if it was free
    """

    at: int
    original: CopySource
    names: Iterator[bytes]
    new: bytes = b""
    made: UnnamedCopy | None = None
    other: Fd | None = None
    mate: _CopyUnderWay | None = None
    identity: Identity | None = None
    is_there: bool = False
    is_put: bool = False
    replaces: os.stat_result | None = None

    def fd(self) -> Fd:
        """Its copy."""
        if self.mate is not None:
            return self.mate.fd()
        fd = self.other if self.made is None else self.made.fd
        assert fd is not None
        return fd


class _CopyBatch:
    """Some copies that become durable together, each step for all of them before the next."""

    def __init__(
        self,
        here: ActionPlace,
        target: Fd,
        private: PrivateDirectory,
        destination: MoveDestination,
        if_exists: IfExists,
        arrivals: ArrivedNames,
        links: dict[Identity, bytes],
    ) -> None:
        """links: where copies of files with more names are, from the destination; more are added."""
        self._kernel = here.kernel
        self._here = here
        self._target = target
        self._private = private
        self._destination = destination
        self._if_exists = if_exists
        self._arrivals = arrivals
        self._links = links
        self._copies: list[_CopyUnderWay] = []
        self._refused: dict[int, int] = {}
        self._n_bytes = 0
        self._end = 0
        self._raw: list[bytes] = []
        self._groups: dict[Identity, list[_CopyUnderWay]] = {}
        """Those of files with more than one name."""

    def run(self, names: Sequence[str]) -> ActionResult:
        """Take as many of the names as make a batch, at least one."""
        self._raw = [os.fsencode(name) for name in names]
        self._end = len(names)
        for at in range(len(names)):
            if at and (self._is_full() or self._here.is_stopped()):
                self._end = min(self._end, at)
            if at >= self._end:
                break
            with self._answering(at):
                self._begin(at)
        self._each(self._put)
        self._flush()
        self._each(self._remove)
        refused = [(names[at], number) for at, number in sorted(self._refused.items()) if at < self._end]
        return ActionResult(refused, "copy", n_left=len(names) - self._end)

    def close(self) -> None:
        """Let go of everything; a copy without a name is gone."""
        for copy in self._copies:
            copy.original.fd.close()
            if copy.made is not None:
                if not copy.is_put:
                    copy.made.unname(self._kernel)
                copy.made.fd.close()
            if copy.other is not None:
                copy.other.close()

    def _is_full(self) -> bool:
        return self._n_bytes >= _MOST_BYTES or len(self._copies) >= _MOST_FILES

    @contextmanager
    def _answering(self, at: int) -> Iterator[None]:
        """Note what the kernel refuses of a name; what was stopped is left, with all after it."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ECANCELED:
                self._end = min(self._end, at)
            else:
                self._refused[at] = error.errno or errno.EIO

    def _each(self, step: Callable[[_CopyUnderWay], None]) -> None:
        for copy in self._copies:
            if self._is_live(copy):
                with self._answering(copy.at):
                    step(copy)

    def _is_live(self, copy: _CopyUnderWay) -> bool:
        """Whether it is of this batch still: neither refused nor left."""
        return copy.at < self._end and copy.at not in self._refused

    def _goes_on(self) -> bool:
        return not self._here.is_stopped()

    # Before it has a name.

    def _begin(self, at: int) -> None:
        name = self._raw[at]
        original = open_original(self._kernel, self._here.sides.fd, name)
        copy = _CopyUnderWay(at, original, candidates(name, self._if_exists))
        self._copies.append(copy)
        self._n_bytes += original.seen.st_blocks * STAT_BLOCK_BYTES
        if original.seen.st_nlink > 1 or self._links:
            self._find_links(copy)
        self._find_name(copy)
        if not copy.is_there and not self._find_link(copy):
            self._make(copy)

    def _find_name(self, copy: _CopyUnderWay) -> None:
        """Find a free name; or one that has its copy, which a command has made that was then killed."""
        for new in copy.names:
            copy.new = new
            try:
                other = open_like(self._kernel, copy.original, self._target, copy.new)
            except FileNotFoundError:
                return
            if other is not None:
                copy.other = other
                if self._is_copy(copy, other):
                    copy.is_there = True
                    return
                other.close()
                copy.other = None
            if self._if_exists is IfExists.REPLACE:
                there = self._arrivals.check_replaceable(self._kernel, self._target, copy.new)
                if stat.S_ISDIR(there.st_mode):
                    raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
                copy.replaces = there
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _is_copy(self, copy: _CopyUnderWay, other: Fd) -> bool:
        """Whether what has a name is a copy, and not the original as another mount shows it."""
        original, kernel = copy.original, self._kernel
        if original.may_be(kernel.fstat(other)):
            return False
        return is_copy(kernel, original, other, original.goes_on(kernel, self._goes_on))

    def _find_links(self, copy: _CopyUnderWay) -> None:
        """Put it to the other names of the same file, where its filesystem tells which these are.

        Elsewhere each is copied by itself, in a batch that ends with it: the end of one name changes what is seen of
        the others.
        """
        identity = self._kernel.identify(copy.original.fd)
        if compare(identity, identity) is Likelihood.SAME:
            copy.identity = identity
            self._groups.setdefault(identity, []).append(copy)
        elif copy.original.seen.st_nlink > 1:
            self._end = min(self._end, copy.at + 1)

    def _find_link(self, copy: _CopyUnderWay) -> bool:
        """Whether another name of the same file has a copy already, or will have one of this batch."""
        if copy.identity is None:
            return False
        first, way = self._groups[copy.identity][0], self._links.get(copy.identity)
        if first is not copy:
            copy.mate = first
        elif way is not None:
            with self._destination.open_root() as root, suppress(FileNotFoundError):  # it was moved on
                copy.other = open_like(self._kernel, copy.original, root, way)
        return copy.other is not None or copy.mate is not None

    def _make(self, copy: _CopyUnderWay) -> None:
        goes_on = copy.original.goes_on(self._kernel, self._goes_on)
        copy.made = make_copy(self._kernel, copy.original, self._target, self._private, goes_on)

    # Its name, and the end of the original.

    def _put(self, copy: _CopyUnderWay) -> None:
        if copy.is_there:
            return
        if copy.made is None:
            if self._is_linked(copy):
                return
            self._make(copy)
        assert copy.made is not None
        verify(self._kernel, copy.original, copy.made, copy.original.goes_on(self._kernel, self._goes_on))
        self._check_untouched(copy)
        self._name(copy, copy.made)
        copy.is_put = True

    def _is_linked(self, copy: _CopyUnderWay) -> bool:
        """Whether a copy could be made as one more link to that of another name."""
        if copy.mate is not None and not self._is_live(copy.mate):
            copy.mate = None
            return False
        try:
            self._name(copy, UnnamedCopy(copy.fd()))
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            copy.mate = None
            return False
        return True

    def _name(self, copy: _CopyUnderWay, made: UnnamedCopy) -> None:
        if copy.replaces is not None:
            self._check_still_replaceable(copy.new, copy.replaces)
            made.replace(self._kernel, self._private, self._target, copy.new)
        else:
            self._name_free(copy, made)
        self._arrivals.note([copy.new])

    def _name_free(self, copy: _CopyUnderWay, made: UnnamedCopy) -> None:
        while True:
            try:
                made.put(self._kernel, self._target, copy.new)
            except FileExistsError:
                following = next(copy.names, None)
                if following is None:
                    raise
                copy.new = following
            else:
                return

    def _check_still_replaceable(self, name: bytes, seen: os.stat_result) -> None:
        """Ask again: copying takes its time. Another link of it that was replaced has changed its ctime, no more.

        Raises  OSError: EEXIST
        """
        with suppress(FileNotFoundError):
            st = self._kernel.stat(self._target, name)
            if not os.path.samestat(st, seen) or st.st_mtime_ns != seen.st_mtime_ns:
                self._arrivals.check_replaceable(self._kernel, self._target, name)

    def _flush(self) -> None:
        """Have the names on disk, and what they mean: the directory by one call for all.

        What was flushed before it had a name is again: btrfs logs no file that no name leads to. On Linux 6.18 the
        flush of the directory was enough (measured), which is not promised. Elsewhere the first call does it for all.
        Source  fs/btrfs/tree-log.c, btrfs_log_inode_parent
        """
        self._each(self._flush_named)
        live = [copy.at for copy in self._copies if self._is_live(copy)]
        if live:
            try:
                self._kernel.fsync(self._target)
            except OSError as error:
                self._refused |= dict.fromkeys(live, error.errno or errno.EIO)

    def _flush_named(self, copy: _CopyUnderWay) -> None:
        if copy.original.is_regular():
            self._kernel.fsync(copy.fd())

    def _remove(self, copy: _CopyUnderWay) -> None:
        """Unlink the original, if it still is what was copied."""
        name, original = self._raw[copy.at], copy.original
        self._check_untouched(copy)
        if not self._kernel.is_named(original.fd, self._here.sides.fd, name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._kernel.unlink(self._here.sides.names(), name)
        if copy.identity is not None:
            self._note_link(copy, copy.identity)

    def _note_link(self, copy: _CopyUnderWay, identity: Identity) -> None:
        st = self._kernel.fstat(copy.original.fd)
        for other in self._groups[identity]:
            other.original = other.original.after_unlink(st)
        if st.st_nlink:
            self._links[identity] = self._destination.place(self._here.upper, copy.new)
        else:
            self._links.pop(identity, None)  # its number may be another file's soon

    def _check_untouched(self, copy: _CopyUnderWay) -> None:
        if not copy.original.is_untouched(self._kernel):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
