"""A volume fails, fills or hangs, clocks are set, people interfere: the service rests, says why, and serves others."""

import errno
import fcntl
import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fusefs.core.orphan_age import Clock, Era, decode_clock, encode_clock
from fusefs.core.service_status import VolumePhase
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.store.stage import SwapOptions
from tests.support.fuse_eio import broken_volume
from tests.support.fuse_slow import slow_volume
from tests.support.group_members import FORGED
from tests.support.hostile_steps import ALICE, BOB, DATA, MAPPED, OF_A_MATE, OF_THE_MAPPED, OF_THE_OWNER, ROOT, team
from tests.support.interrupted_command import run_interrupted, unreported
from tests.support.make_trees import Dir, File, fill, make_tree
from tests.support.plain_twin import MARK, Step, Twins, contents
from tests.support.privileges import Credentials
from tests.support.proc_stat import stop
from tests.support.real_filesystems import ON_DISK, full, loop_volume, mount_of, tmpfs_volume
from tests.support.reap_process import state_of
from tests.support.service_process import LIMIT_S, QUICK, SCALED, Service, configure, events_in, places, service
from tests.support.small_orphans import EXPIRED, orphan_in
from tests.support.store_verbs import assert_silent, forge, init, own, place, recover_all, swap, tmpfs_store

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]


SLOWLY = QUICK + 'max_rate = "100/s"\n'
_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG = struct.pack("=I", 2)


def is_gone(volume: Path, identifier: str) -> bool:
    """Whether a container is in no state any more; asks only names, of root's own folder."""
    return not any((volume / ".trashd/u/0").glob(f"*/{identifier}"))


def is_in(volume: Path, identifier: str, state: str) -> bool:
    return (volume / ".trashd/u/0" / state / identifier).exists()


def assert_served(running: Service, volume: Path, name: str) -> None:
    identifier = orphan_in(volume, name, EXPIRED).id
    running.until(lambda: is_gone(volume, identifier))


