"""The visible top directory of root's mounts. It is not the filesystem's root inode, so the kernel can cache its ACL.

The root inode is created with the mount, before the reply to INIT enables ACLs. The kernel marks it as an inode whose
ACL must not be cached, and since 2026 it never changes that. So for every user except the directory's owner, each path
lookup through this inode would wait for a GETXATTR.

For that reason, root's mounts begin unattached: the mount exists only as an fd. When the daemon answers, the top
directory is looked up once more, by a name that only the root inode has, which creates an ordinary inode. Users see a
bind mount of that inode, and the first mount is dropped. No process ever sees two inodes of one directory.

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

_MOVE_TIMEOUT_S, _GRACE_S = 10.0, 1.0
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = logging.getLogger(__name__)


async def attach_with_new_root(vfs: Vfs, mount: Mount, mount_fd: Fd) -> None:
    """Attach a served mount to its mount point, with a second inode as its top; if that fails, with its root inode.

    mount_fd    an fd of the unattached mount, which is closed afterwards
    Raises      OSError: the mount can't be moved to the mount point
    Checkpoint  while a child process does this and the daemon replies to its requests
    """
    # The daemon itself must open the mount point: an automount point lets only the daemon of its own mount pass.
    with mount_fd, Fd(os.open(mount.point, _DIRECTORY)) as target:
        with vfs.lock:
            vfs.nodes.show_top(True)
        number = await _move_in_child(mount, mount_fd, target)
        with vfs.lock:
            if not number:
                vfs.nodes.hides_root = True
                vfs.nodes.invalidate_all()
                return
            vfs.nodes.show_top(False)
            vfs.timeouts.invalidate(vfs.nodes.root)  # the kernel may have been sent the second inode's attributes
        _log.info(
            "%s: the kernel can't cache the ACL of the mount's root directory: %s",
            printable(mount.point),
            os.strerror(number),
        )
        mount_calls.move_mount(mount_fd, target)


async def _move_in_child(mount: Mount, mount_fd: Fd, target: Fd) -> int:
    """Run `attach_top` in a child; return 0 or its errno.

    The daemon must not call it: a daemon that waits for its own replies can't even be killed.
    Checkpoint  until the child has ended, or was killed because it took too long
    """
    pid, pid_fd, code = 0, -1, 0
    try:
        pid = fork(lambda: attach_top(3, 4), [mount_fd, target])
        pid_fd = os.pidfd_open(pid)
        with trio.move_on_after(_MOVE_TIMEOUT_S):
            await trio.lowlevel.wait_readable(pid_fd)
    except OSError as error:
        code = error.errno or errno.EIO
    finally:
        if pid:
            code = await _end_child(pid, pid_fd) or code
    if not code or mount_of_device(mount.device):
        return 0
    return code if code > 0 else errno.ETIMEDOUT


async def _end_child(pid: int, pid_fd: int) -> int:
    """Kill a child if it has not ended; return its exit code. Checkpoint  until it has ended, for a limited time"""
    os.kill(pid, signal.SIGKILL)
    if pid_fd >= 0:
        with trio.move_on_after(_GRACE_S, shield=True):  # it may be waiting for one of our replies
            await trio.lowlevel.wait_readable(pid_fd)
        os.close(pid_fd)
    waited, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if waited else -signal.SIGKILL


def attach_top(mount_fd: int, target: int) -> None:
    """Mount the second top inode of an unattached mount on a directory. Raises  OSError: nothing was changed"""
    with Fd(os.open(TOP, _DIRECTORY, dir_fd=mount_fd)) as top, mount_calls.clone_tree(top) as clone:
        mount_calls.move_mount(clone, target)
