"""The socket of a mount over itself: a client that shows a directory of it gets what is below, and no way above."""

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusefs.linux import mount_calls
from fusefs.linux.backing_fd_socket import request_backing_fd, socket_path
from fusefs.linux.fd import Fd
from fusefs.mount.places.attach import remount
from tests.support.background_mounts import RUNTIME, backing_of, daemon_of, mount, our_mount, workbench
from tests.support.background_processes import in_time
from tests.support.foreground_mount import until
from tests.support.fuse_silent import sent_to_be_closed
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.other_users import as_user
from tests.support.proc_stat import stat_of, stop
from tests.support.real_filesystems import bind_mount, mounts
from tests.support.trashd_command import TRASHD, done_well

pytestmark = pytest.mark.needs("root", "fuse")

USER, OTHER = 1000, 1001
_WHILE_IT_WAITS = 4
"""The sockets of a visit that waits for the daemon: the door, the daemon's, its visitor's, and one for the answer."""
T = TypeVar("T")


@pytest.fixture
def bench() -> Iterator[Path]:
    """`source` is what is to be mounted over itself; the user's directory in it has a directory and a file."""
    with workbench() as path:
        (path / "source/his/job").mkdir(parents=True)
        (path / "source/his/job/file").write_text("content")
        (path / "source/closed/inner").mkdir(parents=True)
        (path / "source/closed").chmod(0o700)
        for one in ("his", "his/job", "his/job/file"):
            os.chown(path / "source" / one, USER, USER)
        yield path


def door(mounted: Path) -> bytes:
    path = socket_path(os.fsencode(backing_of(mounted)))
    assert path is not None
    return path


def shown(path: Path) -> Fd:
    return Fd(os.open(path, os.O_PATH | os.O_CLOEXEC))


def with_given(mounted: Path, path: Path, act: Callable[[Fd], T], uid: int = USER) -> T:
    """What a user does with what is given for a directory."""

    def body() -> T:
        with shown(path) as fd, request_backing_fd(door(mounted), fd) as backing:
            return act(backing)

    return as_user(uid, body)


def identity(fd: int | Path) -> tuple[int, int]:
    st = os.stat(fd)
    return st.st_dev, st.st_ino


def inside(fd: Fd, name: str) -> Path:
    return Path(f"/proc/self/fd/{fd}") / name


def test_nobody_but_root_comes_to_the_backing_tree_by_path(bench: Path) -> None:
    mount(bench / "source")
    tree = identity(backing_of(bench / "source"))
    places = [Path(os.fsdecode(entry.mount_point)) for entry in mounts()]
    places += [Path(above) / name for above, names, _files in os.walk(RUNTIME) for name in names]

    def found() -> list[Path]:
        reached = []
        for place in places:
            with contextlib.suppress(OSError):
                reached += [place] if identity(place) == tree else []
        return reached

    assert backing_of(bench / "source") in found()
    assert as_user(USER, found) == []


@pytest.mark.parametrize("backing", ["local", "slow"])
def test_who_shows_the_mount_is_given_the_tree_below_it(bench: Path, backing: str) -> None:
    mount(bench / "source", "-o", f"backing={backing}")
    assert with_given(bench / "source", bench / "source", identity) == identity(backing_of(bench / "source"))


@pytest.mark.parametrize("name", ["his", "his/job"])
def test_who_shows_a_directory_is_given_that_and_no_way_above_it(bench: Path, name: str) -> None:
    mount(bench / "source")
    here = identity(backing_of(bench / "source") / name)

    def seen(fd: Fd) -> list[tuple[int, int]]:
        up = [os.open("/".join([".."] * n), os.O_PATH, dir_fd=fd) for n in (1, 2, 9)]
        return [identity(fd), *map(identity, up)]

    assert with_given(bench / "source", bench / "source" / name, seen) == [here] * 4
    assert with_given(bench / "source", bench / "source" / name, seen, uid=0) == [here] * 4


def test_above_the_tree_is_what_root_alone_may_enter(bench: Path) -> None:
    mount(bench / "source")

    def climb(fd: Fd) -> None:
        os.stat("../..", dir_fd=fd)

    with pytest.raises(PermissionError):
        with_given(bench / "source", bench / "source", climb)