def succeeds(*command: str | Path) -> bool:
    """Whether a command does what it is for: a volume may be busy for a moment."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def events(base: Path) -> list[str]:
    return [event["event"] for event in events_in(base)]


# Errors


@pytest.mark.long
@pytest.mark.needs("fuse")
def test_errors_in_many_orphans_give_the_volume_a_rest_and_the_reason_is_told(base: Path, volume: Path) -> None:
    with broken_volume() as broken:
        init(broken.path)
        ids = [orphan_in(broken.path, f"job{n}", EXPIRED, {"unlink-a": "1"}).id for n in range(4)]
        with service(base, broken.path, volume) as running:
            status = running.until_phase(broken.path, VolumePhase.BROKEN)
            assert "Input/output error" in status.why
            assert "tries again" in status.why
            assert status.faults
            assert_served(running, volume, "a")
            assert running.volume(broken.path).phase is VolumePhase.BROKEN
            left = [one for one in ids if not is_in(broken.path, one, "quarantine")]
            running.reload()
            running.until(lambda: all(is_in(broken.path, one, "quarantine") for one in left))
            running.until(lambda: "mended" in events(base))
            assert_served(running, broken.path, "healthy")
            running.stop()
        assert events(base).index("broken") < events(base).index("mended")
        assert_silent(broken.path)


def shut_down(filesystem: Path) -> None:
    root = os.open(filesystem, os.O_RDONLY)
    fcntl.ioctl(root, _EXT4_IOC_SHUTDOWN, _WITHOUT_LOG)
    os.close(root)


def find_fault(filesystem: Path) -> None:
    """Have the kernel find an error in it, of which it becomes read-only."""
    entry = mount_of(filesystem)
    assert entry is not None
    Path("/sys/fs/ext4", Path(os.fsdecode(entry.source)).name, "trigger_fs_error").write_text("test")


@pytest.mark.needs("loop")
@pytest.mark.parametrize(("harm", "why"), [(shut_down, "Input/output error"), (find_fault, "Read-only file system")])
def test_filesystem_that_fails_in_the_middle_of_a_reap_is_left_alone(
    base: Path, volume: Path, harm: Callable[[Path], None], why: str
) -> None:
    with loop_volume("ext4", 64, mount_options=["errors=remount-ro"]) as sick:
        init(sick)
        large = swap(fill(sick / "large", 3000), options=EXPIRED).id
        with service(base, sick, volume, config=SLOWLY) as running:
            running.until(lambda: is_in(sick, large, "reaping"))
            harm(sick)
            assert why in running.until_phase(sick, VolumePhase.BROKEN).why
            assert_served(running, volume, "a")
            running.stop()


@pytest.mark.needs("loop")
def test_volume_that_is_read_only_for_a_while_is_served_afterwards(base: Path, volume: Path) -> None:
    with loop_volume("ext4", 64) as sick:
        init(sick)
        identifier = orphan_in(sick, "job").id
        with service(base, sick, volume, timers=SCALED._replace(rest_pause_s=0.5)) as running:
            running.until_phase(sick, VolumePhase.IDLE)
            running.until(lambda: succeeds("mount", "-o", "remount,ro", sick))
            configure(base, QUICK + 'retention = "0s"\nminimum_age = "0s"\n')
            running.reload()
            assert "Read-only file system" in running.until_phase(sick, VolumePhase.BROKEN).why
            assert_served(running, volume, "a")
            assert succeeds("mount", "-o", "remount,rw", sick)
            running.until(lambda: is_gone(sick, identifier))
        assert_silent(sick)


# No space


@contextmanager
def served_small(filesystem: str) -> Iterator[tuple[Path, Path]]:
    few = [["-N", "3000"]] if filesystem == "ext4" else []
    tmpfs = tmpfs_volume("16m", ["nr_inodes=3000"])
    with tmpfs if filesystem == "tmpfs" else loop_volume(filesystem, 64, *few) as volume:
        init(volume)
        with own(volume) as folder:
            drop = Path(os.fsdecode(folder.path())) / "drop"
        yield volume, drop
        assert recover_all(volume) == []  # fills the reserve up again
        assert_silent(volume)


SMALL = [
    "tmpfs",
    pytest.param("ext4", marks=pytest.mark.needs("loop")),
    pytest.param("xfs", marks=pytest.mark.needs("loop", "xfs")),
]


@pytest.mark.parametrize("filesystem", SMALL)
def test_full_volume_is_reaped(filesystem: str) -> None:
    with served_small(filesystem) as (volume, _drop), places() as base:
        early = orphan_in(volume, "early", EXPIRED).id
        late = fill(volume / "late", 10)
        with full(volume), service(base, volume) as running:
            running.until(lambda: is_gone(volume, early))
            thrown = swap(late, options=EXPIRED).id
            running.until(lambda: is_gone(volume, thrown))
            assert running.volume(volume).phase is not VolumePhase.BROKEN


@pytest.mark.needs("loop")
def test_what_could_not_be_taken_in_for_want_of_space_is_taken_in_later() -> None:
    with served_small("ext4") as (volume, drop), places() as base:
        dropped = [fill(volume / f"dropped{n}", 10) for n in range(3)]
        with service(base, volume) as running:
            with full(volume):
                for one in dropped:
                    one.rename(drop / one.name)
                running.until(lambda: running.volume(volume).faults)
                assert any(drop.iterdir())
            running.until(lambda: not any(drop.iterdir()))


def test_service_goes_on_where_nothing_of_its_own_can_be_written() -> None:
    with tmpfs_store() as volume, places() as base, tmpfs_volume("1m") as state:
        runtime = Path(os.fsdecode(SYSTEM_RUNTIME))
        config = f'audit = "{state}/audit"\n{QUICK}'
        with _service_with(base, volume, config, state) as running:
            running.until_phase(volume, VolumePhase.IDLE)
            with full(state, inodes=False), full(runtime.parent, inodes=False):
                for n in range(30):
                    orphan_in(volume, f"job{n}", EXPIRED)
                for part in ("orphans", "reaping"):
                    running.until(lambda part=part: not any((volume / ".trashd/u/0" / part).iterdir()))  # type: ignore[misc]
            assert_served(running, volume, "after")
            running.until(lambda: running.volume(volume).n_reaped > 30)
            running.stop()
            assert running.process.returncode == 0
        assert "events are missing from it" in running.log.read_text()


def test_service_starts_where_it_can_remember_nothing() -> None:
    with tmpfs_store() as volume, places() as base, tmpfs_volume(options=["ro"]) as state:
        config = f'audit = "{state}/log/audit"\n{QUICK}'
        with _service_with(base, volume, config, state / "missing") as running:
            assert_served(running, volume, "a")
            running.stop()
            assert running.process.returncode == 0


@contextmanager
def _service_with(base: Path, volume: Path, config: str, state: Path) -> Iterator[Service]:
    (base / "config.d").mkdir()
    (base / "config.d/test.toml").write_text(config)
    with service(base, volume, environment={"STATE_DIRECTORY": str(state)}) as running:
        yield running


# A server that is away


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("what", ["", "f"], ids=["all-of-it", "some-of-it"])
def test_server_that_is_away_for_a_while_is_waited_for_and_that_is_said(what: str) -> None:
    with tmpfs_volume() as source, slow_volume(source, 0) as slow, places() as base:
        init(slow.path)
        identifier = swap(fill(slow.path / "large", 300), options=EXPIRED).id
        with service(base, slow.path, config=SLOWLY) as running:
            running.until(lambda: slow.n_messages.get("unlink", 0) > 20)
            slow.refuse(errno.ENOTCONN, what)
            running.until(lambda: "waiting for the server: Transport" in running.volume(slow.path).why)
            slow.refuse(0)
            running.until(lambda: is_gone(source, identifier))
        assert not {"broken", "quarantined"} & set(events(base))
        assert_silent(slow.path)


@pytest.mark.every
@pytest.mark.needs("fuse")
@pytest.mark.parametrize("call_us", [1000, 4000])
def test_service_yields_on_a_server_on_which_its_threads_make_other_clients_wait(call_us: int) -> None:
    with (
        tmpfs_volume() as source,
        slow_volume(source, 0, limit_s=300.0, n_threads=2) as server,
        slow_volume(server.path, 0, limit_s=300.0) as client,
        places() as base,
    ):
        init(client.path)
        for number in range(200):
            fill(client.path / "large" / str(number), 60)
        swap(client.path / "large", options=EXPIRED)
        for mount, delay_us in ((server, call_us), (client, 4000)):
            mount.delay(delay_us)
            mount.delay_all()
        with service(base, client.path, config="") as running:
            running.until(lambda: "latency sets the pace" in running.volume(client.path).why, 60.0)
            assert running.volume(client.path).phase is VolumePhase.YIELDING
            for mount in (client, server):
                mount.delay(0)


# A volume that hangs


@contextmanager
def hanging(pid: int) -> Iterator[None]:
    """A FUSE daemon that answers nothing for the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def daemon_of(mount_point: Path) -> int:
    wanted = {os.fsencode(mount_point), b"tests.support.fuse_eio"}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            if wanted <= set(Path("/proc", name, "cmdline").read_bytes().split(b"\0")):
                return int(name)
    raise LookupError(mount_point)


