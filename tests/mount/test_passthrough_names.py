"""Files passed through while their names go and all else goes wrong: what the kernel holds for us is let go of."""

import errno
import mmap
import os
import resource
import shutil
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_mounts import ended
from tests.support.background_processes import clients, ends, workers
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.open_files import may_be_written, opened, waits_in_the_kernel
from tests.support.other_users import as_user
from tests.support.passthrough_files import (
    CONTENT,
    LIMIT_S,
    NEARLY,
    SIZE,
    free_bytes,
    processes,
    put,
    space_comes_back,
    without_requests,
    works_on,
)
from tests.support.proc_stat import stop
from tests.support.store_verbs import reap_now, recover_all, swap
from tests.support.trashd_command import done_well

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]


# Trees that go.


def test_a_file_of_a_swapped_tree_is_passed_through_when_it_is_opened_then(mount: Mounted) -> None:
    (mount.path / "tree").mkdir()
    put(mount.path / "tree/file")
    with opened(mount.path / "tree", os.O_RDONLY | os.O_DIRECTORY) as tree:
        swap(mount.path / "tree")
        fd = os.open("file", os.O_RDWR, dir_fd=tree)
        try:
            with without_requests(mount):
                works_on(fd)
        finally:
            os.close(fd)


def test_who_has_a_reaped_file_open_goes_on_and_its_space_comes_back_with_the_last_close(mount: Mounted) -> None:
    (mount.path / "tree").mkdir()
    with space_comes_back(mount.backing):
        file = put(mount.path / "tree/file")
        with opened(file) as fd:
            with opened(file, os.O_RDONLY) as other:
                swapped = swap(mount.path / "tree")
                reap_now(mount.backing, swapped.id)
                taken = free_bytes(mount.backing)
                with without_requests(mount):
                    works_on(fd)
                    assert os.pread(other, SIZE, 0) == CONTENT
            assert os.pread(fd, SIZE, 0) == CONTENT
            assert free_bytes(mount.backing) <= taken + NEARLY
    assert recover_all(mount.backing) == []


def test_a_mapping_of_a_reaped_file_outlives_its_close(mount: Mounted) -> None:
    (mount.path / "tree").mkdir()
    with space_comes_back(mount.backing):
        with opened(put(mount.path / "tree/file")) as fd:
            mapped = mmap.mmap(fd, SIZE)
        with mapped:
            swapped = swap(mount.path / "tree")
            reap_now(mount.backing, swapped.id)
            assert mapped[:] == CONTENT
            mapped[:6] = b"MAPPED"
            mapped.flush()
            assert mapped[:7] == b"MAPPED "


# Names that change.


@pytest.mark.parametrize("is_open_first", [True, False])
def test_an_unlinked_file_goes_on_until_it_is_closed(mount: Mounted, is_open_first: bool) -> None:
    with space_comes_back(mount.backing):
        file = put(mount.path / "file")
        with ExitStack() as stack:
            fds = [stack.enter_context(opened(file)) for _ in range(1 + is_open_first)]
            file.unlink()
            with pytest.raises(FileNotFoundError):
                file.stat()
            with without_requests(mount):
                works_on(fds[-1])
            assert os.fstat(fds[0]).st_nlink == 0


def test_a_file_open_by_two_names_is_one(mount: Mounted) -> None:
    with space_comes_back(mount.backing):
        file, other = put(mount.path / "file"), mount.path / "other"
        other.hardlink_to(file)
        with opened(file) as one, opened(other) as two, without_requests(mount):
            os.pwrite(one, b"one", 0)
            assert os.pread(two, 3, 0) == b"one"
            file.unlink()
            os.pwrite(two, b"two", SIZE)
            assert os.pread(one, 3, SIZE) == b"two"
            assert os.fstat(one).st_size == os.fstat(two).st_size == other.stat().st_size == SIZE + 3
        assert other.read_bytes()[:3] == b"one"
        other.unlink()


def test_an_open_file_is_the_same_wherever_it_is_renamed_to(mount: Mounted) -> None:
    (mount.path / "d").mkdir()
    with space_comes_back(mount.backing):
        file, moved, replaced = put(mount.path / "file"), mount.path / "d/moved", put(mount.path / "replaced")
        with opened(file) as fd, opened(replaced) as lost, without_requests(mount):
            file.rename(moved)
            with opened(moved) as other:
                os.pwrite(other, b"moved", 0)
                assert os.pread(fd, 5, 0) == b"moved"
            moved.rename(replaced)
            assert os.pread(lost, SIZE, 0) == CONTENT
            with opened(replaced) as other:
                assert os.pread(other, 5, 0) == b"moved"
            os.pwrite(fd, CONTENT[:5], 0)
            works_on(fd)
            works_on(lost)
        replaced.unlink()


