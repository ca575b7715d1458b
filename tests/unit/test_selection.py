"""Selections: how an option's value is read, what must all hold for an entry, and what has to be looked at to know."""

import pickle
import stat
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.selection import (
    KINDS,
    Field,
    Matcher,
    Selection,
    SelectionStat,
    SizeBound,
    TimeBound,
    check_exclude,
    check_name,
    check_path,
    check_regex,
    common_types,
    parse_depths,
    parse_size_bound,
    parse_types,
)

TIMED: tuple[Field, ...] = ("mtime", "atime", "ctime")


class Entry(NamedTuple):
    """What a stat tells."""

    st_mode: int = stat.S_IFREG | 0o644
    st_size: int = 100
    st_uid: int = 1
    st_gid: int = 2
    st_atime_ns: int = 50
    st_mtime_ns: int = 50
    st_ctime_ns: int = 50


def takes(selection: Selection, entry: SelectionStat, btime_ns: int | None = None) -> bool:
    return Matcher(selection).matches_stat(entry, btime_ns)


def chosen(selection: Selection, *names: str, upper: str = "") -> list[str]:
    says = Matcher(selection).names_in(upper)
    return [name for name in names if says is None or says(name)]


def pruned(selection: Selection, *names: str, upper: str = "") -> list[str]:
    says = Matcher(selection).pruned_in(upper)
    return [name for name in names if says is not None and says(name)]


def test_nothing_told_is_everything_but_directories() -> None:
    matcher = Matcher(Selection())
    assert matcher.types == frozenset(KINDS) - {"d"}
    assert matcher.names_in("a") is None
    assert matcher.pruned_in("a") is None
    assert not any((matcher.needs_stat, matcher.needs_emptiness))


@pytest.mark.parametrize(
    "selection",
    [
        Selection(names=("*",)),
        Selection(types=frozenset("f")),
        Selection(excludes=("a",)),
        Selection(empty=True),
        Selection(min_depth=2),
        Selection(max_depth=9),
    ],
)
def test_whatever_is_told_is_not_everything(selection: Selection) -> None:
    assert Selection().is_everything()
    assert not selection.is_everything()


def test_selection_goes_to_other_processes() -> None:
    selection = Selection(("*",), types=frozenset("f"), sizes=(SizeBound(1),), times=(TimeBound("atime", 1),))
    assert pickle.loads(pickle.dumps(selection)) == selection
    assert hash(pickle.loads(pickle.dumps(selection))) == hash(selection)


def test_all_names_must_match() -> None:
    assert chosen(Selection(names=("a*", "*b"), inames=("*B", "?*")), "ab", "aB", "a", "b", "aab") == ["ab", "aab"]


@pytest.mark.parametrize("n_globs", range(1, 5))
def test_each_name_counts(n_globs: int) -> None:
    globs = tuple(f"*{number}*" for number in range(n_globs))
    whole = "".join(map(str, range(n_globs)))
    lacking = [whole.replace(str(number), "") for number in range(n_globs)]
    assert chosen(Selection(names=globs), whole, *lacking) == [whole]
    assert pruned(Selection(excludes=globs), "x", *(str(number) for number in range(n_globs))) == [*whole]


def test_path_is_relative_to_the_directory() -> None:
    selection = Selection(paths=("a/*.log",))
    assert chosen(selection, "a", "a/x.log", "x.log") == ["a/x.log"]
    assert chosen(selection, "x.log", "x", upper="a") == ["x.log"]
    assert chosen(selection, "x.log", upper="a/b") == ["x.log"]
    assert chosen(selection, "x.log", upper="b") == []


def test_regex_is_for_the_whole_path() -> None:
    selection = Selection(regexes=(r"a/.*\.log",))
    assert chosen(selection, "x.log", "x.log.1", "x\ny.log", upper="a") == ["x.log", "x\ny.log"]
    assert chosen(selection, "x.log") == []


def test_name_and_path_must_both_match() -> None:
    selection = Selection(names=("x*",), paths=("a/*",), regexes=(".*y",))
    assert chosen(selection, "xy", "x", "y", upper="a") == ["xy"]
    assert chosen(selection, "xy", upper="b") == []


def test_any_exclude_is_enough() -> None:
    selection = Selection(excludes=(".git", "a/*.tmp", "*.swp"))
    assert pruned(selection, ".git", "x.tmp", "x.swp", "x", upper="a") == [".git", "x.tmp", "x.swp"]
    assert pruned(selection, ".git", "x.tmp", "x", upper="b") == [".git"]


def test_exclude_with_a_slash_is_for_the_path_alone() -> None:
    assert pruned(Selection(excludes=("a/b",)), "a", "b") == []
    assert pruned(Selection(excludes=("a/b",)), "b", "c", upper="a") == ["b"]