def test_in_a_namespace_of_its_own_even_root_gets_no_way_above_it(bench: Path) -> None:
    mount(bench / "source")
    tree = identity(backing_of(bench / "source"))

    def climb() -> None:
        see_own_mounts_only()
        with shown(bench / "source") as fd, request_backing_fd(door(bench / "source"), fd) as given_fd:
            assert [identity(given_fd), identity(os.open("../..", os.O_PATH, dir_fd=given_fd))] == [tree, tree]

    in_time(climb)


def test_what_was_moved_behind_the_mount_is_what_he_holds(bench: Path) -> None:
    mount(bench / "source")
    tree = backing_of(bench / "source")
    with shown(bench / "source/his/job") as fd:
        (tree / "his/job").rename(tree / "his/moved")
        (tree / "his/job").mkdir()
        with request_backing_fd(door(bench / "source"), fd) as backing:
            assert identity(backing) == identity(tree / "his/moved")


ACTS: dict[str, Callable[[Fd], object]] = {
    "ro": lambda fd: os.mkdir("made", dir_fd=fd),
    "noexec": lambda fd: subprocess.run([inside(fd, "true")], check=True),
    "nosuid": lambda fd: subprocess.run(f"test $({inside(fd, 'suid')} -u) = 0", shell=True, check=True),
    "nodev": lambda fd: inside(fd, "device").open().close(),
    "nosymfollow": lambda fd: inside(fd, "link").read_text(),
}


