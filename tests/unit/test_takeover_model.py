"""Many nodes on one volume (decision 42): all histories of the store's transactions, and what each rule is for.

TRASHD_TEST_FAULTS  2: two faults in one history, and each scenario with faults (make soak-model: hours, some GB)
"""

from __future__ import annotations

import os

import pytest

from tests.support.late_calls import Faults, Loss
from tests.support.takeover_model import Rules
from tests.support.takeover_scenarios import FAULTS, SCENARIOS, TWO_FAULTS

IS_SOAK = os.environ.get("TRASHD_TEST_FAULTS") == "2"
CASES = [
    pytest.param(scenario, faults, id=f"{scenario}-{fault}")
    for scenario, one in SCENARIOS.items()
    for fault, faults in {**FAULTS, **(TWO_FAULTS if IS_SOAK else {})}.items()
    if IS_SOAK or not one.is_wide or (fault == "none" and len(one.clients(Rules())) < 3)
]
NEEDED_BY = {
    "moves": ("swap, watcher, exchange", "none"),
    "gates": ("swap, user, exchange", "late"),
    "in_turn": ("killed swap, two watchers, exchange", "none"),
    "exclusive": ("swap, user, two", "none"),
    "by_identity": ("swap, restore, user, two", "none"),
    "one_way": ("reap, restore from reaping", "none"),
    "asks_again": ("reap, keep, watcher", "none"),
}


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "faults"), CASES)
def test_nothing_is_lost(scenario: str, faults: Faults) -> None:
    assert SCENARIOS[scenario].explore(faults) > 1


@pytest.mark.parametrize("rule", Rules._fields)
def test_without_this_rule_something_is_lost(rule: str) -> None:
    scenario, fault = NEEDED_BY[rule]
    with pytest.raises(Loss):
        SCENARIOS[scenario].explore(FAULTS[fault], Rules()._replace(**{rule: False}))
