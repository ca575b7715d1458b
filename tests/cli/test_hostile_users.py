"""Root's commands on what a user has prepared: names, times, sizes, processes, a directory to work in, a namespace."""

import ctypes
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.support.background_processes import process_of
from tests.support.foreground_mount import fresh_mount
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user, become, run_as
from tests.support.real_filesystems import loop_volume
from tests.support.reap_process import beside
from tests.support.store_verbs import entries, folder_of, forge, init, place, recover_all, swap
from tests.support.trashd_command import TRASHD, done_well, environment, trashd
from tests.support.two_users_store import shared_store

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(60)]

ALICE, MALLORY = 12101, 12102
CLONE_NEWNS, CLONE_NEWUSER, MS_BIND, MS_REC = 0x20000, 0x10000000, 4096, 16384


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's, a directory for all, and a home of Alice's and of Mallory's."""
    with shared_store(alice=ALICE, mallory=MALLORY) as path:
        make_tree(path / "tmp", Dir(mode=0o1777))
        yield path


def orphan_of(uid: int, path: Path) -> str:
    def act() -> str:
        make_tree(path, {"results": str(uid)})
        return str(swap(path).id)

    return as_user(uid, act)


def put_strange_files(top: Path) -> None:
    """Times outside the calendar, and sizes whose sum no 64 bits hold."""
    make_tree(top, {})
    for number, time_s in enumerate((1 << 62, (1 << 63) - 1, -(1 << 62), -(1 << 63), 1 << 40)):
        (top / f"time-{number}").write_text("x")
        subprocess.run(["touch", "--date", f"@{time_s}", top / f"time-{number}"], check=True)
    for number in range(3):
        with (top / f"size-{number}").open("wb") as file:
            os.truncate(file.fileno(), (1 << 63) - 1)


def test_times_and_sizes_out_of_range_end_no_command(volume: Path) -> None:
    as_user(MALLORY, partial(put_strange_files, volume / "tmp/m"))
    identifier = as_user(MALLORY, lambda: str(swap(volume / "tmp/m").id))
    for words in (["list"], ["list", "--json"], ["du", "--count"], ["ls", identifier], ["ls", "--json", identifier]):
        assert done_well(*words, "--volume", volume).out
    done_well("restore", identifier, "--volume", volume)
    for words in (["--dry-run"], ["--dry-run", "--json"], ["--print"]):
        assert done_well("sweep", volume / "tmp", "--name", "*", *words).out


@pytest.mark.parametrize("action", ["delete", "trash", "move"])
def test_times_and_sizes_out_of_range_end_no_plan(volume: Path, action: str) -> None:
    as_user(MALLORY, partial(put_strange_files, volume / "tmp/m"))
    old = as_user(ALICE, lambda: make_tree(volume / "tmp/old", {"file": "x"})) / "file"
    os.utime(old, (1, 1))
    plan = volume / "plan.toml"
    (volume / "lists").mkdir()
    (volume / "away").mkdir()
    lists = f'purgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    move_to = f'move_to = "{volume}/away"' if action == "move" else ""
    plan.write_text(f'[[rule]]\ndirectory = "{volume}/tmp"\nolder = "30d"\naction = "{action}"\n{move_to}\n{lists}\n')
    for words in (["show"], ["show", "--json"], ["apply"], ["apply"]):
        done_well("plan", *words, plan)
    assert not old.exists()
    assert not (volume / "tmp/m/time-3").exists()


