"""Users who move things under a command: mounts, links and renames at any of its calls, and signals to its child."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import AuthorityLost, TrashdError
from fusefs.linux.children import ChildLost, call_in_child_as
from fusefs.linux.kernel import Kernel
from fusefs.store.orphans import ListedContainer, list_all_containers
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Dir, make_tree, remove_tree_hard
from tests.support.nested_stores import point_to, without_upper_store
from tests.support.other_users import as_user
from tests.support.outside_tree import unmount_below
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.store_verbs import (
    ActingAtName,
    FailingAt,
    assert_silent,
    entries,
    folder_of,
    init,
    place,
    problems,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.two_users_store import (
    ALICE,
    BOB,
    CANARY,
    NOGROUP,
    attempt,
    canary_of,
    dooms,
    job_of,
    orphan_of,
    shared_store,
)

pytestmark = pytest.mark.needs("root")

VOLUME = partial(shared_store, CANARY, alice=ALICE, bob=BOB)


# Mounts


@pytest.mark.parametrize(
    "over", ["", "orphans", "stage", "drop", "orphans/ID", "orphans/ID/tree", "orphans/ID/tree/sub"]
)
def test_root_enters_no_mount_in_a_users_folder_and_serves_the_others(volume: Path, over: str) -> None:
    mine, other = orphan_of(volume, ALICE), orphan_of(volume, BOB)
    before = canary_of(volume)
    with bind_mount(volume / "canary", folder_of(volume, ALICE) / over.replace("ID", mine)):
        assert other in [entry.id for entry in entries_of_others(volume)]
        attempt(lambda: recover_all(volume))
        attempt(lambda: problems(volume))
        attempt(lambda: restore(volume, mine))
        attempt(lambda: reap_now(volume, mine))
        assert reap_now(volume, other).report.n_failed == 0
        unmount_below(volume / ".trashd")
    assert canary_of(volume) == before
    recover_all(volume)
    assert_silent(volume)


def test_a_mount_over_the_store_is_refused_as_untrusted(volume: Path) -> None:
    make_tree(volume / "job", {"a": "b"})
    with bind_mount(volume / "canary", volume / ".trashd"), pytest.raises(TrashdError):
        swap(volume / "job")
    assert (volume / "job" / "a").read_text() == "b"
    assert_silent(volume)


# Links and renames at every call


def links_at_every_call(act: Callable[[Kernel], object], path: Path, target: Path) -> Iterator[int]:
    """Do `act` with the directory at `path` replaced by a link to `target` before its n-th call, for n from 1."""
    aside = path.with_name(path.name + ".aside")

    def replace() -> None:
        if not path.is_symlink():
            path.rename(aside)
            path.symlink_to(target)

    n = 1
    while True:
        hook = ActingAtName(n, replace)
        attempt(lambda hook=hook: act(Kernel(hook)))  # type: ignore[misc]
        if path.is_symlink():
            path.unlink()
            aside.rename(path)
        yield n
        if hook.left >= 0:
            return
        n += 1


def test_a_link_that_replaces_a_parent_at_any_call_leads_root_nowhere(volume: Path) -> None:
    job = job_of(volume, ALICE)
    as_user(ALICE, lambda: make_tree(job, {"results": "his own"}))
    before = canary_of(volume)
    steps = links_at_every_call(lambda kernel: swap(job, kernel), job.parent, volume / "canary")
    for n in steps:
        assert canary_of(volume) == before, f"call {n}"
        if not job.exists():
            as_user(ALICE, job.mkdir)
    assert n > 30
    recover_all(volume)
    assert_silent(volume)


def test_a_link_that_replaces_the_origins_parent_at_any_call_leads_a_restore_nowhere(volume: Path) -> None:
    orphan_of(volume, ALICE)
    before = canary_of(volume)
    job = job_of(volume, ALICE)

    def restore_it(kernel: Kernel) -> None:
        restore(volume, entries(volume)[0].id, kernel)

    n = 0
    for n in links_at_every_call(restore_it, job.parent, volume / "canary"):
        assert canary_of(volume) == before, f"call {n}"
        if (job / "results").exists():
            as_user(ALICE, lambda: swap(job))
    assert n > 30
    assert_silent(volume)


def test_a_link_inside_the_tree_at_any_call_leads_the_reaper_nowhere(volume: Path) -> None:
    before = canary_of(volume)
    n, hook = 0, ActingAtName(0, bool)
    while hook.left < 0 or n == 0:
        identifier = orphan_of(volume, ALICE)
        sub = place(volume, identifier) / "tree" / "sub"

        def replace(sub: Path = sub) -> None:
            if sub.is_dir() and not sub.is_symlink():
                sub.rename(sub.with_name("aside"))
                sub.symlink_to(volume / "canary")

        hook = ActingAtName(n, replace)
        reap_now(volume, identifier, Kernel(hook))
        assert canary_of(volume) == before, f"call {n}"
        as_user(ALICE, job_of(volume, ALICE).rmdir)
        n += 1
    assert n > 30
    assert_silent(volume)


@pytest.mark.parametrize("verb", [restore, reap_now])
def test_a_container_renamed_at_any_call_leads_root_nowhere(
    volume: Path, verb: Callable[[Path, str, Kernel], object]
) -> None:
    before = canary_of(volume)
    n, hook = 0, ActingAtName(0, bool)
    while hook.left < 0 or n == 0:
        remove_tree_hard(job_of(volume, ALICE))
        identifier = orphan_of(volume, ALICE)
        users = folder_of(volume, ALICE)
        hidden = volume / "alice" / "hidden"

        def hide(identifier: str = identifier, users: Path = users, hidden: Path = hidden) -> None:
            for state in ("orphans", "restoring", "reaping"):
                container = users / state / identifier
                if container.exists() and not hidden.exists():
                    container.rename(hidden)
                    container.symlink_to(volume / "canary")

        hook = ActingAtName(n, hide)
        attempt(lambda hook=hook, identifier=identifier: verb(volume, identifier, Kernel(hook)))  # type: ignore[misc]
        assert canary_of(volume) == before, f"call {n}"
        for state in ("orphans", "restoring", "reaping"):
            if (users / state / identifier).is_symlink():
                (users / state / identifier).unlink()
        remove_tree_hard(hidden)
        n += 1
    assert n > 30
    recover_all(volume)
    assert_silent(volume)


# Signals to the child


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_its_user_stops_or_kills_is_lost_and_hangs_nobody(volume: Path, number: int) -> None:
    identifier = orphan_of(volume, ALICE)
    with pytest.raises(AuthorityLost):
        restore_as_found(volume, identifier, Kernel(dooms(number)))
    assert (place(volume, identifier) / "tree" / "results").exists()
    assert_silent(volume)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_child_hides_no_other_users_orphans(volume: Path, number: int) -> None:
    orphan_of(volume, ALICE)
    other = orphan_of(volume, BOB)
    lost: list[TrashdError] = []
    assert [entry.id for entry in list_all_containers(Kernel(dooms(number)), [raw(volume)], lost)] == [other]
    assert [type(error) for error in lost] == [AuthorityLost]
    assert_silent(volume)


def test_a_lost_child_keeps_root_from_no_other_users_folder_in_a_lower_store(volume: Path) -> None:
    lower = make_tree(volume / "lower", {"alice": Dir(owner=(ALICE, ALICE)), "bob": Dir(owner=(BOB, BOB))})
    init(lower)
    for uid in (ALICE, BOB):
        with without_upper_store(volume):
            orphan_of(lower, uid)
        as_user(uid, lambda: point_to(volume, lower))
    recover_all(volume, Kernel(dooms(signal.SIGKILL)))
    assert (lower / f".trashd/u/{BOB}").is_dir()


def test_a_disk_that_fails_hides_the_orphans_of_no_other_volume(volume: Path) -> None:
    with tmpfs_volume() as other:
        init(other)
        make_tree(other / "alice", Dir(owner=(ALICE, ALICE)))
        expected = {orphan_of(volume, ALICE), orphan_of(other, ALICE)}
        us = os.getpid()
        for n in range(400):
            hook, lost = FailingAt(n, errno.EIO), list[TrashdError]()
            ours = Kernel(lambda call, hook=hook: hook(call) if os.getpid() == us else None)  # type: ignore[misc]
            found = {entry.id for entry in list_all_containers(ours, [raw(volume), raw(other)], lost)}
            assert found & expected, f"{hook.failed} failed, call {n}"
            if hook.left >= 0:
                return
        pytest.fail("it never came to its end")


def test_a_child_stopped_in_the_middle_of_a_message_hangs_nobody() -> None:
    def body(_ask: object) -> bytes:
        for fd in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, b"r")
                break
        os.kill(os.getpid(), signal.SIGSTOP)
        return b""

    with pytest.raises(ChildLost):
        call_in_child_as(ALICE, body, lambda question: question)


def test_the_child_has_no_capability_and_can_not_be_traced() -> None:
    def body(_ask: object) -> bytes:
        with open("/proc/self/status", "rb") as status:
            return status.read() + b"Fd-owner: %d\n" % os.stat("/proc/self/fd").st_uid

    told = dict(line.split(b":", 1) for line in call_in_child_as(ALICE, body, lambda q: q).splitlines())
    assert told[b"Uid"].split() == [b"1001"] * 4
    for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb"):
        assert int(told[name], 16) == 0
    assert told[b"NoNewPrivs"].strip() == b"1"
    assert told[b"Fd-owner"].strip() == b"0"


# What a user puts in the place of their folder's parts


@pytest.mark.parametrize("part", ["orphans", "stage", "restoring", "drop", "pointers", "quarantine"])
@pytest.mark.parametrize("kind", ["file", "link", "fifo", "closed"])
def test_a_broken_folder_hides_no_other_users_orphans(volume: Path, part: str, kind: str) -> None:
    orphan_of(volume, ALICE)
    other = orphan_of(volume, BOB)
    path = folder_of(volume, ALICE) / part
    remove_tree_hard(path)
    match kind:
        case "file":
            path.write_text("mine")
        case "link":
            path.symlink_to(volume / "canary")
        case "fifo":
            os.mkfifo(path)
        case _:
            make_tree(path, Dir(mode=0))
    before = canary_of(volume)
    lost: list[TrashdError] = []
    found: list[ListedContainer] = list_all_containers(Kernel(), [raw(volume)], lost)
    assert other in [entry.id for entry in found]
    recovered = recover_all(volume)
    assert problems(volume) != [] or kind == "closed"
    assert recovered is not None
    reap_now(volume, other)
    assert canary_of(volume) == before


def entries_of_others(volume: Path) -> list[ListedContainer]:
    """The list, whatever one user's folder is like."""
    return list_all_containers(Kernel(), [raw(volume)], [])


