"""The status as a value: what is written is read again, and nothing else is."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.errors import TrashdError
from fusefs.core.record import quote_path
from fusefs.core.service_status import (
    ObservedStatus,
    Status,
    StatusFault,
    VolumePhase,
    VolumeStatus,
    age_s,
    decode_status,
    encode_status,
)

SOME = Status(version="0.1", pid=1, boot_id="b", started_ns=1, updated_ns=2)
VOLUMES = st.builds(
    VolumeStatus,
    path=st.binary(max_size=20).map(quote_path),
    phase=st.sampled_from(VolumePhase),
    why=st.text(max_size=20),
    io=st.none() | st.floats(0, 1),
    tempo_entries_per_s=st.none() | st.integers(0, 10**6),
    faults=st.lists(st.builds(StatusFault, st.integers(0, 2**62), st.text(max_size=20)), max_size=3).map(tuple),
)


@given(st.lists(VOLUMES, max_size=3).map(tuple))
def test_a_status_is_read_as_it_was_written(volumes: tuple[VolumeStatus, ...]) -> None:
    status = msgspec.structs.replace(SOME, volumes=volumes)
    assert decode_status(encode_status(status)) == status


@given(st.binary(max_size=60))
def test_a_volume_keeps_its_name(path: bytes) -> None:
    assert VolumeStatus(path=quote_path(path)).root_path() == path


@given(
    st.binary() | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_what_is_no_status_is_an_error_with_a_hint(text: bytes) -> None:
    with pytest.raises(TrashdError) as raised:
        decode_status(text)
    assert raised.value.hint


def test_a_path_that_is_not_quoted_is_an_error() -> None:
    with pytest.raises(TrashdError):
        decode_status(encode_status(msgspec.structs.replace(SOME, volumes=(VolumeStatus(path="/\N{SNOWMAN}"),))))


def test_keys_of_a_later_version_are_passed_over() -> None:
    later = {**json.loads(encode_status(SOME)), "mood": "good"}
    assert decode_status(json.dumps(later).encode()) == SOME


def test_a_status_is_stale_after_its_own_time() -> None:
    status = msgspec.structs.replace(SOME, refreshes_s=10)
    assert [ObservedStatus(status, True, old_s).is_stale() for old_s in (0, 10, 11)] == [False, False, True]


def test_a_clock_that_is_set_makes_no_status_older_or_younger() -> None:
    status = msgspec.structs.replace(SOME, updated_ns=10**18, updated_boot_ns=5 * 10**9)
    assert [age_s(status, "b", 12 * 10**9, wall_ns) for wall_ns in (0, 10**18, 10**19)] == [7.0, 7.0, 7.0]


def test_a_status_of_an_earlier_boot_is_as_old_as_the_clock_says() -> None:
    status = msgspec.structs.replace(SOME, updated_ns=0, updated_boot_ns=5 * 10**9)
    assert [age_s(status, "another", 0, at_s * 10**9) for at_s in (-1, 60)] == [0.0, 60.0]