def test_an_id_that_two_users_have_is_ambiguous(volume: Path) -> None:
    """Mallory gives an orphan of hers the ID of Alice's, and says that it came from where Alice's did."""
    alices, mallorys = (orphan_of(uid, volume / "tmp" / f"job-{uid}") for uid in (ALICE, MALLORY))
    container = place(volume, mallorys)
    origin = f"tmp/job-{ALICE}"

    def act() -> None:
        forge(container / "record.json", id=alices, origin=origin)
        container.rename(container.with_name(alices))

    as_user(MALLORY, act)
    before = snapshot(volume / "tmp")
    for words in (["restore"], ["keep"], ["reap", "--now"], ["ls"], ["restore", "--to", f"{volume}/elsewhere"]):
        done = trashd(words[0], alices, *words[1:], "--volume", volume)
        assert (done.code, "ambiguous" in done.err) == (2, True), (words, done)
    assert snapshot(volume / "tmp") == before
    assert not (volume / "elsewhere").exists()
    assert as_user(ALICE, lambda: trashd("restore", alices, "--volume", volume)).code == 0
    assert (volume / origin / "results").read_text() == str(ALICE)


def test_holders_waits_for_no_filesystem_and_escapes_names(volume: Path) -> None:
    """A process with an fd in a mount that never answers, and one with control characters in all its names."""
    job = make_tree(volume / "tmp/job", Dir(mode=0o777))
    silent = make_tree(volume / "mallory/silent", Dir(owner=(MALLORY, MALLORY)))

    def hold(directory: Path) -> None:
        os.open(silent, os.O_PATH)
        directory.mkdir(exist_ok=True)
        os.chdir(directory)
        Path("/proc/self/comm").write_bytes(b"\x1b[2J\n1 0 x")

    names = ("\n\x1b]0;x\x07", os.fsdecode(b"\xff" * 255))
    with silent_fuse(silent, MALLORY), ExitStack() as after:
        pids = [after.enter_context(process_of(MALLORY, partial(hold, job / name))) for name in names]
        done = done_well("holders", job)
        assert all(str(pid) in done.out for pid in pids)
        assert all(char.isprintable() or char == "\n" for char in done.out)
        [held] = done_well("holders", "--json", job).objects()
        assert {one["pid"] for one in held["holders"]} == {*pids}


PROGRAMS = ("fusermount3", "mount", "umount", "systemctl", "journalctl", "less", "stty", "losetup", "git", "sh")
MODULES = ("fusefs", "click", "msgspec", "trio", "tomllib", "sitecustomize", "usercustomize", "struct", "encodings")


