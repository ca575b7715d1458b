"""One user can't fill the log; others are told of all the same."""

from __future__ import annotations

import logging

import pytest

from fusefs.linux.subuid import Subordinates, SubuidRange
from fusefs.service.shared_context import EventLimit

MOST = 1000


def test_what_one_user_does_is_bounded_and_others_are_not() -> None:
    flood = EventLimit()
    told = [flood.lets_pass(1001, 100.0) for _ in range(3 * MOST)]
    assert sum(told) == MOST
    assert flood.lets_pass(1002, 100.0)


def test_subordinate_uids_are_their_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    subordinates = Subordinates([SubuidRange(200_000, 65_536, 1001)])
    monkeypatch.setattr("fusefs.service.shared_context.read_subordinates", lambda: subordinates)
    flood = EventLimit()
    assert sum(flood.lets_pass(200_000 + n, 100.0) for n in range(3 * MOST)) == MOST
    assert flood.lets_pass(1002, 100.0)


@pytest.mark.allows_warnings
def test_what_was_not_told_is_told_as_a_number(caplog: pytest.LogCaptureFixture) -> None:
    flood = EventLimit()
    for _ in range(MOST + 7):
        flood.lets_pass(1001, 100.0)
    with caplog.at_level(logging.WARNING):
        assert flood.lets_pass(1001, 200.0)
    assert "7 more events" in caplog.text
