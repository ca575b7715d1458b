"""Power cut while something is taken out, given up or reaped with stores in it: it is whole in one place, or gone."""

from __future__ import annotations

import pytest

from tests.crash.powerfail_replay import on_some_fs, replay_a_sample
from tests.crash.powerfail_stuck import STUCK


@on_some_fs
@pytest.mark.parametrize("verb", STUCK)
def test_power_cut_leaves_what_is_taken_out_whole(verb: str, fstype: str) -> None:
    result = replay_a_sample(fstype, STUCK[verb])
    print(fstype, verb, result)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 1, str(result)