@pytest.mark.parametrize("words", [["list"], ["status"], ["doctor"], ["plan", "show"], ["du"], ["--version"]])
def test_root_runs_and_reads_nothing_from_its_current_directory(volume: Path, words: list[str]) -> None:
    here = volume / "mallory"
    mark = volume / "tmp/mark"

    def act() -> None:
        for module in MODULES:
            text = f"import os; os.close(os.open({os.fspath(mark)!r}, os.O_CREAT))\n"
            (here / f"{module}.py").write_text(text)
            (here / module).mkdir()
            (here / module / "__init__.py").write_text(text)
        for program in PROGRAMS:
            (here / program).write_text(f"#!/bin/sh\ntouch {mark}\n")
            (here / program).chmod(0o755)
        for name in ("config.toml", "trashd.toml", "trashd.conf", "pyvenv.cfg", ".env", "plan.toml"):
            (here / name).write_text(f'[[rule]]\ndirectory = "{volume}/alice"\nolder = "0s"\naction = "delete"\n')

    as_user(MALLORY, act)
    make_tree(volume / "alice/precious", {"file": "x"})
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
    done = subprocess.run([TRASHD, *words], cwd=here, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "alice" not in done.stdout + done.stderr or words != ["plan", "show"]
    assert not mark.exists()


def test_root_with_a_users_environment_reads_nothing_of_that_users(volume: Path) -> None:
    """As `sudo -E` or `su` leave it; the FIFOs would hold up who opens them."""
    home = volume / "mallory"

    def act() -> None:
        for directory in (".config/trashd", ".local/state/trashd", "run/trashd", ".cache/trashd", "trashd"):
            (home / directory).mkdir(parents=True)
            for name in ("config.toml", "stores", "status", "lock", "paused", "plan.toml", "clock", "conf.d"):
                os.mkfifo(home / directory / name)

    as_user(MALLORY, act)
    variables = {
        **{name: str(home) for name in ("HOME", "TMPDIR", "XDG_CONFIG_DIRS", "XDG_DATA_HOME")},
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_STATE_HOME": str(home / ".local/state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_RUNTIME_DIR": str(home / "run"),
    }
    before = snapshot(home)
    job = os.fspath(make_tree(volume / "roots", {"a": "1"}))
    for words in (["swap", job], ["list"], ["status"], ["plan", "show"], ["doctor"], ["reap"], ["holders", job]):
        done = trashd(*words, cwd=None, stdin=b"", **variables)
        assert (done.code in (0, 1, 5, 13, 14), "Traceback" in done.err) == (True, False), (words, done)
    assert snapshot(home) == before


def test_too_many_attribute_names_stop_no_other_users_sweep() -> None:
    """listxattr(2) has room for 64 KiB of names: E2BIG beyond."""
    with loop_volume("xfs") as disk:
        make_tree(disk / "tmp", Dir(mode=0o1777))

        def act() -> None:
            top = make_tree(disk / "tmp/m", {"sub": {"file": "x"}})
            for path in (top, top / "sub", top / "sub/file"):
                for number in range(300):
                    os.setxattr(path, f"user.{number:0240}", b"x")
                with suppress(OSError):
                    assert not os.listxattr(path), "they can be listed"

        as_user(MALLORY, act)
        as_user(ALICE, lambda: make_tree(disk / "tmp/a", {"sub": {"file": "x"}}))
        init(disk)
        done = trashd("sweep", disk / "tmp", "--name", "file")
        assert done.code in (0, 13), done
        assert not (disk / "tmp/a/sub/file").exists()
        (orphan,) = entries(disk)
        done_well("restore", orphan.id, "--volume", disk)
        assert (disk / "tmp/a/sub/file").exists()


IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def test_root_in_a_users_namespace_gains_no_rights(volume: Path) -> None:
    """There she is uid 0, and everybody else is nobody."""
    alices = orphan_of(ALICE, volume / "tmp/job")
    roots = swap(make_tree(volume / "roots", {"a": "1"})).id
    recover_all(volume)
    before = snapshot(volume / ".trashd/u", with_times=True)
    env = environment({"HOME": str(volume / "mallory")})
    commands: tuple[list[str | Path], ...] = (
        ["init", "--replace", volume],
        ["reap", "--all", "--now", "--volume", volume],
        ["reap", "--force", "--yes", alices, "--volume", volume],
        ["reap", "--now", roots, "--volume", volume],
        ["restore", alices, "--to", volume / "mallory/stolen", "--volume", volume],
        ["doctor", "--repair", volume],
        ["swap", "--for-owner", volume / "alice"],
    )
    for words in commands:
        done = run_as(MALLORY, [*IN_NAMESPACE, TRASHD, *words], env=env)
        assert b"Traceback" not in done.stderr, (words, done)
    assert snapshot(volume / ".trashd/u", with_times=True) == before
    assert not (volume / "mallory/stolen").exists()
    done_well("restore", alices, "--volume", volume)
    done_well("restore", roots, "--volume", volume)
    assert (volume / "tmp/job/results").read_text() == str(ALICE)


WHITEOUT = stat.S_IFCHR | 0o600, os.makedev(0, 0)
"""The one kind of device that a user may make. Source  mknod(2); fs/namei.c, vfs_mknod: WHITEOUT_DEV"""


def test_whiteouts_in_place_of_a_stores_files_mislead_nobody(volume: Path) -> None:
    alices = orphan_of(ALICE, volume / "tmp/alices")
    mallorys = [orphan_of(MALLORY, volume / "tmp" / f"job-{number}") for number in range(3)]
    recover_all(volume)
    first, second, third = (place(volume, identifier) for identifier in mallorys)
    folder = folder_of(volume, MALLORY)

    def act() -> None:
        (first / "record.json").unlink()
        (second / "tree/results").unlink()
        shutil.rmtree(third / "tree")
        for path in (
            first / "record.json",
            second / "tree/results",
            third / "tree",
            folder / "drop/item",
            folder / "pointers" / ("0" * 32),
            folder / "orphans" / mallorys[0].replace("job-0", "job-9"),
            volume / "tmp/.trashd-12102",
            volume / "tmp/.trashd",
            volume / "tmp/.trashd-keep",
            volume / "tmp/old",
        ):
            os.mknod(path, *WHITEOUT)

    as_user(MALLORY, act)
    for words in (["list"], ["du", "--count"], ["reap"], ["reap", "--now", mallorys[1]]):
        done = trashd(*words, "--volume", volume)
        assert (done.code in (0, 13), "Traceback" in done.err) == (True, False), (words, done)
    assert not second.exists()
    assert "Traceback" not in trashd("doctor", volume).err
    assert trashd("sweep", volume / "tmp", "--name", "old").code in (0, 13)
    done_well("restore", alices, "--volume", volume)
    assert as_user(ALICE, lambda: trashd("swap", volume / "tmp/alices")).code == 0


ODD: list[Callable[[Path, Path], object]] = [
    lambda path, canary: path.symlink_to(canary),
    lambda path, _canary: os.mkfifo(path),
    lambda path, _canary: os.mknod(path, *WHITEOUT),
    lambda path, _canary: os.mknod(path, stat.S_IFSOCK | 0o600),
    lambda path, _canary: path.write_text("x"),
]


def exchange_all(top: Path, uid: int, _n: int) -> None:
    """Have another kind of thing at each name of a tree; done as that user."""
    if os.getuid() == 0:
        become(uid)
    for name in os.listdir(top / "real"):
        with suppress(FileNotFoundError):
            one, other = (os.fsencode(top / where / name) for where in ("real", "odd"))
            renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE)


