"""`swap --keep` whose power is cut: what is kept, and the tree that a restore puts together again."""

from __future__ import annotations

from fusefs.store.stage import SwapOptions
from tests.crash.powerfail_invariants import Shape
from tests.crash.powerfail_work import Cut, Scenario
from tests.support.store_verbs import restore, swap


def keep_round(cut: Cut, k: int) -> None:
    _swap_keeping(cut, k)


def restore_kept_round(cut: Cut, k: int) -> None:
    identifier = _swap_keeping(cut, k)
    cut.stands(k, Shape.KEPT, sync=True)
    cut.may(k, Shape.PARTING, Shape.LINKED, Shape.HOME)
    restore(cut.base, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)
    cut.may(k, Shape.LINKED)  # recovery has nothing to do but to drop the link


def _swap_keeping(cut: Cut, k: int) -> str:
    cut.begin(k)
    cut.may(k, Shape.LINKED, Shape.SHOWN, Shape.KEPT)
    done = swap(cut.name(k), cut.kernel, SwapOptions(keep=("f0", "part")))
    assert not done.warnings, done.warnings
    cut.stands(k, Shape.KEPT)
    return done.id


KEEPING = {"swap --keep": Scenario(keep_round), "restore of kept": Scenario(restore_kept_round)}
