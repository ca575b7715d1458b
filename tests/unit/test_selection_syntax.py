"""Option values of a selection: read as find's are where they look alike, refused by name where they would surprise."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.selection import (
    SizeBound,
    check_exclude,
    check_name,
    check_path,
    check_regex,
    common_types,
    parse_depths,
    parse_size_bound,
    parse_types,
)


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
        ("", "no bound for a size: write"),
        ("+", "no bound for a size"),
        ("--1M", "no bound for a size"),
        ("+-1M", "no bound for a size"),
        ("+1X", r"'\+1X' is no bound for a size"),
        ("100c", "no bound for a size"),
        ("1e3", "no bound for a size"),
        ("-0", "nothing is smaller than 0 bytes"),
        ("+100b", r"find means blocks of 512 bytes by b: write \+100 for bytes"),
        ("+9999999T", "no bound for a size"),
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
    with pytest.raises(ValueError, match="there is no type"):
        parse_types(text)


def test_types_given_twice_must_both_hold() -> None:
    assert common_types([frozenset("fl"), frozenset("ld")]) == frozenset("l")


def test_no_types_are_no_types() -> None:
    assert common_types([]) == frozenset()


def test_two_types_at_once_are_not_taken_for_the_usual_ones() -> None:
    with pytest.raises(ValueError, match="nothing has two types"):
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
        ("3..2", "the wrong way round"),
        ("9" * 5000, "deeper than any tree"),
    ],
)
def test_depth_that_is_none_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_depths(text)


def test_name_with_a_slash_is_refused_because_it_would_match_nothing() -> None:
    with pytest.raises(ValueError, match=r"'a/\*' has a slash, which no name has"):
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
    with pytest.raises(ValueError, match=r"slash|relative|empty|wrong way|lone"):
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
        ("a(b", r"no regular expression: missing \), unterminated subpattern at character 2"),
        ("*a", "nothing to repeat at character 1"),
        ("a{99999999999}", "no regular expression"),
        ("[[:alpha:]]", "doubtful: Possible nested set"),
        ("(" * 5000 + ")" * 5000, "no regular expression"),
    ],
)
def test_regex_that_is_none_is_named_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_regex(text)


def test_regex_is_as_it_was() -> None:
    assert check_regex(r".*/[0-9]+\.log") == r".*/[0-9]+\.log"
