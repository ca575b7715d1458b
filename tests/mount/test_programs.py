"""Programs that people run, as what they are now: what they do ends as on the filesystem below."""

import errno
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.acls import CAN_BIND, CAPABILITY
from tests.support.foreground_mount import SHARED_LIMIT_S, trashd_mount, until
from tests.support.mount_and_backing import Sides
from tests.support.open_files import errno_of
from tests.support.other_users import as_user
from tests.support.privileges import HE, mount_and_behind
from tests.support.real_filesystems import loop_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")


N_SOURCES = 20
NO_FILE_WORK = "fanotify,binderfs,mknod,aiol,ramfs,rofs,verity,procfs,sysfs,dev,loop,swap,quota,fiemap,chroot,iomix"
"""Stressors of the class that work elsewhere, or do what no FUSE filesystem offers."""
GROUPS = (
    "access,bind-mount,chattr,chdir,chmod,chown",
    "copy-file,dentry,dir,dirdeep,dirmany,dnotify",
    "dup,eventfd,fallocate,fcntl,file-ioctl",
    "filename,flock,fpunch,fsize,fstat",
    "getdent,handle,hdd,inode-flags,inotify",
    "io,ioprio,lease,link,locka",
    "lockf,lockmix,lockofd,open,rename,symlink",
    "filerace,metamix,sync-file,touch,utime,xattr",
)
"""What else there is, by name: a stressor that is in none of them runs with each."""
SMALL = [f"--{name}-bytes=64m" for name in ("hdd", "fallocate", "sync-file")]
"""Else one of them alone could fill the volume, and have no time for anything but that."""


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    """An ext4 with a mount of ours over its directory `source`, at `source-mounted`."""
    with loop_volume("ext4", 4096) as path, trashd_mount(path / "source", limit_s=SHARED_LIMIT_S):
        yield path