@pytest.mark.long
@pytest.mark.needs("fuse")
def test_volume_that_hangs_in_the_middle_of_a_reap_holds_nothing_else_up(base: Path, volume: Path) -> None:
    with broken_volume() as hung:
        init(hung.path)
        large = swap(fill(hung.path / "large", 2000), options=EXPIRED).id
        with service(base, hung.path, volume, config=SLOWLY) as running:
            running.until(lambda: is_in(hung.backing, large, "reaping"))
            with hanging(daemon_of(hung.path)):
                assert_served(running, volume, "a")
                assert_served(running, volume, "b")
                running.stop()
        with service(base, hung.path) as running:
            running.until(lambda: is_gone(hung.backing, large))
        assert_silent(hung.path)


@pytest.mark.needs("fuse")
def test_service_that_looks_for_volumes_ends_at_once_though_one_hangs(base: Path, volume: Path) -> None:
    with broken_volume() as hung:
        init(hung.path)
        with service(base, hung.path, volume) as running:
            running.until_phase(hung.path, VolumePhase.IDLE)
            with hanging(daemon_of(hung.path)):
                running.process.send_signal(signal.SIGHUP)
                running.until(lambda: "RELOADING=1" in running.read_messages())
                assert_served(running, volume, "a")
                running.stop()


def test_idle_service_ends_with_its_forker() -> None:
    """Its manager starts it again; it would not notice itself before something is due."""
    with tmpfs_store() as volume, places() as base, service(base, volume) as running:
        os.kill(running.forker(), signal.SIGKILL)
        assert running.process.wait(LIMIT_S) != 0


