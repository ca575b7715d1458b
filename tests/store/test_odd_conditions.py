"""The ways out, upgrades and copies where there is no room, no right to write, no end of depth, or somebody besides."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.errors import NotProven
from fusefs.linux.kernel import Kernel
from fusefs.store.find import act_on
from tests.support.store import entries, init, problems, raw, recover_all, restore
from tests.support.volumes import full, tmpfs_volume

pytestmark = pytest.mark.needs("root")

SAMPLE = Path(__file__).parent / "samples/store-1.tar.xz"


# A store of the first format that can't be brought up to date now


@contextmanager
def first_format() -> Iterator[Path]:
    """A small volume with a store as the version before made it: root's orphan and a user's."""
    with tmpfs_volume("2m", ("nr_inodes=200",)) as path:
        subprocess.run(["tar", "--numeric-owner", "-pxJf", SAMPLE, "-C", path], check=True)
        yield path


@contextmanager
def read_only(volume: Path) -> Iterator[None]:
    """It is mounted so in the block."""
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", volume], check=True)


@pytest.mark.parametrize("state", [full, read_only], ids=["full", "read-only"])
def test_roots_own_orphan_is_listed_where_the_first_format_must_stay(state: object) -> None:
    assert callable(state)
    with first_format() as volume, state(volume):
        recover_all(volume)
        assert sorted(entry.uid for entry in entries(volume)) == [0, 1001]
        assert "first format" in problems(volume)[0].what
        assert f"trashd init {volume}" in problems(volume)[0].hint


def test_on_a_full_volume_it_is_restored() -> None:
    with first_format() as volume, full(volume):
        recover_all(volume)
        [roots] = [entry for entry in entries(volume) if entry.uid == 0]
        restore(volume, roots.id, to=volume / "back")
        assert (volume / "back/results").is_file()


def test_on_a_full_volume_it_is_not_reaped_before_it_is_proven() -> None:
    with first_format() as volume:
        [roots] = [entry for entry in entries(volume) if entry.uid == 0]
        with full(volume):
            recover_all(volume)
            with pytest.raises(NotProven) as refused:
                act_on(Kernel(), [raw(volume)], roots, lambda *_: None, object, needs_proof=True)
            assert f"trashd init {volume}" in refused.value.hint
        init(volume)
        assert next(one for one in entries(volume) if one.id == roots.id).is_proven
