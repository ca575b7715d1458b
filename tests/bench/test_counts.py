"""What commands cost in system calls, and a mount's operations in messages, is what is stored: exactly."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.counts import Counts, of_more_files, of_operations, of_restore, of_verbs, prepare
from bench.messages import counted
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user

pytestmark = pytest.mark.needs("root")

STORED = Path(__file__).parents[2] / "bench/stored/counts.json"
USER = 1001


def assert_stored(kind: str, found: Mapping[str, Counts]) -> None:
    """More calls need a reason, and so do fewer: both are told, and written by GOLDEN=write."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    if os.environ.get("GOLDEN") == "write":
        STORED.write_text(json.dumps(stored | {kind: found}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    assert found == stored[kind]


def test_roots_verbs_make_the_calls_that_are_stored(volume: Path) -> None:
    assert_stored("root", of_verbs(volume) | {"restore": of_restore(volume)})


def test_a_users_verbs_make_the_calls_that_are_stored(volume: Path) -> None:
    home = make_tree(volume / "home", Dir(owner=(USER, USER)))
    assert_stored("a user", as_user(USER, lambda: of_verbs(home)))


@pytest.mark.needs("strace")
@pytest.mark.parametrize("native", ["0", "1"])
def test_files_cost_the_calls_that_are_stored_in_c_and_in_python(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setenv("TRASHD_NATIVE", native)
    assert_stored("files", of_more_files(volume, tmp_path / "log"))


@pytest.mark.needs("fuse", "passthrough", "fuse_trace")
def test_operations_of_a_mount_take_the_messages_that_are_stored(volume: Path) -> None:
    prepare(volume / "source")
    with (
        trashd_mount(volume / "source", options=["coherence=exclusive"]) as mounted,
        counted(os.minor(mounted.path.stat().st_dev)) as messages,
    ):
        assert_stored("messages", of_operations(mounted.path, messages))
