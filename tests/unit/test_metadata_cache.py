"""The cache may forget anything, takes the memory that it says, and never tells what has expired or changed."""

import errno
import stat
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.metadata_cache import (
    ACCESS_ACL,
    CAPABILITY,
    DEFAULT_ACL,
    LABEL,
    NAMES,
    Answers,
    Attributes,
    Dirent,
    Epoch,
    MetadataCache,
    PackedEntries,
    SourceKey,
    UserAnswers,
    is_cached_xattr,
    pack_xattrs,
    unpack_xattrs,
)

LARGE = 1 << 20
LIFETIME_S = 10.0
DIRECTORY, FILE, OTHER = (8, b"directory"), (8, b"file"), (8, b"other")


def seen(ino: int = 12, *, mtime_ns: int = 5) -> Attributes:
    return Attributes(8, ino, stat.S_IFREG | 0o644, 1, 1000, 100, 0, 1 << 40, 8, 4096, -1, mtime_ns, 6, 7)


def listed(*names: bytes) -> PackedEntries:
    return PackedEntries((name, 12, number + 1, 8) for number, name in enumerate(names))


def full_cache(limit_bytes: int = LARGE) -> MetadataCache:
    """Knows a directory with one name, and the file that has it."""
    cache = MetadataCache(limit_bytes, LIFETIME_S)
    learn_all(cache, cache.epoch)
    return cache


def knows(cache: MetadataCache, now_s: float = 1.0) -> set[str]:
    answers = {
        "file": cache.attributes(FILE, now_s),
        "directory": cache.attributes(DIRECTORY, now_s),
        "a": cache.name(DIRECTORY, b"a", now_s),
        "missing": cache.name(DIRECTORY, b"missing", now_s),
        "listing": cache.listing(DIRECTORY, now_s),
        "target": cache.target(OTHER, now_s),
    }
    return {what for what, answer in answers.items() if answer is not None}


ALL = {"file", "directory", "a", "missing", "listing", "target"}


def test_lifetime_without_end_never_expires() -> None:
    cache = MetadataCache(LARGE, float("inf"))
    cache.learn_attributes(FILE, seen(), cache.epoch, 0.0)
    assert cache.attributes(FILE, 1e12) == (seen(), float("inf"))


def test_lifetime_of_nothing_remembers_nothing() -> None:
    cache = MetadataCache(LARGE, 0.0)
    cache.learn_attributes(FILE, seen(), cache.epoch, 1.0)
    assert cache.attributes(FILE, 1.0) is None


Change = Callable[[MetadataCache], None]
CHANGES: dict[str, tuple[Change, set[str]]] = {
    "attributes of a file": (lambda cache: cache.note_attributes_change(FILE), ALL - {"file"}),
    "attributes of a directory": (lambda cache: cache.note_attributes_change(DIRECTORY), ALL - {"directory"}),
    "name, with its directory's listing and attributes": (
        lambda cache: cache.note_name_change(DIRECTORY, b"a"), {"file", "missing", "target"},
    ),
    "new name": (lambda cache: cache.note_name_change(DIRECTORY, b"missing"), {"file", "a", "target"}),
    "directory": (lambda cache: cache.note_directory_change(DIRECTORY), {"file", "target"}),
    "target of a link that is gone": (lambda cache: cache.note_directory_change(OTHER), ALL - {"target"}),
    "all": (MetadataCache.clear, set()),
}  # fmt: skip
"""What changed, and what is still known."""


def test_time_too_late_for_nanoseconds_is_not_remembered_nor_what_was_before() -> None:
    cache = full_cache()
    cache.learn_attributes(FILE, seen(mtime_ns=2**63), cache.epoch, 1.0)
    assert cache.attributes(FILE, 1.0) is None


def learn_all(cache: MetadataCache, epoch: Epoch) -> set[str]:
    """What is known after a look that began with an epoch has learnt all."""
    cache.learn_attributes(FILE, seen(), epoch, 0.0)
    cache.learn_attributes(DIRECTORY, seen(2), epoch, 0.0)
    cache.learn_name(DIRECTORY, b"a", FILE, epoch, 0.0)
    cache.learn_name(DIRECTORY, b"missing", None, epoch, 0.0)
    cache.learn_listing(DIRECTORY, listed(b"a"), epoch, 0.0)
    cache.learn_target(OTHER, b"to/somewhere", epoch, 0.0)
    return knows(cache)


@pytest.mark.parametrize(("change", "left"), CHANGES.values(), ids=CHANGES)
def test_what_changed_since_a_look_began_is_not_learnt_and_all_else_is(change: Change, left: set[str]) -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin_lookup()
    change(cache)
    assert learn_all(cache, epoch) == left


def test_who_learns_after_his_end_is_refused_all_that_may_have_changed() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin_lookup()
    cache.note_attributes_change((8, b"stranger"))
    cache.end_lookup()
    assert learn_all(cache, epoch) == set()


