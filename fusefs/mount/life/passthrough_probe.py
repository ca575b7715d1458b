"""Whether the kernel passes reads through on a mount that has just begun: tried on a file that is hidden from all.

Two files in memory stand behind it: one that the kernel is told to read itself, and one that we read when it asks us.
What comes back tells which has read. A process of its own opens it: a thread that waits for its own daemon could not be
killed if the daemon were, and would keep the mount from ending.
"""

from __future__ import annotations

import os
import secrets
import subprocess

import trio

from fusefs.core.inode_table import Node, source_key
from fusefs.linux.fd import Fd
from fusefs.linux.statx import look_at
from fusefs.mount.tree.passthrough import reason_of
from fusefs.mount.tree.vfs import Vfs

_LIMIT_S, _GRACE_S, _GLANCE_S = 10.0, 1.0, 0.001
_PASSED, _ASKED = b"passed through", b"asked the daemon"


async def why_not_through(vfs: Vfs, mount_point: bytes) -> str | None:
    """Why this kernel does not pass reads through, after the answer to INIT; None: it does.

    Checkpoint  while the process reads, which we have to answer meanwhile
    """
    name = b".trashd-probe-" + secrets.token_hex(8).encode()
    lock, nodes, handles, passthrough, opening = vfs.lock, vfs.nodes, vfs.handles, vfs.passthrough, vfs.opening
    unlisted = vfs.lookups.unlisted
    with lock, _in_memory(_PASSED) as passed:
        asked = _in_memory(_ASKED)
        seen = look_at(asked)
        node = nodes.learn(source_key(seen, b""), seen, nodes.root, name)
        fh = handles.add(node, asked, os.geteuid())
        try:
            passthrough.begin_with(node, passed)
        except OSError as error:
            opening.release(fh)
            return reason_of(error)
        unlisted[name] = node
    try:
        with trio.move_on_after(_LIMIT_S):
            return await _try(node, mount_point + b"/" + name)
        return f"reading through took longer than {_LIMIT_S:.0f} s"
    finally:
        with lock:
            unlisted.pop(name, None)
            opening.release(fh)


async def _try(node: Node, path: bytes) -> str | None:
    """Checkpoint  until the kernel has forgotten it: what counts requests from now on counts none of ours"""
    try:
        code, told = await _told_by("cat", "--", path, path)  # the second time nothing has the name any more
    except OSError as error:
        return f"there is no cat to try it with: {error.strerror}"
    if told == _ASKED:
        return "the kernel agrees to it, and yet asks for reads"
    if told != _PASSED:
        return f"reading through failed (exit code {code})"
    while node.n_open > 1 or node.nlookup:
        await trio.sleep(_GLANCE_S)
    return None


async def _told_by(*command: str | bytes) -> tuple[int, bytes]:
    """Exit code and output of a program; a cancelled task kills it, and waits for its end, but not for ever.

    It may wait for us: to close a file takes an answer, which a mount that ends does not give any more.
    Raises      OSError: it can't be run
    Checkpoint  until it has ended
    """
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with process.stdout as output:
            told = b"".join([part async for part in output])
        return await process.wait(), told
    finally:
        if process.returncode is None:
            process.kill()
            with trio.move_on_after(_GRACE_S, shield=True):
                await process.wait()


def _in_memory(content: bytes) -> Fd:
    fd = Fd(os.memfd_create("trashd-probe"))
    os.write(fd, content)
    return fd
