"""Names from a list: where it comes from, read as they come in bounded memory; and as jobs, by directory.

A newline in a name ends a line too, unless the list escapes it or ends names with NUL.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from fusefs.core.errors import UsageError, errors_about, from_os
from fusefs.core.listed_names import NO_NAMES, Listed, ListedName, ListedTogether, ListFormat
from fusefs.core.names import join, split
from fusefs.core.sweep_result import OUTSIDE, UNCLEAR
from fusefs.linux.kernel import Kernel
from fusefs.sweep.agenda import Job, JobKind

_TOGETHER = 1024
_MOST_KNOWN = 1024
_LONGEST = 1 << 20
"""Bytes of a path, far longer than any real one: what has no end at all must not fill the memory."""
_CHUNK = 1 << 20

_POLICY = re.compile(rb" *([0-9]+) +[0-9]+ +[0-9]+(?: .*)?", re.DOTALL)
_DELIMITER = b" -- "
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|%00")


class BrokenList(UsageError):
    """The list of names can't be read"""


def jobs_of(
    names: Iterable[Listed | ListedTogether],
    tops: Iterable[bytes],
    refuse: Callable[[bytes, str], None],
    most: int | None = None,
) -> Iterator[Job]:
    """Jobs for names relative to the sweep's directory, or absolute and in it; their order stays, nearly.

    tops    the absolute paths that the directory has
    refuse  called with a name and why: it is outside of it, no plain path, or not understood
    most    names of a job; with 1 no name is asked for before what is done to the last one has begun
    """
    most = most or _TOGETHER
    places = _ListedPlaces(tops)
    upper, together, inos = b"", list[str](), dict[str, int]()
    for name in names:
        if isinstance(name, ListedTogether):
            if together:
                yield Job(JobKind.LOOK, upper, together, inos=inos)
                together, inos = [], {}
            place = places.of(name.directory)
            if place is None:
                refuse(name.directory, OUTSIDE)
            else:
                yield Job(JobKind.LOOK, join(*place), name.names)
            continue
        path, ino, is_understood = (name, 0, True) if isinstance(name, bytes) else name
        place = places.of(path) if is_understood else None
        if place is None:
            refuse(path, OUTSIDE if is_understood else UNCLEAR)
            continue
        above, last = place
        if not last:
            continue  # the sweep's directory itself, which find tells first, and which is never chosen
        if above != upper and together:
            yield Job(JobKind.LOOK, upper, together, inos=inos)
            together, inos = [], {}
        upper = above
        together.append(os.fsdecode(last))
        if ino:
            inos[together[-1]] = ino
        if len(together) >= most:
            yield Job(JobKind.LOOK, upper, together, inos=inos)
            together, inos = [], {}
    if together:
        yield Job(JobKind.LOOK, upper, together, inos=inos)


class _ListedPlaces:
    """Where in the sweep's directory listed paths are; a directory that many are in is made out once."""

    def __init__(self, tops: Iterable[bytes]) -> None:
        self._prefixes = [top.rstrip(b"/") + b"/" for top in tops]
        self._directories: dict[bytes, bytes | None] = {}

    def of(self, path: bytes) -> tuple[bytes, bytes] | None:
        """The directory, relative to the sweep's, and the name in it (empty for that itself); None: outside, no path"""
        at = path.rfind(b"/") + 1
        above, last = path[:at], path[at:]
        if above not in self._directories:
            if len(self._directories) >= _MOST_KNOWN:
                self._directories.clear()
            self._directories[above] = _relative(above, self._prefixes)
        upper = self._directories[above]
        if upper is not None and last not in NO_NAMES and b"\0" not in last:
            return upper, last
        whole = _relative(path, self._prefixes)
        if whole is None:
            return None
        upper, _slash, last = whole.rpartition(b"/")
        return upper, last


def read_list(fd: int, how: ListFormat) -> Iterator[Listed]:
    """Read a list as its lines are needed. Raises  as `read_names`"""
    names = read_names(fd, b"\0" if how is ListFormat.NUL else b"\n")
    return map(_read_policy_line, names) if how is ListFormat.MMAPPLYPOLICY else names


