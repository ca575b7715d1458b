"""Events as lines: whatever names are in them, a line is one line, and a terminal is left alone."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.events import ERRORS, TAKEN, WARNINGS, Event, EventKind, describe_event, encode_event, to_variables
from fusefs.core.printable_names import printable_text

PATHS = st.none() | st.binary(max_size=40).map(lambda name: b"/" + name.replace(b"\0", b""))
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(EventKind),
    at_ns=st.integers(0, 2**63 - 1),
    volume=PATHS,
    uid=st.none() | st.integers(0, 2**32 - 2),
    id=st.none() | st.just("20261121T032253.555Z-job-2fe7e4cb8ba8"),
    origin=PATHS,
    n_entries=st.none() | st.integers(0, 2**63),
    n_bytes=st.none() | st.integers(0, 2**63),
    seconds=st.none() | st.floats(0, 1e9),
    detail=st.text(st.characters(exclude_categories=()), max_size=40),
)


@given(EVENTS)
def test_an_event_is_one_line_of_ascii(event: Event) -> None:
    line = encode_event(event)
    assert line.isascii()
    assert b"\n" not in line
    assert b"\x1b" not in line


@given(EVENTS)
def test_names_in_an_event_come_back_as_they_were(event: Event) -> None:
    fields = json.loads(encode_event(event))
    assert {key: fields[key] and os.fsencode(fields[key]) for key in ("origin", "volume")} == {
        "origin": event.origin, "volume": event.volume,
    }  # fmt: skip


@given(EVENTS)
def test_an_event_has_all_its_keys_always(event: Event) -> None:
    assert list(json.loads(encode_event(event))) == [
        "at", "event", "at_ns", "volume", "uid", "id", "origin", "n_entries", "n_bytes", "seconds", "detail",
    ]  # fmt: skip


@given(EVENTS)
def test_a_description_moves_no_cursor(event: Event) -> None:
    assert describe_event(event).isprintable()


@given(EVENTS)
def test_variables_are_always_all_there(event: Event) -> None:
    assert set(to_variables(event)) == set(to_variables(Event(EventKind.STARTED, 0)))
    assert not any(b"\0" in value for value in to_variables(event).values())


@given(st.text(st.characters(exclude_categories=())))
def test_every_text_can_be_shown(text: str) -> None:
    assert printable_text(text).isprintable()


def test_a_description_says_who_and_how_much() -> None:
    event = Event(EventKind.REAPED, 0, b"/scratch", 1000, "id", b"/scratch/job", 12345, 3 << 29, 12.2)
    assert describe_event(event) == "reaped /scratch/job of uid 1000: 12,345 entries, 1.50 GiB in 12s"


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Event(EventKind.LOW_SPACE, 0, b"/scratch", detail="3 % free"), "low space /scratch: 3 % free"),
        (Event(EventKind.REAPED, 0, uid=7, id="ID", n_entries=1), "reaped ID of uid 7: 1 entry"),
        (Event(EventKind.STARTED, 0), "started"),
        (Event(EventKind.MENDED, 0, b"/v", seconds=60.0), "mended /v: in 1m"),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Event) else "",
)
def test_a_description_leaves_out_what_is_not_known(event: Event, told: str) -> None:
    assert describe_event(event) == told


def test_the_time_is_utc() -> None:
    assert json.loads(encode_event(Event(EventKind.STARTED, 1_700_000_000_123_456_789)))["at"] == "2023-11-14T22:13:20Z"


def test_no_kind_is_bad_in_two_ways() -> None:
    assert not WARNINGS & ERRORS
    assert not TAKEN & (WARNINGS | ERRORS)