@pytest.fixture
def here(volume: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = volume / "source-mounted" / request.node.name
    path.mkdir()
    yield path
    shutil.rmtree(path)


def run(*argv: str | Path, cwd: Path | None = None) -> str:
    """What a program says; it must succeed."""
    environment = {**os.environ, "LC_ALL": "C", "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_TRUNC])
def test_program_that_runs_is_not_cut(here: Path, flags: int) -> None:
    """Not even by who opens it for reading only: FUSE's kernel has us cut it before it looks whether it runs."""
    program = here / "program"
    shutil.copy(shutil.which("sleep") or "", program)
    whole = program.read_bytes()
    os.link(program, here / "another name")
    with subprocess.Popen([program, "1000"]) as running:
        for path in (program, here / "another name"):
            with pytest.raises(OSError, match="busy") as found:
                os.close(os.open(path, flags))
            assert found.value.errno == errno.ETXTBSY
        assert program.read_bytes() == whole
        assert running.poll() is None
        running.kill()
    assert until(lambda: errno_of(lambda: os.close(os.open(program, flags))) == 0)
    assert program.read_bytes() == (b"" if flags & os.O_TRUNC else whole)


def rich_tree(path: Path) -> Path:
    """Files, links of both kinds, odd modes and owners, xattrs, an ACL, a sparse file, a FIFO, times long ago."""
    (path / "sub" / "deep").mkdir(parents=True)
    (path / "plain").write_bytes(os.urandom(300_000))
    (path / "sub" / "empty").touch(0o600)
    (path / "sub" / "program").write_text("#!/bin/sh\n")
    os.chown(path / "sub" / "program", 1000, 1001)
    (path / "sub" / "program").chmod(0o6755)
    (path / "hard").hardlink_to(path / "plain")
    (path / "soft").symlink_to("sub/nowhere")
    os.mkfifo(path / "fifo")
    with (path / "sparse").open("wb") as file:
        file.truncate(5_000_000)
        file.seek(2_000_000)
        file.write(b"island")
    os.setxattr(path / "plain", "user.colour", b"blue\0green")
    run("setfacl", "-m", "u:1000:rwx,d:g:1001:r-x", path / "sub")
    os.utime(path / "sub" / "deep", ns=(1_000_000_123_456_789, 900_000_123_456_789))
    return path


def test_tar_out_and_in_is_the_same_tree(here: Path, tmp_path: Path) -> None:
    tree = rich_tree(here / "tree")
    tar = ("tar", "--xattrs", "--acls", "--sparse", "--numeric-owner")
    run(*tar, "-cf", tmp_path / "a.tar", "-C", here, "tree")
    run(*tar, "--compare", "-f", tmp_path / "a.tar", "-C", here)
    (here / "again").mkdir()
    run(*tar, "-xpf", tmp_path / "a.tar", "-C", here / "again")
    run(*tar, "--compare", "-f", tmp_path / "a.tar", "-C", here / "again")
    assert run("getfacl", "-Rnp", ".", cwd=here / "again" / "tree") == run("getfacl", "-Rnp", ".", cwd=tree)


def test_rsync_finds_nothing_to_do_after_a_copy_either_way(here: Path, volume: Path) -> None:
    inside, outside = rich_tree(here / "tree"), volume / "outside"
    rsync = ("rsync", "-aHAXS", "--numeric-ids", "--checksum", "--itemize-changes")
    run(*rsync, f"{inside}/", f"{outside}/")
    assert run(*rsync, "--dry-run", f"{inside}/", f"{outside}/") == ""
    run(*rsync, f"{outside}/", f"{here / 'back'}/")
    assert run(*rsync, "--dry-run", f"{outside}/", f"{here / 'back'}/") == ""
    assert (here / "back" / "hard").stat().st_ino == (here / "back" / "plain").stat().st_ino
    shutil.rmtree(outside)


def test_git_clones_collects_and_finds_no_fault(here: Path) -> None:
    origin, clone = here / "origin", here / "clone"
    origin.mkdir()
    run("git", "init", "-q", "-b", "main", cwd=origin)
    for key, value in (("user.name", "A"), ("user.email", "a@example.org"), ("gc.auto", "0")):
        run("git", "config", key, value, cwd=origin)
    for number in range(3):
        for name in range(20):
            (origin / f"{name}").write_text(f"{number} {name}\n" * (name + 1))
        run("git", "add", "-A", cwd=origin)
        run("git", "commit", "-q", "-m", f"change {number}", cwd=origin)
    run("git", "clone", "-q", "--no-hardlinks", origin, clone)
    run("git", "gc", "-q", "--prune=now", "--aggressive", cwd=clone)
    run("git", "fsck", "--full", "--strict", cwd=clone)
    assert run("git", "status", "--porcelain", cwd=clone) == ""
    assert run("git", "rev-parse", "HEAD", cwd=clone) == run("git", "rev-parse", "HEAD", cwd=origin)


def _fill_until_killed(path: Path, ready: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, twice INTEGER, text BLOB)")
        number = 0
        while True:
            base.execute("BEGIN")
            for _ in range(20):
                base.execute("INSERT INTO t VALUES (?, ?, ?)", (number, 2 * number, b"x" * 500))
                number += 1
            base.execute("COMMIT")
            if number == 400:
                os.write(ready, b".")


def test_sqlite_with_a_wal_is_whole_after_its_writer_was_killed(here: Path) -> None:
    path = here / "base"
    reading, writing = os.pipe()
    writer = multiprocessing.get_context("fork").Process(target=_fill_until_killed, args=(path, writing))
    writer.start()
    try:
        os.close(writing)
        assert os.read(reading, 1) == b"."
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT count(*) >= 400 FROM t").fetchone() == (1,), "a reader beside the writer"
    finally:
        os.close(reading)
        writer.kill()
        writer.join()
    with closing(sqlite3.connect(path)) as base:
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        n, is_whole = base.execute("SELECT count(*), min(twice = 2 * n) FROM t").fetchone()
    assert (n % 20, is_whole) == (0, 1)


def test_parallel_make_builds_a_program_and_then_has_nothing_to_do(here: Path) -> None:
    names = [f"part{number}" for number in range(N_SOURCES)]
    for number, name in enumerate(names):
        (here / f"{name}.c").write_text(f'#include "all.h"\nint {name}(void) {{ return {number}; }}\n')
    (here / "all.h").write_text("".join(f"int {name}(void);\n" for name in names))
    calls = " + ".join(f"{name}()" for name in names)
    (here / "main.c").write_text(f'#include "all.h"\nint main(void) {{ return {calls}; }}\n')
    objects = " ".join(f"{name}.o" for name in [*names, "main"])
    (here / "Makefile").write_text(f"all: {objects}\n\tcc -o all {objects}\n%.o: %.c all.h\n\tcc -c -o $@ $<\n")
    run("make", "-j4", cwd=here)
    assert subprocess.run([here / "all"], check=False).returncode == sum(range(N_SOURCES))
    run("make", "-q", "main.o", *(f"{name}.o" for name in names), cwd=here)


def rotate(here: Path, how: str) -> None:
    """Rotate `log` once as logrotate's configuration says."""
    (here / "conf").write_text(f'"{here}/log" {{\n  rotate 3\n  size 1\n  {how}\n}}\n')
    run("logrotate", "--force", "--state", here / "state", here / "conf")


def test_logrotate_truncates_what_a_writer_has_open(here: Path) -> None:
    with (here / "log").open("ab", buffering=0) as log:
        log.write(b"before\n")
        rotate(here, "copytruncate")
        log.write(b"after\n")
    assert ((here / "log.1").read_bytes(), (here / "log").read_bytes()) == (b"before\n", b"after\n")


def test_logrotate_creates_a_new_log_and_a_shipper_finds_its_place_by_inode_numbers(here: Path) -> None:
    with (here / "log").open("ab", buffering=0) as log, (here / "log").open("rb") as shipped:
        log.write(b"one\n")
        assert shipped.read() == b"one\n"
        rotate(here, "create 0640 1000 1000")
        log.write(b"two\n")
        assert shipped.read() == b"two\n", "what is open goes on under its new name"
        assert os.fstat(shipped.fileno()).st_ino == (here / "log.1").stat().st_ino
    fresh = (here / "log").stat()
    assert fresh.st_ino != (here / "log.1").stat().st_ino
    assert (fresh.st_mode & 0o7777, fresh.st_uid, fresh.st_gid, fresh.st_size) == (0o640, 1000, 1000, 0)


def test_fio_reads_back_what_it_wrote(here: Path) -> None:
    run(
        "fio", "--name=verify", f"--directory={here}", "--size=16m", "--bs=4k", "--rw=randwrite", "--verify=crc32c",
        "--do_verify=1", "--verify_state_save=0", "--ioengine=psync", "--end_fsync=1", "--numjobs=2",
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_stress_of_every_kind_finds_no_fault_and_the_daemon_goes_on(here: Path) -> None:
    """One kind of each group at a time: each has its second, however much else there is to do."""

    stressors = run("stress-ng", "--stressors").split()  # an unknown one is an error

    def stress(group: str) -> None:
        elsewhere = [other for other in GROUPS if other != group]
        excluded = [name for name in ",".join([NO_FILE_WORK, *elsewhere]).split(",") if name in stressors]
        run(
            "stress-ng", "--class", "filesystem", "--sequential", "1", "--timeout", "1s", "--verify",
            "--temp-path", here, "--exclude", ",".join(excluded), *SMALL,
        )  # fmt: skip

    with ThreadPoolExecutor(len(GROUPS)) as pool:
        list(pool.map(stress, GROUPS))
    (here / "still").touch()


TEAM = 72_100
PROGRAM = "/usr/bin/id"


@pytest.fixture(scope="module", params=["native", "exclusive", "slow", "exclusive+passthrough=off"])
def place(request: pytest.FixtureRequest) -> Iterator[Sides]:
    way, *options = request.param.split("+")
    with mount_and_behind(way, *options) as both:
        yield Sides(*both)


def program(place: Sides, mode: int, name: str) -> Path:
    """One of root's and the team's, which was run, and looked at."""
    path = place.mount_path / f"{name} {mode:o}"
    shutil.copy(PROGRAM, path)
    os.chown(path, 0, TEAM)
    path.chmod(mode)
    run_itself(path)
    os.listdir(place.mount_path)
    path.stat()
    return path


def run_itself(path: Path, fd: int = -1) -> str:
    """The user that it finds itself to be, run by this one."""

    def do() -> str:
        what = str(path) if fd < 0 else f"/proc/self/fd/{fd}"
        fds = () if fd < 0 else (fd,)
        return subprocess.run([what], capture_output=True, text=True, check=True, pass_fds=fds).stdout

    return as_user(HE, do)


def give_away(place: Sides, path: Path) -> None:
    """Behind: from then on it is the user's, who writes anything to it."""
    behind = place.behind / path.name
    os.chown(behind, HE, HE)
    behind.write_bytes(Path(PROGRAM).read_bytes() + b"\0")


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
@pytest.mark.parametrize("is_by_fd", [False, True])
def test_who_was_given_a_program_does_not_run_it_as_who_owned_it(place: Sides, mode: int, is_by_fd: bool) -> None:
    path = program(place, mode, "by fd" if is_by_fd else "by path")
    assert ("euid=0" in run_itself(path), f"egid={TEAM}" in run_itself(path)) == (
        bool(mode & 0o4000),
        bool(mode & 0o2000),
    )
    fd = os.open(path, os.O_PATH) if is_by_fd else -1
    try:
        give_away(place, path)
        assert "euid" not in run_itself(path, fd)
        assert "egid" not in run_itself(path, fd)
    finally:
        if is_by_fd:
            os.close(fd)


def test_nor_with_the_capabilities_that_it_had(place: Sides) -> None:
    path = program(place, 0o755, "capable")
    os.setxattr(path, CAPABILITY, CAN_BIND)
    assert os.getxattr(path, CAPABILITY) == CAN_BIND
    give_away(place, path)
    with pytest.raises(OSError, match="No data"):
        os.getxattr(path, CAPABILITY)
