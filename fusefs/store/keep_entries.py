"""Moves entries between the old tree and the replacement: those kept by `swap --keep`, and parts restored earlier.

Before the exchange, `swap --keep` makes a hard link in the replacement for each kept entry that is not a directory. So
the name is never missing, and the old tree keeps the file, too. A directory can have only one name, so it is renamed
right after the exchange. The record lists these directories: recovery completes the renames, and a restore undoes them.

If a part was restored before the whole orphan, and its path was free, the part is in the replacement, at the same path
as in the tree. When the whole orphan is restored, the entry at that path moves from the replacement into the tree,
because it is newer.
No existing entry is replaced.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.errors import NotKept, UsageError
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import Name, RelPath, join_path, split_path
from fusefs.core.printable_names import printable
from fusefs.core.record import KeptDirectory, KeptEntries, Method, Record, encode_record, quote_path
from fusefs.linux.directory_metadata import is_frozen
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import NO_EXCHANGE
from fusefs.store.backing_and_mount import (
    ABSENT_ERRNOS,
    DIRECTORY,
    UNREACHABLE_ERRNOS,
    BackingAndMount,
    borrow_both_sides,
    choose_rename_fds,
    open_beneath_on_both,
    suppress_errno,
)
from fusefs.store.container import HeldContainer, flush_directory, open_inside, rewrite_record
from fusefs.store.layout import REPLACEMENT, TREE, is_store_name
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room
from fusefs.store.stage import Staged, identify_at
from fusefs.store.victim import Victim

_NAMES_MAX_BYTES = 48 * 1024
"""The space in a record for the names of kept directories, if the origin has the maximum length."""
_NO_LINK_ERRNOS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PERMANENT_ERRNOS = (*UNREACHABLE_ERRNOS, errno.EEXIST, errno.EPERM, errno.EBUSY, errno.EMLINK)
"""Errors that concern the entry and will recur; other errors may be gone when recovery tries again."""


# Choosing entries


def choose_kept_entries(kernel: Kernel, victim: Victim, globs: Sequence[str]) -> KeptEntries:
    """Choose the victim's top-level entries that match any of the globs, as in fnmatch(3) for whole names.

    Raises  NotKept if a glob matches nothing, since the entry that the user had in mind would disappear; UsageError if
            a glob is invalid; OSError
    """
    matchers = _matchers(globs)
    files, directories, unmatched_globs = [], [], set(globs)
    for entry in _matching_entries(kernel, victim.fd, matchers):
        unmatched_globs -= {glob for glob, matches in matchers.items() if matches(entry.name)}
        name = Name(os.fsencode(entry.name))
        if not entry.is_dir(follow_symlinks=False):
            files.append(name)
        elif (identity := identify_at(kernel, victim.fd, name)) is not None:
            directories.append(KeptDirectory(name, identity.ino))
    if unmatched_globs:
        missed = " or ".join(f"'{printable(os.fsencode(glob))}'" for glob in globs if glob in unmatched_globs)
        raise NotKept(f"no name in {printable(victim.path())} matches {missed}")
    if sum(len(quote_path(one.name)) + len(str(one.ino)) + 7 for one in directories) > _NAMES_MAX_BYTES:
        raise NotKept(f"the names of {len(directories)} directories do not fit into one record")
    return KeptEntries(tuple(globs), tuple(sorted(files)), tuple(sorted(directories)))


_Matchers = dict[str, Callable[[str], bool]]


def _matchers(globs: Sequence[str]) -> _Matchers:
    from fusefs.core.glob import compile_glob  # late: recovery does not need it

    matchers = {}
    for glob in globs:
        if "/" in glob:
            raise UsageError(
                f"--keep {glob}: the pattern contains a slash", "--keep matches the names at the top of DIR"
            )
        try:
            matchers[glob] = compile_glob(glob)
        except ValueError as error:
            raise UsageError(f"--keep '{glob}': {error}") from error
    return matchers


def _matching_entries(kernel: Kernel, dir_fd: Fd, matchers: _Matchers) -> Iterator[os.DirEntry[str]]:
    with kernel.open_dir(dir_fd) as readable, kernel.scan(readable) as entries:
        for entry in entries:
            if any(matches(entry.name) for matches in matchers.values()) and not is_store_name(os.fsencode(entry.name)):
                yield entry


def find_keep_refusals(kernel: Kernel, victim: Victim, kept_entries: KeptEntries) -> Iterator[NotKept]:
    """Yield the reasons why entries can't be kept, as far as they can be found without trying."""
    for name in kept_entries.files:
        with suppress(FileNotFoundError), kernel.open_beneath(victim.fd, name) as fd:
            st = kernel.fstat(fd)
            if os.geteuid() not in (0, st.st_uid) and not (
                stat.S_ISREG(st.st_mode) and _has_access(fd, os.R_OK | os.W_OK)
            ):
                yield _not_kept(victim, name, _OTHERS_FILE)
    yield from _immovable(kernel, victim, kept_entries.directories)


