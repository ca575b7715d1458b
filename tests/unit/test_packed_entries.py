"""The packed entries of a directory: what goes in comes out."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.metadata_cache import Dirent, PackedEntries

DIRENTS = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name),
        st.integers(0, 2**64 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 255),
    )
)


def entries(n: int) -> list[Dirent]:
    return [(b"name-%015d" % number, 1000 + number, 7 * number + 7, 8) for number in range(n)]


@given(parts=st.lists(DIRENTS, max_size=4))
def test_what_was_added_comes_back_in_order(parts: list[list[Dirent]]) -> None:
    packed = PackedEntries()
    for part in parts:
        packed.extend(part)
    together = [entry for part in parts for entry in part]
    assert list(packed) == together
    assert [packed[index] for index in range(len(packed))] == together


def test_goes_on_after_an_offset_that_an_entry_has_told() -> None:
    packed = PackedEntries(entries(5))
    assert packed.after(7) == 1
    assert packed[packed.after(14) or 0] == entries(5)[2]
    assert packed.after(35) == len(packed)
    assert packed.after(0) is None
    assert packed.after(8) is None


def test_extends_from_an_iterator() -> None:
    assert list(PackedEntries(iter(entries(3)))) == entries(3)


def bytes_of_an_entry() -> tuple[float, float]:
    """What one takes in truth, and what it says."""
    source = entries(20_000)
    tracemalloc.start()
    try:
        packed = PackedEntries()
        for at in range(0, len(source), 100):
            packed.extend(source[at : at + 100])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return taken / len(source), packed.n_bytes / len(source)


def test_entry_takes_little_more_than_its_name() -> None:
    tries = (bytes_of_an_entry() for _ in range(3))  # other threads allocate too, now and then
    assert any(taken < 20 + 40 and 0.95 * taken <= said <= 1.05 * taken for taken, said in tries)
