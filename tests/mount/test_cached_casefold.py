"""Where one file has many names, a name that is missing, or is there, may change without being named: none is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux import filesystem_probes, syscalls
from fusefs.mount.tree.vfs import Vfs
from tests.support.foreground_mount import trashd_mount
from tests.support.fuse_casefold import folding_volume
from tests.support.real_filesystems import tmpfs_volume
from tests.support.vfs_without_mount import DirectoryRequests, Names, Somebody, vfs_at

pytestmark = pytest.mark.needs("root", "fuse")

ME = Somebody(0, 0, os.getpid(), 0o022)
CASEFOLD_FL = 0x40000000
SPELLINGS = ("Readme", "README", "readme", "rEADME")


@pytest.mark.parametrize("backing", ["local", "slow"])
def test_each_spelling_is_found_as_below(backing: str) -> None:
    with folding_volume(["Readme", "other"]) as volume:
        point = volume.with_name("mounted")
        with trashd_mount(volume, point, ["ro", "coherence=exclusive", f"backing={backing}"]) as mounted:
            for _ in range(2):
                for name in SPELLINGS:
                    assert os.path.lexists(point / name)
                    assert not os.path.lexists(point / f"{name}-absent")
                assert sorted(os.listdir(point)) == ["Readme", "other"]
                mounted.forget_all()


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vfs]:
    """A tree whose directories say that they fold, all but `exact`, as this kernel has none that does."""

    def ioctl(fd: int, _request: int, buffer: bytearray) -> None:
        folds = os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) != "exact"
        buffer[:4] = (CASEFOLD_FL if folds else 0).to_bytes(4, "little")

    with tmpfs_volume() as top:
        (top / "known").write_bytes(b"content")
        (top / "exact").mkdir()
        monkeypatch.setattr(syscalls, "ioctl", ioctl)
        monkeypatch.setattr(filesystem_probes, "_TMPFS_FEATURE", os.fspath(top))
        with vfs_at(top, timeout_s=3600) as vfs:
            yield vfs


def test_a_missing_name_is_not_remembered_where_names_fold(folding: Vfs) -> None:
    with pytest.raises(FileNotFoundError):
        Names(folding).lookup(ROOT, b"absent", ME)


def test_a_name_is_asked_for_each_time_where_names_fold(folding: Vfs) -> None:
    """Of `known` unlinked as `KNOWN` the kernel would not learn."""
    assert Names(folding).lookup(ROOT, b"known", ME).timeout_s == 0
    assert Names(folding).mkdir(ROOT, b"made", 0o755, ME).timeout_s == 0


def test_each_directory_s_own_flag_counts(folding: Vfs) -> None:
    exact = Names(folding).lookup(ROOT, b"exact", ME).nodeid
    for _ in range(2):
        assert Names(folding).lookup(exact, b"absent", ME).timeout_s
        with pytest.raises(FileNotFoundError):
            Names(folding).lookup(ROOT, b"absent", ME)


def test_a_listing_makes_no_name_known_where_names_fold(folding: Vfs) -> None:
    listed = DirectoryRequests(folding).entries(ROOT)
    assert {one.name for one in listed} == {b".", b"..", b"known", b"exact"}
    assert not any(one.entry.nodeid for one in listed)


def test_a_missing_name_is_remembered_where_they_do_not() -> None:
    with tmpfs_volume() as top, vfs_at(top, timeout_s=3600) as vfs:
        known = Names(vfs).lookup(ROOT, b"absent", ME)
        assert (known.nodeid, known.timeout_s > 0) == (0, True)
        assert Names(vfs).mkdir(ROOT, b"made", 0o755, ME).timeout_s > 0
