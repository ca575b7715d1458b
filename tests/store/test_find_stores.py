"""Discovery: all places are asked once in a command, and anew when that is long ago or the mounts have changed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.store import find_stores as discovery
from fusefs.store.find_stores import discover_stores
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init


def find_bases(kernel: Kernel, silent: list[bytes] | None = None) -> list[bytes]:
    bases = []
    for store in discover_stores(kernel, (), silent):
        with store:
            bases.append(store.base_path)
    return bases


@pytest.fixture
def new() -> Iterator[Path]:
    with tmpfs_volume() as volume:
        yield volume


@pytest.fixture
def steady(new: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A volume without a store; discovery is believed however long it takes, and whatever other tests mount."""
    mounts = read_mounts()
    assert any(mount.point == os.fsencode(new) for mount in mounts)
    monkeypatch.setattr(discovery, "_CACHED_S", 1e9)
    monkeypatch.setattr(discovery, "read_mounts", lambda: list(mounts))
    return new


@pytest.fixture
def count_forks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    forks: list[int] = []
    fork = os.fork

    def count() -> int:
        forks.append(0)
        return fork()

    monkeypatch.setattr(os, "fork", count)
    return lambda: len(forks)


def test_a_second_discovery_forks_no_child_and_finds_the_same(steady: Path, count_forks: Callable[[], int]) -> None:
    init(steady)
    kernel = Kernel()
    bases = find_bases(kernel)
    n_forks = count_forks()
    assert os.fsencode(steady) in bases
    assert n_forks > 0
    assert find_bases(kernel) == bases
    assert count_forks() == n_forks


def test_all_places_are_asked_anew_after_a_moment(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_CACHED_S", 0.0)
    kernel = Kernel()
    assert os.fsencode(new) not in find_bases(kernel)
    init(new)
    assert os.fsencode(new) in find_bases(kernel)


def test_all_places_are_asked_anew_when_the_mounts_have_changed(steady: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, mounts = Kernel(), read_mounts()
    assert os.fsencode(steady) not in find_bases(kernel)
    init(steady)
    monkeypatch.setattr(discovery, "read_mounts", lambda: mounts[:1] + mounts)
    assert os.fsencode(steady) in find_bases(kernel)


def test_each_discovery_names_a_mount_point_that_does_not_answer(steady: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_kernel: Kernel, _mounts: object, silent: list[bytes]) -> list[bytes]:
        silent.append(os.fsencode(steady))
        return []

    monkeypatch.setattr(discovery, "_places_with_store", answer)
    kernel, first, second = Kernel(), list[bytes](), list[bytes]()
    assert find_bases(kernel, first) == find_bases(kernel, second)
    assert first == second == [os.fsencode(steady)]
