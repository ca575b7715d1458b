"""`swap --for-owner`: nothing that the owner could choose has root's name, ever; the owner gets the old tree."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.record import NewOwner
from fusefs.core.record_decoding import decode_record
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import make_folder_for, swap_for_owner
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from tests.support.covering_sets import share_of
from tests.support.crash_scenarios import LOOKING, DyingAfter, end_of, forbid_exchange
from tests.support.make_trees import Dir, make_tree, remove_tree_hard, snapshot
from tests.support.other_users import as_user
from tests.support.store_verbs import (
    ActingAt,
    ActingAtName,
    assert_silent,
    entries,
    folder_of,
    opened,
    place,
    raw,
    reap_now,
    record_of,
    recover_all,
    restore,
)
from tests.support.two_users_store import ALICE, NOGROUP, dooms, shared_store

pytestmark = pytest.mark.needs("root")

DAY_S = 86400
N_CALLS = 10_000
"""More than a swap makes."""


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's, in which Alice has a folder; her directory in root's; and the canary, which is root's."""
    with shared_store({"secret": "root's"}) as path:
        with opened(path) as store:
            make_folder_for(store, ALICE).fd.close()
        make_home(path)
        yield path


def make_home(volume: Path) -> None:
    remove_tree_hard(volume / "home")
    make_tree(volume / "home", Dir({"results": "hers"}, owner=(ALICE, NOGROUP)))


def swap_it(
    volume: Path, hook: Callable[[str], None] = lambda _call: None, options: SwapOptions | None = None
) -> Swapped:
    return swap_for_owner(Kernel(hook), raw(volume / "home"), options or SwapOptions(retention_s=DAY_S))


def staged(volume: Path) -> list[Path]:
    return list((folder_of(volume, ALICE) / "stage").iterdir())


def plant_links(volume: Path) -> None:
    """Put a link in the place of whatever lies in a container that Alice stages, as she."""
    for container in staged(volume):
        for name in ("tree", "fresh"):
            if os.path.lexists(container / name) and not (container / name).is_symlink():
                (container / name).rename(container / f"aside-{name}")
            if not os.path.lexists(container / name):
                (container / name).symlink_to(volume / "canary")


def plant_directories(volume: Path) -> None:
    """Put a directory with something in it there."""
    for container in staged(volume):
        if not (container / "tree").exists():
            make_tree(container / "tree", {"planted": "by her"})


def hide_containers(volume: Path) -> None:
    for container in staged(volume):
        container.rename(folder_of(volume, ALICE) / "drop" / container.name)


def open_containers(volume: Path) -> None:
    for container in staged(volume):
        container.chmod(0o777)


def remove_containers(volume: Path) -> None:
    for container in staged(volume):
        remove_tree_hard(container)


ACTS = {act.__name__: act for act in (plant_links, plant_directories, hide_containers, open_containers)}


class Watching:
    """A hook that looks at root's name before each call and after what another one does then."""

    def __init__(self, volume: Path, acting: ActingAt) -> None:
        self.acting = acting
        self.name = volume / "home"

    def __call__(self, call: str) -> None:
        assert_rootly(self.name)
        self.acting(call)
        assert_rootly(self.name)


def _as_alice(act: Callable[[], None]) -> None:
    if os.geteuid() == ALICE:
        act()
    else:
        as_user(ALICE, act)


def assert_rootly(name: Path) -> None:
    """The name has her old directory or the fresh one, never anything that she put there."""
    st = os.lstat(name)
    assert stat.S_ISDIR(st.st_mode)
    if os.geteuid() == 0:
        assert (st.st_uid, os.listdir(name)) in [(ALICE, ["results"]), (ALICE, [])]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("exchange", [True, False])
def test_whatever_she_puts_into_her_stage_at_any_call_never_has_roots_name(
    volume: Path, act: str, exchange: bool
) -> None:
    if not exchange:
        forbid_exchange(volume)
    canary = snapshot(volume / "canary", with_times=True)
    for n in share_of(range(N_CALLS), [*ACTS].index(act) + exchange, len(ACTS)):
        acting = ActingAtName(n, partial(_as_alice, partial(ACTS[act], volume)))
        swapped = swap_it(volume, Watching(volume, acting) if exchange else acting)
        assert os.listdir(volume / "home") == []
        assert_rootly(volume / "home")
        assert snapshot(volume / "canary", with_times=True) == canary
        found = [path for path in (volume / ".trashd").rglob("results") if path.read_text() == "hers"]
        assert len(found) == 1, f"call {n}: {swapped}"
        remove_containers(volume)
        (volume / "home").rmdir()
        for folder in (folder_of(volume, 0), folder_of(volume, ALICE)):
            for path in [*(folder / "orphans").iterdir(), *(folder / "drop").iterdir(), *(folder / "stage").iterdir()]:
                remove_tree_hard(path)
        make_home(volume)
        if acting.left >= 0:
            return
    raise AssertionError(f"it makes more than {N_CALLS} calls")


def test_she_gets_it_with_the_retention_that_was_asked_for(volume: Path) -> None:
    swapped = swap_it(volume)
    record = record_of(swapped)
    assert (record.heir, record.retention_s, record.lent_mode) == (None, DAY_S, None)
    [entry] = as_user(ALICE, lambda: entries(volume))
    assert (entry.id, entry.state) == (swapped.id, State.ORPHANS)
    assert swapped.warnings == ()
    assert_silent(volume)