# More than one way in.


def test_a_file_open_through_two_mounts_of_the_same_tree_is_one(source: Path, tmp_path: Path) -> None:
    with (
        trashd_mount(source, options=["coherence=shared"], limit_s=LIMIT_S) as one,
        trashd_mount(source, tmp_path, ["coherence=shared"], limit_s=LIMIT_S) as two,
        space_comes_back(source),
    ):
        put(one.path / "file")
        with (
            opened(one.path / "file") as first,
            opened(two.path / "file") as second,
            without_requests(one),
            without_requests(two),
        ):
            assert_one_file(first, second)
            (one.path / "file").unlink()
            os.pwrite(second, CONTENT[:6], 0)
            works_on(second)


def assert_one_file(first: int, second: int) -> None:
    with mmap.mmap(first, SIZE) as here, mmap.mmap(second, SIZE) as there:
        here[:5] = b"first"
        assert there[:5] == os.pread(second, 5, 0) == b"first"
        os.pwrite(second, b"SECOND", 0)
        assert here[:6] == os.pread(first, 6, 0) == b"SECOND"


N_PROCESSES, N_OPENS_EACH = 20, 50
STRANGER = 4711


# Many.


def test_a_thousand_opens_of_one_file_by_many_processes_read_and_append_through(mount: Mounted) -> None:
    with space_comes_back(mount.backing):
        file = put(mount.path / "file")

        def open_often() -> None:
            for number in range(N_OPENS_EACH):
                fd = os.open(file, os.O_RDWR | os.O_APPEND)
                assert os.pread(fd, 16, 16 * number) == CONTENT[:16]
                assert os.write(fd, b"%07d\n" % number) == 8

        with without_requests(mount), processes(N_PROCESSES, open_often):
            assert mount.n_fds() > N_PROCESSES * N_OPENS_EACH
            appended = file.read_bytes()[SIZE:].split()
            assert sorted(appended) == sorted([b"%07d" % number for number in range(N_OPENS_EACH)] * N_PROCESSES)
        file.unlink()


def test_a_thousand_files_open_at_a_time_are_passed_through_each_by_itself(mount: Mounted) -> None:
    with space_comes_back(mount.backing), ExitStack() as stack:
        (mount.path / "many").mkdir()
        files = [mount.path / "many" / str(number) for number in range(1000)]
        with without_requests(mount):
            fds = [stack.enter_context(opened(path, os.O_RDWR | os.O_CREAT)) for path in files]
            for number, fd in enumerate(fds):
                os.write(fd, b"%d" % number * 4096)
            for number, fd in enumerate(fds):
                assert os.pread(fd, SIZE, 0) == b"%d" % number * 4096
        for path in files:
            path.unlink()


# Opens that come to nothing.


def test_clients_killed_while_they_open_leave_no_file_behind(mount: Mounted) -> None:
    n_fds = mount.n_fds()
    with space_comes_back(mount.backing):
        file = put(mount.path / "file")
        (mount.path / "new").mkdir()
        for _ in range(15):
            begun, begins = os.pipe()

            def open_on(begins: int = begins) -> None:
                os.write(begins, b".")
                new = mount.path / "new" / str(os.getpid())
                while True:
                    os.close(os.open(file, os.O_RDWR))
                    os.close(os.open(new, os.O_CREAT | os.O_RDWR))
                    new.unlink()

            with workers([open_on] * 3):
                for _ in range(3):
                    os.read(begun, 1)
                ask_for_missing_names(mount.path, 20)
            os.close(begun)
            os.close(begins)
        shutil.rmtree(mount.path / "new")
        file.unlink()
    assert until(lambda: mount.n_fds() <= n_fds)


def ask_for_missing_names(path: Path, n: int) -> None:
    for number in range(n):
        assert not (path / f"missing-{os.getpid()}-{number}").exists()


def test_clients_killed_before_the_daemon_has_read_their_open_leave_no_file_behind(mount: Mounted) -> None:
    n_fds = mount.n_fds()
    with space_comes_back(mount.backing):
        file = put(mount.path / "file")
        begun, begins = os.pipe()

        def open_once() -> None:
            os.write(begins, b".")
            os.open(file, os.O_RDWR)
            signal.pause()

        stop(mount.pid)
        try:
            with clients([open_once] * 4) as pids:
                for _ in pids:
                    os.read(begun, 1)
                assert until(lambda: all(waits_in_the_kernel(pid) for pid in pids))
        finally:
            os.kill(mount.pid, signal.SIGCONT)  # over io_uring they end no sooner
        assert {ends(pid) for pid in pids} == {-signal.SIGKILL}
        os.close(begun)
        os.close(begins)
        with opened(file) as fd, without_requests(mount):
            works_on(fd)
        file.unlink()
    assert until(lambda: mount.n_fds() <= n_fds)