@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("limit_bytes", [0, LARGE])
def test_says_whether_what_a_look_saw_is_unchanged(limit_bytes: int, change: str | None) -> None:
    cache = MetadataCache(limit_bytes, LIFETIME_S)
    epoch = cache.begin_lookup()
    left = ALL
    if change is not None:
        act, left = CHANGES[change]
        act(cache)
    is_true = cache.is_unchanged(epoch, FILE) and cache.is_name_unchanged(epoch, DIRECTORY, b"a")
    assert is_true == ({"file", "a"} <= left)


def test_what_was_not_asked_for_longest_goes_first() -> None:
    cache = MetadataCache(4096, LIFETIME_S)
    cache.learn_attributes(FILE, seen(), cache.epoch, 0.0)
    for number in range(100):
        cache.learn_attributes((8, b"%d" % number), seen(), cache.epoch, 0.0)
        assert cache.attributes(FILE, 1.0) is not None
    assert cache.attributes((8, b"99"), 1.0) is not None
    assert cache.attributes((8, b"0"), 1.0) is None


def test_name_that_is_asked_for_keeps_its_directory() -> None:
    cache = MetadataCache(8192, LIFETIME_S)
    cache.learn_name(DIRECTORY, b"a", FILE, cache.epoch, 0.0)
    for number in range(100):
        cache.learn_attributes((8, b"%d" % number), seen(), cache.epoch, 0.0)
        assert cache.name(DIRECTORY, b"a", 1.0) is not None


def test_directory_with_very_many_names_does_not_push_out_the_others() -> None:
    cache = full_cache()
    for number in range(100_000):
        cache.learn_name(OTHER, b"%d" % number, None, cache.epoch, 0.0)
    assert knows(cache) >= {"file", "directory", "a"}


def test_very_long_listing_is_not_remembered() -> None:
    cache = full_cache()
    entries = listed(*(b"%d" % number for number in range(20_000)))
    assert entries.n_bytes > cache.largest_bytes
    cache.learn_listing(OTHER, entries, cache.epoch, 0.0)
    assert cache.listing(OTHER, 1.0) is None
    assert knows(cache) == ALL


def test_listing_that_is_too_long_by_now_is_forgotten_as_it_was() -> None:
    cache = full_cache()
    cache.learn_listing(DIRECTORY, listed(*(b"%d" % number for number in range(20_000))), cache.epoch, 1.0)
    assert knows(cache) == ALL - {"listing"}


HAS_ACL: Answers = {ACCESS_ACL: b"\2\0\0\0", CAPABILITY: errno.ENODATA}


def xattrs(cache: MetadataCache, now_s: float, uid: int = 0) -> Answers:
    found = {name: cache.xattr(FILE, name, now_s, uid) for name in (ACCESS_ACL, CAPABILITY, DEFAULT_ACL)}
    return {name: answer for name, answer in found.items() if answer is not None}


def test_tells_no_xattr_of_what_changed_meanwhile() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_xattrs(FILE, HAS_ACL, cache.epoch, 0.0)
    assert xattrs(cache, 1.0) == HAS_ACL
    assert cache.has_xattrs(FILE, HAS_ACL, 1.0)
    assert not cache.has_xattrs(FILE, [ACCESS_ACL, DEFAULT_ACL], 1.0)
    cache.note_attributes_change(FILE)
    assert xattrs(cache, 1.0) == {}


def test_what_is_read_keeps_its_xattrs() -> None:
    cache = full_cache()
    cache.learn_xattrs(FILE, HAS_ACL, cache.epoch, 0.0)
    cache.note_access(FILE)
    assert xattrs(cache, 1.0) == HAS_ACL
    assert cache.attributes(FILE, 1.0) is None


def test_xattrs_seen_at_different_times_expire_with_the_first() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_xattrs(FILE, {ACCESS_ACL: errno.ENODATA}, cache.epoch, 0.0)
    cache.learn_xattrs(FILE, {DEFAULT_ACL: b"1"}, cache.epoch, 1.0)
    assert xattrs(cache, 1.0) == {ACCESS_ACL: errno.ENODATA, DEFAULT_ACL: b"1"}
    assert xattrs(cache, LIFETIME_S) == {}
    cache.learn_xattrs(FILE, {DEFAULT_ACL: b"2"}, cache.epoch, LIFETIME_S)
    assert xattrs(cache, LIFETIME_S + 1) == {DEFAULT_ACL: b"2"}


def test_tells_nobody_what_another_was_told() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_xattrs(FILE, HAS_ACL, cache.epoch, 0.0)
    cache.learn_xattrs(FILE, {ACCESS_ACL: errno.ENODATA}, cache.epoch, 0.0, uid=1000)
    assert xattrs(cache, 1.0) == HAS_ACL
    assert xattrs(cache, 1.0, uid=1000) == {ACCESS_ACL: errno.ENODATA}
    assert xattrs(cache, 1.0, uid=1001) == {}
    for uid in range(1, 200):
        cache.learn_xattrs(FILE, {ACCESS_ACL: b"x" * 1000}, cache.epoch, 0.0, uid=uid)
    assert cache.size_bytes < 64 << 10
    assert xattrs(cache, 1.0, uid=199) == {ACCESS_ACL: b"x" * 1000}


