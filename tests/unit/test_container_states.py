"""What recovery decides: total over its inputs, and never a tree given up whose identity is not certain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.container_states import (
    LEGAL_MOVES,
    RestoringAction,
    StageAction,
    State,
    decide_restoring,
    decide_stage,
)
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import ContainerId, RelPath, VolumeId
from fusefs.core.record import Method, Record

VICTIM, FRESH, STRANGER = Identity("1:aa", 1, 1), Identity("1:bb", 2, 2), Identity("1:cc", 3, 3)
IDENTITY = st.sampled_from([VICTIM, FRESH, STRANGER, Identity("", 1, 0), Identity("", 2, 0), Identity("", 0, 0)])
MAYBE = st.none() | IDENTITY


def record_of(
    method: Method = Method.EXCHANGE, fresh: Identity | None = FRESH, victim: Identity | None = VICTIM
) -> Record:
    return Record(
        id=ContainerId("20261121T032253.555Z-job-2fe7e4cb8ba8"),
        volume=VolumeId("0" * 32),
        method=method,
        origin=RelPath(b"job"),
        parent=None,
        fresh=fresh,
        victim=victim,
        host="here",
        boot="now",
        created_ns=1,
        retention_s=None,
    )


RECORD = st.none() | st.builds(record_of, st.sampled_from([*Method]), MAYBE, MAYBE)


@given(RECORD, MAYBE, MAYBE, MAYBE)
def test_decision_on_stage_is_total(
    record: Record | None, tree: Identity | None, fresh: Identity | None, name: Identity | None
) -> None:
    assert decide_stage(record, tree, fresh, name) in StageAction


@given(RECORD, MAYBE, MAYBE, MAYBE)
def test_decision_on_restoring_is_total(
    record: Record | None, tree: Identity | None, fresh: Identity | None, name: Identity | None
) -> None:
    assert decide_restoring(record, tree, fresh, name) in RestoringAction


@given(RECORD, IDENTITY, MAYBE, MAYBE)
def test_staged_tree_is_undone_only_if_it_is_certainly_the_fresh_one(
    record: Record | None, tree: Identity, fresh: Identity | None, name: Identity | None
) -> None:
    action = decide_stage(record, tree, fresh, name)
    if record is not None and action in (StageAction.BACK, StageAction.UNMADE):
        assert compare(tree, record.fresh) is IdentityMatch.SAME


@given(RECORD, IDENTITY, MAYBE, MAYBE)
def test_tree_that_contradicts_the_record_is_never_moved(
    record: Record | None, tree: Identity, fresh: Identity | None, name: Identity | None
) -> None:
    if record is None or compare(tree, record.victim) is not IdentityMatch.OTHER:
        return
    assert decide_stage(record, tree, fresh, name) in (StageAction.KEEP, StageAction.BACK)
    assert decide_restoring(record, tree, fresh, name) in (RestoringAction.KEEP, RestoringAction.RETIRE)


@given(st.sampled_from([VICTIM, FRESH, STRANGER]), MAYBE, MAYBE)
def test_exchanged_container_is_settled_by_identity_alone(
    tree: Identity, fresh: Identity | None, name: Identity | None
) -> None:
    wanted = {VICTIM: StageAction.FORWARD, FRESH: StageAction.BACK, STRANGER: StageAction.KEEP}
    assert decide_stage(record_of(), tree, fresh, name) is wanted[tree]


@given(MAYBE)
def test_exchange_with_an_identity_that_proves_nothing_is_kept(name: Identity | None) -> None:
    assert decide_stage(record_of(), Identity("", 0, 0), None, name) is StageAction.KEEP


@given(st.sampled_from([VICTIM, Identity("", 0, 0)]), st.sampled_from([FRESH, STRANGER]))
def test_two_renames_are_never_undone(tree: Identity, name: Identity) -> None:
    record = record_of(Method.TWO_RENAME)
    assert decide_stage(record, tree, FRESH, None) is StageAction.PLACE
    assert decide_stage(record, tree, FRESH, name) is StageAction.FORWARD
    assert decide_stage(record, tree, None, None) is StageAction.FORWARD


@given(st.sampled_from([None, *Method]), MAYBE, MAYBE)
def test_container_without_a_tree_holds_nothing_to_keep(
    method: Method | None, fresh: Identity | None, name: Identity | None
) -> None:
    record = None if method is None else record_of(method)
    wanted = StageAction.UNMADE if record is None else StageAction.BACK
    assert decide_stage(record, None, fresh, name) is wanted
    assert decide_restoring(record, None, fresh, name) is RestoringAction.RETIRE


def test_restoring_tree_without_a_record_is_kept() -> None:
    assert decide_restoring(None, VICTIM, None, None) is RestoringAction.KEEP


@given(st.sampled_from([Method.EXCHANGE, Method.TWO_RENAME]), MAYBE)
def test_fresh_directory_under_tree_means_that_the_restore_happened(method: Method, name: Identity | None) -> None:
    assert decide_restoring(record_of(method), FRESH, None, name) is RestoringAction.RETIRE


def test_restore_cut_between_two_renames_goes_on() -> None:
    assert decide_restoring(record_of(Method.TWO_RENAME), VICTIM, FRESH, None) is RestoringAction.PLACE


@given(MAYBE)
def test_restore_that_had_not_begun_is_given_back(name: Identity | None) -> None:
    assert decide_restoring(record_of(), VICTIM, None, name) is RestoringAction.GIVE_BACK


@given(st.sampled_from([VICTIM, Identity("", 0, 0)]), MAYBE, MAYBE)
def test_sweeps_own_tree_is_kept_for_what_is_in_it(
    tree: Identity, fresh: Identity | None, name: Identity | None
) -> None:
    record = record_of(Method.SWEEP, fresh=None)
    assert decide_stage(record, tree, fresh, name) is StageAction.GATHERED
    assert decide_restoring(record, tree, fresh, name) is RestoringAction.REST


def test_every_state_but_the_first_is_entered_and_every_one_left_by_a_move() -> None:
    assert {to for _, to in LEGAL_MOVES} == set(State) - {State.STAGE}
    assert {source for source, _ in LEGAL_MOVES} == set(State)


def test_no_move_leads_back_into_stage() -> None:
    assert all(to is not State.STAGE for _source, to in LEGAL_MOVES)


PLAIN, MARKED, REMARKED = Identity("", 0, 0), Identity("mark:" + "a" * 32, 0, 0), Identity("mark:" + "b" * 32, 0, 0)


@pytest.mark.parametrize(
    ("victim", "tree", "staged", "restoring"),
    [
        (PLAIN, MARKED, StageAction.BACK, RestoringAction.RETIRE),
        (PLAIN, PLAIN, StageAction.FORWARD, RestoringAction.GIVE_BACK),
        (PLAIN, REMARKED, StageAction.KEEP, RestoringAction.KEEP),
        (REMARKED, REMARKED, StageAction.FORWARD, RestoringAction.GIVE_BACK),  # an earlier swap's fresh directory
        (REMARKED, MARKED, StageAction.BACK, RestoringAction.RETIRE),
    ],
)
def test_where_nothing_else_lasts_the_mark_of_the_fresh_directory_tells(
    victim: Identity, tree: Identity, staged: StageAction, restoring: RestoringAction
) -> None:
    record = record_of(fresh=MARKED, victim=victim)
    assert decide_stage(record, tree, None, None) is staged
    assert decide_restoring(record, tree, None, None) is restoring
