"""The cache against dicts that forget nothing: it may know less, and never tells anything else."""

import errno
import stat

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusefs.core.metadata_cache import (
    ACCESS_ACL,
    CAPABILITY,
    Attributes,
    Dirent,
    Epoch,
    MetadataCache,
    PackedEntries,
    SourceKey,
)

LIFETIME_S = 8.0
LARGE, TINY = 1 << 24, 2500

Key = tuple[str, SourceKey] | tuple[str, SourceKey, bytes]
"""What can be known: kind, inode, name."""

SOURCES: list[SourceKey] = [(8, b"a"), (8, b"b"), (8, b"long handle" * 9), (8, 12, 99), (9, 12, 99)]
NAMES = [b"x", b"y", b"long" * 50]
UIDS, XATTRS = [0, 1000], [ACCESS_ACL, CAPABILITY]

sources = st.sampled_from(SOURCES)
names = st.sampled_from(NAMES)
listings = st.lists(st.tuples(names, st.integers(1, 9), st.integers(1, 9), st.just(8)), max_size=30)
uids, xattr_names = st.sampled_from(UIDS), st.sampled_from(XATTRS)
answers = st.just(errno.ENODATA) | st.binary(max_size=40)
attributes = st.builds(
    lambda ino, size, mtime_ns: Attributes(8, ino, stat.S_IFREG, 1, 0, 0, 0, size, 0, 4096, -1, mtime_ns, 0, 0),
    st.integers(1, 2**64 - 1), st.integers(0, 9), st.integers(-9, 9),
)  # fmt: skip


