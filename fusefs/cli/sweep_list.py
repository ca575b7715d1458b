"""The list of names that a sweep reads: where it comes from, and as absolute paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from fusefs.cli.typed_paths import standard_input
from fusefs.core.errors import UsageError, errors_about, from_os
from fusefs.core.listed_names import Listed, ListedName, ListFormat
from fusefs.linux.kernel import Kernel

STDIN = b"-"
_CHUNK = 1 << 20

ListReader = Callable[[], "Iterator[Listed]"]
"""Reads the list from its beginning."""


@contextmanager
def open_list(kernel: Kernel, source: bytes | None, how: ListFormat, *, reads_twice: bool) -> Iterator[ListReader]:
    """A list, read as its names are needed.

    source       its path; None or STDIN: standard input
    reads_twice  it is read more than once: what can't be read again is copied to a file without a name, not to memory
    """
    from fusefs.sweep.names_from_list import read_list

    with ExitStack() as owned:
        if source in (None, STDIN):
            source, fd = STDIN, standard_input()
        else:
            assert source is not None
            with errors_about(source):
                fd = owned.enter_context(kernel.open_path(source, os.O_RDONLY))
        begins_at = None
        if reads_twice:
            if not _is_seekable(fd):
                fd = _copied(owned, fd, source)
            begins_at = os.lseek(fd, 0, os.SEEK_CUR)

        def read() -> Iterator[Listed]:
            if begins_at is not None:
                os.lseek(fd, begins_at, os.SEEK_SET)
            return _begun(read_list(fd, how), source)

        yield read


def _is_seekable(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def _copied(owned: ExitStack, fd: int, source: bytes) -> int:
    """A file with what can be read from an fd. Raises  TrashdError"""
    import tempfile  # most lists are read once

    with errors_about(os.fsencode(tempfile.gettempdir())):
        file = owned.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  the stack closes it
    while chunk := _read(fd, source):
        with errors_about(os.fsencode(tempfile.gettempdir())):
            while chunk:
                chunk = chunk[file.write(chunk) :]
    file.seek(0)
    return file.fileno()


def _read(fd: int, source: bytes) -> bytes:
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
