"""Two services on one volume, of two machines that see neither locks nor notices of each other: claims decide."""

import contextlib
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.service_status import SeenNode
from fusefs.linux.kernel import Kernel
from tests.support.make_trees import make_tree
from tests.support.mount_namespaces import be_machine
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import QUICK, Service, audited, begin_large, service
from tests.support.small_orphans import EXPIRED, ids, orphan_in
from tests.support.sshfs_volumes import sshfs_of
from tests.support.store_verbs import ActingBefore, DyingAt, assert_silent, die, forge, in_child, init, restore, swap
from tests.support.trashd_command import CommandResult, trashd

_MACHINE_ID, _BOOT_ID = Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")
UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")
POLLED = 'poll = "1s"\n' + QUICK
"""Beats and looks for what others did come each second."""


class Machines(NamedTuple):
    """Two mounts of one directory."""

    a: Path
    b: Path


class ServiceNode(NamedTuple):
    """The service of one machine. volume: as it is mounted there"""

    name: str
    base: Path
    volume: Path
    running: Service

    def status(self, *options: str) -> CommandResult:
        return trashd("status", *options, RUNTIME_DIRECTORY=str(self.base / "run"))


@contextlib.contextmanager
def machines_at_one_volume() -> Iterator[Machines]:
    """An sshfs of a tmpfs that is mounted twice, with a store: neither mount sees the locks of the other."""
    with tmpfs_volume() as base:
        (backing := base / "backing").mkdir()
        with sshfs_of(backing, base / "a", UNCACHED) as a, sshfs_of(backing, base / "b", UNCACHED) as b:
            init(a.path)
            init(b.path, is_made_by_root=True)  # that filesystem keeps no attribute by which root knows its own
            yield Machines(a.path, b.path)


def boot_of(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, name))


@contextlib.contextmanager
def node(base: Path, name: str, volume: Path, config: str = POLLED) -> Iterator[ServiceNode]:
    """The service of a machine of that name, ready; stopped at the end, unless it was killed. base: of `places`"""
    own = base / name
    (own / "run").mkdir(parents=True, exist_ok=True)
    (own / "machine-id").write_text(uuid.uuid5(uuid.NAMESPACE_URL, name).hex + "\n")
    (own / "boot_id").write_text(boot_of(name) + "\n")
    files = {_MACHINE_ID: own / "machine-id", _BOOT_ID: own / "boot_id"}
    with service(own, volume, config=config, runtime=own / "run", prepare=partial(be_machine, name, files)) as running:
        yield ServiceNode(name, own, volume, running)


pytestmark = pytest.mark.needs("root", "fuse", "sshfs")
SLOWLY = POLLED + 'max_rate = "100/s"\n'


@pytest.fixture
def machines(base: Path) -> Iterator[Machines]:
    """They share the directory of the configuration alone, which is made before."""
    assert base.is_dir()
    with machines_at_one_volume() as both:
        yield both


@contextmanager
def two_nodes(base: Path, machines: Machines, config: str = POLLED) -> Iterator[tuple[ServiceNode, ServiceNode]]:
    with node(base, "alpha", machines.a, config) as alpha, node(base, "beta", machines.b, config) as beta:
        yield alpha, beta


def others(of: ServiceNode) -> list[SeenNode]:
    return [one for one in of.running.volume(of.volume).nodes if not one.is_here]


def sees_one_alive(of: ServiceNode) -> bool:
    return [one.is_alive for one in others(of)] == [True]


def until_seen(alpha: ServiceNode, beta: ServiceNode) -> None:
    for one in (alpha, beta):
        one.running.until(partial(sees_one_alive, one))


def reaped(*nodes: ServiceNode) -> Counter[str]:
    events = [event for one in nodes if (one.base / "audit").exists() for event in audited(one.base)]
    return Counter(event["id"] for event in events if event["event"] == "reaped" and not event["detail"])


def test_each_orphan_is_reaped_by_one_of_them(base: Path, machines: Machines) -> None:
    with two_nodes(base, machines) as (alpha, beta):
        made = {orphan_in(machines[n % 2], f"job{n}", EXPIRED).id for n in range(30)}
        alpha.running.until(lambda: not ids(machines.a))
        alpha.running.until(lambda: reaped(alpha, beta).keys() == made)
    assert set(reaped(alpha, beta).values()) == {1}
    assert_silent(machines.a)


def test_an_orphan_swapped_on_one_is_found_by_the_service_of_the_other(base: Path, machines: Machines) -> None:
    with node(base, "beta", machines.b) as beta:
        beta.running.until(lambda: beta.running.volume(machines.b).phase.value == "idle")
        kept = orphan_in(machines.a, "kept").id
        beta.running.until(lambda: beta.running.volume(machines.b).n_orphans == 1)
        due = orphan_in(machines.a, "due", EXPIRED).id
        beta.running.until(lambda: ids(machines.a) == {kept})
    assert due in reaped(beta)


def test_without_a_poll_of_the_configuration_it_is_found_within_seconds(base: Path, machines: Machines) -> None:
    with node(base, "beta", machines.b, QUICK) as beta:
        beta.running.until(lambda: beta.running.volume(machines.b).phase.value == "idle")
        orphan_in(machines.a, "due", EXPIRED)
        beta.running.until(lambda: not ids(machines.b))


def test_what_is_dropped_on_one_is_taken_in_by_the_service_of_the_other(base: Path, machines: Machines) -> None:
    with node(base, "beta", machines.b) as beta:
        beta.running.until(lambda: beta.running.volume(machines.b).phase.value == "idle")
        (machines.a / "drop").mkdir()
        drop = machines.a / ".trashd/u/0/drop/dropped"
        (machines.a / "drop").rename(drop)
        beta.running.until(lambda: beta.running.volume(machines.b).n_orphans == 1)


