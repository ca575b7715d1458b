"""Attacks of a user on the processes, limits, locks and kernel tables that the service shares with her."""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from fusefs.store.stage import SwapOptions
from tests.support.background_processes import process_of
from tests.support.hostile_volume import ALICE, MALLORY, Shared, shared_volume
from tests.support.make_trees import Dir, File, make_tree, remove_tree_hard
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import unmount
from tests.support.reap_process import beside
from tests.support.service_process import QUICK, Service, service
from tests.support.small_orphans import EXPIRED, PINNED
from tests.support.store_verbs import forge, place, raw, swap
from tests.support.trashd_command import done_well, trashd
from tests.support.user_homes import ALICE as HOME_ALICE
from tests.support.user_homes import BOB, SOON, line_of, outlasts, own_stores, register, thrown

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(90)]


def serves_alice(shared: Shared, running: Service, n: int = 1) -> None:
    for number in range(n):
        thrown_id = shared.throw(ALICE, f"served-{number}")
        running.until(partial(shared.is_gone, thrown_id), 20)


def test_a_hole_of_exbibytes_takes_no_longer_than_what_is_in_the_file() -> None:
    """A paced reaper cuts a large file in steps. In steps of equal size, a hole of exbibytes would take years."""
    with shared_volume("size=256m") as shared:

        def act() -> str:
            job = make_tree(shared.home(MALLORY) / "job", Dir({"vast": b""}))
            with (job / "vast").open("r+b") as file:
                os.posix_fallocate(file.fileno(), 1 << 61, 65 << 20)
                os.truncate(file.fileno(), (1 << 63) - 1)
            return str(swap(job, options=EXPIRED).id)

        vast = as_user(MALLORY, act)
        with shared.served(f'{QUICK}max_rate = "1000/s"\n') as running:
            running.until(lambda: shared.is_gone(vast), 20)
            serves_alice(shared, running)