def test_what_nothing_is_known_of_takes_no_room() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_xattrs(FILE, {ACCESS_ACL: errno.EIO, b"user.a": b"1"}, cache.epoch, 0.0)
    assert not len(cache)


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


REMEMBERED = [NAMES, ACCESS_ACL, DEFAULT_ACL, CAPABILITY, LABEL]
ABSENT = [errno.ENODATA, errno.EOPNOTSUPP]
LONG = b"x" * 5000
KEYS = st.tuples(st.integers(0, (1 << 32) - 2), st.sampled_from(REMEMBERED))


@given(st.dictionaries(KEYS, st.binary(max_size=4096) | st.sampled_from(ABSENT)))
def test_what_is_packed_comes_back_but_for_capabilities(known: UserAnswers) -> None:
    packed = pack_xattrs(known)
    left = {key: answer for key, answer in known.items() if key[1] != CAPABILITY or isinstance(answer, int)}
    assert unpack_xattrs(packed) == left
    assert unpack_xattrs(b"12345678" + packed, 8) == left


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (ACCESS_ACL, errno.EIO),
        (ACCESS_ACL, errno.ERANGE),
        (ACCESS_ACL, errno.EACCES),
        (ACCESS_ACL, LONG),
        (b"user.a", b"1"),
    ],
)
def test_what_may_be_otherwise_the_next_time_is_left_out(name: bytes, answer: bytes | int) -> None:
    assert pack_xattrs({(0, name): answer, (0, CAPABILITY): b"1"}) == pack_xattrs({(0, CAPABILITY): b"1"})


def test_who_knows_of_no_xattrs_has_none() -> None:
    assert unpack_xattrs(pack_xattrs({(0, NAMES): errno.ENOSYS})) == {(0, NAMES): errno.EOPNOTSUPP}


def test_that_there_is_none_takes_a_few_bytes() -> None:
    assert len(pack_xattrs({(0, ACCESS_ACL): errno.ENODATA, (0, CAPABILITY): errno.ENODATA})) <= 18


def test_of_others_nothing_is_remembered() -> None:
    assert all(map(is_cached_xattr, REMEMBERED))
    assert not is_cached_xattr(b"user.a")
    assert not is_cached_xattr(b"ceph.dir.rbytes")


N = 25_000
"""What is learnt in a second."""
MIB = 1 << 20


def device() -> int:
    return int("2049")  # not the one number that a constant is


def handle(number: int) -> SourceKey:
    return (device(), b"%012d" % number)


def birth(number: int) -> SourceKey:
    return (device(), 1 << 32 | number, 1 << 60 | number)


def large_seen(number: int) -> Attributes:
    large, time_ns = 1 << 32 | number, 1 << 60 | number
    return Attributes(2049, large, 33188, 1, 1000, 1000, 0, large, large, 4096, time_ns, time_ns, time_ns, time_ns)


def learn_tree(cache: MetadataCache, n: int, source_of: Callable[[int], SourceKey] = handle) -> None:
    """Entries as lookups find them: a hundred in a directory, each with a name of 20 bytes."""
    for number in range(n):
        now_s = number / N
        cache.learn_name(source_of(N + number // 100), b"name-%015d" % number, source_of(number), cache.epoch, now_s)
        cache.learn_attributes(source_of(number), large_seen(number), cache.epoch, now_s)


def learn_attributes(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        cache.learn_attributes(handle(number), large_seen(number), cache.epoch, number / N)


def learn_births(cache: MetadataCache, n: int) -> None:
    learn_tree(cache, n, birth)


def learn_missing(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        cache.learn_name(handle(number // 1000), b"name-%015d" % number, None, cache.epoch, number / N)


def learn_links(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        source = handle(number)
        cache.learn_target(source, b"../target-%010d" % number, cache.epoch, number / N)
        cache.learn_attributes(source, large_seen(number), cache.epoch, number / N)


def learn_xattrs(cache: MetadataCache, n: int) -> None:
    for number in range(n):
        source = handle(number)
        acl = b"acl" * (number % 30) if number % 10 else errno.ENODATA
        answers: Answers = {ACCESS_ACL: acl, CAPABILITY: errno.ENODATA}
        cache.learn_attributes(source, large_seen(number), cache.epoch, number / N)
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
                cache.note_name_change(handle(number // 1000), b"name-%015d" % gone)


def learn_and_delete_all(cache: MetadataCache, n: int) -> None:
    learn_and_delete(cache, n)
    for number in range(999, n, 1000):
        cache.note_name_change(handle(number // 1000), b"name-%015d" % number)


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
        cache.begin_lookup()
        for number in range(n):
            cache.note_name_change(handle(number), b"name-%015d" % number)

    tries = (taken_bytes(change, 0, 50_000) for _ in range(_N_TRIES))
    assert any(taken < 2 * MIB for taken, _ in tries)


def test_after_the_last_look_no_changes_are_noted() -> None:
    def look(cache: MetadataCache, n: int) -> None:
        cache.begin_lookup()
        for number in range(n):
            cache.note_attributes_change(handle(number))
        cache.end_lookup()

    tries = (taken_bytes(look, 0, 1000) for _ in range(_N_TRIES))
    assert any(taken < 4096 for taken, _ in tries)
