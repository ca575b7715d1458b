"""The cache may forget anything, and never tells what has expired or changed since it was seen."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable

import pytest

from fusefs.core.metadata_cache import (
    ACCESS_ACL,
    CAPABILITY,
    DEFAULT_ACL,
    Answers,
    Attributes,
    Epoch,
    MetadataCache,
    PackedEntries,
    SourceKey,
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


def test_what_is_known_comes_back_with_the_time_that_is_left_and_so_does_an_absence() -> None:
    cache = full_cache()
    assert cache.attributes(FILE, 4.0) == (seen(), 6.0)
    assert cache.name(DIRECTORY, b"a", 4.0) == (FILE, 6.0)
    assert cache.name(DIRECTORY, b"missing", 4.0) == (None, 6.0)


def test_name_never_seen_is_not_known() -> None:
    assert full_cache().name(DIRECTORY, b"b", 1.0) is None


def test_target_comes_back() -> None:
    assert full_cache().target(OTHER, 1.0) == b"to/somewhere"


def test_listing_comes_back_in_order() -> None:
    entries = full_cache().listing(DIRECTORY, 1.0)
    assert entries is not None
    assert list(entries) == list(listed(b"a"))


def test_empty_listing_is_known() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_listing(DIRECTORY, listed(), cache.epoch, 0.0)
    entries = cache.listing(DIRECTORY, 1.0)
    assert entries is not None
    assert len(entries) == 0


def test_all_expires_at_the_end_of_its_lifetime() -> None:
    cache = full_cache()
    assert knows(cache, LIFETIME_S - 0.1) == ALL
    assert knows(cache, LIFETIME_S) == set()


def test_lifetime_without_end_never_expires() -> None:
    cache = MetadataCache(LARGE, float("inf"))
    cache.learn_attributes(FILE, seen(), cache.epoch, 0.0)
    assert cache.attributes(FILE, 1e12) == (seen(), float("inf"))


def test_lifetime_of_nothing_remembers_nothing() -> None:
    cache = MetadataCache(LARGE, 0.0)
    cache.learn_attributes(FILE, seen(), cache.epoch, 1.0)
    assert cache.attributes(FILE, 1.0) is None


def test_what_is_seen_again_lives_longer() -> None:
    cache = full_cache()
    cache.learn_attributes(FILE, seen(), cache.epoch, 5.0)
    assert cache.attributes(FILE, 6.0) == (seen(), 9.0)


def test_what_was_seen_earlier_does_not_replace_what_was_seen_later() -> None:
    cache = full_cache()
    cache.learn_attributes(FILE, seen(mtime_ns=99), cache.epoch, -1.0)
    cache.learn_name(DIRECTORY, b"a", None, cache.epoch, -1.0)
    cache.learn_target(OTHER, b"elsewhere", cache.epoch, -1.0)
    cache.learn_listing(DIRECTORY, listed(b"b"), cache.epoch, -1.0)
    assert cache.attributes(FILE, 1.0) == (seen(), 9.0)
    assert cache.name(DIRECTORY, b"a", 1.0) == (FILE, 9.0)
    assert cache.target(OTHER, 1.0) == b"to/somewhere"
    assert list(cache.listing(DIRECTORY, 1.0) or ()) == list(listed(b"a"))


Change = Callable[[MetadataCache], None]
CHANGES: dict[str, tuple[Change, set[str]]] = {
    "attributes of a file": (lambda cache: cache.attributes_changed(FILE), ALL - {"file"}),
    "attributes of a directory": (lambda cache: cache.attributes_changed(DIRECTORY), ALL - {"directory"}),
    "name, with its directory's listing and attributes": (
        lambda cache: cache.name_changed(DIRECTORY, b"a"), {"file", "missing", "target"},
    ),
    "new name": (lambda cache: cache.name_changed(DIRECTORY, b"missing"), {"file", "a", "target"}),
    "directory": (lambda cache: cache.directory_changed(DIRECTORY), {"file", "target"}),
    "target of a link that is gone": (lambda cache: cache.directory_changed(OTHER), ALL - {"target"}),
    "all": (MetadataCache.clear, set()),
}  # fmt: skip
"""What changed, and what is still known."""


@pytest.mark.parametrize(("change", "left"), CHANGES.values(), ids=CHANGES)
def test_what_changed_is_forgotten_and_nothing_else(change: Change, left: set[str]) -> None:
    cache = full_cache()
    change(cache)
    assert knows(cache) == left


def test_clear_gives_back_the_memory() -> None:
    cache = full_cache()
    cache.clear()
    assert cache.size_bytes == MetadataCache(LARGE, LIFETIME_S).size_bytes


def test_incarnation_without_a_handle_is_known_too() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    source: SourceKey = (8, 12, 777)
    cache.learn_attributes(source, seen(), cache.epoch, 0.0)
    cache.learn_name(DIRECTORY, b"a", source, cache.epoch, 0.0)
    assert cache.attributes(source, 1.0) == (seen(), 9.0)
    assert cache.name(DIRECTORY, b"a", 1.0) == (source, 9.0)


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


def test_look_that_saw_no_change_learns_all() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin()
    cache.attributes_changed((8, b"stranger"))
    cache.name_changed((8, b"strange directory"), b"a")
    assert learn_all(cache, epoch) == ALL


@pytest.mark.parametrize(("change", "left"), CHANGES.values(), ids=CHANGES)
def test_what_changed_since_a_look_began_is_not_learnt_and_all_else_is(change: Change, left: set[str]) -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin()
    change(cache)
    assert learn_all(cache, epoch) == left


def test_look_that_began_after_the_change_learns_it() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.begin()
    cache.name_changed(DIRECTORY, b"a")
    cache.attributes_changed(FILE)
    assert learn_all(cache, cache.begin()) == ALL


def test_who_learns_at_once_needs_no_begin() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.attributes_changed(FILE)
    assert learn_all(cache, cache.epoch) == ALL


def test_end_of_one_look_leaves_the_others_refused() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin()
    cache.begin()
    cache.name_changed(DIRECTORY, b"a")
    cache.end()
    assert learn_all(cache, epoch) == {"file", "missing", "target"}


def test_who_learns_after_his_end_is_refused_all_that_may_have_changed() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin()
    cache.attributes_changed((8, b"stranger"))
    cache.end()
    assert learn_all(cache, epoch) == set()


@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("limit_bytes", [0, LARGE])
def test_says_whether_what_a_look_saw_is_unchanged(limit_bytes: int, change: str | None) -> None:
    cache = MetadataCache(limit_bytes, LIFETIME_S)
    epoch = cache.begin()
    left = ALL
    if change is not None:
        act, left = CHANGES[change]
        act(cache)
    is_true = cache.is_unchanged(epoch, FILE) and cache.is_named_so(epoch, DIRECTORY, b"a")
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


def test_cache_of_no_size_remembers_nothing() -> None:
    cache = full_cache(0)
    assert knows(cache) == set()
    assert len(cache) == 0


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
    cache.attributes_changed(FILE)
    assert xattrs(cache, 1.0) == {}


def test_remembers_that_there_is_no_xattr_until_that_expires() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_xattrs(FILE, {ACCESS_ACL: errno.ENODATA}, cache.epoch, 0.0)
    assert xattrs(cache, LIFETIME_S / 2) == {ACCESS_ACL: errno.ENODATA}
    assert xattrs(cache, LIFETIME_S) == {}


def test_what_is_read_keeps_its_xattrs() -> None:
    cache = full_cache()
    cache.learn_xattrs(FILE, HAS_ACL, cache.epoch, 0.0)
    cache.accessed(FILE)
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


def test_refuses_xattrs_seen_before_a_change() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    epoch = cache.begin()
    cache.attributes_changed(FILE)
    cache.learn_xattrs(FILE, HAS_ACL, epoch, 0.0)
    assert xattrs(cache, 0.0) == {}
    cache.end()


def test_what_nothing_is_known_of_takes_no_room() -> None:
    cache = MetadataCache(LARGE, LIFETIME_S)
    cache.learn_xattrs(FILE, {ACCESS_ACL: errno.EIO, b"user.a": b"1"}, cache.epoch, 0.0)
    assert not len(cache)
