"""Many nodes on one volume (decision 42): all histories of the store's transactions, and what each rule is for."""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from tests.support.model_checker import Call, Explorer, Faults, Loss, ModelDisk, Program, disk_of, run_alone
from tests.support.takeover_model import (
    Rules,
    afterwards,
    pinner,
    reaper,
    restorer,
    seizer,
    swapper,
    user,
    volume,
    watcher,
    why_lost,
    why_stuck,
)

FAULTS = {
    "none": Faults(),
    "lost": Faults(lost=1),
    "late": Faults(late=1),
    "twice": Faults(twice=1),
    "stale": Faults(stale=1),
}
TWO_FAULTS = {
    f"{one}+{other}": Faults(*map(sum, zip(FAULTS[one], FAULTS[other], strict=True)))
    for one, other in ((a, b) for n, a in enumerate(list(FAULTS)[1:], 1) for b in list(FAULTS)[n:])
}


class Scenario(NamedTuple):
    """Some clients at work on a volume.

    clients   what each does, as the rules have it
    disk      what they find
    method    how the swap is done; restore and watchers know it by the record
    is_named  the victim's name is to mean something whenever all stop
    is_wide   has millions of histories with a fault: left to soaks
    """

    clients: Callable[[Rules], list[Callable[[], Program]]]
    disk: ModelDisk
    method: str
    is_named: bool = False
    is_wide: bool = False

    def explore(self, faults: Faults, rules: Rules | None = None) -> int:
        """How many states there are. Raises  Loss

        After two faults an empty directory that somebody just made may be gone, a file never (decision 42).
        """
        lost = partial(why_lost, counts_empty=sum(faults) < 2)
        stuck = partial(why_stuck, is_named=self.is_named)
        rules = rules or Rules()
        watchers = afterwards(self.method, rules)
        return Explorer(self.clients(rules), self.disk, faults, lost, watchers, stuck).explore()


def killed_swap(method: str) -> ModelDisk:
    """What a swap left that was killed when the victim was in its transfer directory."""
    calls = 0
    disk = volume()
    while disk.place_of("V") == ("P", "job"):
        calls += 1
        disk = run_alone(volume(), swapper(method, Rules())(), calls)
    return disk


def _scenarios(method: str) -> dict[str, Scenario]:
    orphan = volume("orphans")
    swap = partial(swapper, method)
    restore = partial(restorer, "orphans", method)
    watch, watch_restore = partial(watcher, "stage", method), partial(watcher, "restoring", method)
    return {
        f"swap, watcher, {method}": Scenario(lambda r: [swap(r), watch("b", r)], volume(), method, is_named=True),
        f"swap, user, {method}": Scenario(lambda r: [swap(r), user], volume(), method, is_named=True),
        f"swap, restore, user, {method}": Scenario(lambda r: [swap(r), restore(r), user], volume(), method),
        f"swap, watcher, user, {method}": Scenario(
            lambda r: [swap(r), watch("b", r), user], volume(), method, is_named=True, is_wide=True
        ),
        f"killed swap, watcher, user, {method}": Scenario(lambda r: [watch("b", r), user], killed_swap(method), method),
        f"killed swap, two watchers, {method}": Scenario(
            lambda r: [watch("b", r), watch("c", r)], killed_swap(method), method, is_wide=True
        ),
        f"killed swap, two watchers, user, {method}": Scenario(
            lambda r: [watch("b", r), watch("c", r), user], killed_swap(method), method, is_wide=True
        ),
        f"restore, user, {method}": Scenario(lambda r: [restore(r), user], orphan, method),
        f"restore, watcher, {method}": Scenario(
            lambda r: [restore(r), watch_restore("b", r)], orphan, method, is_wide=method == "two"
        ),
        f"restore, watcher, user, {method}": Scenario(
            lambda r: [restore(r), watch_restore("b", r), user], orphan, method, is_wide=True
        ),
    }


def _reap_and_restore(state: str, rules: Rules) -> list[Callable[[], Program]]:
    return [reaper(rules), *([] if rules.one_way else [restorer(state, "two", rules)])]


def _of_reaps() -> dict[str, Scenario]:
    watch = partial(watcher, "reaping", "two", "b")
    orphan = volume("orphans")
    gives_back = {
        f"reap, restore from {state}": Scenario(partial(_reap_and_restore, state), orphan, "two")
        for state in ("reaping", "quarantine")
    }
    return {
        **gives_back,
        "reap, restore, watcher": Scenario(
            lambda r: [reaper(r), restorer("orphans", "two", r), watch(r)], orphan, "two"
        ),
        "seize, reap, try again": Scenario(
            lambda r: [seizer(r), reaper(r), reaper(r, "quarantine")], volume("quarantine"), "exchange"
        ),
        "seize, reap, restore": Scenario(  # of which one has it, by one rename, whatever is said of one_way
            lambda r: [seizer(r), reaper(r), restorer("quarantine", "exchange", r)], volume("quarantine"), "exchange"
        ),
        "reap, keep, watcher": Scenario(lambda r: [reaper(r), pinner(r), watch(r)], orphan, "two"),
    }


SCENARIOS = {**_scenarios("exchange"), **_scenarios("two"), **_of_reaps()}
IS_SOAK = os.environ.get("TRASHD_TEST_FAULTS") == "2"
CASES = [
    pytest.param(scenario, faults, id=f"{scenario}-{fault}")
    for scenario, one in SCENARIOS.items()
    for fault, faults in {**FAULTS, **(TWO_FAULTS if IS_SOAK else {})}.items()
    if IS_SOAK or not one.is_wide or (fault == "none" and len(one.clients(Rules())) < 3)
]
NEEDED_BY = {
    "moves": ("swap, watcher, exchange", "none"),
    "transfers": ("swap, user, exchange", "late"),
    "in_turn": ("killed swap, two watchers, exchange", "none"),
    "exclusive": ("swap, user, two", "none"),
    "by_identity": ("swap, restore, user, two", "none"),
    "one_way": ("reap, restore from reaping", "none"),
    "rechecks": ("reap, keep, watcher", "none"),
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


def remover() -> Program:
    yield Call("mkdir", ("D", "mine", "M"))
    yield Call("rmdir", ("D", "mine"))


@pytest.mark.parametrize(
    ("faults", "n_states"),
    [(Faults(), 3), (Faults(lost=1), 5), (Faults(late=1), 9), (Faults(twice=1), 9), (Faults(stale=1), 3)],
    ids=["none", "lost", "late", "twice", "stale"],
)
def test_a_fault_adds_its_histories_and_no_others(faults: Faults, n_states: int) -> None:
    disk = disk_of({"/": {"d": "D"}, "D": {}})
    assert Explorer([remover], disk, faults, lambda _before, _after: "").explore() == n_states
