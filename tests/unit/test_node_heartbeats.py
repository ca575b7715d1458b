"""Who is alive, by beats: seen to change or not, by the watcher's own time."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.node_heartbeats import (
    FORGOTTEN_S,
    HEARTBEAT_BYTES,
    HEARTBEAT_S,
    LEAST_POLL_S,
    SILENT_S,
    Heartbeat,
    HeartbeatWatch,
    PollInterval,
    decode_heartbeat,
    encode_heartbeat,
    heartbeat_name,
    is_heartbeat_name,
)

BOOT = str(uuid.UUID(int=7))
NAME = heartbeat_name("beta", BOOT)
MOST_S = 600.0


def beat(n: int, started_ns: int = 1) -> Heartbeat:
    return Heartbeat(started_ns=started_ns, n=n, version="0.3.0", phase="idle", probe_ms=1.5)


def watched(*counts: int | None, every_s: float = HEARTBEAT_S) -> HeartbeatWatch:
    """What one watcher knows after it has seen these counters one after the other."""
    watch = HeartbeatWatch()
    for index, n in enumerate(counts):
        watch.update({NAME: None if n is None else beat(n)}, index * every_s)
    return watch


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.none() | st.floats(0, 1e6))
def test_a_beat_is_read_as_it_was_written_and_has_one_size(started_ns: int, n: int, probe_ms: float | None) -> None:
    heartbeat = Heartbeat(started_ns=started_ns, n=n, version="0.3.0", phase="hurrying", probe_ms=probe_ms)
    assert decode_heartbeat(encode_heartbeat(heartbeat)) == heartbeat
    assert len(encode_heartbeat(heartbeat)) == HEARTBEAT_BYTES


@given(st.binary(max_size=2 * HEARTBEAT_BYTES))
def test_what_is_no_beat_is_none(text: bytes) -> None:
    assert decode_heartbeat(text) is None


@given(st.text())
def test_every_host_has_a_name_that_is_one_file(host: str) -> None:
    name = heartbeat_name(host, BOOT)
    assert is_heartbeat_name(name)
    assert b"/" not in name
    assert len(name) <= 255


def test_other_names_are_no_beats() -> None:
    assert not any(
        map(is_heartbeat_name, (b"", b".", b"beta", b".hidden." + BOOT.encode(), b"beta." + BOOT.encode() + b".new"))
    )


def test_a_beat_that_was_not_seen_to_change_is_not_alive() -> None:
    assert watched(1).alive_nodes() == watched(1, 1).alive_nodes() == set()


def test_a_beat_that_changes_is_alive_until_it_was_watched_in_vain_for_long_enough() -> None:
    assert watched(1, 2).alive_nodes() == {NAME}
    assert watched(1, 2, 2, 2).alive_nodes() == {NAME}
    assert watched(1, 2, *[2] * int(SILENT_S / HEARTBEAT_S)).alive_nodes() == set()


def test_a_counter_that_goes_back_is_a_change() -> None:
    assert watched(9, 1).alive_nodes() == {NAME}


def test_a_watcher_who_was_frozen_takes_nobody_for_dead() -> None:
    watch = watched(1, 2)
    watch.update({NAME: beat(2)}, 10**6)
    assert watch.alive_nodes() == {NAME}


def test_who_fell_silent_or_went_is_told_once() -> None:
    watch = watched(1, 2)
    assert watch.update({}, 2 * HEARTBEAT_S) == {NAME}
    assert watch.update({}, 3 * HEARTBEAT_S) == set()


def test_what_is_half_written_is_no_change() -> None:
    assert watched(1, None).alive_nodes() == watched(None, 1).alive_nodes() == set()


def test_a_dead_nodes_beat_is_forgotten_after_days_and_not_before() -> None:
    n = int(FORGOTTEN_S / HEARTBEAT_S)
    assert watched(*[1] * n).expired_names() == []
    assert watched(*[1] * (n + 1)).expired_names() == [NAME]


def test_a_watcher_who_was_suspended_for_days_forgets_nobody() -> None:
    watch = watched(1)
    watch.update({NAME: beat(1)}, 10 * FORGOTTEN_S)
    assert watch.expired_names() == []


def test_of_one_that_was_not_watched_long_enough_nobody_says_whether_it_lives() -> None:
    (told,) = watched(1, 1).list_nodes(None)
    assert (told.host, told.boot_id, told.is_alive) == ("beta", BOOT, None)
    (told,) = watched(*[1] * 5).list_nodes(None)
    assert told.is_alive is False


def test_our_own_beat_is_alive_here() -> None:
    (told,) = watched(1).list_nodes(NAME)
    assert (told.is_here, told.is_alive, told.phase) == (True, True, "idle")


def test_while_nothing_happens_looks_are_ever_rarer_up_to_the_poll() -> None:
    interval = PollInterval()
    waits = [interval.next_wait_s(0.0, MOST_S, is_lively=False) for _ in range(9)]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert interval.next_wait_s(0.0, MOST_S, is_lively=True) == LEAST_POLL_S


def test_a_look_that_takes_long_comes_seldom_but_not_less_than_by_the_poll() -> None:
    assert PollInterval().next_wait_s(3.0, MOST_S, is_lively=True) == 60.0
    assert PollInterval().next_wait_s(100.0, MOST_S, is_lively=True) == MOST_S


def test_a_poll_that_is_shorter_is_obeyed() -> None:
    assert PollInterval().next_wait_s(0.0, 1.0, is_lively=True) == 1.0
