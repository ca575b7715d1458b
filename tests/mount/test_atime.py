"""Access times: the backing filesystem keeps them as its own mount says, whatever the options of our mount are."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.background_mounts import backing_of, mount, workbench
from tests.support.real_filesystems import bind_mount
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root", "fuse")

LONG_AGO_NS = 10**18


@pytest.fixture
def bench() -> Iterator[Path]:
    with workbench() as path:
        (path / "source" / "inside").mkdir()
        for name in ("file", "inside"):
            os.utime(path / "source" / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
        yield path


def points(bench: Path, where: str) -> list[Path]:
    """The source, over itself or at another place."""
    return [bench / "source"] if where == "source" else [bench / "source", bench / where]


def read(mounted: Path) -> set[str]:
    """Read a file and a directory; those whose access time has changed below."""
    (mounted / "file").read_text()
    os.listdir(mounted / "inside")
    below = backing_of(mounted)
    return {name for name in ("file", "inside") if (below / name).stat().st_atime_ns != LONG_AGO_NS}


@pytest.mark.parametrize("passthrough", ["auto", "off"])
@pytest.mark.parametrize("where", ["source", "target"])
@pytest.mark.parametrize("options", ["noatime", "nodiratime", "noatime,nodiratime"])
def test_an_option_for_access_times_is_accepted_has_no_effect_below_and_is_printed(
    bench: Path, options: str, where: str, passthrough: str
) -> None:
    target = bench / where
    printed = mount(*points(bench, where), "-o", f"{options},passthrough={passthrough}").err
    for option in options.split(","):
        assert printed.count(f"-o {option} has no effect: the mount options of the backing filesystem") == 1
    assert read(target) == {"file", "inside"}


@pytest.mark.needs("passthrough")
@pytest.mark.takes_engine
def test_each_time_that_a_small_file_is_read_its_time_of_access_is_another_below(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "coherence=exclusive")
    for _ in range(4):
        os.utime(bench / "source/file", ns=(LONG_AGO_NS, LONG_AGO_NS))
        assert "file" in read(bench / "target")


def test_without_such_an_option_nothing_is_printed_of_it(bench: Path) -> None:
    assert "no effect" not in mount(bench / "source", "-o", "atime").err


@pytest.mark.parametrize("where", ["source", "target"])
@pytest.mark.parametrize(("options", "kept"), [("noatime", set[str]()), ("nodiratime", {"file"})])
def test_the_mount_of_the_source_says_which_are_kept(bench: Path, options: str, kept: set[str], where: str) -> None:
    source, target = bench / "source", bench / where
    with bind_mount(source, source, [options]):
        mount(*points(bench, where))
        assert read(target) == kept
        done_well("umount", target)
