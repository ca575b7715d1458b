"""What a killed maker left beside a store: taken away by init, and nothing else that has such a name."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init

pytestmark = pytest.mark.needs("root")

BOB = 1002
VOLUME = tmpfs_volume


def test_init_takes_away_what_a_killed_copy_left(volume: Path) -> None:
    left = volume / ".trashd.new-copy-0123456789abcdef"
    left.mkdir(0o700)
    (left / "0123456789abcdef").touch()
    (left / "logs").mkdir(0o700)
    init(volume)
    assert not left.exists()


def test_a_directory_of_roots_that_a_user_names_like_a_copy_in_the_making_keeps_what_it_has(volume: Path) -> None:
    os.chown(volume, BOB, BOB)
    for mode in (0o700, 0o755):
        secret = make_tree(volume / "secret", Dir({"key": b"1", "more": {"key": b"2"}}, mode))
        before = snapshot(secret)
        named = volume / f".trashd.new-copy-{mode}"
        as_user(BOB, partial(os.rename, secret, named))
        init(volume)
        assert snapshot(named) == before
