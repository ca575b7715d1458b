"""The adapter answers every request, whatever goes wrong below: an exception that leaks would end the mount."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import types
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import pytest

from fusefs.core.nodeids import ROOT
from fusefs.mount.bridge.pyfuse3_handlers import Pyfuse3Handlers
from fusefs.mount.bridge.pyfuse3_threads import Pyfuse3Threads
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.tables_lock import TablesLock
from tests.support.fake_dev_fuse import Broken, a_real

P = ParamSpec("P")
R = TypeVar("R")

NOT_HANDLED = {"poll"}
"""Answered by pyfuse3 with ENOSYS: the kernel then takes every file as ready, as on other filesystems."""

HANDLERS = sorted(
    name for name, method in inspect.getmembers(pyfuse3.Operations) if inspect.iscoroutinefunction(method)
)


FMODE_EXEC = 0x20
"""include/linux/fs.h, among the flags of OPEN: the file is run."""


class AtOnce(Pyfuse3Threads):
    """No threads: there is no trio here."""

    async def wait_for(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return act(*args, **kwargs)


class Busy(Pyfuse3Threads):
    """All threads have something else to do for a while."""

    async def wait_for(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        await _while()
        return act(*args, **kwargs)


@types.coroutine
def _while() -> Generator[None, None, None]:
    yield


class Context:
    """Root asks."""

    uid = gid = pid = umask = 0


def answer_of(name: str, error: Exception) -> int:
    """The errno that a handler answers with when all below it raises that."""
    broken: Any = Broken(error)
    stats = Counters.in_memory()
    adapter = Pyfuse3Handlers(broken, AtOnce(TablesLock(), stats, 1), broken)
    handler: Callable[..., object] = getattr(adapter, name)
    values = {"ctx": Context(), "name": b"a", "inode_list": [(2, 1)], "attr": pyfuse3.EntryAttributes()}
    values |= {"fields": pyfuse3.SetattrFields(), "token": pyfuse3.ReaddirToken(), "buf": b"", "datasync": False}
    parameters = inspect.signature(handler).parameters
    coroutine = handler(*[values.get(parameter, 2) for parameter in parameters])
    assert inspect.iscoroutine(coroutine)
    try:
        coroutine.send(None)
    except pyfuse3.FUSEError as answer:
        return answer.errno
    except StopIteration as end:
        raise AssertionError("it succeeded") from end
    raise AssertionError("it waits")


def test_every_handler_is_ours_but_those_that_nobody_needs() -> None:
    ours = {name for name in HANDLERS if getattr(Pyfuse3Handlers, name) is not getattr(pyfuse3.Operations, name)}
    assert set(HANDLERS) - ours == NOT_HANDLED


@pytest.mark.parametrize("name", sorted(set(HANDLERS) - NOT_HANDLED))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_error_of_the_kernel_goes_to_who_asked(name: str, number: int) -> None:
    assert answer_of(name, OSError(number, "refused")) == number


@pytest.mark.allows_warnings
@pytest.mark.parametrize("error", [KeyError("a bug"), OSError("no errno"), ValueError("embedded null byte")])
@pytest.mark.parametrize("name", sorted(set(HANDLERS) - NOT_HANDLED))
def test_bug_is_told_as_eio_and_in_the_log(name: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert answer_of(name, error) == errno.EIO
    has_logged = any(record.levelno == logging.ERROR for record in caplog.records)
    assert has_logged is not isinstance(error, OSError)


def test_what_has_run_may_be_written_at_once_whatever_its_release_waits_for() -> None:
    """A release is sent before a wait for the program's end returns, and thus before the file is opened next."""
    with a_real() as (_kernel, vfs, path):
        (path / "program").write_bytes(b"content")
        (path / "program").chmod(0o755)
        nodeid = vfs.lookups.lookup(ROOT, b"program", Context()).nodeid
        run = vfs.files.open(nodeid, os.O_RDONLY | FMODE_EXEC, Context())
        with pytest.raises(OSError, match=os.strerror(errno.ETXTBSY)):
            vfs.files.open(nodeid, os.O_WRONLY | os.O_TRUNC, Context())
        nobody: Any = None
        adapter = Pyfuse3Handlers(vfs, Busy(TablesLock(is_slow=True), Counters.in_memory(), 1), nobody)
        releasing = adapter.release(pyfuse3.FileHandleT(run.fh))
        releasing.send(None)
        written = vfs.files.open(nodeid, os.O_WRONLY | os.O_TRUNC, Context())
        assert not (path / "program").read_bytes()
        with pytest.raises(StopIteration):
            releasing.send(None)
        vfs.opening.release(written.fh)
        assert not len(vfs.handles)