def test_what_she_does_not_take_stays_roots_and_is_kept_until_root_asks(volume: Path) -> None:
    swapped = swap_it(volume, dooms(signal.SIGKILL, "tmpfile", "create"))
    [warning] = swapped.warnings
    assert "trashd restore" in warning
    [entry] = entries(volume)
    assert (entry.id, entry.uid, entry.state, entry.expires_ns) == (swapped.id, 0, State.ORPHANS, None)
    assert record_of(swapped).heir == NewOwner(ALICE, DAY_S)
    assert os.listdir(volume / "home") == []
    restore(volume, swapped.id, to=volume / "again")
    assert (volume / "again/results").read_text() == "hers"
    recover_all(volume)
    assert_silent(volume)


def test_root_reaps_what_was_not_taken_by_its_id(volume: Path) -> None:
    swapped = swap_it(volume, dooms(signal.SIGSTOP, "tmpfile", "create"))
    assert reap_now(volume, swapped.id).report.n_failed == 0
    recover_all(volume)
    assert_silent(volume)


@pytest.mark.parametrize("call", [("exchange", 1), ("renameat2", 1)])
def test_what_a_killed_root_left_is_handed_over_by_his_next_command(volume: Path, call: tuple[str, int]) -> None:
    end_of(lambda: swap_it(volume, DyingAfter(*call)))
    assert os.listdir(volume / "home") == []
    assert recover_all(volume) == []
    [entry] = entries(volume)
    assert (entry.uid, entry.state) == (ALICE, State.ORPHANS)
    assert entry.expires_ns == entry.created_ns + DAY_S * 1_000_000_000
    assert (place(volume, entry.id) / "tree/results").read_text() == "hers"
    assert_silent(volume)


def test_what_came_in_before_it_was_handed_over_is_told_from_what_was_there(volume: Path) -> None:
    end_of(lambda: swap_it(volume, DyingAfter("exchange")))
    [left] = (folder_of(volume, 0) / "stage").iterdir()
    before = decode_record((left / "record.json").read_bytes())
    assert recover_all(volume) == []
    [entry] = entries(volume)
    after = decode_record((place(volume, entry.id) / "record.json").read_bytes())
    assert before.moved_ns is not None
    assert before.boot_ns is not None
    for key in ("moved_ns", "boot_ns", "boot", "created_ns", "victim", "fresh", "parent", "origin", "method"):
        assert getattr(after, key) == getattr(before, key), key


def test_a_user_who_killed_her_child_after_root_gave_has_it_by_her_next_command(volume: Path) -> None:
    def hook(call: str) -> None:
        if os.geteuid() == ALICE and call == "rename" and any((one / "tree").exists() for one in staged(volume)):
            os.kill(os.getpid(), signal.SIGKILL)

    swapped = swap_it(volume, hook)
    assert swapped.warnings == ()
    as_user(ALICE, lambda: recover_all(volume))
    [entry] = as_user(ALICE, lambda: entries(volume))
    assert (entry.id, entry.state) == (swapped.id, State.ORPHANS)
    assert_silent(volume)


@pytest.mark.parametrize("uid", [0, ALICE])
def test_a_command_of_roots_or_hers_at_any_moment_leaves_it_to_who_does_it(volume: Path, uid: int) -> None:
    n = 0
    while True:
        acting = ActingAtChange(n, partial(_recover_as, volume, uid))
        swapped = swap_it(volume, acting)
        assert swapped.warnings == (), f"call {n}"
        [entry] = as_user(ALICE, lambda: entries(volume))
        assert (entry.id, entry.state) == (swapped.id, State.ORPHANS), f"call {n}"
        assert entries(volume) == [entry]
        as_user(ALICE, partial(reap_now, volume, swapped.id))
        (volume / "home").rmdir()
        make_home(volume)
        if acting.left >= 0:
            break
        n += 1
    recover_all(volume)
    assert_silent(volume)


class ActingAtChange(ActingAt):
    """Acts before the n-th call that changes anything, or locks it: between two of them it makes no difference."""

    def __call__(self, call: str) -> None:
        if call not in LOOKING or call == "flock":
            super().__call__(call)


def _recover_as(volume: Path, uid: int) -> None:
    if uid == os.geteuid():
        recover_all(volume)
    elif os.geteuid() == 0:
        as_user(uid, partial(recover_all, volume))


def test_a_directory_of_roots_own_is_swapped_plainly(volume: Path) -> None:
    make_tree(volume / "roots", {"a": "b"})
    swapped = swap_for_owner(Kernel(), raw(volume / "roots"), SwapOptions())
    assert record_of(swapped).heir is None
    assert_silent(volume)


@pytest.mark.parametrize("exchange", [True, False])
def test_she_restores_what_was_kept_in_view_too(volume: Path, exchange: bool) -> None:
    if not exchange:
        forbid_exchange(volume)
    os.chown(volume, ALICE, NOGROUP)
    make_tree(volume / "home/sub", Dir({"deep": "hers"}, owner=(ALICE, NOGROUP)))
    before = snapshot(volume / "home")
    swapped = swap_it(volume, options=SwapOptions(keep=("sub", "results")))
    assert sorted(os.listdir(volume / "home")) == ["results", "sub"]
    os.chown(volume, 0, 0)
    os.chmod(volume, 0o777)
    as_user(ALICE, lambda: restore(volume, swapped.id), gid=NOGROUP)
    assert snapshot(volume / "home") == before
    assert_silent(volume)