def _immovable(kernel: Kernel, victim: Victim, directories: Iterable[KeptDirectory]) -> Iterator[NotKept]:
    """Yield the reasons why directories can't be moved: after the exchange, it would be too late to refuse."""
    top, uid = kernel.fstat(victim.fd), os.geteuid()
    for one in directories:
        with suppress(FileNotFoundError), kernel.open_beneath(victim.fd, one.name) as fd:
            if not _has_access(fd, os.W_OK):
                yield _not_kept(victim, one.name, "moving a directory needs write permission on it")
            elif top.st_mode & stat.S_ISVTX and uid not in (0, top.st_uid, kernel.fstat(fd).st_uid):
                yield _not_kept(
                    victim,
                    one.name,
                    "its parent directory has the sticky bit, and you own neither the entry nor its parent",
                )
            elif is_frozen(fd):
                yield _not_kept(victim, one.name, _FROZEN)


_OTHERS_FILE = "a hard link to another user's file needs read and write permission on the file (fs.protected_hardlinks)"
_FROZEN = "it is immutable or append-only (lsattr)"


def _has_access(fd: Fd, mode: int) -> bool:
    return os.access(b"/proc/self/fd/%d" % fd, mode, effective_ids=True)


def _not_kept(victim: Victim, name: Name, why: str) -> NotKept:
    return NotKept(f"{printable(os.path.join(victim.path(), name))}: {why}")


# The swap


class KeptLinks(NamedTuple):
    """The entries that a swap keeps, after their links have been made.

    tree, replacement  the old directory and the new one, wherever they are now; the staged container closes them
    inos               the name and inode number of each link before the exchange; any other name in the replacement
                       was made by another process
    """

    kernel: Kernel
    kept_entries: KeptEntries
    tree: BackingAndMount
    replacement: BackingAndMount
    inos: dict[bytes, int]

    def finish(self) -> list[str]:
        """After the exchange, move the directories, and apply changes that were made since the links were made.

        Returns  descriptions of entries that were not moved and why, for messages
        Raises   OSError if recovery should try again
        """
        unmoved = _move_directories(self.kernel, self.kept_entries.directories, self.tree, self.replacement)
        return unmoved + self._apply_late_changes()

    def _apply_late_changes(self) -> list[str]:
        """Apply changes that others made between the links and the exchange: files created, removed or replaced.

        Nothing is removed: names are linked, moved or exchanged.
        """
        added, replaced, gone = [], [], dict(self.inos)
        for one in _matching_entries(self.kernel, self.tree.fd, _matchers(self.kept_entries.globs)):
            if not one.is_dir(follow_symlinks=False):
                name = os.fsencode(one.name)
                ino = gone.pop(name, None)
                if ino is None:
                    added.append(name)
                elif ino != one.inode():
                    replaced.append(name)
        tree, replacement_fd = choose_rename_fds(self.tree, self.replacement)
        unmoved = []
        for name in added:
            with suppress(FileExistsError, FileNotFoundError):
                self.kernel.link(tree, name, replacement_fd, name)
        for name in filter(self._is_still_linked, gone):
            with suppress(FileExistsError, FileNotFoundError):
                self.kernel.rename_free(replacement_fd, name, tree, name)
        for name in filter(self._is_still_linked, replaced):
            try:
                self.kernel.exchange(tree, name, replacement_fd, name)
            except OSError as error:
                if error.errno not in (*NO_EXCHANGE, errno.ENOENT):
                    raise
                unmoved.append(f"{printable(name)} (a file that replaced it during the swap)")
        return unmoved

    def _is_still_linked(self, name: bytes) -> bool:
        try:
            return self.kernel.stat(self.replacement.fd, name).st_ino == self.inos[name]
        except FileNotFoundError:
            return False


def link_kept_entries(staged: Staged, victim: Victim) -> KeptLinks:
    """Link the kept entries into the staged replacement; no flush is needed for this (docs/internals/crash-windows.md).

    Raises  NotKept; OSError EXDEV if the victim can't be moved into this store; other OSError
    """
    kept_entries, kernel = victim.kept_entries, staged.held.folder.store.kernel
    assert kept_entries is not None
    for reason in _immovable(kernel, victim, kept_entries.directories):
        raise reason
    tree, replacement = _open_sides(staged, victim)
    source, target = choose_rename_fds(tree, replacement)
    for name in kept_entries.files:
        try:
            kernel.link(source, name, target, name)
        except FileNotFoundError:
            continue  # it has been removed
        except OSError as error:
            if error.errno not in _NO_LINK_ERRNOS:
                raise
            raise _not_kept(victim, name, _explain_link_error(kernel, tree.fd, name, error)) from error
        if name is kept_entries.files[0] and not _is_same_file(kernel, replacement.fd, tree.fd, name):
            kernel.unlink(target, name)
            raise _not_kept(victim, name, "the filesystem does not report whether two names are the same file")
    return KeptLinks(kernel, kept_entries, tree, replacement, kernel.list_inos(replacement.fd))


