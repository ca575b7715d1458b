"""Where a swap must stop: mounts here and in other namespaces, roots, files, links, stores; immutable things."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.core.errors import (
    IsMountPoint,
    IsStore,
    MountInside,
    NotADirectory,
    NotPermitted,
    Refused,
)
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import swap_path
from tests.support.make_trees import APPEND_ONLY, IMMUTABLE, Dir, make_tree, remove_tree_hard, set_flags, snapshot
from tests.support.mount_namespaces import tmpfs_elsewhere
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    init,
    place,
    raw,
    recover_all,
    remove,
    restore,
    swap,
)

pytestmark = pytest.mark.needs("root")

ALICE = 1001


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume with a store, a victim, and a canary."""
    with tmpfs_volume() as path:
        init(path)
        make_tree(path / "job", {"results": "x", "sub": {"deeper": {}}})
        make_tree(path / "canary", {"secret": "s"})
        yield path


@pytest.fixture(scope="module")
def ext4() -> Iterator[Path]:
    """An ext4, which has inode flags."""
    with loop_volume("ext4", 64) as path:
        init(path)
        yield path


# Mounts


@pytest.mark.parametrize("where", ["sub", "sub/deeper"])
@pytest.mark.parametrize("verb", [swap, remove])
def test_a_mount_inside_is_refused_and_told(volume: Path, verb: Callable[[Path], object], where: str) -> None:
    with bind_mount(volume / "canary", volume / "job" / where):
        with pytest.raises(MountInside) as caught:
            verb(volume / "job")
        assert where in caught.value.message()
        assert (volume / "job" / where / "secret").exists()
    assert_silent(volume)


def test_a_file_mounted_inside_is_refused(volume: Path) -> None:
    with bind_mount(volume / "canary" / "secret", volume / "job" / "results"), pytest.raises(MountInside):
        swap(volume / "job")
    assert_silent(volume)


def test_a_mount_inside_is_seen_through_another_bind_mount(volume: Path) -> None:
    (volume / "window").mkdir()
    with (
        bind_mount(volume / "job", volume / "window"),
        bind_mount(volume / "canary", volume / "window" / "sub"),
        pytest.raises(MountInside),
    ):
        swap(volume / "job")
    assert_silent(volume)


def test_what_is_mounted_elsewhere_too_is_swapped(volume: Path) -> None:
    (volume / "window").mkdir()
    with bind_mount(volume / "job", volume / "window"):
        identifier = swap(volume / "job").id
        assert (volume / "window" / "results").exists()
        restore(volume, identifier)
    assert_silent(volume)


@pytest.mark.parametrize("verb", [swap, remove])
def test_a_mount_point_itself_is_refused(volume: Path, verb: Callable[[Path], object]) -> None:
    with bind_mount(volume / "canary", volume / "job"), pytest.raises(IsMountPoint):
        verb(volume / "job")
    with pytest.raises(IsMountPoint):
        verb(volume)
    assert_silent(volume)


@pytest.mark.parametrize("path", [b"/", b"//", b"/.", b"/..", b"/../.."])
def test_the_root_is_refused(path: bytes) -> None:
    with pytest.raises(Refused):
        swap_path(Kernel(), path, SwapOptions())


@pytest.mark.parametrize("where", [".", "sub"])
@pytest.mark.parametrize("verb", [swap, remove])
def test_root_refuses_what_holds_a_mount_of_another_namespace(
    volume: Path, verb: Callable[[Path], object], where: str
) -> None:
    with tmpfs_elsewhere(volume / "job" / where), pytest.raises(Refused, match="mount namespace of process"):
        verb(volume / "job")
    assert (volume / "job" / "results").exists()
    assert_silent(volume)


def test_a_mount_of_another_namespace_beside_the_victim_is_no_matter(volume: Path) -> None:
    with tmpfs_elsewhere(volume / "canary"):
        restore(volume, swap(volume / "job").id)
    assert_silent(volume)


# What is no directory


def test_a_link_to_a_directory_is_not_followed(volume: Path) -> None:
    (volume / "link").symlink_to("job")
    for path in (raw(volume / "link"), raw(volume / "link") + b"/"):
        with pytest.raises(NotADirectory):
            swap_path(Kernel(), path, SwapOptions())
    assert entries(volume) == []
    remove(volume / "link")
    assert not (volume / "link").is_symlink()
    assert (volume / "job" / "results").exists()
    assert_silent(volume)


# Stores


@pytest.mark.parametrize(
    "inside", ["", "u", "u/0", "u/0/orphans", "u/0/stage", "u/0/orphans/ID", "u/0/orphans/ID/tree"]
)
@pytest.mark.parametrize("verb", [swap, remove])
def test_the_store_and_what_is_in_it_are_refused(volume: Path, verb: Callable[[Path], object], inside: str) -> None:
    identifier = swap(volume / "job").id
    with pytest.raises(IsStore):
        verb(volume / ".trashd" / inside.replace("ID", identifier))
    assert_silent(volume)


