"""Power cut while root registers users' folders: nothing is lost, and nothing proven that root has not looked at."""

import pytest

from fusefs.linux.kernel import Kernel
from tests.crash.powerfail_replay import IS_EVERYWHERE, NoRecordFsync, on_some_fs, replay, replay_a_sample
from tests.crash.powerfail_work import FOLDERS, FlushedHere, FlushedThere

ALL = [(verb, kind) for verb in FOLDERS for kind in (Kernel, FlushedHere, FlushedThere)]
SOME = [("registration", Kernel), ("taking over", FlushedHere)]


@pytest.mark.long
@on_some_fs
@pytest.mark.parametrize(("verb", "kind"), ALL if IS_EVERYWHERE else SOME)
def test_power_cut_strands_nothing_and_proves_nothing_planted(verb: str, kind: type[Kernel], fstype: str) -> None:
    """Nor if another process flushes one side of each rename, and only that."""
    result = replay_a_sample(fstype, FOLDERS[verb], kind)
    print(fstype, verb, kind.__name__, result)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 1, str(result)


@pytest.mark.needs("root", "loop", "fuse", "btrfs")
def test_entry_of_the_registry_without_fsync_is_forgotten() -> None:
    assert replay("btrfs", FOLDERS["registration"], NoRecordFsync, stop_after=1).failures
