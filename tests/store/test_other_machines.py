"""Two machines at one filesystem whose locks they don't see of each other: here two mounts, with one machine id."""

import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.cli.main import run
from fusefs.core.container_states import State
from fusefs.core.errors import Busy, NoLocks
from fusefs.core.record import encode_record
from fusefs.core.record_decoding import decode_record
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id, host_id
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.sshfs_volumes import sshfs_of
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    FailingAt,
    InTheGap,
    assert_silent,
    die,
    entries,
    forge,
    forked,
    in_child,
    init,
    reap_now,
    recover_all,
    restore,
    swap,
    tmpfs_store,
)
from tests.support.trashd_command import done_well, trashd

pytestmark = pytest.mark.needs("root", "fuse", "sshfs")

UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")
OTHER_BOOT = str(uuid.UUID(int=1))


class Machines(NamedTuple):
    """Two mounts of one directory, with a victim in it."""

    a: Path
    b: Path


@pytest.fixture
def machines() -> Iterator[Machines]:
    with tmpfs_volume() as base:
        (backing := base / "backing").mkdir()
        with sshfs_of(backing, base / "a", UNCACHED) as a, sshfs_of(backing, base / "b", UNCACHED) as b:
            init(a.path)
            init(
                b.path, is_made_by_root=True
            )  # that filesystem keeps no attribute by which this root knows of the other's
            make_tree(a.path / "job", {"file": "content"})
            yield Machines(a.path, b.path)


@contextmanager
def held_at(call: str | Path, act: Callable[[Kernel], object]) -> Iterator[None]:
    """A process that acts, and waits for as long as the block lasts; it has to end well then.

    call  before which it waits; a path: as soon as it is missing
    act   by that way to the kernel
    """
    (told, tells), (awaited, lets) = os.pipe(), os.pipe()

    def wait() -> None:
        os.write(tells, b".")
        os.read(awaited, 1)

    pid = forked(lambda: act(Kernel(ActingBefore(call, wait) if isinstance(call, str) else InTheGap(call, wait))))
    os.close(tells)
    try:
        assert os.read(told, 1) == b"."
        yield
    finally:
        os.write(lets, b".")
        _, status = os.waitpid(pid, 0)
        for fd in (told, awaited, lets):
            os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 0


def staged(volume: Path) -> Path:
    (path,) = volume.glob(".trashd/u/0/stage/*/record.json")
    return path


def kill_swap(volume: Path) -> None:
    assert in_child(partial(swap, volume / "job", Kernel(InTheGap(volume / "job", die)))) == DyingAt.EXIT_CODE


def let_restart(volume: Path) -> None:
    """Have the staged container be of another boot of this very machine."""
    forge(staged(volume), boot=OTHER_BOOT)


@pytest.mark.parametrize("verb", ["doctor", "list", "reap"])
def test_a_live_swap_of_another_machine_is_left_alone_though_both_have_one_machine_id(
    machines: Machines, verb: str
) -> None:
    words = {"doctor": ("doctor", "--repair", machines.b)}.get(verb, (verb, "--volume", machines.b))
    with held_at(machines.a / "job", partial(swap, machines.a / "job")):
        assert decode_record(staged(machines.b).read_bytes()).host == host_id()
        assert "may still be working on it" in trashd(*words).err
        assert not (machines.b / "job").exists()
    assert list((machines.b / "job").iterdir()) == []
    assert [entry.state for entry in entries(machines.b)] == [State.ORPHANS]
    assert_silent(machines.a)


def test_a_live_swap_is_left_alone_by_another_machines_swap(machines: Machines) -> None:
    make_tree(machines.b / "other", {"a": "1"})
    with held_at(machines.a / "job", partial(swap, machines.a / "job")):
        done_well("swap", machines.b / "other")
        assert not (machines.b / "job").exists()
    assert_silent(machines.a)


def test_a_live_restore_is_left_alone_by_the_machine_that_made_the_orphan(machines: Machines) -> None:
    swapped = swap(machines.a / "job")
    (machines.a / "job").rmdir()

    def restore_there(kernel: Kernel) -> None:
        restore(machines.b, swapped.id, kernel)

    with held_at("renameat2", restore_there):
        (told,) = recover_all(machines.a)
        assert "may still be working on it" in told
        assert [entry.state for entry in entries(machines.a)] == [State.RESTORING]
    assert (machines.a / "job/file").read_text() == "content"
    assert_silent(machines.b)