def test_what_is_in_a_store_is_refused_through_a_bind_mount_too(volume: Path) -> None:
    identifier = swap(volume / "job").id
    (volume / "window").mkdir()
    with bind_mount(place(volume, identifier), volume / "window"), pytest.raises(IsStore):
        swap(volume / "window" / "tree")
    assert_silent(volume)


def test_a_refusal_makes_nothing() -> None:
    with tmpfs_volume() as bare:
        (bare / "file").write_text("x")
        make_tree(bare / "job", {"sub": {}})
        with bind_mount(bare / "job", bare / "job" / "sub"):
            for path in (bare / "file", bare / "job", bare):
                with pytest.raises(Refused):
                    swap(path)
        assert sorted(os.listdir(bare)) == ["file", "job"]


# Modes and flags


@pytest.mark.parametrize("mode", [0o555, 0o000, 0o111, 0o333, 0o444, 0o700, 0o1500, 0o1555])
@pytest.mark.parametrize("verb", [swap, remove])
@pytest.mark.parametrize("restorer", [0, ALICE])
def test_a_users_own_directory_of_any_mode_goes_and_comes_back(
    volume: Path, verb: Callable[[Path], object], mode: int, restorer: int
) -> None:
    make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
    job = volume / "home" / "job"

    def act() -> None:
        make_tree(job, Dir({"results": "hers"}, mode=mode))
        verb(job)

    as_user(ALICE, act)
    [entry] = entries(volume)
    assert (place(volume, entry.id) / "tree").stat().st_mode & 0o7777 == mode
    assert verb is remove or job.stat().st_mode & 0o7777 == mode
    restore(volume, entry.id) if restorer == 0 else as_user(ALICE, lambda: restore(volume, entry.id))
    assert job.stat().st_mode & 0o7777 == mode
    assert (job / "results").read_text() == "hers"
    assert_silent(volume)


@pytest.mark.parametrize("verb", [swap, remove])
def test_set_group_id_that_a_loan_would_lose_is_refused_unchanged(volume: Path, verb: Callable[[Path], object]) -> None:
    make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
    make_tree(volume / "home" / "job", Dir({"results": "hers"}, mode=0o2555, owner=(ALICE, 4242)))
    before = snapshot(volume / "home" / "job")
    with pytest.raises(NotPermitted, match="set-group-id"):
        as_user(ALICE, lambda: verb(volume / "home" / "job"))
    recover_all(volume)
    assert snapshot(volume / "home" / "job") == before
    assert_silent(volume)


@pytest.mark.parametrize("mode", [0o2555, 0o2770])
def test_set_group_id_of_ones_own_group_is_kept(volume: Path, mode: int) -> None:
    make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
    make_tree(volume / "home" / "job", Dir({"results": "hers"}, mode=mode, owner=(ALICE, 4242)))
    before = snapshot(volume / "home" / "job")
    swapped = as_user(ALICE, lambda: swap(volume / "home" / "job"), groups=[4242])
    assert swapped.unlike == ()
    assert snapshot(volume / "home" / "job") == before[:1]
    as_user(ALICE, lambda: restore(volume, swapped.id), groups=[4242])
    assert snapshot(volume / "home" / "job") == before
    assert_silent(volume)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("flag", [IMMUTABLE, APPEND_ONLY])
@pytest.mark.parametrize("verb", [swap, remove])
def test_an_immutable_or_append_only_victim_is_a_clear_error(
    ext4: Path, verb: Callable[[Path], object], flag: int
) -> None:
    make_tree(ext4 / "job", {"results": "x"})
    set_flags(ext4 / "job", flag)
    before = snapshot(ext4 / "job")
    with pytest.raises(NotPermitted) as caught:
        verb(ext4 / "job")
    assert "lsattr" in caught.value.hint
    assert snapshot(ext4 / "job") == before
    remove_tree_hard(ext4 / "job")
    assert_silent(ext4)


@pytest.mark.needs("loop")
def test_an_immutable_victim_of_a_users_is_a_clear_error_too(ext4: Path) -> None:
    make_tree(ext4 / "home", Dir(owner=(ALICE, ALICE)))
    make_tree(ext4 / "home" / "job", Dir({}, mode=0o555, owner=(ALICE, ALICE)))
    set_flags(ext4 / "home" / "job", IMMUTABLE)
    with pytest.raises(NotPermitted) as caught:
        as_user(ALICE, lambda: swap(ext4 / "home" / "job"))
    assert "lsattr" in caught.value.hint
    remove_tree_hard(ext4 / "home")
    recover_all(ext4)
    assert_silent(ext4)
