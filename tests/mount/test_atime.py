"""Times of access: below they are kept, or not, as the options of the mount say."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.mount.places.remount import remount
from tests.support.background_mounts import backing_of, mount, workbench
from tests.support.foreground_mount import until
from tests.support.real_filesystems import mounts, tmpfs_over
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root", "fuse")

LONG_AGO_NS = 10**18
KEPT: list[tuple[str, set[str]]] = [
    ("rw", {"file", "inside"}), ("nodiratime", {"file"}), ("noatime", set()), ("noatime,nodiratime", set()),
]  # fmt: skip


@pytest.fixture
def bench() -> Iterator[Path]:
    with workbench() as path:
        for among in (".", "1", "2", "3", "4"):
            (path / "source" / among / "inside").mkdir(parents=True)
            (path / "source" / among / "file").write_text("content")
            for name in ("file", "inside"):
                os.utime(path / "source" / among / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
        yield path


def read(mounted: Path, among: str = ".") -> set[str]:
    """Read a file and a directory; of which of them the time of access is another then, below."""
    (mounted / among / "file").read_text()
    os.listdir(mounted / among / "inside")
    below = backing_of(mounted) / among
    return {name for name in ("file", "inside") if (below / name).stat().st_atime_ns != LONG_AGO_NS}


@pytest.mark.parametrize("passthrough", ["auto", "off"])
@pytest.mark.parametrize(("options", "kept"), KEPT)
def test_over_itself_times_of_access_are_kept_as_the_options_say(
    bench: Path, options: str, kept: set[str], passthrough: str
) -> None:
    mount(bench / "source", "-o", f"{options},passthrough={passthrough}")
    assert read(bench / "source") == kept


@pytest.mark.needs("passthrough")
@pytest.mark.rests_on("passthrough")
def test_each_time_that_a_small_file_is_read_its_time_of_access_is_another_below(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "coherence=exclusive")
    for _ in range(4):
        os.utime(bench / "source/file", ns=(LONG_AGO_NS, LONG_AGO_NS))
        assert "file" in read(bench / "target")


@pytest.fixture
def shared(bench: Path) -> Path:
    """A bench where what is mounted is mounted in copies too, as systemd has it."""
    subprocess.run(["mount", "--make-shared", bench], check=True)
    return bench


@pytest.mark.parametrize("passthrough", ["auto", "off"])
@pytest.mark.parametrize(("options", "kept"), KEPT)
def test_elsewhere_they_are_kept_so_too(shared: Path, options: str, kept: set[str], passthrough: str) -> None:
    mount(shared / "source", shared / "target", "-o", f"{options},passthrough={passthrough}")
    assert read(shared / "target") == kept


def test_elsewhere_a_remount_changes_that(shared: Path) -> None:
    mount(shared / "source", shared / "target", "-o", "noatime")
    for step, (words, kept) in enumerate([("ro", set()), ("rw,atime", {"file", "inside"}), *KEPT[1:3]], 1):
        assert remount(os.fsencode(shared / "target"), [f"remount,{words}"])
        assert read(shared / "target", str(step)) == kept, words


def test_where_mounts_are_not_shared_they_are_kept_as_the_source_has_it_and_who_mounts_is_told(bench: Path) -> None:
    said = mount(bench / "source", bench / "target", "-o", "noatime").err
    assert "times of access" in said
    assert read(bench / "target") == {"file", "inside"}


def test_without_times_of_access_what_is_mounted_in_the_source_comes_and_goes(shared: Path) -> None:
    source, target = shared / "source", shared / "target"
    (source / "later").mkdir()
    with tmpfs_over(source / "inside"):
        (source / "inside/deeper").mkdir()
        with tmpfs_over(source / "inside/deeper"):
            (source / "inside/deeper/file").touch()
            mount(source, target, "-o", "noatime")
            assert os.listdir(target / "inside/deeper") == ["file"]
            with tmpfs_over(source / "later"):
                (source / "later/file").touch()
                assert os.listdir(target / "later") == ["file"]
                assert len([one for one in mounts() if one.mount_point.endswith(b"/later")]) == 2
            assert until(lambda: os.listdir(target / "later") == [])
            assert not [one for one in mounts() if one.mount_point.endswith(b"/later")]
            done_well("umount", target)
            assert until(
                lambda: not any(b"/closed/tree" in one.mount_point and b"deeper" in one.mount_point for one in mounts())
            )
            assert os.listdir(source / "inside/deeper") == ["file"]
    assert os.listdir(source / "inside") == []