@pytest.mark.parametrize("options", [["--delete"], ["--type", "d,f,p", "--delete", "--recursive"], []])
def test_a_sweep_by_root_follows_nothing_that_changes_its_type(volume: Path, options: list[str]) -> None:
    canary = make_tree(volume / "canary", {"file": "x", "sub": {"file": "x"}})
    before = snapshot(canary, with_times=True)
    top = volume / "tmp/m"

    def act() -> None:
        make_tree(top, {"odd": {}, "real": {f"{number}": {"sub": {"file": "x"}} for number in range(60)}})
        for number, make in enumerate(ODD * 12):
            make(top / "odd" / f"{number}", canary)

    as_user(MALLORY, act)
    as_user(ALICE, lambda: make_tree(volume / "tmp/a", {"file": "x"}))
    with beside(partial(exchange_all, top, MALLORY)):
        for _ in range(5):
            done = trashd("sweep", volume / "tmp", "--name", "[fs]*", *options)
            assert (done.code in (0, 13), "Traceback" in done.err) == (True, False), done
    assert snapshot(canary, with_times=True) == before
    assert not (volume / "tmp/a/file").exists()


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("coherence", ["exclusive", "shared"])
def test_times_and_attributes_out_of_range_pass_through_a_mount(coherence: str) -> None:
    with fresh_mount(f"coherence={coherence}") as mounted:
        mounted.backing.chmod(0o1777)

        def act() -> None:
            put_strange_files(mounted.path / "m")
            for number in range(300):
                os.setxattr(mounted.path / "m", f"user.{number:0240}", b"x")

        as_user(MALLORY, act)
        for _ in range(2):
            for path in (mounted.path / "m").iterdir():
                behind = mounted.backing / "m" / path.name
                assert (path.stat().st_mtime_ns, path.stat().st_size) == (
                    behind.stat().st_mtime_ns,
                    behind.stat().st_size,
                )
            with pytest.raises(OSError, match="too long"):
                os.listxattr(mounted.path / "m")
        as_user(ALICE, lambda: make_tree(mounted.path / "a", {"file": "x"}))
        assert (mounted.path / "a/file").read_text() == "x"