@pytest.mark.parametrize(
    "selection", [Selection(names=("[z-a]",)), Selection(excludes=("",)), Selection(paths=("a\\",))]
)
def test_glob_that_is_none_is_refused(selection: Selection) -> None:
    with pytest.raises(ValueError, match=r"reversed|empty|lone"):
        Matcher(selection)


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 200), st.none() | st.integers(0, 200)), max_size=3))
def test_size_is_within_all_bounds(size: int, bounds: list[tuple[int, int | None]]) -> None:
    selection = Selection(sizes=tuple(SizeBound(*bound) for bound in bounds))
    within = all(least <= size and (most is None or size <= most) for least, most in bounds)
    assert takes(selection, Entry(st_size=size)) is within


MOMENTS = st.none() | st.integers(0, 9)
BOUNDS = st.builds(TimeBound, st.sampled_from(TIMED), MOMENTS, MOMENTS)


@given(st.lists(BOUNDS, max_size=4), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_times_are_strictly_within_all_bounds(bounds: list[TimeBound], times: list[int]) -> None:
    entry = Entry(**{f"st_{field}_ns": time for field, time in zip(TIMED, times, strict=True)})
    within = all(
        (bound.after_ns is None or bound.after_ns < times[TIMED.index(bound.field)])
        and (bound.before_ns is None or times[TIMED.index(bound.field)] < bound.before_ns)
        for bound in bounds
    )
    assert takes(Selection(times=tuple(bounds)), entry) is within


@pytest.mark.parametrize(("btime_ns", "is_taken"), [(49, True), (50, False), (0, False), (None, False)])
def test_without_a_birth_time_nothing_is_old_enough(btime_ns: int | None, is_taken: bool) -> None:
    assert takes(Selection(times=(TimeBound("btime", None, 50),)), Entry(), btime_ns) is is_taken


@pytest.mark.parametrize(
    ("selection", "is_taken"),
    [
        (Selection(uids=(1,)), True),
        (Selection(uids=(0,)), False),
        (Selection(uids=(1, 1)), True),
        (Selection(uids=(1, 0)), False),
        (Selection(gids=(2,)), True),
        (Selection(gids=(2, 1)), False),
        (Selection(uids=(1,), gids=(1,)), False),
    ],
)
def test_owner_must_be_all_that_are_named(selection: Selection, is_taken: bool) -> None:
    assert takes(selection, Entry()) is is_taken


@pytest.mark.parametrize(
    ("entry", "is_taken"),
    [
        (Entry(st_size=0), True),
        (Entry(st_size=1), False),
        (Entry(stat.S_IFDIR, 4096), True),
        (Entry(stat.S_IFIFO, 0), False),
        (Entry(stat.S_IFLNK, 0), False),
        (Entry(stat.S_IFCHR, 0), False),
    ],
)
def test_empty_is_for_files_and_of_directories_somebody_else_looks(entry: Entry, is_taken: bool) -> None:
    assert takes(Selection(empty=True), entry) is is_taken


@pytest.mark.parametrize(
    ("types", "meant", "needs_stat", "needs_emptiness"),
    [("", "fd", True, True), ("f", "f", True, False), ("d", "d", False, True), ("fdl", "fd", True, True)],
)
def test_only_files_and_directories_are_empty(types: str, meant: str, needs_stat: bool, needs_emptiness: bool) -> None:
    matcher = Matcher(Selection(types=frozenset(types), empty=True))
    assert matcher.types == frozenset(meant)
    assert matcher.needs_stat is needs_stat
    assert matcher.needs_emptiness is needs_emptiness


@pytest.mark.parametrize(
    ("selection", "needs_stat"),
    [
        (Selection(("*",), ("*",), ("*",), (".*",), ("*",), frozenset("fd"), min_depth=2, max_depth=3), False),
        (Selection(sizes=(SizeBound(1),)), True),
        (Selection(times=(TimeBound("mtime", 1),)), True),
        (Selection(times=(TimeBound("btime", 1),)), True),
        (Selection(uids=(0,)), True),
        (Selection(gids=(0,)), True),
        (Selection(types=frozenset("d"), sizes=(SizeBound(1),), empty=True), True),
    ],
)
def test_names_and_kinds_cost_no_stat(selection: Selection, needs_stat: bool) -> None:
    assert Matcher(selection).needs_stat is needs_stat


@given(st.integers(1, 5), st.none() | st.integers(0, 3), st.integers(1, 7))
def test_depth_is_from_and_to(least: int, n_more: int | None, depth: int) -> None:
    most = None if n_more is None else least + n_more
    matcher = Matcher(Selection(min_depth=least, max_depth=most))
    assert matcher.selects_depth(depth) is (least <= depth and (most is None or depth <= most))
    assert matcher.selects_below(depth) is any(matcher.selects_depth(deeper) for deeper in range(depth + 1, 9))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("+1M", SizeBound(1_048_577)),
        ("-1M", SizeBound(0, 1_048_575)),
        ("1M", SizeBound(1_048_576, 1_048_576)),
        ("+0", SizeBound(1)),
        ("0", SizeBound(0, 0)),
        ("-1", SizeBound(0, 0)),
        ("+1.5K", SizeBound(1537)),
        ("-2GiB", SizeBound(0, 2**31 - 1)),
        ("4096", SizeBound(4096, 4096)),
    ],
)
def test_size_is_larger_smaller_or_exactly_to_the_byte(text: str, bound: SizeBound) -> None:
    assert parse_size_bound(text) == bound


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a size limit: write"),
        ("+", "not a size limit"),
        ("--1M", "not a size limit"),
        ("+-1M", "not a size limit"),
        ("+1X", r"'\+1X' is not a size limit"),
        ("100c", "not a size limit"),
        ("1e3", "not a size limit"),
        ("-0", "nothing is smaller than 0 bytes"),
        ("+100b", r"in find, b means blocks of 512 bytes: write \+100 for bytes"),
        ("+9999999T", "not a size limit"),
    ],
)
def test_size_that_is_none_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_size_bound(text)