@pytest.mark.parametrize("flag", ACTS)
@pytest.mark.parametrize("name", ["", "his"])
def test_what_the_mount_refuses_is_refused_in_what_he_is_given(bench: Path, flag: str, name: str) -> None:
    source = bench / "source"
    where = source / name
    source.chmod(0o777)
    shutil.copy("/bin/true", where / "true")
    shutil.copy("/usr/bin/id", where / "suid")
    (where / "suid").chmod(0o4755)
    os.mknod(where / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (where / "device").chmod(0o666)
    (where / "link").symlink_to("true")
    mount(source, "-o", flag)

    def refused(fd: Fd) -> bool:
        os.set_inheritable(fd, True)
        try:
            ACTS[flag](fd)
        except (OSError, subprocess.CalledProcessError):
            return True
        return False

    assert with_given(source, where, refused)


def test_a_remount_holds_for_what_was_given_before(bench: Path) -> None:
    source = bench / "source"
    mount(source)
    with shown(source) as fd, request_backing_fd(door(source), fd) as tree:
        os.mkdir("before", dir_fd=tree)
        remount(os.fsencode(source), ["remount,ro"])
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir("after", dir_fd=tree)


CHANGES: dict[str, Callable[[Fd], object]] = {
    "flags": lambda fd: mount_calls.set_flags(fd, 0, mount_calls.MS_RDONLY | mount_calls.MS_NOEXEC),
    "copy": mount_calls.clone_tree,
    "place": lambda fd: mount_calls.move_mount(fd, os.open("/", os.O_PATH)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["", "his"])
def test_who_is_root_in_a_namespace_of_his_own_can_change_nothing_of_it(bench: Path, change: str, name: str) -> None:
    mount(bench / "source", "-o", "ro,noexec")

    def tried(fd: Fd) -> int | None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x10000000 | 0x20000) == 0  # CLONE_NEWUSER | CLONE_NEWNS
        try:
            CHANGES[change](fd)
        except OSError as error:
            return error.errno
        return None

    assert with_given(bench / "source", bench / "source" / name, tried) == errno.EINVAL


def refusal(mounted: Path, fd: int) -> int | None:
    try:
        request_backing_fd(door(mounted), fd).close()
    except OSError as error:
        return error.errno
    return None


def test_what_is_no_directory_of_the_mount_gets_nothing(bench: Path) -> None:
    source = bench / "source"
    mount(source)
    tree = backing_of(source)
    (source / "link").symlink_to("his")
    with bind_mount(tree, bench / "target"):
        for path, number in (
            (source / "his/job/file", errno.ENOTDIR),
            (tree / "his", errno.EXDEV),
            (bench / "target/his", errno.EXDEV),
            (Path("/"), errno.EXDEV),
            (Path("/proc/self"), errno.EXDEV),
        ):
            with shown(path) as fd:
                assert refusal(source, fd) == number, path
    with Fd(os.open(source / "link", os.O_PATH | os.O_NOFOLLOW)) as link:
        assert refusal(source, link) == errno.ENOTDIR
    with Fd(os.open(source / "his", os.O_RDONLY)) as readable:
        assert refusal(source, readable) == errno.EBADF


def test_what_was_removed_is_given_to_nobody(bench: Path) -> None:
    source = bench / "source"
    mount(source)
    (source / "short").mkdir()
    with shown(source / "short") as fd:
        (source / "short").rmdir()
        for _ in range(3):
            (source / "another").mkdir()
            assert refusal(source, fd) is not None
            (source / "another").rmdir()


def test_who_can_not_enter_a_directory_has_none_below_it_to_show(bench: Path) -> None:
    source = bench / "source"
    mount(source)
    with pytest.raises(PermissionError):
        with_given(source, source / "closed/inner", identity)

    def listed(fd: Fd) -> list[str]:
        return os.listdir(os.open(".", os.O_RDONLY, dir_fd=fd))

    with pytest.raises(PermissionError):
        with_given(source, source / "closed", listed)


def test_who_can_not_come_to_the_mount_any_more_is_given_nothing(bench: Path) -> None:
    volume = bench / "outer/volume"
    volume.mkdir(parents=True)
    mount(volume)
    assert with_given(volume, volume, identity) == identity(backing_of(volume))
    (bench / "outer").chmod(0o700)
    with pytest.raises(PermissionError):
        with_given(volume, volume, identity)
    done_well("umount", volume)


def conversation(mounted: Path) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(door(mounted))
    return asking


def others_are_served(mounted: Path) -> None:
    in_time(partial(with_given, mounted, mounted, identity, OTHER))


def test_who_says_nothing_keeps_nobody_waiting(bench: Path) -> None:
    mount(bench / "source")

    with contextlib.ExitStack() as owned:
        os.seteuid(USER)
        try:
            for _ in range(400):
                owned.enter_context(conversation(bench / "source"))
            for _ in range(1500):
                conversation(bench / "source").close()
        finally:
            os.seteuid(0)
        others_are_served(bench / "source")


def test_who_has_no_answer_in_time_asks_again_and_the_daemon_serves_on(bench: Path) -> None:
    mount(bench / "source")
    daemon = daemon_of(bench / "source")
    (porter,) = children(daemon)
    with shown(bench / "source") as fd, conversation(bench / "source") as asking:
        stop(daemon)
        try:
            socket.send_fds(asking, [b"?"], [fd])
            assert until(lambda: [n_sockets(visit) for visit in children(porter)] == [_WHILE_IT_WAITS])
            (visit,) = children(porter)
            os.kill(visit, signal.SIGALRM)
            assert asking.recv(4) == b""
        finally:
            os.kill(daemon, signal.SIGCONT)
        others_are_served(bench / "source")
        assert os.listdir(bench / "source")


def test_what_is_sent_may_never_be_closed_and_others_are_served(bench: Path) -> None:
    mount(bench / "source")
    (bench / "silent").touch()

    def send(fd: int) -> None:
        for _ in range(40):
            with conversation(bench / "source") as asking:
                socket.send_fds(asking, [b"?"], [fd])

    with sent_to_be_closed(bench / "silent", send):
        others_are_served(bench / "source")
        assert n_visits(bench / "source")
    assert until(lambda: not n_visits(bench / "source"))


def lingering() -> socket.socket:
    """A connection whose last close takes as long as it likes: no process takes what was sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _address = server.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 100_000))
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    os.set_inheritable(theirs.detach(), True)
    return ours


def test_what_lingers_when_it_is_closed_keeps_nobody_waiting(bench: Path) -> None:
    mount(bench / "source")
    (porter,) = children(daemon_of(bench / "source"))
    stop(porter)  # until no other process has them open
    for n_fds in (1, 2, 9):
        with conversation(bench / "source") as asking, contextlib.ExitStack() as owned:
            sent = [owned.enter_context(lingering()) for _ in range(n_fds)]
            socket.send_fds(asking, [b"?"], [one.fileno() for one in sent])
    os.kill(porter, signal.SIGCONT)
    others_are_served(bench / "source")
    assert until(lambda: not n_visits(bench / "source"))


def test_messages_of_any_kind_get_an_error_or_nothing_and_the_next_is_answered(bench: Path) -> None:
    mount(bench / "source")
    with shown(bench / "source") as directory, open("/dev/null", "rb") as file:

        @settings(max_examples=60, deadline=None)
        @given(
            messages=st.lists(
                st.tuples(
                    st.binary(max_size=40), st.lists(st.sampled_from([int(directory), file.fileno()]), max_size=9)
                ),
                max_size=3,
            )
        )
        def said(messages: list[tuple[bytes, list[int]]]) -> None:
            # Who was refused, and sends more, is told that nobody reads it.
            with conversation(bench / "source") as asking, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for message, fds in messages:
                    socket.send_fds(asking, [message], fds)
                if messages and (len(messages[0][0]), messages[0][1]) != (1, [int(directory)]):
                    answer, given_fds, _flags, _address = socket.recv_fds(asking, 4, 9)
                    assert given_fds == []
                    assert answer == b"" or int.from_bytes(answer, "little")

        said()
    others_are_served(bench / "source")
    assert until(lambda: not n_visits(bench / "source"))


def n_visits(mounted: Path) -> int:
    """How many visitors the porter has that have not ended."""
    (porter,) = children(daemon_of(mounted))
    n = 0
    for visit in children(porter):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            n += stat_of(visit)[0] != "Z"
    return n


def n_sockets(pid: int) -> int:
    """How many sockets a process has; an fd may be closed between the listing and the look."""
    n = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            n += os.readlink(one).startswith("socket:")
    return n


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Sees the mount, or a part of it, at another place alone, as a user. In a container nothing of /run is there but the
# directory of the door.
_CONTAINED = """
import ctypes, os, subprocess, sys
what, hidden, place, uid, home, words = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def do(*words):
    subprocess.run(words, check=True)
assert libc.unshare(0x20000) == 0
do("mount", "--make-rprivate", "/")
do("mount", "--bind", what, place)
do("umount", "--lazy", hidden)
if home:
    kept = os.open(home, os.O_PATH)
    do("mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run")
    os.makedirs(home)
    assert libc.mount(f"/proc/self/fd/{kept}".encode(), home.encode(), None, ctypes.c_ulong(0x1000), None) == 0
    os.close(kept)
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
sys.exit(subprocess.run(["sh", "-euc", words], cwd=place).returncode)
"""


@pytest.mark.parametrize("uid", [USER, 0])
@pytest.mark.parametrize("what", [".", "his"])
@pytest.mark.parametrize("how", ["namespace", "container"])
def test_who_sees_it_elsewhere_swaps_lists_and_restores_there(bench: Path, what: str, how: str, uid: int) -> None:
    source = bench / "source"
    mount(source)
    his = "his" if what == "." else "."
    script = f"""
    id() {{ {TRASHD} list --volume . | awk 'END {{ print $1 }}'; }}
    {TRASHD} swap {his}/job
    test -z "$(ls {his}/job)"
    {TRASHD} restore "$(id)"
    cat {his}/job/file
    {TRASHD} swap {his}/job
    {TRASHD} restore "$(id)" --to {his}/elsewhere
    cat {his}/elsewhere/file
    {TRASHD} rm {his}/elsewhere/file
    test -z "$(ls {his}/elsewhere)"
    """
    home = os.fsdecode(os.path.dirname(door(source))) if how == "container" else ""
    argv = ["python3", "-c", _CONTAINED, str(source / what), str(source), str(bench / "target"), str(uid), home, script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("content")) == (0, 2), done.stderr + done.stdout
    assert our_mount(source) is not None


def test_who_is_in_a_user_namespace_is_given_what_he_shows(bench: Path) -> None:
    mount(bench / "source")
    path = door(bench / "source")

    def body() -> list[tuple[int, int]]:
        assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
        found = []
        for name in ("", "his"):
            with shown(bench / "source" / name) as fd, request_backing_fd(path, fd) as backing:
                found.append(identity(backing))
        return found

    tree = backing_of(bench / "source")
    assert as_user(USER, body) == [identity(tree), identity(tree / "his")]