class Truth(RuleBasedStateMachine):
    """Looks begin, learn and end, in any order, while things change and time goes on.

    model    what may be told, each with its deadline
    xattrs   the same of extended attributes: all that was seen since the last change
    changed  for each thing the number of its newest change, never forgotten
    looks    those that have not ended: the cache's epoch, the number of changes before, when they began
    """

    limit_bytes = LARGE

    @initialize()
    def begin_with_nothing(self) -> None:
        self.cache = MetadataCache(self.limit_bytes, LIFETIME_S)
        self.model: dict[Key, tuple[object, float]] = {}
        self.xattrs: dict[tuple[SourceKey, int, bytes], list[tuple[bytes | int, float]]] = {}
        self.changed: dict[Key, int] = {}
        self.n_changes = 0
        self.looks: list[tuple[Epoch, int, float]] = []
        self.now_s = 100.0

    @rule(passed_s=st.sampled_from([0.5, 3.0, LIFETIME_S]))
    def time_goes_on(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def begin(self) -> None:
        self.looks.append((self.cache.begin_lookup(), self.n_changes, self.now_s))

    @precondition(lambda self: self.looks)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.looks.pop(data.draw(st.integers(0, len(self.looks) - 1)))
        self.cache.end_lookup()

    def a_look(self, data: st.DataObject) -> tuple[Epoch, int, float]:
        """One of those that go on, or one that needs no time."""
        return data.draw(st.sampled_from([(self.cache.epoch, self.n_changes, self.now_s), *self.looks]))

    def learn(self, key: Key, what: object, n_changes: int, began_s: float) -> None:
        until_s = began_s + LIFETIME_S
        if self.changed.get(key, 0) <= n_changes and self.model.get(key, (None, until_s))[1] <= until_s:
            self.model[key] = (what, until_s)

    @rule(data=st.data(), source=sources, seen=attributes)
    def learn_attributes(self, data: st.DataObject, source: SourceKey, seen: Attributes) -> None:
        epoch, n_changes, began_s = self.a_look(data)
        self.cache.learn_attributes(source, seen, epoch, began_s)
        self.learn(("attributes", source), seen, n_changes, began_s)

    @rule(data=st.data(), directory=sources, name=names, source=st.none() | sources)
    def learn_name(self, data: st.DataObject, directory: SourceKey, name: bytes, source: SourceKey | None) -> None:
        epoch, n_changes, began_s = self.a_look(data)
        self.cache.learn_name(directory, name, source, epoch, began_s)
        self.learn(("name", directory, name), (source,), n_changes, began_s)

    @rule(data=st.data(), source=sources, leads_to=names)
    def learn_target(self, data: st.DataObject, source: SourceKey, leads_to: bytes) -> None:
        epoch, n_changes, began_s = self.a_look(data)
        self.cache.learn_target(source, leads_to, epoch, began_s)
        self.learn(("target", source), leads_to, n_changes, began_s)

    @rule(data=st.data(), source=sources, uid=uids, name=xattr_names, answer=answers)
    def learn_xattr(self, data: st.DataObject, source: SourceKey, uid: int, name: bytes, answer: bytes | int) -> None:
        epoch, n_changes, began_s = self.a_look(data)
        self.cache.learn_xattrs(source, {name: answer}, epoch, began_s, uid)
        if self.changed.get(("xattrs", source), 0) <= n_changes:
            self.xattrs.setdefault((source, uid, name), []).append((answer, began_s + LIFETIME_S))

    @rule(data=st.data(), directory=sources, entries=listings)
    def learn_listing(self, data: st.DataObject, directory: SourceKey, entries: list[Dirent]) -> None:
        epoch, n_changes, began_s = self.a_look(data)
        self.cache.learn_listing(directory, PackedEntries(entries), epoch, began_s)
        self.learn(("listing", directory), entries, n_changes, began_s)

    def change(self, *keys: Key) -> None:
        """These are not known any more. Who looked before learns no target where attributes changed."""
        self.n_changes += 1
        for key in keys:
            self.model.pop(key, None)
            self.changed[key] = self.n_changes
            if key[0] == "attributes":
                self.changed["target", key[1]] = self.n_changes
            if key[0] == "xattrs":
                self.xattrs = {one: seen for one, seen in self.xattrs.items() if one[0] != key[1]}

    @rule(source=sources)
    def change_attributes(self, source: SourceKey) -> None:
        self.cache.note_attributes_change(source)
        self.change(("attributes", source), ("xattrs", source))

    @rule(source=sources)
    def read(self, source: SourceKey) -> None:
        self.cache.note_access(source)
        self.change(("attributes", source))

    @rule(directory=sources, name=names)
    def change_name(self, directory: SourceKey, name: bytes) -> None:
        self.cache.note_name_change(directory, name)
        self.change(("name", directory, name), ("listing", directory), ("attributes", directory))

    @rule(source=sources)
    def change_directory(self, source: SourceKey) -> None:
        self.cache.note_directory_change(source)
        self.change(*self.everything(source))

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.change(*(key for source in SOURCES for key in self.everything(source)))

    def everything(self, source: SourceKey) -> list[Key]:
        kinds: list[Key] = [(kind, source) for kind in ("attributes", "listing", "target", "xattrs")]
        return [*kinds, *(("name", source, name) for name in NAMES)]

    def told(self) -> dict[Key, tuple[object, float]]:
        """All that the cache tells now, with deadlines; where it tells none, with that of the model."""
        told: dict[Key, tuple[object, float]] = {}
        for source in SOURCES:
            if (attributes := self.cache.attributes(source, self.now_s)) is not None:
                told["attributes", source] = (attributes[0], self.now_s + attributes[1])
            for name in NAMES:
                if (meant := self.cache.name(source, name, self.now_s)) is not None:
                    told["name", source, name] = ((meant[0],), self.now_s + meant[1])
            if (target := self.cache.target(source, self.now_s)) is not None:
                told["target", source] = (target, self.model.get(("target", source), (None, 0.0))[1])
            if (entries := self.cache.listing(source, self.now_s)) is not None:
                told["listing", source] = (list(entries), self.model.get(("listing", source), (None, 0.0))[1])
        return told

    def true(self) -> dict[Key, tuple[object, float]]:
        """What the model holds and what has not expired."""
        return {key: (what, until_s) for key, (what, until_s) in self.model.items() if until_s > self.now_s}

    @invariant()
    def tells_the_truth(self) -> None:
        told, true = self.told(), self.true()
        assert {key: true.get(key) for key in told} == told
        # What found no room is not there to be compared with: an older look, which is good yet, may be learned then.
        self.model = {key: seen for key, seen in self.model.items() if key in told}

    @invariant()
    def tells_each_of_xattrs_what_he_was_told(self) -> None:
        for source in SOURCES:
            for uid in UIDS:
                for name in XATTRS:
                    answer = self.cache.xattr(source, name, self.now_s, uid)
                    seen = self.xattrs.get((source, uid, name), [])
                    assert answer is None or any(one == answer and until_s > self.now_s for one, until_s in seen)

    @invariant()
    def keeps_to_its_size(self) -> None:
        assert self.cache.size_bytes <= self.limit_bytes or len(self.cache) == 0

    @invariant()
    def knows_which_looks_are_still_true(self) -> None:
        for epoch, n_changes, _ in self.looks:
            for source in SOURCES:
                changed = self.changed.get(("attributes", source), 0), self.changed.get(("name", source, b"x"), 0)
                if self.cache.is_unchanged(epoch, source):
                    assert changed[0] <= n_changes
                if self.cache.is_name_unchanged(epoch, source, b"x"):
                    assert changed[1] <= n_changes

    def teardown(self) -> None:
        """What is forgotten one by one is not counted any more."""
        if hasattr(self, "cache"):
            for source in SOURCES:
                self.cache.note_directory_change(source)
            assert len(self.cache) == 0
            empty_bytes = self.cache.size_bytes
            self.cache.clear()
            assert empty_bytes - self.cache.size_bytes < 1024  # the table's own room


class Large(Truth):
    """Where there is room, all is told that is true."""

    @invariant()
    def forgets_nothing(self) -> None:
        assert self.told() == self.true()


class Tiny(Truth):
    limit_bytes = TINY


class NoSize(Truth):
    limit_bytes = 0

    @invariant()
    def remembers_nothing(self) -> None:
        assert self.told() == {}


TestLargeCache = Large.TestCase
TestTinyCache = Tiny.TestCase
TestCacheOfNoSize = NoSize.TestCase
