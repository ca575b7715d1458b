"""The handlers of plain mode answer every request, whatever fails below: an exception would end the mount."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.syscalls import handle_of
from fusefs.mount.plain.handlers import PlainHandlers
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import Broken
from tests.support.foreground_mount import fresh_mount
from tests.support.open_files import opened
from tests.support.vfs_without_mount import Files, Names, Somebody, vfs_at

NOT_HANDLED = {"poll"}
"""Answered by pyfuse3 with ENOSYS: the kernel then takes every file as ready, as on other filesystems."""

HANDLERS = sorted(
    name for name, method in inspect.getmembers(pyfuse3.Operations) if inspect.iscoroutinefunction(method)
)
FMODE_EXEC = 0x20
"""include/linux/fs.h, among the flags of OPEN: the file is run."""
CALLER = Somebody(uid=0, gid=0, pid=1, umask=0)
LIMIT_S = 60.0


def answer_of(name: str, error: Exception) -> int:
    """The errno that a handler answers with when all below it raises that."""
    broken: Any = Broken(error)
    handlers = PlainHandlers(broken, 2, has_acls=True)
    handler: Callable[..., Any] = getattr(handlers, name)
    values: dict[str, Any] = dict.fromkeys(("name", "name_old", "name_new", "new_name", "target", "value"), b"a")
    values |= {"ctx": CALLER, "inode_list": [(2, 1)], "attr": pyfuse3.EntryAttributes()}
    values |= {"fields": pyfuse3.SetattrFields(), "token": pyfuse3.ReaddirToken(), "buf": b"", "datasync": False}
    parameters = inspect.signature(handler).parameters
    with pytest.raises(pyfuse3.FUSEError) as answer:
        trio.run(handler, *[values.get(parameter, 2) for parameter in parameters])
    number: int = answer.value.errno
    return number


def test_every_handler_is_ours_but_those_that_nobody_needs() -> None:
    ours = {name for name in HANDLERS if getattr(PlainHandlers, name) is not getattr(pyfuse3.Operations, name)}
    assert set(HANDLERS) - ours == NOT_HANDLED


@pytest.mark.parametrize("name", sorted(set(HANDLERS) - NOT_HANDLED))
def test_an_error_of_the_kernel_goes_to_the_client(name: str) -> None:
    assert answer_of(name, OSError(errno.EDQUOT, "refused")) == errno.EDQUOT


@pytest.mark.allows_warnings
@pytest.mark.parametrize("error", [KeyError("a bug"), OSError("no errno")], ids=["bug", "no errno"])
@pytest.mark.parametrize("name", sorted(set(HANDLERS) - NOT_HANDLED))
def test_a_bug_is_eio_and_in_the_log(name: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert answer_of(name, error) == errno.EIO
    has_logged = any(record.levelno == logging.ERROR for record in caplog.records)
    assert has_logged is not isinstance(error, OSError)


@pytest.mark.allows_warnings
def test_no_thread_to_be_had_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", refuse)
        assert answer_of("statfs", OSError()) == errno.EIO


@contextmanager
def program(path: Path) -> Iterator[tuple[Vfs, int]]:
    """A tree with an executable file, and its nodeid."""
    (path / "program").write_bytes(b"content")
    (path / "program").chmod(0o755)
    with vfs_at(path) as vfs:
        yield vfs, Names(vfs).lookup(ROOT, b"program", CALLER).nodeid


@pytest.mark.needs("root")
def test_what_has_run_may_be_written_at_once_whatever_its_release_waits_for(tmp_path: Path) -> None:
    """A release is sent before a wait for the program's end returns, and thus before the file is opened next."""
    with program(tmp_path) as (vfs, nodeid):
        run = Files(vfs).open(nodeid, os.O_RDONLY | FMODE_EXEC, CALLER)
        with pytest.raises(OSError, match=os.strerror(errno.ETXTBSY)):
            Files(vfs).open(nodeid, os.O_WRONLY | os.O_TRUNC, CALLER)

        async def release_and_write() -> None:
            handlers = PlainHandlers(vfs, 1, has_acls=True)
            go_on = threading.Event()
            async with trio.open_nursery() as nursery:
                busy = partial(trio.to_thread.run_sync, go_on.wait, limiter=handlers.ending)
                nursery.start_soon(busy)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(handlers.release, pyfuse3.FileHandleT(run.fh))
                await trio.testing.wait_all_tasks_blocked()
                written = Files(vfs).open(nodeid, os.O_WRONLY | os.O_TRUNC, CALLER)
                go_on.set()
            Files(vfs).release(written.fh)

        trio.run(release_and_write)
        assert not (tmp_path / "program").read_bytes()
        assert not vfs.nodes.n_handles


@pytest.mark.needs("root", "fuse")
def test_a_file_handle_never_means_a_later_file() -> None:
    """The kernel makes it of nodeid and generation."""
    with fresh_mount("coherence=exclusive", "engine=plain", limit_s=LIMIT_S) as mounted:
        path = mounted.path / "file"
        handles = set()
        for _ in range(20):
            path.write_bytes(b"content")
            with opened(path, os.O_RDONLY) as fd:
                handles.add(handle_of(fd))
            path.unlink()
        assert len(handles) == 20


@pytest.mark.needs("root", "fuse")
def test_large_listings_come_whole_while_others_change_the_directory() -> None:
    with fresh_mount("coherence=exclusive", "engine=plain", limit_s=LIMIT_S) as mounted:
        names = {f"file-{number:04}" + "x" * (number % 200) for number in range(1000)}
        for name in names:
            (mounted.backing / name).touch()

        def change(number: int) -> None:
            for _ in range(50):
                (mounted.path / f"new-{number}").touch()
                (mounted.path / f"new-{number}").unlink()

        with ThreadPoolExecutor(2) as pool:
            changes = [pool.submit(change, number) for number in range(2)]
            while not all(one.done() for one in changes):
                seen = [name for name in os.listdir(mounted.path) if not name.startswith("new-")]
                assert sorted(seen) == sorted(names)
            for one in changes:
                one.result()
