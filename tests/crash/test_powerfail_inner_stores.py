"""A power cut while an orphan with stores in it is reaped loses nothing that is pinned there."""

from collections.abc import Sequence
from pathlib import Path

from fusefs.core.errors import TrashdError
from tests.crash.powerfail_replay import on_some_fs, replay_a_sample
from tests.crash.powerfail_work import Cut, Scenario
from tests.support.make_trees import make_tree
from tests.support.nested_stores import reap_with_stores, store_in
from tests.support.other_users import query_without_fork
from tests.support.small_orphans import EXPIRED, PINNED
from tests.support.store_verbs import entries, problems, reap_now, recover_all, swap

PREPARED = "it is there to be reaped"
DONE = "done"
TEXT = "all of it " * 300


def run_round(cut: Cut, _k: int) -> None:
    """`reap --with-stores` of a tree in which one store holds what is pinned, and one what is not."""
    team = make_tree(cut.base / "team", {"a": TEXT, "kept": {}, "given": {"sub": {"file": TEXT}}})
    store_in(cut.base, team / "kept", PINNED)
    store_in(cut.base, team / "given", EXPIRED)
    identifier = swap(team).id
    assert reap_now(cut.base, identifier).report.n_failed == 2
    cut.sync()
    cut.volume.mark(PREPARED)
    assert reap_with_stores(cut.base, identifier, cut.kernel).report.n_failed == 1
    cut.volume.mark(DONE)


@query_without_fork()
def check(root: Path, _marks: Sequence[str]) -> str | None:
    """What is pinned is whole; what a killed reap left the next one ends."""
    try:
        recover_all(root)
        if found := _not_pinned(root, "after recovery"):
            return found
        (entry,) = [one for one in entries(root) if b"/.trashd/u/0/" in one.path and b"/tree/" not in one.path]
        if reap_with_stores(root, entry.id).report.n_failed != 1:
            return "more is left than what is pinned, or less"
        found_problems = problems(root)
        return _not_pinned(root, "in the end") or (f"the checker: {found_problems}" if found_problems else None)
    except (OSError, TrashdError, ValueError) as error:
        return f"recovery raised {error!r}"


def _not_pinned(root: Path, when: str) -> str | None:
    found = [(path / "a").read_text() for path in root.glob(".trashd/u/0/*/*/tree/kept/.trashd/u/0/orphans/*/tree")]
    return None if found == ["1"] else f"{when}: what is pinned is {found}"


@on_some_fs
def test_power_cut_in_a_reap_with_stores_keeps_what_is_pinned(fstype: str) -> None:
    result = replay_a_sample(fstype, Scenario(run_round, 1, check=check, since=PREPARED))
    print(fstype, result)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 1, str(result)