NS = 1_000_000_000
DAY_S = 86_400
JUMP_S = 30 * DAY_S
WATCHED_S = 100
"""So long ago the wall clock was what it had always been."""
WEEK = SwapOptions(retention_s=7 * DAY_S)


def remember(base: Path, ahead_s: int) -> None:
    """What a service leaves that saw the wall clock run undisturbed, before it was set ahead by so much (or back)."""
    wall_ns, boot_ns = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    seen_wall_ns, seen_boot_ns = wall_ns - (ahead_s + WATCHED_S) * NS, boot_ns - WATCHED_S * NS
    clock = Clock(seen_wall_ns, seen_boot_ns, seen_wall_ns - seen_boot_ns, (Era(0, 0),), boot_id())
    (base / "clock.json").write_bytes(encode_clock(clock))


def dated(volume: Path, name: str, age_s: int, ahead_s: int = 0) -> str:
    """The id of an orphan with a week's retention, so old in truth, made before the wall clock was set ahead."""
    identifier = orphan_in(volume, name, WEEK).id
    created_ns = time.time_ns() - (age_s + ahead_s) * NS
    forge(place(volume, identifier) / "record.json", created_ns=created_ns)
    return identifier


def is_in_no_state(volume: Path, identifier: str) -> bool:
    return state_of(volume, identifier) is None


@pytest.mark.parametrize("ahead_s", [JUMP_S, -JUMP_S, 0])
def test_ages_are_told_by_the_time_that_passed_and_not_by_the_clock(base: Path, volume: Path, ahead_s: int) -> None:
    old = dated(volume, "old", 8 * DAY_S, ahead_s)
    young = [dated(volume, f"young{n}", age_s, ahead_s) for n, age_s in enumerate((WATCHED_S + 60, 6 * DAY_S))]
    new = orphan_in(volume, "new", WEEK).id
    asked = orphan_in(volume, "asked", EXPIRED).id
    remember(base, ahead_s)
    with service(base, volume) as running:
        running.until(lambda: is_in_no_state(volume, old) and is_in_no_state(volume, asked))
        running.until(lambda: running.volume(volume).n_orphans == len([*young, new]))
        running.until_phase(volume, VolumePhase.IDLE)
        assert not any(is_in_no_state(volume, one) for one in [*young, new])


@pytest.mark.parametrize("set_s", [JUMP_S, -JUMP_S])
def test_without_a_memory_what_was_made_in_this_boot_has_its_age(base: Path, volume: Path, set_s: int) -> None:
    """The clock was set, and then the first service began: records tell the clock that is never set, too."""
    young, old = (orphan_in(volume, name, WEEK).id for name in ("young", "old"))
    for identifier, retention_s in ((young, 7 * DAY_S), (old, 0)):
        record = place(volume, identifier) / "record.json"
        fields = json.loads(record.read_text())
        created_ns = fields["created_ns"] - set_s * NS
        forge(record, created_ns=created_ns, boot_ns=fields["boot_ns"], retention_s=retention_s)
    with service(base, volume) as running:
        running.until(lambda: is_in_no_state(volume, old))
        running.until_phase(volume, VolumePhase.IDLE)
        assert not is_in_no_state(volume, young)


