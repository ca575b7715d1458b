"""The cache takes the memory that it says, and no more than it may."""

from __future__ import annotations

import errno
import tracemalloc
from collections.abc import Callable

import pytest

from fusefs.core.metadata_cache import (
    ACCESS_ACL,
    CAPABILITY,
    Answers,
    Attributes,
    MetadataCache,
    PackedEntries,
    SourceKey,
)

N = 25_000
"""What is learnt in a second."""
MIB = 1 << 20


def device() -> int:
    return int("2049")  # not the one number that a constant is


def handle(number: int) -> SourceKey:
    return (device(), b"%012d" % number)


def birth(number: int) -> SourceKey:
    return (device(), 1 << 32 | number, 1 << 60 | number)


def seen(number: int) -> Attributes:
    large, time_ns = 1 << 32 | number, 1 << 60 | number
    return Attributes(2049, large, 33188, 1, 1000, 1000, 0, large, large, 4096, time_ns, time_ns, time_ns, time_ns)


def learn_tree(cache: MetadataCache, n: int, source_of: Callable[[int], SourceKey] = handle) -> None:
    """Entries as lookups find them: a hundred in a directory, each with a name of 20 bytes."""
    for number in range(n):
        now_s = number / N
        cache.learn_name(source_of(N + number // 100), b"name-%015d" % number, source_of(number), cache.epoch, now_s)
        cache.learn_attributes(source_of(number), seen(number), cache.epoch, now_s)


def learn_attributes(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        cache.learn_attributes(handle(number), seen(number), cache.epoch, number / N)


def learn_births(cache: MetadataCache, n: int) -> None:
    learn_tree(cache, n, birth)


def learn_missing(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        cache.learn_name(handle(number // 1000), b"name-%015d" % number, None, cache.epoch, number / N)


def learn_links(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        source = handle(number)
        cache.learn_target(source, b"../target-%010d" % number, cache.epoch, number / N)
        cache.learn_attributes(source, seen(number), cache.epoch, number / N)


def learn_xattrs(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        source = handle(number)
        acl = b"acl" * (number % 30) if number % 10 else errno.ENODATA
        answers: Answers = {ACCESS_ACL: acl, CAPABILITY: errno.ENODATA}
        cache.learn_attributes(source, seen(number), cache.epoch, number / N)
        cache.learn_xattrs(source, answers, cache.epoch, number / N)


def learn_listings(cache: MetadataCache, n: int) -> None:
    for at in range(0, n, 100):
        entries = PackedEntries((b"name-%015d" % number, number, number, 8) for number in range(at, at + 100))
        cache.learn_listing(handle(at), entries, cache.epoch, at / N)


def learn_and_delete(cache: MetadataCache, n: int) -> None:
    """Directories of 1000 that lose all names but one: what is left of them is room."""
    for number in range(n):
        cache.learn_name(handle(number // 1000), b"name-%015d" % number, handle(number), cache.epoch, 0.0)
        if number % 1000 == 999:
            for gone in range(number - 999, number):
                cache.name_changed(handle(number // 1000), b"name-%015d" % gone)


def learn_and_delete_all(cache: MetadataCache, n: int) -> None:
    learn_and_delete(cache, n)
    for number in range(999, n, 1000):
        cache.name_changed(handle(number // 1000), b"name-%015d" % number)


def learn_what_appears(cache: MetadataCache, n: int) -> None:
    """Names that were missing at first."""
    learn_missing(cache, n)
    for number in range(n):
        cache.learn_name(handle(number // 1000), b"name-%015d" % number, handle(number), cache.epoch, 1.0)


LEARN = (
    learn_tree, learn_births, learn_attributes, learn_missing, learn_links, learn_xattrs, learn_listings,
    learn_and_delete, learn_and_delete_all, learn_what_appears,
)  # fmt: skip


_N_TRIES = 3
"""Other threads of this process allocate too, now and then: what is too much each time is the cache's."""


def taken_bytes(learn: Callable[[MetadataCache, int], None], limit_bytes: int, n: int) -> tuple[int, int]:
    """What a cache takes in truth, and what it says."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        cache = MetadataCache(limit_bytes, 60.0)
        learn(cache, n)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before, cache.size_bytes


@pytest.mark.parametrize("learn", LEARN, ids=lambda learn: learn.__name__.removeprefix("learn_"))
def test_cache_says_what_it_takes(learn: Callable[[MetadataCache, int], None]) -> None:
    tries = (taken_bytes(learn, 1 << 30, 10_000) for _ in range(_N_TRIES))
    assert any(0.8 * said - 4096 <= taken <= 1.05 * said + 4096 for taken, said in tries)


@pytest.mark.parametrize(("limit_bytes", "n"), [(MIB // 64, 1000), (2 * MIB, 10_000)])
def test_full_cache_keeps_to_its_size(limit_bytes: int, n: int) -> None:
    tries = (taken_bytes(learn_tree, limit_bytes, n) for _ in range(_N_TRIES))
    assert any(0.75 * limit_bytes < said <= limit_bytes and taken <= 1.2 * limit_bytes for taken, said in tries)


def test_look_that_never_ends_costs_bounded_memory() -> None:
    def change(cache: MetadataCache, n: int) -> None:
        cache.begin()
        for number in range(n):
            cache.name_changed(handle(number), b"name-%015d" % number)

    tries = (taken_bytes(change, 0, 50_000) for _ in range(_N_TRIES))
    assert any(taken < 2 * MIB for taken, _ in tries)


def test_after_the_last_look_no_changes_are_noted() -> None:
    def look(cache: MetadataCache, n: int) -> None:
        cache.begin()
        for number in range(n):
            cache.attributes_changed(handle(number))
        cache.end()

    tries = (taken_bytes(look, 0, 1000) for _ in range(_N_TRIES))
    assert any(taken < 4096 for taken, _ in tries)
