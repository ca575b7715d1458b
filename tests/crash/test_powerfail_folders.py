"""Power cut while root says whose folder is whose: nothing is lost, and nothing proven that he has not looked at."""

from __future__ import annotations

import pytest

from fusefs.linux.kernel import Kernel
from tests.crash.powerfail_folders import FOLDERS, FlushedHere, FlushedThere
from tests.crash.powerfail_replay import IS_SOAK, on_some_fs, replay
from tests.support.scenes import EVERY_CALL

FLUSHED = [(verb, kind) for verb in FOLDERS for kind in (FlushedHere, FlushedThere)]


@on_some_fs
@pytest.mark.parametrize("verb", FOLDERS)
def test_power_cut_strands_nothing_and_proves_nothing_planted(verb: str, fstype: str) -> None:
    result = replay(fstype, FOLDERS[verb])
    print(fstype, verb, result)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 1, str(result)


@on_some_fs
@pytest.mark.parametrize(
    ("verb", "kind"),
    FLUSHED if IS_SOAK or EVERY_CALL else [("registration", FlushedHere), ("taking over", FlushedHere)],
)
def test_whoever_flushes_one_side_of_each_rename_changes_nothing(verb: str, kind: type[Kernel], fstype: str) -> None:
    result = replay(fstype, FOLDERS[verb], kind)
    print(fstype, verb, kind.__name__, result)
    assert not result.failures, str(result)
