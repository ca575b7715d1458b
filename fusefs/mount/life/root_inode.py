"""The visible top of root's mounts: another inode than the filesystem's own root, so that the kernel keeps its ACL.

The root's inode is made with the mount, before the answer to INIT tells that there are ACLs. The kernel takes it for
one whose ACL must not be kept, and since 2026 it does so for good: each user but the root's owner, passing it on the
way to a name, waits for a GETXATTR each time. So root's mounts begin apart: in an fd, out of reach. When the
daemon answers, the top is looked up once more, by a name that only that root has: an inode like all others. A mount of
that is what people see; the first one goes. No process ever had two inodes of one directory.

Source  fuse_init_inode (fs/fuse/inode.c), __forget_cached_acl (fs/posix_acl.c), fsmount(2), open_tree(2)
"""

from __future__ import annotations

import errno
import logging
import os
import signal

import trio

from fusefs.core.printable_names import printable
from fusefs.linux import mount_calls
from fusefs.linux.children import fork
from fusefs.linux.fd import Fd
from fusefs.linux.mountinfo import TOP, Mount
from fusefs.mount.places.mount_points import mount_of_device
from fusefs.mount.tree.vfs import Vfs

_LIMIT_S, _GRACE_S = 10.0, 1.0
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = logging.getLogger(__name__)


async def show(vfs: Vfs, mount: Mount, apart: Fd) -> None:
    """Have a mount that answers where people see it; if another inode of its root can't be mounted, by its own root.

    apart   the mount, which is closed then
    Raises  OSError: it can't be moved there
    Checkpoint  while a process does that, which we have to answer
    """
    with apart, Fd(os.open(mount.point, _DIRECTORY)) as target:  # by us: an automount lets its own mount's daemon pass
        with vfs.lock:
            vfs.nodes.show_top(True)
        number = await _moved(mount, apart, target)
        with vfs.lock:
            if not number:
                vfs.nodes.hides_root = True
                vfs.nodes.renew_all()
                return
            vfs.nodes.show_top(False)
            vfs.timeouts.renew(vfs.nodes.root)  # what the kernel was sent of it meanwhile counts as the top's
        _log.info("the second inode of %s can't be mounted: %s", printable(mount.point), os.strerror(number))
        mount_calls.move_mount(apart, target)


async def _moved(mount: Mount, apart: Fd, target: Fd) -> int:
    """0, or the errno of `move`, done by a process: a daemon that waits for itself could not be killed.

    Checkpoint  until it has ended, or has been killed as it takes too long
    """
    pid, ended, code = 0, -1, 0
    try:
        pid = fork(lambda: move(3, 4), [apart, target])
        ended = os.pidfd_open(pid)
        with trio.move_on_after(_LIMIT_S):
            await trio.lowlevel.wait_readable(ended)
    except OSError as error:
        code = error.errno or errno.EIO
    finally:
        if pid:
            code = await _end(pid, ended) or code
    if not code or mount_of_device(mount.device):
        return 0
    return code if code > 0 else errno.ETIMEDOUT


async def _end(pid: int, ended: int) -> int:
    """The exit code of a child that has ended, or is killed now. Checkpoint  until then, but not for ever"""
    os.kill(pid, signal.SIGKILL)
    if ended >= 0:
        with trio.move_on_after(_GRACE_S, shield=True):  # it may be waiting for an answer of ours
            await trio.lowlevel.wait_readable(ended)
        os.close(ended)
    waited, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if waited else -signal.SIGKILL


def move(apart: int, target: int) -> None:
    """Mount the top of a mount that is apart on a directory. Raises  OSError: nothing is changed"""
    with Fd(os.open(TOP, _DIRECTORY, dir_fd=apart)) as top, mount_calls.clone_tree(top) as clone:
        mount_calls.move_mount(clone, target)