def test_hundreds_of_broken_records_print_little_to_root(volume: Path) -> None:
    alices = orphan_of(ALICE, volume / "tmp/alices")
    recover_all(volume)

    def act() -> None:
        swap(make_tree(volume / "tmp/job", {}))
        orphans = folder_of(volume, MALLORY) / "orphans"
        (one,) = orphans.iterdir()
        for number in range(300):
            (orphans / f"{one.name[:-12]}{number:012x}").mkdir()
            (orphans / f"{one.name[:-12]}{number:012x}/record.json").write_text("\x1b[2J")

    as_user(MALLORY, act)
    for words in (["list"], ["reap"], ["keep", alices], ["status"]):
        done = trashd(*words, *([] if words == ["status"] else ["--volume", os.fspath(volume)]))
        assert (done.err.count("\n") < 5, "\x1b" in done.err + done.out) == (True, False), (words, done)
    assert alices[-12:] in trashd("list", "--volume", volume).out
    done_well("restore", alices, "--volume", volume)


KINDS: list[Callable[[Path], object]] = [
    lambda path: path.symlink_to("../../canary/file"),
    lambda path: path.symlink_to("../../canary"),
    os.mkfifo,
    lambda path: path.mkdir(),
    lambda path: path.write_text("x"),
    lambda path: os.mknod(path, *WHITEOUT),
]


def change_kind(path: Path, n: int) -> None:
    if os.getuid() == 0:
        become(MALLORY)
    odd = path.with_name(f"{path.name}-{n % len(KINDS)}")
    with suppress(FileNotFoundError, FileExistsError):
        KINDS[n % len(KINDS)](odd)
    with suppress(FileNotFoundError):
        renameat2(AT_FDCWD, os.fsencode(odd), AT_FDCWD, os.fsencode(path), RENAME_EXCHANGE)


def test_a_swap_by_root_follows_nothing_that_it_keeps_in_place(volume: Path) -> None:
    canary = make_tree(volume / "canary", {"file": "x", "sub": {"file": "x"}})
    job = volume / "tmp/job"
    as_user(MALLORY, lambda: make_tree(job, {"kept": "x", "data": {"file": "x"}}) and None)
    before = snapshot(canary, with_times=True)
    with beside(partial(change_kind, job / "kept")):
        for _ in range(12):
            done = trashd("swap", "--keep", "kept*", job)
            assert "Traceback" not in done.err, done
    assert snapshot(canary, with_times=True) == before
    assert job.stat().st_uid == MALLORY
    for entry in entries(volume):
        trashd("restore", entry.id, "--volume", volume)
    assert snapshot(canary, with_times=True) == before


def make_mounts(top: Path, n: int) -> None:
    """In namespaces of one's own: so many mounts, by bind mounts of all that there are already."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid = os.getuid()
    assert libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0, ctypes.get_errno()
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1")):
        Path("/proc/self", name).write_text(text)
    for path in (top, top / "m"):
        path.mkdir(exist_ok=True)
        assert libc.mount(b"x", os.fsencode(path), b"tmpfs", 0, b"") == 0, ctypes.get_errno()
    for number in range(n.bit_length()):
        (top / f"m/{number}").mkdir()
        target = os.fsencode(top / f"m/{number}")
        assert libc.mount(os.fsencode(top / "m"), target, None, MS_BIND | MS_REC, None) == 0, ctypes.get_errno()


@pytest.mark.timeout(30)
def test_the_time_of_holders_does_not_grow_with_mounts_times_open_files(volume: Path) -> None:
    top, job = make_tree(volume / "mallory/top", Dir(owner=(MALLORY, MALLORY))), make_tree(volume / "tmp/job", {})

    def act() -> None:
        n_most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_most, n_most))
        make_mounts(top, 30_000)
        for number in range(min(15_000, n_most - 100)):
            os.open(top / f"{number}", os.O_CREAT)

    with process_of(MALLORY, act):
        assert done_well("holders", job).out == f"no process uses {job}\n"
