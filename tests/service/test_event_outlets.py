"""The audit log: a line an event, whatever is in it, rotated, full, or cut by a death; no user can fill it."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.events import Event, EventKind
from fusefs.linux.user_ids import Subordinates, SubuidRange
from fusefs.service.event_outlets import Audit, log_event
from fusefs.service.shared_context import EventLimit
from tests.support.real_filesystems import full
from tests.unit.test_events import EVENTS


def audit(path: Path) -> closing[Audit]:
    return closing(Audit(os.fsencode(path)))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def reaped(n: int) -> Event:
    return Event(EventKind.REAPED, 0, b"/v", 1000, "id", b"/v/job", n_entries=n)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@given(st.lists(EVENTS, max_size=5))
def test_each_event_is_a_line(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    with audit(path) as write:
        for event in events:
            write(event)
    assert [line["event"] for line in lines(path)] == [event.kind.value for event in events]


def test_a_service_goes_on_where_the_last_one_stopped(log: Path) -> None:
    for n in (1, 2):
        with audit(log) as write:
            write(reaped(n))
    assert [line["n_entries"] for line in lines(log)] == [1, 2]


@pytest.mark.allows_warnings
def test_a_log_that_cannot_be_opened_anew_is_used_on(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    with audit(log) as write:
        log.rename(log.with_suffix(".1"))
        log.mkdir()
        write.reopen()
        write(reaped(1))
    assert len(lines(log.with_suffix(".1"))) == 1
    assert "can't be opened anew" in caplog.text


def test_what_a_death_cut_is_not_continued(log: Path) -> None:
    log.write_bytes(b'{"event": "rea')
    with audit(log) as write:
        write(reaped(1))
    cut, whole = log.read_bytes().splitlines()
    assert cut == b'{"event": "rea'
    assert json.loads(whole)["n_entries"] == 1


def test_the_log_is_made_with_its_directory_and_not_for_everybody(tmp_path: Path) -> None:
    with audit(tmp_path / "a" / "b" / "audit.log"):
        assert (tmp_path / "a" / "b" / "audit.log").stat().st_mode & 0o007 == 0


@pytest.mark.parametrize("make", [lambda log: log.symlink_to("elsewhere"), os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(log: Path, make: Callable[[Path], object]) -> None:
    make(log)
    with pytest.raises(OSError, match="audit"):
        Audit(os.fsencode(log))
    assert not log.with_name("elsewhere").exists()


@pytest.mark.needs("root")
@pytest.mark.allows_warnings
def test_a_full_disk_costs_lines_and_is_told_once(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = volume / "audit.log"
    with audit(log) as write:
        write(reaped(0))
        with full(volume, inodes=False):
            for n in range(1, 100):
                write(reaped(n))
        write(reaped(100))
    whole, cut = [], []
    for line in log.read_bytes().splitlines():
        try:
            whole.append(json.loads(line)["n_entries"])
        except ValueError:
            cut.append(line)
    assert whole == [*range(len(whole) - 1), 100]
    assert len(cut) <= 1
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _text in told] == [logging.ERROR, logging.WARNING]
    assert f"lacks {100 - len(whole) + 1} events" in told[1][1]


@pytest.mark.allows_warnings
@pytest.mark.parametrize(
    ("kind", "level"),
    [(EventKind.REAPED, logging.INFO), (EventKind.QUARANTINED, logging.WARNING), (EventKind.BROKEN, logging.ERROR)],
)
def test_an_event_is_logged_by_its_weight(kind: EventKind, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_event(Event(kind, 0, b"/v", origin=b"/v/\x1b[2J"))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().isprintable()
    assert vars(record)["fields"]["TRASHD_EVENT"] == kind.value.encode()


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
