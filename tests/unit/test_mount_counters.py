"""A mount's numbers as a file: each counter has its place, names travel with them, and estimates are near the truth."""

import struct
from bisect import bisect_right
from contextlib import suppress
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.cli.status import mount_lines
from fusefs.core.errors import TrashdError
from fusefs.core.mount_counters import (
    BOUNDS_NS,
    OPERATIONS,
    CachedKind,
    CacheHits,
    CounterLayout,
    CounterTable,
    Gauges,
    ObservedMount,
    Operation,
    decode_counters,
    encode_counters,
)
from fusefs.core.uring_choice import FastPathState

TABLE = CounterTable(version="0.1", pid=7, started_ns=5)
times_ns = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=200)
shares = st.floats(0.01, 1)


def with_cells(table: CounterTable, cells: dict[int, int]) -> bytes:
    """A file in which some counters are not 0."""
    layout, data = CounterLayout(table), encode_counters(table)
    numbers = [cells.get(i, 0) for i in range(layout.n_cells)]
    return data[: -8 * layout.n_cells] + struct.pack(f"={layout.n_cells}Q", *numbers)


def operation_of(times: list[int]) -> Operation:
    counts = [0] * (len(BOUNDS_NS) + 1)
    for time_ns in times:
        counts[bisect_right(BOUNDS_NS, time_ns)] += 1
    return Operation(0, sum(times), max(times, default=0), tuple(counts), BOUNDS_NS)


def test_a_new_file_holds_nothing_but_names() -> None:
    stats = decode_counters(encode_counters(TABLE))
    assert stats.table == TABLE
    assert tuple(stats.operations) == OPERATIONS
    assert stats.gauges == Gauges()._asdict()
    assert set(stats.remembered.values()) == {CacheHits(0, 0)}
    assert {operation.n() for operation in stats.operations.values()} == {0}


def test_every_counter_has_a_place_of_its_own() -> None:
    layout = CounterLayout(TABLE)
    stats = decode_counters(with_cells(TABLE, {i: i + 1 for i in range(layout.n_cells)}))
    found = [stats.device, stats.updated_ns, *stats.gauges.values()]
    for remembered in stats.remembered.values():
        found += remembered
    for one in stats.operations.values():
        found += [one.n_failed, one.total_ns, one.max_ns, *one.counts]
    assert sorted(found) == list(range(1, layout.n_cells + 1))


def test_the_counters_are_whole_words_at_the_end() -> None:
    assert [n for n in range(20) if len(encode_counters(msgspec.structs.replace(TABLE, version="v" * n))) % 8] == []


def test_what_another_version_counts_keeps_its_name() -> None:
    other = msgspec.structs.replace(
        TABLE, gauges=("n_wheels",), sorts=("wheel",), operations=("ioctl", "lookup"), bounds_ns=(10, 20)
    )
    layout = CounterLayout(other)
    cells = {layout.gauges: 4, layout.sorts: 5, layout.operations["ioctl"] + layout.buckets + 2: 6}
    stats = decode_counters(with_cells(other, cells))
    assert (stats.gauges, stats.remembered) == ({"n_wheels": 4}, {"wheel": CacheHits(5, 0)})
    assert (stats.operations["ioctl"].counts, stats.operations["lookup"].counts) == ((0, 0, 6), (0, 0, 0))


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(TrashdError):
        decode_counters(data)


@given(st.integers(0, len(encode_counters(TABLE)) - 1))
def test_a_file_cut_short_is_refused(n_bytes: int) -> None:
    with pytest.raises(TrashdError):
        decode_counters(encode_counters(TABLE)[:n_bytes])


@given(st.integers(0, 40), st.integers(0, 255))
def test_a_changed_head_is_refused_or_harmless(at: int, byte: int) -> None:
    data = bytearray(encode_counters(TABLE))
    data[at] = byte
    with suppress(TrashdError):
        decode_counters(bytes(data))


def test_another_machines_byte_order_is_refused() -> None:
    data = encode_counters(TABLE)
    with pytest.raises(TrashdError):
        decode_counters(data[:8] + data[15:7:-1] + data[16:])


def test_nothing_has_no_mean_and_no_percentile() -> None:
    none = operation_of([])
    assert (none.n(), none.mean_ns(), none.percentile_ns(0.5)) == (0, None, None)
    assert CacheHits(0, 0).rate() is None


def test_the_hit_rate_is_the_share_of_hits() -> None:
    assert CacheHits(3, 1).rate() == 0.75


@pytest.mark.parametrize(
    ("off", "printed"),
    [
        ((), ", over io_uring"),
        (("uring",), ", over /dev/fuse"),
        (("uring", "passthrough"), ", over /dev/fuse, without passthrough"),
        (("engine", "uring", "passthrough"), ", in plain mode"),
    ],
)
def test_a_mount_lists_its_transport_and_what_it_lacks(off: tuple[str, ...], printed: str) -> None:
    states = tuple(FastPathState(name, is_on=name not in off, why="") for name in ("engine", "uring", "passthrough"))
    (_head, line) = mount_lines(
        [ObservedMount(b"/mnt", b"/src", decode_counters(encode_counters(TABLE)), True, states)], 5
    )
    assert line.endswith(f"up 0s{printed}")


@given(times_ns, shares)
def test_a_percentile_is_in_the_bucket_of_the_true_one(times: list[int], share: float) -> None:
    one = operation_of(times)
    counts = accumulate(one.counts)
    bucket = next(i for i, so_far in enumerate(counts) if so_far >= share * len(times))
    low, high = (BOUNDS_NS[bucket - 1] if bucket else 0), (*BOUNDS_NS, one.max_ns)[bucket]
    found = one.percentile_ns(share)
    assert found is not None
    assert min(low, one.max_ns) <= found <= min(high, one.max_ns)


@given(times_ns, shares, shares)
def test_percentiles_grow_with_the_share(times: list[int], one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = operation_of(times).percentile_ns(low), operation_of(times).percentile_ns(high)
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] <= found[1]


@given(times_ns)
def test_the_last_percentile_is_the_longest(times: list[int]) -> None:
    assert operation_of(times).percentile_ns(1) == pytest.approx(max(times), abs=1)


def test_sorts_are_labelled_for_programs() -> None:
    names = ["name", "missing_name", "attributes", "listing", "link_target", "xattr", "missing_xattr"]
    assert [sort.label() for sort in CachedKind] == names
