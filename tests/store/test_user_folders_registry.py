"""Each user's registry of the stores in use: what it names, what it forgets, and what it never waits for."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.identity import Identity
from fusefs.core.names import VolumeId, user_store_name
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import open_store
from fusefs.store.registry_lines import MAX_LINES, RegistryLine, decode_lines, encode_line, read_own_lines
from fusefs.store.store_registry import UserLine, open_registered
from fusefs.store.user_folders import is_registered_store, register_store
from tests.support.make_trees import make_tree
from tests.support.mount_namespaces import ROOTS
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume
from tests.support.store_verbs import init, opened, raw, swap, users_own
from tests.support.trashd_command import done_well
from tests.support.user_homes import ALICE, BOB, homes, registry_of, trashd_as

pytestmark = pytest.mark.needs("root")

LINE = RegistryLine(Identity("1:0a0b", 7, 9), VolumeId("0" * 32), 5, b"/srv/\xff with\nall")


@pytest.fixture(autouse=True)
def alice() -> Iterator[Path]:
    """Alice's home; no registry names a store."""
    with homes(ALICE, BOB) as made:
        yield made[ALICE]


def known() -> list[Path]:
    return [Path(os.fsdecode(one.path)) for one in read_own_lines()]


def own_store(home: Path, name: str = "work") -> Path:
    """A directory of Alice's with her own store, in which she has an orphan."""
    work = make_tree(home / name, {"job": {"file": "x"}})
    for path in (work, *work.rglob("*")):
        os.chown(path, ALICE, ALICE)
    done = trashd_as(ALICE, home, "swap", "--json", work / "job")
    assert done.code == 0, done
    return Path(done.objects()[0]["store"]).parents[2]


def test_a_line_says_what_it_was_made_of() -> None:
    assert decode_lines(encode_line(LINE)) == [LINE]
    assert decode_lines(encode_line(LINE._replace(identity=Identity("", 0, 0), path=b"/"))) == [
        LINE._replace(identity=Identity("", 0, 0), path=b"/")
    ]


@pytest.mark.parametrize("path", [b"srv", b"/srv/../etc", b"/srv/.", b"/srv//x", b"/a\0b"])
def test_a_line_with_a_path_that_is_not_plain_is_none(path: bytes) -> None:
    assert decode_lines(encode_line(LINE._replace(path=path))) == []


def test_a_store_is_named_when_it_is_made_and_when_it_is_used() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        assert known() == [volume]
        (ROOTS / "stores").unlink()
        swap(make_tree(volume / "job", {}))
        assert known() == [volume]


def test_a_store_that_is_named_is_not_named_again() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        before = (ROOTS / "stores").stat()
        swap(make_tree(volume / "job", {}))
        after = (ROOTS / "stores").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_users_registry_is_his_alone_and_root_has_another(alice: Path) -> None:
    base = own_store(alice)
    st = registry_of(alice).stat()
    assert (st.st_uid, st.st_mode & 0o777) == (ALICE, 0o600)
    assert [os.fsdecode(one.path) for one in decode_lines(registry_of(alice).read_bytes())] == [str(base)]
    assert known() == []


def test_root_names_no_users_store(alice: Path) -> None:
    kernel, base = Kernel(), own_store(alice)
    store = open_store(
        kernel, BackingAndMount(kernel.open_path(raw(base))), raw(base), user_store_name(ALICE), of=ALICE
    )
    assert store is not None
    with store:
        assert register_store(store)


def test_a_copy_of_a_store_is_not_the_one_that_is_named() -> None:
    with tmpfs_volume() as volume:
        (volume / "proj").mkdir()
        init(volume / "proj")
        shutil.copytree(volume / "proj", volume / "copy", symlinks=True)
        with opened(volume / "proj") as store, opened(volume / "copy") as copy:
            assert is_registered_store(store)
            assert not is_registered_store(copy)


def test_a_copy_of_a_whole_disk_is_not_the_one_that_is_named() -> None:
    with loop_volume("ext4", 16) as volume, tmpfs_volume() as other:
        init(volume)
        device = next(one.source for one in read_mounts() if one.point == raw(volume))
        subprocess.run(["sync", "-f", volume], check=True)
        subprocess.run(["dd", f"if={os.fsdecode(device)}", f"of={other}/image", "status=none"], check=True)
        (other / "copy").mkdir()
        subprocess.run(["mount", "-o", "loop,ro,noload", other / "image", other / "copy"], check=True)
        try:
            with opened(volume) as store, opened(other / "copy") as copy:
                assert is_registered_store(store)
                assert not is_registered_store(copy)
        finally:
            subprocess.run(["umount", other / "copy"], check=True)


def test_what_was_copied_to_the_place_of_a_store_is_not_opened_for_it() -> None:
    with tmpfs_volume() as volume:
        (volume / "proj").mkdir()
        init(volume / "proj")
        (line,) = read_own_lines()
        shutil.copytree(volume / "proj", volume / "copy", symlinks=True)
        (volume / "proj").rename(volume / "old")
        (volume / "copy").rename(volume / "proj")
        assert open_registered(Kernel(), UserLine(0, line), read_mounts()) is None


def test_a_store_that_was_moved_is_named_where_it_is_when_it_is_used() -> None:
    with tmpfs_volume() as volume:
        (volume / "proj").mkdir()
        init(volume / "proj")
        (volume / "proj").rename(volume / "moved")
        swap(make_tree(volume / "moved/job", {}))
        assert known() == [volume / "moved"]


def test_a_store_that_is_gone_is_forgotten_at_the_next_write() -> None:
    with tmpfs_volume() as volume:
        for name in ("gone", "there"):
            (volume / name).mkdir()
        init(volume / "gone")
        shutil.rmtree(volume / "gone")
        init(volume / "there")
        assert known() == [volume / "there"]


def test_a_store_whose_disk_is_not_mounted_is_not_forgotten() -> None:
    with tmpfs_volume() as here:
        with tmpfs_volume() as away:
            init(away)
            (away / "deep").mkdir()
            init(away / "deep")
        init(here)
        assert known() == [away, away / "deep", here]


def test_a_full_registry_gives_up_what_leads_nowhere() -> None:
    with tmpfs_volume() as volume:
        away = [LINE._replace(path=b"/nowhere/%d" % number) for number in range(MAX_LINES)]
        (ROOTS / "stores").write_bytes(b"".join(map(encode_line, away)))
        init(volume)
        assert known() == [volume]


def test_without_a_home_a_store_is_used_all_the_same() -> None:
    def act() -> bool:
        os.environ["HOME"] = "/nonexistent"
        init(volume)
        with opened(volume) as store:
            return is_registered_store(store)

    with tmpfs_volume() as volume:
        os.chown(volume, 6102, 6102)
        assert as_user(6102, act) is False
        assert (users_own(volume, 6102) / "volume.json").exists()


def test_what_root_does_for_a_user_goes_into_that_users_registry(alice: Path) -> None:
    with tmpfs_volume() as volume:
        init(volume)
        victim = make_tree(volume / "job", {})
        os.chown(victim, ALICE, ALICE)
        done_well("swap", "--for-owner", victim)
        assert [one.path for one in decode_lines(registry_of(alice).read_bytes())] == [raw(volume)]


def test_a_store_seen_through_a_bind_mount_is_named_once_for_each_way() -> None:
    with tmpfs_volume() as volume, tmpfs_volume() as other:
        init(volume)
        (other / "bound").mkdir()
        with bind_mount(volume, other / "bound"):
            swap(make_tree(other / "bound/job", {}))
            assert known() == [volume, other / "bound"]