@given(st.text(max_size=8) | st.from_regex(r"\A[+-]?[0-9]{0,20}[kmgtKMGT]?\Z"))
def test_no_size_is_below_nothing(text: str) -> None:
    with suppress(ValueError):
        bound = parse_size_bound(text)
        assert bound.least >= 0
        assert bound.most is None or bound.most >= 0


def test_types_are_a_list() -> None:
    assert parse_types("f,l, p") == frozenset("flp")


@pytest.mark.parametrize("text", ["", "fd", "f,", "x", "D", "f;d", "file"])
def test_type_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="unknown type"):
        parse_types(text)


def test_types_given_twice_must_both_hold() -> None:
    assert common_types([frozenset("fl"), frozenset("ld")]) == frozenset("l")


def test_two_types_at_once_are_not_taken_for_the_usual_ones() -> None:
    with pytest.raises(ValueError, match="no file has two types"):
        common_types([frozenset("f"), frozenset("l")])


@pytest.mark.parametrize(
    ("text", "depths"),
    [("1", (1, 1)), ("3", (1, 3)), ("2..3", (2, 3)), ("2..2", (2, 2)), ("2..", (2, None)), ("..3", (1, 3))],
)
def test_depths(text: str, depths: tuple[int, int | None]) -> None:
    assert parse_depths(text) == depths


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a depth"),
        ("..", "not a depth"),
        ("-1", "not a depth"),
        ("1-2", "not a depth"),
        ("1...2", "not a depth"),
        ("two", "not a depth"),
        ("\u0662", "not a depth"),
        ("0", "are at depth 1"),
        ("0..2", "are at depth 1"),
        ("3..2", "is reversed"),
        ("9" * 5000, "deeper than any tree"),
    ],
)
def test_depth_that_is_none_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_depths(text)


def test_name_with_a_slash_is_refused_because_it_would_match_nothing() -> None:
    with pytest.raises(ValueError, match=r"'a/\*' contains a slash, which a name can't contain"):
        check_name("a/*")


def test_class_of_case_is_refused_where_case_is_ignored() -> None:
    assert check_name("[[:upper:]]") == "[[:upper:]]"
    with pytest.raises(ValueError, match="case is ignored"):
        check_name("[[:upper:]]", ignores_case=True)


@pytest.mark.parametrize("text", ["./a", "/a", "../a", "a/", "a//b"])
def test_path_that_would_match_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slash|relative"):
        check_path(text)


@pytest.mark.parametrize("text", ["", "./a", "a/", "[z-a]", "a\\"])
def test_what_would_leave_out_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slash|relative|empty|reversed|lone"):
        check_exclude(text)


@pytest.mark.parametrize("text", [".git", "*/cache", "a/b"])
def test_what_is_left_out_is_a_name_or_a_path(text: str) -> None:
    assert check_exclude(text) == text


@pytest.mark.parametrize("text", ["a", "*/cache/*", "a/b", ".git", "[.]/a"])
def test_path_is_as_it_was(text: str) -> None:
    assert check_path(text) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "an empty regular expression"),
        ("a(b", r"not a regular expression: missing \), unterminated subpattern at character 2"),
        ("*a", "nothing to repeat at character 1"),
        ("a{99999999999}", "not a regular expression"),
        ("[[:alpha:]]", "ambiguous: Possible nested set"),
        ("(" * 5000 + ")" * 5000, "not a regular expression"),
    ],
)
def test_regex_that_is_none_is_named_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_regex(text)
