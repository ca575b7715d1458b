"""What is due when, and in which order: pinned things never, young things not yet; and the windows for work."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.human_units import DURATION_MAX_S
from fusefs.core.names import ContainerId, make_id
from fusefs.core.orphan_age import Clock, FirstSight, advance_clock, first_sight, start_clock
from fusefs.core.policy import (
    DAY_MIN,
    DeleteAs,
    KnownOrphan,
    OrphanSize,
    Quota,
    RetentionRules,
    SpaceNeeded,
    TimeWindow,
    VolumePolicy,
    Watermark,
    beyond_quota,
    choose_early_deletions,
    due_in_s,
    hurries,
    is_at_or_below,
    opens_in_s,
    parse_window,
    warning_in_s,
)

S = 1_000_000_000
NOW = 1_800_000_000 * S
DAY_S = 86_400
CLOCK = start_clock(NOW, 0)

durations = st.integers(0, DURATION_MAX_S)
times_ns = st.integers(0, 2 * NOW)
origins = st.sampled_from([None, b"/", b"/scratch/job", b"/scratch/keep/this"])
rules = st.builds(
    RetentionRules,
    retention_s=durations | st.none(),
    minimum_age_s=durations,
    keep=st.sampled_from([(), ("*/keep/*",), ("*",)]),
)


def orphan(created_ns: int, retention_s: int | None = DEFAULT_RETENTION_S, origin: bytes | None = None) -> KnownOrphan:
    """An orphan that was not seen yet."""
    return KnownOrphan(make_id("20261121T000000", 0, b"job", bytes(6)), created_ns, retention_s, origin)


orphans = st.builds(orphan, times_ns, durations | st.just(DEFAULT_RETENTION_S) | st.none(), origins)


def later(clock: Clock, seconds: int, jump_s: int = 0) -> Clock:
    """The clock after some time; it was set meanwhile by `jump_s`."""
    boot_ns = clock.boot_ns + seconds * S
    return advance_clock(clock, max(0, clock.wall_ns + (seconds + jump_s) * S), boot_ns)


def test_usual_retention_is_the_rules() -> None:
    assert due_in_s(orphan(NOW), RetentionRules(retention_s=3600), CLOCK) == 3600


def test_retention_that_was_asked_for_is_kept() -> None:
    assert due_in_s(orphan(NOW, 5 * DAY_S), RetentionRules(retention_s=3600), CLOCK) == 5 * DAY_S


def test_retention_below_the_minimum_age_that_was_asked_for_is_kept() -> None:
    assert due_in_s(orphan(NOW, 5), RetentionRules(minimum_age_s=600), CLOCK) == 5


def test_rules_without_a_retention_make_nothing_due_until_space_is_wanted() -> None:
    known_orphan = orphan(NOW - DAY_S * S)
    assert due_in_s(known_orphan, RetentionRules(retention_s=None), CLOCK) is None
    due_s = due_in_s(known_orphan, RetentionRules(retention_s=None), CLOCK, early=True)
    assert due_s is not None
    assert due_s <= 0


def test_space_that_is_wanted_gives_up_the_retention_but_not_the_first_minutes() -> None:
    assert due_in_s(orphan(NOW - 60 * S, 5 * DAY_S), RetentionRules(minimum_age_s=600), CLOCK, early=True) == 540


@given(orphans, rules, st.booleans())
def test_nothing_is_due_below_the_minimum_age_unless_its_owner_asked_for_less(
    known: KnownOrphan, rules: RetentionRules, early: bool
) -> None:
    due_s = due_in_s(known, rules, CLOCK, early=early)
    if due_s is not None and known.retention_s is not None:
        least_s = min(rules.minimum_age_s, known.retention_s)
        if known.retention_s == DEFAULT_RETENTION_S:
            least_s = rules.minimum_age_s
        age_s = max(0, (NOW - known.created_ns) / S)
        assert due_s >= least_s - age_s - 1e-3


@given(times_ns, origins, rules, st.booleans())
def test_pinned_is_never_due(created_ns: int, origin: bytes | None, rules: RetentionRules, early: bool) -> None:
    assert due_in_s(orphan(created_ns, None, origin), rules, CLOCK, early=early) is None


@given(times_ns, durations, rules, st.booleans())
def test_what_a_pattern_keeps_is_never_due(
    created_ns: int, retention_s: int, rules: RetentionRules, early: bool
) -> None:
    known_orphan = orphan(created_ns, retention_s, b"/scratch/keep/this")
    assert due_in_s(known_orphan, rules._replace(keep=("/scratch/keep/*",)), CLOCK, early=early) is None


@given(orphans, rules)
def test_what_is_claimed_is_due(known: KnownOrphan, rules: RetentionRules) -> None:
    assert due_in_s(known._replace(is_claimed=True), rules, CLOCK) == 0


@given(orphans, rules)
def test_early_is_never_later(known: KnownOrphan, rules: RetentionRules) -> None:
    early, usual = due_in_s(known, rules, CLOCK, early=True), due_in_s(known, rules, CLOCK)
    assert usual is None or (early is not None and early <= usual)


@given(orphans, rules, st.integers(0, 100 * DAY_S))
def test_time_brings_it_nearer_by_as_much_as_goes_by(known: KnownOrphan, rules: RetentionRules, seconds: int) -> None:
    known = known._replace(sight=first_sight(CLOCK, known.created_ns))
    before, after = due_in_s(known, rules, CLOCK), due_in_s(known, rules, later(CLOCK, seconds))
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after == pytest.approx(before - seconds, abs=1e-3)


@given(orphans, rules, st.lists(st.tuples(st.integers(0, DAY_S), st.integers(-DURATION_MAX_S, DURATION_MAX_S))))
def test_no_jump_makes_it_due_early(known: KnownOrphan, rules: RetentionRules, looks: list[tuple[int, int]]) -> None:
    known = known._replace(sight=first_sight(CLOCK, known.created_ns))
    clock = CLOCK
    for seconds, jump_s in looks:
        clock = later(clock, seconds, jump_s)
    before, after = due_in_s(known, rules, CLOCK), due_in_s(known, rules, clock)
    if before is not None and after is not None:
        assert after >= before - sum(seconds for seconds, _jump in looks) - 1e-3


@given(rules, durations, st.integers(-DURATION_MAX_S, DURATION_MAX_S))
def test_one_from_the_future_is_due_at_last(rules: RetentionRules, retention_s: int, jump_s: int) -> None:
    rules = rules._replace(keep=(), retention_s=DEFAULT_RETENTION_S)
    known_orphan = orphan(2 * NOW, retention_s)
    known_orphan = known_orphan._replace(sight=first_sight(CLOCK, known_orphan.created_ns))
    due_s = due_in_s(known_orphan, rules, later(CLOCK, 2 * DURATION_MAX_S, jump_s))
    assert due_s is not None
    assert due_s <= 0


# Rules for places.


def test_a_warning_comes_so_long_before_the_end_of_the_term() -> None:
    assert warning_in_s(orphan(NOW), RetentionRules(), CLOCK, 3600) == DEFAULT_RETENTION_S - 3600


@given(orphans, rules, st.integers(1, DURATION_MAX_S))
def test_a_warning_is_ahead_of_what_is_due_by_itself_and_of_nothing_else(
    known: KnownOrphan, rules: RetentionRules, before_s: int
) -> None:
    due_s, wait_s = due_in_s(known, rules, CLOCK), warning_in_s(known, rules, CLOCK, before_s)
    assert wait_s is None or (due_s is not None and due_s > 0 and wait_s == due_s - before_s)


def test_who_keeps_it_no_longer_than_that_is_not_warned() -> None:
    for retention_s, is_warned in ((3600, False), (3601, True)):
        known_orphan = orphan(NOW, retention_s)
        for seconds in (0, 3000):
            wait_s = warning_in_s(
                known_orphan._replace(sight=first_sight(CLOCK, NOW)), RetentionRules(), later(CLOCK, seconds), 3600
            )
            assert (wait_s is not None) == is_warned


def test_of_what_is_claimed_nothing_is_told() -> None:
    assert warning_in_s(orphan(NOW)._replace(is_claimed=True), RetentionRules(), CLOCK, 3600) is None


def test_deepest_path_gives_the_rules() -> None:
    deep, deeper = RetentionRules(retention_s=1), RetentionRules(retention_s=2)
    volume = VolumePolicy(b"/v", paths=((b"/v/a/b", deeper), (b"/v/a", deep)))
    assert volume.rules_for(b"/v/a/b/c") == deeper
    assert volume.rules_for(b"/v/a/b") == deeper
    assert volume.rules_for(b"/v/a/bc") == deep
    assert volume.rules_for(b"/v/ab") == volume.rules
    assert volume.rules_for(None) == volume.rules


@pytest.mark.parametrize(
    ("path", "top", "is_there"),
    [(b"/a", b"/", True), (b"/", b"/", True), (b"/a/b", b"/a", True), (b"/ab", b"/a", False), (b"/", b"/a", False)],
)
def test_path_lies_at_or_below_another(path: bytes, top: bytes, is_there: bool) -> None:
    assert is_at_or_below(path, top) is is_there


def test_root_acts_for_those_who_are_named_alone() -> None:
    rules = RetentionRules(delete_as=DeleteAs.ROOT, users=("ci", "12001"))
    assert rules.deletes_as_root(7, "ci")
    assert rules.deletes_as_root(12001, "12001")
    assert not rules.deletes_as_root(1000, "alice")
    assert not rules._replace(delete_as=DeleteAs.OWNER).deletes_as_root(7, "ci")


def test_pattern_spans_directories() -> None:
    keeping = RetentionRules(keep=("/scratch/*/results",))
    assert keeping.keeps(b"/scratch/a/b/results")
    assert not keeping.keeps(b"/scratch/a/b/results/c")
    assert keeping.keeps(b"/scratch/\xff/results")
    assert not keeping.keeps(None)


# Space.


@given(st.floats(0, 1), st.booleans())
def test_nothing_hurries_without_a_watermark_or_a_count(free: float, hurried: bool) -> None:
    assert not hurries(None, free, hurried)
    assert not hurries(Watermark(), None, hurried)


@pytest.mark.parametrize(
    ("free", "hurried", "hurries_on"),
    [(0.04, False, True), (0.05, False, False), (0.07, False, False), (0.07, True, True), (0.10, True, False)],
)
def test_hurrying_begins_at_low_and_ends_at_high(free: float, hurried: bool, hurries_on: bool) -> None:
    assert hurries(Watermark(0.05, 0.10), free, hurried) is hurries_on


def sized(number: int, age_s: int, n_bytes: int, retention_s: int | None = DEFAULT_RETENTION_S) -> KnownOrphan:
    """An orphan of a known size, 10 entries in it."""
    identifier = make_id("20261121T000000", number, b"job", bytes(6))
    created_ns = NOW - age_s * S
    return KnownOrphan(
        identifier, created_ns, retention_s, None, False, OrphanSize(10, n_bytes), FirstSight(0, age_s * S)
    )


def going(trash: list[KnownOrphan], volume: VolumePolicy, *others: list[KnownOrphan]) -> list[ContainerId]:
    """What goes for a quota of one user's orphans, and of others'."""
    held = dict(enumerate([trash, *others]))
    return choose_early_deletions(held, beyond_quota(held, volume, 1000), volume, CLOCK)


def test_the_oldest_go_until_the_rest_is_within_the_quota() -> None:
    trash = [sized(0, 1000, 40), sized(1, 3000, 40), sized(2, 2000, 40)]
    assert going(trash, VolumePolicy(b"/v", quota=Quota(bytes=80))) == [trash[1].id]
    assert going(trash, VolumePolicy(b"/v", quota=Quota(bytes=79))) == [trash[1].id, trash[2].id]


def test_quota_of_inodes_and_of_a_share_count_as_well() -> None:
    trash = [sized(0, 1000, 40), sized(1, 3000, 40)]
    assert going(trash, VolumePolicy(b"/v", quota=Quota(inodes=15))) == [trash[1].id]
    assert going(trash, VolumePolicy(b"/v", quota=Quota(share=0.05))) == [trash[1].id]
    assert going(trash, VolumePolicy(b"/v", quota=Quota(share=0.08))) == []


quotas = st.builds(Quota, st.integers(0, 500) | st.none(), st.integers(0, 200) | st.none(), st.floats(0, 1) | st.none())
shapes = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 100), st.sampled_from([None, DEFAULT_RETENTION_S, 5 * DAY_S])),
    max_size=12,
)
trashes = shapes.map(lambda each: [sized(number, *shape) for number, shape in enumerate(each)])
holders = st.lists(shapes, max_size=5).map(
    lambda users: {
        uid: [sized(100 * uid + number, *shape) for number, shape in enumerate(each)] for uid, each in enumerate(users)
    }
)


@given(trashes, quotas)
def test_quota_lets_no_pinned_and_no_young_one_go_and_no_more_than_needed(
    trash: list[KnownOrphan], quota: Quota
) -> None:
    volume = VolumePolicy(b"/v", quota=quota)
    gone = going(trash, volume)
    by_id = {known.id: known for known in trash}
    for identifier in gone:
        due_s = due_in_s(by_id[identifier], volume.rules, CLOCK, early=True)
        assert due_s is not None
        assert due_s <= 0

    def is_within(gone: list[str]) -> bool:
        sizes = [known.size for known in trash if known.id not in gone and known.size]
        limit = quota.limit_bytes(1000)
        few = quota.inodes is None or sum(size.n_inodes for size in sizes) <= quota.inodes
        return few and (limit is None or sum(size.n_bytes for size in sizes) <= limit)

    could_go = [known.id for known in trash if known.retention_s is not None and NOW - known.created_ns >= 600 * S]
    assert is_within(list(gone)) or sorted(gone) == sorted(could_go)
    if gone:
        assert not is_within(list(gone[:-1]))


def test_whoever_holds_most_gives_up_first() -> None:
    much, little = [sized(0, 1000, 400), sized(1, 2000, 400)], [sized(2, 9000, 10)]
    assert going(little, VolumePolicy(b"/v", quota=Quota(bytes=500)), much) == [much[1].id]
    assert going(little, VolumePolicy(b"/v", quota=Quota(bytes=9)), much) == [much[1].id, much[0].id, little[0].id]


def test_what_one_user_pinned_takes_nothing_from_others() -> None:
    pinned, little = [sized(0, 1000, 400, None)], [sized(1, 9000, 90), sized(2, 8000, 90)]
    assert going(pinned, VolumePolicy(b"/v", quota=Quota(bytes=360)), little) == []
    assert going(pinned, VolumePolicy(b"/v", quota=Quota(bytes=300)), little) == [little[0].id]


def test_a_quota_waits_for_young_orphans_of_whoever_holds_most_and_low_space_does_not() -> None:
    young, old, volume = [sized(0, 60, 80)], [sized(1, 9000, 60)], VolumePolicy(b"/v", quota=Quota(bytes=100))
    assert going(young, volume, old) == []
    assert going([sized(0, 600, 80)], volume, old) == [young[0].id]
    assert choose_early_deletions({1: young, 2: old}, SpaceNeeded(n_bytes=40), volume, CLOCK, is_urgent=True) == [
        old[0].id
    ]


@given(holders, st.integers(0, 600))
def test_whoever_holds_no_more_than_an_equal_share_loses_nothing(
    held: dict[int, list[KnownOrphan]], n_bytes: int
) -> None:
    gone = set(choose_early_deletions(held, SpaceNeeded(n_bytes=n_bytes), VolumePolicy(b"/v"), CLOCK))
    amounts = {uid: sum(known.size.n_bytes for known in each if known.size) for uid, each in held.items()}
    for uid, each in held.items():
        if amounts[uid] * len(held) <= sum(amounts.values()) - n_bytes:
            assert not gone & {known.id for known in each}


def test_where_space_is_low_nothing_goes_that_could_not_help() -> None:
    small, large = [sized(n, 2000, 1) for n in range(5)], [sized(9, 1000, 600)]
    wanted, volume = SpaceNeeded(n_bytes=1000), VolumePolicy(b"/v")
    assert choose_early_deletions({1: small}, wanted, volume, CLOCK, is_urgent=True) == []
    assert choose_early_deletions({1: small, 2: large}, wanted, volume, CLOCK, is_urgent=True) == [large[0].id]
    assert len(choose_early_deletions({1: small, 2: large}, wanted, volume, CLOCK)) == 6


def test_a_volume_that_runs_full_does_not_wait_for_a_window() -> None:
    at_night = VolumePolicy(b"/v", windows=(TimeWindow(22 * 60, 6 * 60),))
    assert at_night.closed_s(12 * 3600, hurries=False) == 10 * 3600
    assert at_night.closed_s(12 * 3600, hurries=True) == 0
    assert at_night.closed_s(23 * 3600, hurries=False) == 0


def test_each_node_has_its_part_of_a_rate_and_never_nothing() -> None:
    policy = VolumePolicy(b"/v", n_nodes=4)
    assert [policy.node_share(rate) for rate in (None, 1000, 7, 1)] == [None, 250, 1, 1]


H = 3600
minutes = st.integers(0, DAY_MIN - 1)
windows = st.tuples(minutes, minutes).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: TimeWindow(*pair))
seconds = st.integers(0, 24 * H - 1)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("22:00-06:00", TimeWindow(1320, 360)),
        ("9:30-12:00", TimeWindow(570, 720)),
        ("00:00-24:00", TimeWindow(0, 1440)),
    ],
)
def test_window_is_typed_as_two_times(text: str, window: TimeWindow) -> None:
    assert parse_window(text) == window


@pytest.mark.parametrize(
    "text", ["", "22-06", "24:00-06:00", "22:00-24:01", "22:60-06:00", "06:00-06:00", "22:00 - 06:00", "\u0661:00-2:00"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_window(text)


@given(windows)
def test_shown_window_reads_back(window: TimeWindow) -> None:
    assert parse_window(str(window)) == window


@pytest.mark.parametrize(
    ("second", "waits_s"),
    [(22 * H, 0), (23 * H + 3599, 0), (0, 0), (6 * H - 1, 0), (6 * H, 16 * H), (22 * H - 1, 1)],
)
def test_window_over_midnight(second: int, waits_s: int) -> None:
    assert opens_in_s([TimeWindow(1320, 360)], second) == waits_s


def test_without_windows_it_is_always_open() -> None:
    assert opens_in_s([], 12 * H) == 0


@given(st.lists(windows, min_size=1), seconds)
def test_of_several_the_next_counts(several: list[TimeWindow], second: int) -> None:
    assert opens_in_s(several, second) == min(opens_in_s([window], second) for window in several)


@given(windows, seconds)
def test_it_is_open_when_the_wait_is_over_and_not_before(window: TimeWindow, second: int) -> None:
    wait_s = opens_in_s([window], second)
    assert opens_in_s([window], (second + wait_s) % (24 * H)) == 0
    if wait_s:
        assert opens_in_s([window], (second + wait_s - 1) % (24 * H)) == 1