def test_opens_that_fail_leave_no_file_behind(mount: Mounted) -> None:
    n_fds = mount.n_fds()
    with space_comes_back(mount.backing):
        file = put(mount.path / "file")
        file.chmod(0o600)
        for flags, number in (
            (os.O_RDONLY | os.O_DIRECTORY, errno.ENOTDIR),
            (os.O_RDWR | os.O_CREAT | os.O_EXCL, errno.EEXIST),
        ):
            with pytest.raises(OSError, match=os.strerror(number)):
                os.open(file, flags)

        def open_as_stranger() -> int:
            try:
                return os.open(file, os.O_RDWR)
            except PermissionError:
                return -1

        assert as_user(STRANGER, open_as_stranger) == -1
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                os.open(file, os.O_RDWR)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert until(lambda: mount.n_fds() <= n_fds)
        with opened(file) as fd, without_requests(mount):
            works_on(fd)
        file.unlink()


def test_a_program_that_runs_is_not_written_and_leaves_no_file_behind(mount: Mounted) -> None:
    n_fds = mount.n_fds()
    with space_comes_back(mount.backing):
        program = mount.path / "program"
        program.write_bytes(Path("/bin/sleep").read_bytes())
        program.chmod(0o755)
        for place in (mount.path, mount.backing):
            assert until(lambda: mount.n_fds() <= n_fds)  # nothing runs what the daemon still has open to be written
            with subprocess.Popen([place / "program", "60"]) as running:
                assert until(lambda: os.path.realpath(f"/proc/{running.pid}/exe").endswith("program"))
                with pytest.raises(OSError, match=os.strerror(errno.ETXTBSY)):
                    os.open(program, os.O_WRONLY)
                running.kill()
        assert until(lambda: may_be_written(program))
        with opened(program) as fd, without_requests(mount):
            os.pwrite(fd, b"x", 0)
        program.unlink()


def test_a_daemon_out_of_fds_refuses_an_open_and_leaves_no_file_behind(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, n_fds_max=200) as mounted, space_comes_back(mounted.backing):
        file, others = put(mounted.path / "file"), [mounted.path / str(number) for number in range(20)]
        for _ in range(2):
            with ExitStack() as stack, pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                open_all(stack, [file, *map(put, others)] * 20)
            with opened(file) as fd, without_requests(mounted):
                works_on(fd)
        for path in (file, *others):
            path.unlink()


def open_all(stack: ExitStack, files: list[Path]) -> None:
    for file in files:
        stack.enter_context(opened(file))


# The end.


def test_after_a_lazy_unmount_who_has_a_file_open_goes_on_until_he_closes_it(source: Path) -> None:
    with space_comes_back(source), trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted:
        pid_fd = os.pidfd_open(mounted.pid)
        file = put(mounted.path / "file")
        with opened(file) as fd:
            assert subprocess.run(["umount", mounted.path], check=False, stderr=subprocess.DEVNULL).returncode
            done_well("umount", "--lazy", mounted.path)
            works_on(fd)
            (source / "file").unlink()
            works_on(fd)
        ended(pid_fd)


def test_a_stopped_daemon_takes_no_file_with_it(source: Path) -> None:
    with space_comes_back(source), trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted:
        pid_fd = os.pidfd_open(mounted.pid)
        with opened(put(mounted.path / "file")) as fd:
            os.kill(mounted.pid, signal.SIGTERM)
            ended(pid_fd)
            with suppress(OSError):
                assert os.pread(fd, SIZE, 0) == CONTENT
        (source / "file").unlink()


def test_a_killed_daemon_takes_no_file_with_it_once_its_mount_is_gone(source: Path) -> None:
    with space_comes_back(source), trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted:
        pid_fd = os.pidfd_open(mounted.pid)
        with opened(put(mounted.path / "file")) as fd, mmap.mmap(fd, SIZE) as mapped:
            os.kill(mounted.pid, signal.SIGKILL)
            ended(pid_fd)
            assert mapped[:] == CONTENT
            with suppress(OSError):
                assert os.pread(fd, SIZE, 0) == CONTENT
            with pytest.raises(OSError, match=r".") as caught:
                os.open(mounted.path / "file", os.O_RDONLY)
            assert caught.value.errno in DAEMON_GONE
        done_well("umount", mounted.path)
        (source / "file").unlink()