LIMITS = {
    "files": (resource.RLIMIT_NOFILE, 0),
    "sizes": (resource.RLIMIT_FSIZE, 0),
    "seconds": (resource.RLIMIT_CPU, 0),
    "memory": (resource.RLIMIT_AS, 1 << 20),
    "processes": (resource.RLIMIT_NPROC, 0),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_user_who_limits_the_process_that_acts_for_her_delays_only_herself(shared: Shared, limit: str) -> None:
    """prlimit(2) asks for nothing but the same uid."""
    kind, value = LIMITS[limit]
    orphans = [shared.throw(MALLORY, f"job{number}") for number in range(3)]

    def lower(_n: int) -> None:
        if os.getuid() == 0:
            become(MALLORY)
        for pid in running.children():
            with suppress(OSError):
                resource.prlimit(pid, kind, (value, value))

    with shared.served() as running:
        with beside(lower, 0.002):
            serves_alice(shared, running, 3)
        running.until(lambda: all(map(shared.is_gone, orphans)))


def send_fds_to_nobody() -> None:
    """Send as many fds as a uid may have in flight, so that no process with this uid may send another one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    with suppress(OSError):
        while True:
            one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            held.extend((one, other))
            for _ in range(5):
                socket.send_fds(one, [b"x"], [one.fileno()] * 250)


def take_inotify() -> None:
    libc = ctypes.CDLL(None)
    while libc.inotify_init1(0) >= 0:
        pass


def fill_pipes() -> None:
    with suppress(OSError):
        while True:
            _reader, writer = os.pipe()
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)


def queue_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    libc = ctypes.CDLL(None)
    while libc.sigqueue(os.getpid(), signal.SIGRTMIN, 0) == 0:
        pass


held: list[socket.socket] = []


@pytest.mark.parametrize("use_up", [send_fds_to_nobody, take_inotify, fill_pipes, queue_signals])
def test_a_user_at_the_kernels_limits_delays_nobody_else(shared: Shared, use_up: Callable[[], None]) -> None:
    with process_of(MALLORY, use_up), shared.served() as running:
        mallorys = shared.throw(MALLORY)
        serves_alice(shared, running)
        later = shared.throw(MALLORY, "later")
        serves_alice(shared, running)
    with shared.served() as running:
        running.until(lambda: shared.is_gone(mallorys) and shared.is_gone(later))


def lock_all(*tops: Path) -> None:
    """Lock everything that can be opened there in each way, and take leases on the user's own files."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel sends it when a lease is broken
    for directory, _subdirs, names in (found for top in tops for found in os.walk(top)):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(OSError):
                    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            with suppress(OSError):
                fcntl.lockf(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_users_locks_and_leases_delay_nobody(shared: Shared) -> None:
    """A lease is broken after 45 s (fs.lease-break-time), a lock never."""
    first = shared.throw(MALLORY, "first")
    tops = (shared.volume, Path("/run/trashd"), Path("/var/lib/trashd"), shared.base)
    with shared.served() as running:
        running.until(lambda: shared.is_gone(first))
        running.until_phase(shared.volume, VolumePhase.IDLE)
        kept = shared.throw(MALLORY, "job", SwapOptions())
        with process_of(MALLORY, partial(lock_all, *tops)) as pid:
            os.kill(pid, signal.SIGSTOP)
            serves_alice(shared, running)
            make_tree(shared.volume / "roots", {"a": "1"})
            for words in (
                ["swap", shared.volume / "roots"],
                ["list", "--volume", shared.volume],
                ["reap", "--all", "--now", "--volume", shared.volume],
                ["init", shared.volume],
                ["status"],
            ):
                done = trashd(*words)
                assert done.code == 0, done
            assert kept in trashd("doctor", shared.volume).out
            os.kill(pid, signal.SIGCONT)
        done_well("reap", "--now", kept, "--volume", shared.volume)


def test_a_user_who_drops_a_part_of_her_folder_harms_only_herself(shared: Shared) -> None:
    for number, part in enumerate(("orphans", "reaping", "stage", "quarantine", "pointers", "reserve")):
        uid = 13_000 + number
        make_tree(shared.home(uid), Dir(owner=(uid, uid)))
        shared.throw(uid)
        folder = shared.folder(uid)
        as_user(uid, partial((folder / part).rename, folder / "drop" / part))
    with shared.served() as running:
        serves_alice(shared, running, 2)
        assert running.volume(shared.volume).phase is not VolumePhase.BROKEN
    for words in (["list"], ["reap", "--all", "--now"]):
        assert "Traceback" not in trashd(*words, "--volume", shared.volume).err


FORGERIES: Mapping[str, object] = {"taken_from": ALICE, "moved_ns": (1 << 63) - 1, "boot_ns": None}


@pytest.mark.parametrize("by_force", [False, True])
def test_a_record_that_names_another_users_directory_deletes_nothing_in_it(shared: Shared, by_force: bool) -> None:
    """Mallory shares a group with Alice, whose directory the group may write and therefore move."""
    team = 5000
    thesis = Dir({"thesis": File(b"years of work", owner=(ALICE, team))}, mode=0o755, owner=(ALICE, team))
    make_tree(shared.volume / "team", Dir({"data": Dir({"sub": thesis}, 0o2775, (ALICE, team))}, 0o2775, (0, team)))
    mallorys = shared.throw(MALLORY)
    container = place(shared.volume, mallorys)
    as_user(MALLORY, lambda: (shared.volume / "team/data").rename(container / "tree/data") and None, groups=[team])
    kernel, entered = Kernel(), {}
    for path in (container / "tree/data", container / "tree/data/sub"):
        with kernel.open_path(raw(path)) as fd:
            entered[kernel.identify(fd).handle] = path.stat().st_ctime_ns
    forge(container / "record.json", **FORGERIES, entered=entered)
    with shared.served() as running:
        running.until(lambda: shared.is_in(mallorys, "quarantine") or shared.is_gone(mallorys))
        serves_alice(shared, running)
    if by_force:
        trashd("reap", "--force", "--yes", mallorys, "--volume", shared.volume)
    assert list(shared.volume.rglob("thesis")) != []


STRANGE = [b"a\nSTOPPING=1\nMAINPID=1", b'b"} 1\ntrashd_up{c="', b"\x1b]0;x\x07\x9b2J", b"\xff\xfe", b"n" * 255]


def test_directory_names_inject_nothing_into_systemd_prometheus_or_the_log(
    base: Path, home: Mapping[int, Path]
) -> None:
    containers = []
    for name in STRANGE:
        place = home[BOB] / os.fsdecode(name)
        make_tree(place, Dir(owner=(BOB, BOB)))
        containers.append(thrown(BOB, home[BOB], *SOON, where=os.fsdecode(name)))
    config = f'{QUICK}[metrics]\ntextfile = "{base}/trashd.prom"\n'
    with service(base, config=config) as running:
        running.until(lambda: not any(container.exists() for container in containers))
        running.until((base / "trashd.prom").exists)
        sent, metrics = running.read_messages(), (base / "trashd.prom").read_text()
    log, audit = running.log.read_text(), (base / "audit").read_text()
    assert "STOPPING=1" not in sent.partition("READY=1")[0]
    assert not {"MAINPID=1", "STOPPING=1"} & {*sent.splitlines()[:-1]}
    assert all(line.startswith(("trashd_", "# ")) and "up{c" not in line for line in metrics.splitlines())
    assert all(json.loads(line) for line in audit.splitlines())
    for text in (log, audit, metrics):
        assert all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("way", ["{pid}/cwd", "{pid}/root{base}", "{pid}/fd/{fd}", "{pid}/task/{pid}/cwd"])
def test_root_follows_no_registered_path_through_a_users_process(
    base: Path, home: Mapping[int, Path], way: str
) -> None:
    """Such a link leads wherever the process is, in namespaces of its own too."""
    kept, served = (thrown(uid, home[uid], *SOON) for uid in (BOB, HOME_ALICE))
    store_base = kept.parents[4]
    line = line_of(store_base)
    fd = os.open(store_base, os.O_RDONLY)
    with process_of(BOB, partial(os.chdir, store_base)) as pid:
        os.close(fd)
        path = "/proc/" + way.format(pid=pid, base=store_base, fd=fd)
        register(BOB, home[BOB], [line._replace(path=os.fsencode(path))])
        with service(base) as running:
            running.until(lambda: not served.exists())
            outlasts(running, HOME_ALICE, home[HOME_ALICE], kept)
            assert {one.owner for one in own_stores(running)} == {HOME_ALICE}


# Tables of mounts


def fuse_of_mallorys(target: Path, **options: str) -> int:
    """A FUSE mount as fusermount3 makes it for her, with a name and a type of her choice; it answers nothing."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    data = f"fd={fd},rootmode=40000,user_id={MALLORY},group_id={MALLORY}".encode()
    kind = b"fuse." + os.fsencode(options["subtype"])
    assert libc.mount(os.fsencode(options["source"]), os.fsencode(target), kind, 0, data) == 0, ctypes.get_errno()
    return fd


@pytest.mark.parametrize("subtype", ["trashd", "mergerfs", "x"])
def test_a_mount_that_imitates_trashd_or_has_an_odd_name_misleads_nobody(shared: Shared, subtype: str) -> None:
    """fusermount3 lets her choose the type and the source."""
    with ExitStack() as after:
        for number, name in enumerate((b"plain", b"a b\n1 2 0:3 x rw - ext4", b"\xff\\040 - fuse", b"-")):
            target = shared.home(MALLORY) / os.fsdecode(name)
            as_user(MALLORY, target.mkdir)
            source = os.fsdecode((os.fsencode(shared.volume), b"\xfe", b"\x1b[2J", b"- - ext4")[number])
            fd = fuse_of_mallorys(target, subtype=subtype, source=source)
            after.callback(unmount, target)
            after.callback(os.close, fd)
        make_tree(shared.volume / "roots", {"a": "1"})
        with shared.served() as running:
            serves_alice(shared, running)
            done_well("swap", shared.volume / "roots")
            done_well("status")
            for words in (["list"], ["reap", "--all", "--now"]):
                done_well(*words, "--volume", shared.volume)


# What changes all the time


ODD: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("/etc"),
    "fifo": os.mkfifo,
    "directory": lambda path: path.mkdir(0o700),
}


def flap(path: Path, odd: Path, kind: str, n: int) -> None:
    """Have something else at a path, or another mode; done as Mallory."""
    if os.getuid() == 0:
        become(MALLORY)
    if kind == "mode":
        path.chmod((0o700, 0o755, 0, 0o777)[n % 4])
        return
    if n == 0:
        ODD[kind](odd)
    renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(odd), RENAME_EXCHANGE)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("part", ["", "orphans", "pointers"])
@pytest.mark.parametrize("kind", [*ODD, "mode"])
def test_a_folder_that_keeps_changing_its_type_delays_nobody_else(
    shared: Shared, kind: str, part: str, is_new: bool
) -> None:
    """Root looks at it, opens it, and watches it: between any two of these it changes."""
    if is_new:
        for path in (shared.folder(MALLORY), shared.volume / ".trashd/folders" / str(MALLORY)):
            remove_tree_hard(path) if path.is_dir() else path.unlink()
    shared.throw(MALLORY)
    folder = shared.folder(MALLORY)
    if not is_new and not part:
        kind = "mode"  # only root makes names there
    with beside(partial(flap, folder / part, shared.home(MALLORY) / "odd", kind), 0.0003), shared.served() as running:
        serves_alice(shared, running, 2)
        assert running.volume(shared.volume).phase is not VolumePhase.BROKEN
        kept = shared.throw(ALICE, "kept", PINNED)
        done = trashd("list", "--volume", shared.volume)
        assert (kept[-12:] in done.out, "Traceback" in done.err) == (True, False), done


def come_and_go(new: Path, n: int) -> None:
    if os.getuid() == 0:
        become(MALLORY)
    path = new / f"{MALLORY}.{n:012x}"
    path.mkdir(0o700)
    (path / "orphans").mkdir(0o700)
    (path / "orphans").rmdir()
    path.rmdir()


def test_folders_that_come_and_go_quickly_delay_no_new_user(shared: Shared) -> None:
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        with beside(partial(come_and_go, shared.volume / ".trashd/new"), 0.0003):
            serves_alice(shared, running)
            make_tree(shared.home(13_000), Dir(owner=(13_000, 13_000)))
            first = shared.throw(13_000)
            running.until(lambda: shared.is_gone(first), 20)


def test_sizes_beyond_64_bits_are_summed(shared: Shared) -> None:
    most = (1 << 63) - 1
    size = {"n_entries": most, "n_bytes": most, "linked_bytes": 0, "shared_bytes": 0, "is_at_least": False}
    for number in range(3):
        vast = shared.throw(MALLORY, f"job{number}", PINNED)
        forge(place(shared.volume, vast) / "record.json", size={**size, "source": "count", "at_ns": 1})
    config = f'{QUICK}quota = {{ bytes = "1G" }}\n[metrics]\ntextfile = "{shared.base}/trashd.prom"\n'
    with shared.served(config) as running:
        alices = shared.throw(ALICE, "kept", PINNED)
        running.until(lambda: running.volume(shared.volume).n_orphans == 4, 20)
        for words in (["status"], ["status", "--json"], ["list"], ["du"], ["du", "--json"]):
            done_well(*words)
        serves_alice(shared, running)
        assert not shared.is_gone(alices)