def restore_as_found(volume: Path, identifier: str, kernel: Kernel) -> object:
    """Restore what an undisturbed list told of, so that the first child that is disturbed is the restore's."""
    from fusefs.store.orphans import find_container
    from fusefs.store.restore import restore_by_id

    entry = find_container(Kernel(), [raw(volume)], identifier)
    return restore_by_id(kernel, [raw(volume)], entry, None, None)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("over", ["", "orphans", "pointers", "reserve/ready", "orphans/ID", "orphans/ID/tree/sub"])
def test_a_users_mount_that_never_answers_holds_nobody(volume: Path, over: str) -> None:
    mine, other = orphan_of(volume, ALICE), orphan_of(volume, BOB)
    with silent_fuse(folder_of(volume, ALICE) / over.replace("ID", mine), ALICE, NOGROUP):
        assert other in [entry.id for entry in entries_of_others(volume)]
        for act in (recover_all, problems, init):
            attempt(lambda act=act: act(volume))  # type: ignore[misc]
        for verb in (restore, reap_now):
            attempt(lambda verb=verb: verb(volume, mine))  # type: ignore[misc]
        assert reap_now(volume, other).report.n_failed == 0
    recover_all(volume)
    assert_silent(volume)


@pytest.mark.needs("fuse")
def test_a_mount_that_never_answers_in_a_tree_stops_the_reaper_there_only(volume: Path) -> None:
    mine = orphan_of(volume, ALICE)
    with silent_fuse(place(volume, mine) / "tree" / "sub", ALICE, NOGROUP):
        reaped = reap_now(volume, mine)
        assert {failure.errno for failure in reaped.report.failures} == {errno.EXDEV}
    assert_silent(volume)