def _explain_link_error(kernel: Kernel, dir_fd: Fd, name: Name, error: OSError) -> str:
    if error.errno == errno.EMLINK:
        return "it has the maximum number of hard links"
    if error.errno not in (errno.EPERM, errno.EACCES):
        return f"no hard link can be created: {error.strerror}"
    with kernel.open_beneath(dir_fd, name) as fd:
        if stat.S_ISDIR(kernel.fstat(fd).st_mode):
            return "it has been replaced with a directory"
        if is_frozen(fd):
            return _FROZEN
        return (
            _OTHERS_FILE
            if os.geteuid() not in (0, kernel.fstat(fd).st_uid)
            else "the filesystem does not support hard links"
        )


def drop_kept_links(staged: Staged, victim: Victim) -> None:
    """Remove the links from a replacement that will not get the victim's name."""
    tree, replacement = _open_sides(staged, victim)
    _drop_links(staged.held.folder.store.kernel, replacement, tree)


def _open_sides(staged: Staged, victim: Victim) -> tuple[BackingAndMount, BackingAndMount]:
    """Open the victim and the replacement, each on both sides if possible; the staged container closes the fds."""
    held, replacement = staged.held, staged.replacement
    kernel = held.folder.store.kernel
    assert replacement is not None
    name = TREE if held.record.method is Method.EXCHANGE else REPLACEMENT
    tree = held.owned.enter_context(borrow_both_sides(kernel, victim.fd, victim.parent.sides.mounted, victim.name))
    way = join_path(held.relative_path(), name)
    return tree, held.owned.enter_context(borrow_both_sides(kernel, replacement, held.folder.store.base.mounted, way))


# Recovery and restore


def settle_kept(held: HeldContainer, at_name: BackingAndMount | None) -> list[str]:
    """Move kept entries, and parts that were restored before the whole orphan, to the directory where they belong.

    If the replacement has the victim's name, they belong in the replacement. If not (before the exchange, or after a
    restore), they belong in the old tree, and the links are removed from the replacement.
    at_name  the entry at the victim's name; None if there is none
    Returns  descriptions of entries that were not moved and why, for messages
    Raises   OSError
    """
    kernel, record = held.folder.store.kernel, held.record
    if record.kept is None and not record.parts:
        return []
    with ExitStack() as owned:
        tree, replacement, is_in_view = None, _open_inside(held, REPLACEMENT, owned), False
        inside = _open_inside(held, TREE, owned)
        if inside is not None and compare(kernel.identify(inside.fd), record.fresh) is IdentityMatch.SAME:
            replacement = inside
        else:
            tree = inside
        if at_name is not None:
            identity = kernel.identify(at_name.fd)
            if tree is None and compare(identity, record.victim) is not IdentityMatch.OTHER:
                tree = at_name
            elif replacement is None and compare(identity, record.fresh) is not IdentityMatch.OTHER:
                replacement, is_in_view = at_name, True
        if tree is None or replacement is None:
            return []
        if is_in_view:
            return _move_directories(kernel, record.kept or (), tree, replacement)
        unmoved = _move_directories(kernel, record.kept or (), replacement, tree)
        if record.kept:
            # A flush of the container would do nothing if another process called sync after the exchange.
            flush_directory(held, replacement.fd)
        if record.kept is not None:
            _drop_links(kernel, replacement, tree)
        return unmoved + merge_parts(held, replacement, tree)


def _open_inside(held: HeldContainer, name: Name, owned: ExitStack) -> BackingAndMount | None:
    with suppress_errno(*ABSENT_ERRNOS):
        return owned.enter_context(open_inside(held, name))
    return None


def find_missing_kept(held: HeldContainer, tree: Fd) -> list[str]:
    """Return the directories that a swap kept in place and that are missing in the restored tree."""
    kernel = held.folder.store.kernel
    kept = held.record.kept or ()
    return [printable(one.name) for one in kept if identify_at(kernel, tree, one.name) is None]


