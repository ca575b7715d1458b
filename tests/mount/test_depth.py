"""However deep in the tree something is done, it takes as many requests and fds as near the top."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.support.foreground_mount import Mounted, fresh_mount
from tests.support.nested_directories import make_chain, walk_chain
from tests.support.real_filesystems import volume_of

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_FDS = 256
N_LEVELS, N_LEVELS_BESIDE = 600, 60


@pytest.fixture(params=["tmpfs", "ext4"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """With fewer fds than the tree has levels."""
    with fresh_mount(made=volume_of(request.param), n_fds_max=N_FDS) as mounted:
        yield mounted


def n_messages(mount: Mounted, act: Callable[[], object]) -> int:
    before = mount.n_requests()
    act()
    return mount.n_requests() - before


def test_a_tree_deeper_than_the_daemon_has_fds_is_made_walked_moved_and_removed(mount: Mounted) -> None:
    a, b = mount.path / "a", mount.path / "b"
    make_chain(a, N_LEVELS)
    a.rename(b)
    assert walk_chain(b) == N_LEVELS
    mount.forget_all()
    assert walk_chain(b) == N_LEVELS
    subprocess.run(["rm", "-rf", b], check=True)
    assert os.listdir(mount.path) == []


def test_a_deep_tree_takes_no_more_messages_a_level(mount: Mounted) -> None:
    """What is made, what is found, and what is removed."""

    def of(n: int) -> list[float]:
        top = mount.path / f"{n}"
        acts = (
            lambda: make_chain(top, n),
            lambda: walk_chain(top),
            lambda: subprocess.run(["rm", "-rf", top], check=True),
        )
        return [n_messages(mount, act) / n for act in acts]

    for deep, shallow in zip(of(N_LEVELS), of(N_LEVELS_BESIDE), strict=True):
        assert deep < 1.5 * shallow