def test_a_killed_service_leaves_what_it_knew_of_the_clock(base: Path, volume: Path) -> None:
    """The one after it would else take the new time for the true one, and reap weeks early."""
    young = dated(volume, "young", WATCHED_S + 60, JUMP_S)
    remember(base, JUMP_S)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        running.kill()
    left = decode_clock((base / "clock.json").read_bytes())
    assert left is not None
    assert [round(era.ahead_ns / NS / DAY_S) for era in left.eras] == [0, JUMP_S // DAY_S]
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
    assert not is_in_no_state(volume, young)


def test_a_first_service_that_is_killed_leaves_its_clock(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.kill()
    left = decode_clock((base / "clock.json").read_bytes())
    assert left is not None
    assert abs(left.ahead_ns()) < NS


AS_ROOT = f'{QUICK}delete_as = "root"\nusers = ["{ALICE.uid}"]\n'
ROOTS = "team/project/roots"


@pytest.fixture(scope="module")
def volumes() -> Iterator[tuple[Path, Path]]:
    with tmpfs_volume() as first, tmpfs_volume() as plain:
        yield first, plain


def throw(twins: Twins, asker: Credentials, where: str, number: int) -> None:
    assert run_interrupted(twins, asker, f"swap --keep-for 0s VOLUME/{where}").code == 0
    twins.give(asker, where, number, is_swap=True)


def is_done(twins: Twins) -> bool:
    """Whether nothing waits to be reaped any more but what was planted."""
    return all(path.name == FORGED for state in ("orphans", "reaping") for path in containers(twins, state))


def containers(twins: Twins, state: str, whose: str = "*") -> list[Path]:
    return list(twins.first.volume.glob(f".trashd/*/{whose}/{state}/*Z-*"))


def act_before_its_look(twins: Twins, running: Service, act: Sequence[Step]) -> None:
    """Alice and root throw away while the service is stopped, and the hostile one acts before it goes on."""
    with running.held():
        throw(twins, ALICE, DATA, 1)
        throw(twins, ROOT, ROOTS, 2)
        for side in (twins.first, twins.plain):
            twins.act(side, act)


def hold(volumes: tuple[Path, Path], hostile: Credentials, act: Sequence[Step], config: str = QUICK) -> None:
    """Nothing is done that the twin doesn't show."""
    with team(*volumes, hostile) as twins, places() as base:
        if config == AS_ROOT:
            put_roots_into_hers(twins)
        before = contents(twins.first)
        with service(base, twins.first.volume, config=config) as running:
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            if config == AS_ROOT:
                twins.may_go |= twins.deletable(ROOT, DATA)
            act_before_its_look(twins, running, act)
            running.until(lambda: is_done(twins))
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            running.stop()
            assert "internal error in trashd" not in running.log.read_text()
        assert (twins.faults(before), unreported(twins)) == ([], [])


def put_roots_into_hers(twins: Twins) -> None:
    for side in (twins.first, twins.plain):
        make_tree(side.at(f"{DATA}/built"), Dir({"object": File(f"{MARK}built".encode())}))


@pytest.mark.parametrize("act", OF_A_MATE)
def test_service_beside_a_mate(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, BOB, OF_A_MATE[act])


@pytest.mark.parametrize("act", OF_THE_MAPPED)
def test_service_beside_one_with_subordinate_ids(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, MAPPED, OF_THE_MAPPED[act])


@pytest.mark.parametrize("act", ["moves in", "exchanges in", "moves files in", "goes up", "plants u", "takes out"])
def test_service_with_roots_authority_for_her_beside_a_mate(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, BOB, OF_A_MATE[act], AS_ROOT)


def test_what_came_in_is_not_taken_out_of_its_owners_reach_by_roots_authority(volumes: tuple[Path, Path]) -> None:
    """It lies in quarantine beside what root was to delete for her; a service that starts finds it there again."""
    with team(*volumes, BOB) as twins, places() as base:
        put_roots_into_hers(twins)
        with service(base, twins.first.volume, config=AS_ROOT) as running:
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            act_before_its_look(twins, running, OF_A_MATE["moves in"])
            running.until(lambda: is_done(twins))
            later_is_gone(twins, running)
        with service(base, twins.first.volume, config=AS_ROOT) as running:
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            later_is_gone(twins, running)
        [kept] = containers(twins, "quarantine", f"{ALICE.uid}*")
        assert (kept / "tree/came-in/results/thesis").exists()
        assert (kept / "tree/built/object").exists()


def later_is_gone(twins: Twins, running: Service) -> None:
    """What is thrown away now, and what root took over before that, has been reaped."""
    assert run_interrupted(twins, ALICE, "swap --keep-for 0s VOLUME/alice/job").code == 0
    running.until(lambda: is_done(twins))
    running.until_phase(twins.first.volume, VolumePhase.IDLE)


@pytest.mark.parametrize("act", OF_THE_OWNER)
def test_service_with_roots_authority_for_one_who_plays_with_it(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, ALICE, OF_THE_OWNER[act], AS_ROOT)


@pytest.mark.parametrize("filesystem", ON_DISK)
def test_service_leaves_what_came_in_on_each_filesystem(filesystem: str) -> None:
    steps = [*OF_A_MATE["exchanges in"], *OF_A_MATE["moves files in"]]
    with loop_volume(filesystem) as first, tmpfs_volume() as plain:
        hold((first, plain), BOB, steps)