def _move_directories(
    kernel: Kernel, kept: Iterable[KeptDirectory], source: BackingAndMount, target: BackingAndMount
) -> list[str]:
    """Move recorded directories; return descriptions of those that were not moved, with the reasons, for messages."""
    unmoved = []
    source_fd, target_fd = choose_rename_fds(source, target)
    for one in kept:
        try:
            with kernel.open_beneath(source.fd, one.name, DIRECTORY) as fd:
                if compare(kernel.identify(fd), Identity("", one.ino, 0)) is IdentityMatch.OTHER:
                    continue
        except OSError as error:
            if error.errno not in ABSENT_ERRNOS:
                raise
            continue
        try:
            kernel.rename_free(source_fd, one.name, target_fd, one.name)
        except OSError as error:
            if error.errno not in _PERMANENT_ERRNOS:
                raise
            unmoved.append(f"{printable(one.name)} ({error.strerror})")
    return unmoved


def _drop_links(kernel: Kernel, replacement: BackingAndMount, tree: BackingAndMount) -> None:
    """Remove a name from the replacement if the old tree has the same name for the same inode; remove nothing else."""
    with suppress(PermissionError), kernel.open_dir(replacement.fd) as readable:
        for name in kernel.list(readable):
            if _is_same_file(kernel, replacement.fd, tree.fd, name):
                kernel.unlink(replacement.names_fd(), name)


def _is_same_file(kernel: Kernel, a: Fd, b: Fd, name: bytes) -> bool:
    with suppress_errno(*ABSENT_ERRNOS):
        here = kernel.stat(b, name)
        return not stat.S_ISDIR(here.st_mode) and os.path.samestat(here, kernel.stat(a, name))
    return False


_RECORD_MAX_BYTES = 24 * 1024
"""The maximum size of a record with parts: recovery and a reap need space for keys that they add later."""


def record_part(held: HeldContainer, inside: RelPath, *, is_home: bool) -> tuple[HeldContainer, list[str]]:
    """Before a part is moved out of a tree, drop the container's recorded size and record the part.

    is_home  whether the part is restored to its original path, which is in the replacement if the swap made one
    Returns  the container, and a warning if the part could not be recorded; the caller restores it nevertheless
    """
    record = held.record._replace(size=None)
    why = ""
    if is_home and record.fresh is not None and inside not in record.parts:
        with_part = record._replace(parts=(*record.parts, inside))
        if _has_room(with_part):
            record = with_part
        else:
            why = "the record is full"
    if record != held.record:
        try:
            held = call_with_room(held.folder, SPARE_FOR_USER, partial(rewrite_record, held, record))
        except OSError as error:
            why = os.strerror(error.errno or errno.EIO)
    if not why:
        return held, []
    what = f"this restore of {printable(inside)} could not be recorded ({why})"
    return held, [f"{what}, so a later restore of the whole orphan will leave this part in a separate orphan"]


def _has_room(record: Record) -> bool:
    try:
        return len(encode_record(record)) <= _RECORD_MAX_BYTES
    except ValueError:
        return False


def merge_parts(held: HeldContainer, replacement: BackingAndMount, tree: BackingAndMount) -> list[str]:
    """Move recorded parts into the tree from a replacement that has lost the victim's name; return the unmoved parts.

    A killed merge can be repeated, since parts that were moved are no longer in the replacement.
    """
    unmoved = []
    for part in held.record.parts:
        try:
            _merge(held, replacement, tree, part)
        except OSError as error:
            if error.errno not in ABSENT_ERRNOS or _has_part(held, replacement, part):
                unmoved.append(f"{printable(part)} ({error.strerror})")
    return unmoved


def _merge(held: HeldContainer, replacement: BackingAndMount, tree: BackingAndMount, part: RelPath) -> None:
    kernel = held.folder.store.kernel
    *parents, name = split_path(part)
    above = join_path(*parents)
    with open_beneath_on_both(kernel, replacement, above) as source:
        kernel.stat(source.fd, name)
        with open_beneath_on_both(kernel, tree, above) as target:
            source_fd, target_fd = choose_rename_fds(source, target)
            kernel.rename_free(source_fd, name, target_fd, name)
        flush_directory(held, source.fd)  # as in `restore_inside`
    with suppress(OSError):
        while above:  # remove the directories that were made for the part and are now empty
            upper, _, last = above.rpartition(b"/")
            with open_beneath_on_both(kernel, replacement, upper) as directory:
                kernel.rmdir(directory.names_fd(), last)
            above = RelPath(upper)


def _has_part(held: HeldContainer, replacement: BackingAndMount, part: RelPath) -> bool:
    """Return whether the replacement still has a part: then the merge failed because the tree lacks a directory."""
    kernel = held.folder.store.kernel
    with suppress(OSError), open_beneath_on_both(kernel, replacement, RelPath(os.path.dirname(part))) as source:
        kernel.stat(source.fd, os.path.basename(part))
        return True
    return False