def test_the_same_mount_in_the_same_boot_recovers_what_was_killed(machines: Machines) -> None:
    kill_swap(machines.a)
    assert recover_all(machines.a) == []
    assert list((machines.a / "job").iterdir()) == []
    assert_silent(machines.a)


def test_a_machine_that_was_started_again_is_not_told_from_its_clone(machines: Machines) -> None:
    kill_swap(machines.a)
    let_restart(machines.a)
    (told,) = recover_all(machines.a)
    assert f"(boot {OTHER_BOOT}) may still be working on it" in told
    assert f"trashd doctor --repair --ended {OTHER_BOOT} {machines.a}" in told
    assert not (machines.a / "job").exists()


def test_what_a_record_of_before_does_not_tell_may_be_alive(machines: Machines) -> None:
    kill_swap(machines.a)
    path = staged(machines.a)
    assert b'"superblock"' in path.read_bytes()
    path.write_bytes(encode_record(decode_record(path.read_bytes())._replace(superblock="")))
    (told,) = recover_all(machines.a)
    assert f"--ended {boot_id()}" in told


def test_a_person_says_which_boot_is_over(machines: Machines) -> None:
    kill_swap(machines.a)
    let_restart(machines.a)
    done = trashd("doctor", "--repair", machines.b)
    command = done.err[done.err.index("trashd doctor --repair --ended") :].rstrip(")\n").split()[1:]
    trashd("doctor", "--repair", "--ended", boot_id(), machines.b)
    assert not (machines.b / "job").exists()
    done_well(*command)
    assert list((machines.b / "job").iterdir()) == []
    assert_silent(machines.b)


def test_a_boot_whose_id_is_none_is_no_part_of_a_command(machines: Machines) -> None:
    kill_swap(machines.a)
    forge(staged(machines.a), boot="x; rm -rf /")
    (told,) = recover_all(machines.a)
    assert "--ended" not in told


def test_ended_is_for_repairs_alone(machines: Machines) -> None:
    assert run(["doctor", "--ended", OTHER_BOOT, str(machines.a)]) == 2


def test_on_a_local_filesystem_nobody_needs_to_be_asked() -> None:
    with tmpfs_store() as volume:
        make_tree(volume / "job", {"file": "content"})
        in_child(partial(swap, volume / "job", Kernel(ActingBefore("exchange", die))))
        forge(staged(volume), boot=OTHER_BOOT, host="another", superblock="")
        assert recover_all(volume) == []
        assert (volume / "job/file").read_text() == "content"


def test_what_a_reaper_has_begun_is_not_given_back_and_nobody_says_that_it_is_not_there(machines: Machines) -> None:
    swapped = swap(machines.a / "job")
    in_child(lambda: reap_now(machines.a, swapped.id, Kernel(ActingBefore("unlink", die))))
    assert [entry.state for entry in entries(machines.b)] == [State.REAPING]
    for machine in machines:
        done = trashd("restore", "--volume", machine, swapped.id)
        assert done.code == Busy.exit_code
        assert f"{swapped.id} (a reaper has begun to delete it)" in done.err
        assert "on another host" in done.err
    done_well("reap", "--volume", machines.b)
    assert_silent(machines.a)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_filesystem_without_locks_is_told_in_a_sentence(number: int) -> None:
    with tmpfs_volume() as volume:
        job = make_tree(volume / "job", {})
        with pytest.raises(NoLocks, match=re.escape(str(job))) as caught:
            swap(job, kernel=Kernel(ActingBefore("flock", partial(refuse, number))))
    assert "has no file locks (flock)" in caught.value.message()
    assert "-o flock" in caught.value.hint


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_a_victim_that_another_machine_replaced_meanwhile_is_looked_up_anew() -> None:
    """The kernel says so (ESTALE) of what it had in its cache, and looks anew then."""
    with tmpfs_store() as volume:
        for n in range(20):
            hook = FailingAt(n, errno.ESTALE)
            (victim := volume / str(n)).mkdir()
            swap(victim, Kernel(hook))
            assert hook.failed is not None