def test_what_was_restored_on_one_is_no_orphan_for_the_service_of_the_other(base: Path, machines: Machines) -> None:
    kept = orphan_in(machines.a, "kept").id
    with node(base, "beta", machines.b) as beta:
        beta.running.until(lambda: beta.running.volume(machines.b).n_orphans == 1)
        restore(machines.a, kept)
        beta.running.until(lambda: beta.running.volume(machines.b).n_orphans == 0)


def test_what_a_dead_node_left_is_taken_over_after_the_silence_that_the_configuration_states(
    base: Path, machines: Machines
) -> None:
    make_tree(machines.a / "job", {"file": "content"})
    assert in_child(partial(swap, machines.a / "job", Kernel(ActingBefore("rmdir", die)))) == DyingAt.EXIT_CODE
    (left,) = machines.a.glob(".trashd/u/0/stage/*/record.json")
    forge(left, boot=str(uuid.UUID(int=1)))
    with node(base, "beta", machines.b, POLLED + "takeover_s = 2\n") as beta:
        beta.running.until(lambda: beta.running.volume(machines.b).n_orphans == 1)


def test_each_lists_both(base: Path, machines: Machines) -> None:
    with two_nodes(base, machines) as (alpha, beta):
        until_seen(alpha, beta)
        for here, there in ((alpha, beta), (beta, alpha)):
            (service,) = here.status("--json").objects()
            (volume,) = service["volumes"]
            seen = {one["host"]: (one["boot_id"], one["is_here"], one["is_alive"]) for one in volume["nodes"]}
            assert seen == {
                here.name: (boot_of(here.name), True, True),
                there.name: (boot_of(there.name), False, True),
            }
            assert service["host"] == here.name
            assert f"{there.name} (" in here.status().out


def test_both_go_on_when_one_is_killed(base: Path, machines: Machines) -> None:
    with two_nodes(base, machines) as (alpha, beta):
        until_seen(alpha, beta)
        alpha.running.kill()
        orphan_in(machines.a, "after", EXPIRED)
        beta.running.until(lambda: not ids(machines.b))
        with node(base, "alpha", machines.a) as again:
            orphan_in(machines.b, "later", EXPIRED)
            again.running.until(lambda: not ids(machines.a))


def test_one_goes_on_while_the_other_is_frozen_and_both_when_it_wakes(base: Path, machines: Machines) -> None:
    with two_nodes(base, machines) as (alpha, beta):
        until_seen(alpha, beta)
        with alpha.running.held():
            orphan_in(machines.a, "meanwhile", EXPIRED)
            beta.running.until(lambda: not ids(machines.b))
        made = {orphan_in(machines.a, f"job{n}", EXPIRED).id for n in range(5)}
        alpha.running.until(lambda: reaped(alpha, beta).keys() >= made)
    assert set(reaped(alpha, beta).values()) == {1}
    assert_silent(machines.b)


def test_a_node_that_ends_well_takes_its_beat_away(base: Path, machines: Machines) -> None:
    with two_nodes(base, machines) as (alpha, beta):
        until_seen(alpha, beta)
        beta.running.stop()
        alpha.running.until(lambda: not others(alpha))
    assert not list((machines.a / ".trashd/nodes").iterdir())


def test_a_dead_nodes_beat_is_no_problem_of_the_store(base: Path, machines: Machines) -> None:
    with node(base, "alpha", machines.a) as alpha:
        alpha.running.until(lambda: alpha.running.volume(machines.a).nodes)
        alpha.running.kill()
    assert list((machines.a / ".trashd/nodes").iterdir())
    init(machines.a)
    assert_silent(machines.a)
    assert list((machines.a / ".trashd/nodes").iterdir())


def test_a_local_volume_has_no_nodes(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        orphan_in(volume, options=EXPIRED)
        running.until(lambda: not ids(volume))
        assert running.volume(volume).nodes == ()
    assert (volume / ".trashd/reaper.lock").exists()
    assert not (volume / ".trashd/nodes").exists()


def test_a_second_service_of_the_same_machine_leaves_alone_what_the_first_reaps(base: Path, machines: Machines) -> None:
    with node(base, "alpha", machines.a, POLLED + 'max_rate = "10/s"\n') as first:
        begin_large(first.running, machines.a, 1000)
        with node(base / "more", "alpha", machines.a) as second:
            second.running.until(lambda: second.running.volume(machines.a).phase.value == "elsewhere")


def test_a_beat_that_is_a_link_is_not_believed(base: Path, machines: Machines) -> None:
    with node(base, "alpha", machines.a) as alpha:
        alpha.running.until(lambda: alpha.running.volume(machines.a).nodes)
        nodes = machines.a / ".trashd/nodes"
        (own,) = nodes.iterdir()
        (nodes / f"mallory.{boot_of('mallory')}").symlink_to(own)
        alpha.running.until(lambda: [one.host for one in others(alpha)] == ["mallory"])
        (told,) = others(alpha)
        assert (told.version, told.is_alive) == ("", None)


@pytest.mark.parametrize("n_nodes", [1, 4])
def test_a_rate_is_divided_by_the_number_of_nodes(base: Path, machines: Machines, n_nodes: int) -> None:
    with node(base, "alpha", machines.a, SLOWLY + f"nodes = {n_nodes}\n") as alpha:
        begin_large(alpha.running, machines.a, 1000)
        # Now and then it rests, and may nothing: not each look shows it.
        alpha.running.until(lambda: alpha.running.volume(machines.a).tempo_entries_per_s == 100 // n_nodes)
