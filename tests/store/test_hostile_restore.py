"""`restore --to` by root: what gets the name is the record's tree, or nothing, whichever process is faster."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import Refused, TrashdError
from fusefs.linux.kernel import Kernel
from tests.support.make_trees import make_tree, remove_tree_hard, snapshot
from tests.support.other_users import as_user
from tests.support.store_verbs import assert_silent, entries, folder_of, place, remove, restore, swap
from tests.support.two_users_store import BOB, orphan_of, shared_store

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's, Bob's home, a canary, and a directory of root's to restore to."""
    with shared_store({"secret": "root's"}, bob=BOB) as path:
        make_tree(path / "srv", {})
        yield path


SUBSTITUTES: dict[str, Callable[[Path], object]] = {
    "another directory": lambda tree: make_tree(tree, {"another": "one"}),
    "a link": lambda tree: tree.symlink_to("/etc"),
    "a file": lambda tree: tree.write_text("a file"),
    "a FIFO": os.mkfifo,
}


def substitute(container: Path, planted: Callable[[Path], object]) -> None:
    """Put something else where a container's tree is, as its owner."""
    (container / "tree").rename(container / "aside")
    planted(container / "tree")


@pytest.mark.parametrize("what", SUBSTITUTES)
def test_what_is_not_the_records_tree_is_refused_and_stays_where_it_was(volume: Path, what: str) -> None:
    identifier = orphan_of(volume, BOB)
    container = place(volume, identifier)
    as_user(BOB, lambda: substitute(container, SUBSTITUTES[what]))
    before = snapshot(container)
    with pytest.raises(Refused, match="it is ") as caught:
        restore(volume, identifier, to=volume / "srv/data")
    assert caught.value.exit_code == 3
    assert os.listdir(volume / "srv") == []
    assert container.parent.name == State.ORPHANS.value
    assert snapshot(container) == before


def test_a_link_that_was_removed_is_its_owners_to_restore(volume: Path) -> None:
    def act() -> str:
        (volume / "bob/link").symlink_to("/etc")
        return str(remove(volume / "bob/link").id)

    identifier = as_user(BOB, act)
    with pytest.raises(Refused, match="a symbolic link, not a directory or a file"):
        restore(volume, identifier, to=volume / "srv/data")
    assert os.listdir(volume / "srv") == []
    as_user(BOB, lambda: restore(volume, identifier, to=volume / "bob/again"))
    assert (volume / "bob/again").is_symlink()
    assert_silent(volume)


@pytest.mark.parametrize("is_file", [False, True])
def test_what_the_record_tells_of_is_restored(volume: Path, is_file: bool) -> None:
    def act() -> str:
        if is_file:
            (volume / "bob/file").write_text("his own")
            return str(remove(volume / "bob/file").id)
        make_tree(volume / "bob/job", {"results": "his own"})
        return str(swap(volume / "bob/job").id)

    restore(volume, as_user(BOB, act), to=volume / "srv/data")
    assert stat.S_ISREG((volume / "srv/data").stat().st_mode) is is_file
    assert entries(volume) == []
    assert_silent(volume)


class AtRootsRename:
    """A hook that lets a user act before root's n-th rename onto a free name."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self.acts = list(acts)

    def __call__(self, call: str) -> None:
        if call == "renameat2" and os.geteuid() == 0 and self.acts:
            as_user(BOB, self.acts.pop(0))


def claimed(volume: Path, identifier: str) -> Path:
    return folder_of(volume, BOB) / State.RESTORING.value / identifier


@pytest.mark.parametrize("what", SUBSTITUTES)
def test_who_is_faster_than_roots_look_gets_back_what_he_put_there(volume: Path, what: str) -> None:
    identifier = orphan_of(volume, BOB)
    container = claimed(volume, identifier)
    hook = AtRootsRename(lambda: substitute(container, SUBSTITUTES[what]))
    with pytest.raises(Refused, match="moved back"):
        restore(volume, identifier, Kernel(hook), to=volume / "srv/data")
    assert hook.acts == []
    assert os.listdir(volume / "srv") == []
    assert sorted(os.listdir(container)) == ["aside", "record.json", "tree"]
    assert (container / "aside/results").read_text() == "his own"


def test_who_is_faster_twice_leaves_nothing_at_roots_name(volume: Path) -> None:
    identifier = orphan_of(volume, BOB)
    container = claimed(volume, identifier)
    hook = AtRootsRename(
        lambda: substitute(container, SUBSTITUTES["a link"]), lambda: make_tree(container / "tree", {})
    )
    with pytest.raises(Refused, match="moved back"):
        restore(volume, identifier, Kernel(hook), to=volume / "srv/data")
    assert hook.acts == []
    assert os.listdir(volume / "srv") == []
    assert [name for name in os.listdir(container) if name.startswith("refused.")] != []


def test_who_removes_the_container_meanwhile_leaves_nothing_at_roots_name(volume: Path) -> None:
    identifier = orphan_of(volume, BOB)
    container = claimed(volume, identifier)

    def take_apart() -> None:
        (container / "aside").rename(volume / "bob/aside")
        remove_tree_hard(container)

    hook = AtRootsRename(lambda: substitute(container, SUBSTITUTES["a link"]), take_apart)
    with pytest.raises(TrashdError):
        restore(volume, identifier, Kernel(hook), to=volume / "srv/data")
    assert hook.acts == []
    assert os.listdir(volume / "srv") == []
    assert (volume / "bob/aside/results").read_text() == "his own"


def test_in_a_copied_store_root_refuses_and_its_owner_restores(volume: Path) -> None:
    identifier = orphan_of(volume, BOB)
    tree = place(volume, identifier) / "tree"

    def copy() -> None:
        make_tree(tree.parent / "copy", {"results": "his own"})
        remove_tree_hard(tree)
        (tree.parent / "copy").rename(tree)

    as_user(BOB, copy)
    with pytest.raises(Refused, match="inode"):
        restore(volume, identifier, to=volume / "srv/data")
    as_user(BOB, lambda: restore(volume, identifier, to=volume / "bob/back"))
    assert (volume / "bob/back/results").read_text() == "his own"
    assert_silent(volume)