def _read_policy_line(line: bytes) -> ListedName:
    """Read a line of mmapplypolicy: inode, generation and snapshot, what SHOW prints, ` -- `, the path.

    Users choose what SHOW prints and the path: with two delimiters in it a line is not understood.
    Source  Storage Scale's "File list format", and "Policy rules: Terms" on ESCAPE
    """
    head, _delimiter, path = line.partition(_DELIMITER)
    numbers = _POLICY.fullmatch(head)
    if numbers is None or _DELIMITER in path or _BROKEN_ESCAPE.search(path):
        return ListedName(line, is_understood=False)
    path = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), path)
    return ListedName(path, int(numbers[1])) if path.startswith(b"/") else ListedName(line, is_understood=False)


def read_names(fd: int, end: bytes) -> Iterator[bytes]:
    """The names in a file, as soon as they can be read.

    end     what each ends with; what is empty between two of them is none
    Raises  BrokenList for what is no list of names, or if the kernel refuses to read on (its error is the cause)
    """
    rest = b""
    while chunk := _read(fd):
        if end != b"\0" and b"\0" in chunk:
            raise BrokenList("it has NUL in it", "-0 reads names that end with it (find -print0)")
        *whole, rest = (rest + chunk).split(end)
        if len(rest) > _LONGEST:
            raise BrokenList("a name in it has no end", "names end with a newline, or with NUL if -0 is given")
        yield from filter(None, whole)
    if rest:
        yield rest


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError as error:
        raise BrokenList(os.strerror(error.errno or errno.EIO)) from error


def _relative(name: bytes, prefixes: Iterable[bytes]) -> bytes | None:
    """The path below the sweep's directory, empty for that itself; None for one that is none."""
    plain = b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))
    if name.startswith(b"/"):
        whole = b"/" + plain + b"/"
        inside = next((whole[len(prefix) : -1] for prefix in prefixes if whole.startswith(prefix)), None)
        if inside is None:
            return None
        plain = inside
    if not plain:
        return plain
    try:
        split(plain)
    except ValueError:
        return None
    return plain


@contextmanager
def open_list(
    kernel: Kernel, source: bytes, fd: int | None, how: ListFormat, *, reads_twice: bool
) -> Iterator[Callable[[], Iterator[Listed]]]:
    """What reads a list from its beginning, each name when it is needed; its names are absolute paths then.

    source       its path
    fd           itself, if it is open: standard input
    reads_twice  it is read more than once: what can't be read again is copied to a file without a name, not to memory
    """
    with ExitStack() as owned:
        if fd is None:
            with errors_about(source):
                fd = owned.enter_context(kernel.open_path(source, os.O_RDONLY))
        begins_at = None
        if reads_twice:
            try:
                begins_at = os.lseek(fd, 0, os.SEEK_CUR)
            except OSError:
                fd, begins_at = _copied(owned, fd, source), 0

        def read() -> Iterator[Listed]:
            if begins_at is not None:
                os.lseek(fd, begins_at, os.SEEK_SET)
            return _begun(read_list(fd, how), source)

        yield read


def _copied(owned: ExitStack, fd: int, source: bytes) -> int:
    """A file with what can be read from an fd. Raises  TrashdError"""
    import tempfile  # most lists are read once

    with errors_about(os.fsencode(tempfile.gettempdir())):
        file = owned.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  the stack closes it
    while chunk := _read_chunk(fd, source):
        with errors_about(os.fsencode(tempfile.gettempdir())):
            while chunk:
                chunk = chunk[file.write(chunk) :]
    return file.fileno()


def _read_chunk(fd: int, source: bytes) -> bytes:
    with errors_about(source):
        return os.read(fd, _CHUNK)


def _begun(names: Iterator[Listed], source: bytes) -> Iterator[Listed]:
    """The names of a list as absolute paths, the first one read: what is no list is refused before anything is done."""
    try:
        first = next(names, None)
    except UsageError as error:
        if isinstance(error.__cause__, OSError):
            raise from_os(error.__cause__, source) from error
        raise
    if first is None:
        return iter(())
    return _absolute(os.getcwdb(), chain((first,), names))


def _absolute(here: bytes, names: Iterable[Listed]) -> Iterator[Listed]:
    """A name of a format that has more than names is so already, or it is none."""
    above = os.path.join(here, b"")
    for name in names:
        if isinstance(name, ListedName):
            yield name
        else:
            yield _from(here, name) if name.startswith((b"/", b"..")) else above + name


def _from(here: bytes, name: bytes) -> bytes:
    """An absolute path. Where we are is told without links, so that `..` in front means what it says; not elsewhere."""
    while name == b".." or name.startswith(b"../"):
        here, name = os.path.dirname(here), name[3:].lstrip(b"/")
    return os.path.join(here, name)
