"""Names and ids: what a container may be called, and how bytes of any kind are shown."""

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.core.names import ID_MAX_BYTES, is_container_id, is_volume_id, join_path, make_id, split_path
from fusefs.core.printable_names import printable, unescape

UTC = st.integers(0, 4_000_000_000).map(lambda s: time.strftime("%Y%m%dT%H%M%S", time.gmtime(s)))
RANDOM = st.binary(min_size=6, max_size=6)
NAME = st.binary(min_size=1, max_size=255).filter(lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b".."))


@given(UTC, st.integers(0, 999), st.binary(max_size=255), RANDOM)
def test_id_of_any_name_is_an_id_of_at_most_200_bytes(utc: str, ms: int, victim: bytes, random: bytes) -> None:
    made = make_id(utc, ms, victim, random)
    assert is_container_id(made)
    assert len(made.encode()) <= ID_MAX_BYTES


@given(UTC, UTC, st.integers(0, 999), st.integers(0, 999), NAME, NAME, RANDOM)
def test_ids_sort_by_time(a: str, b: str, a_ms: int, b_ms: int, first: bytes, second: bytes, random: bytes) -> None:
    one, other = make_id(a, a_ms, first, random), make_id(b, b_ms, second, random)
    if (a, a_ms) != (b, b_ms):
        assert (one < other) == ((a, a_ms) < (b, b_ms))


@given(UTC, NAME)
def test_ids_of_one_name_and_moment_differ_by_chance(utc: str, victim: bytes) -> None:
    assert make_id(utc, 0, victim, b"\0" * 6) != make_id(utc, 0, victim, b"\1" * 6)


@given(UTC, NAME, RANDOM)
def test_id_is_one_plain_component(utc: str, victim: bytes, random: bytes) -> None:
    made = make_id(utc, 7, victim, random)
    assert split_path(made.encode()) == [made.encode()]
    assert printable(made.encode()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "job",
        "20261121T032253.555Z-job-2fe7e4cb8ba8\n",
        "20261121T032253.555Z-a/b-2fe7e4cb8ba8",
        "20261121T032253.555Z-job-2FE7E4CB8BA8",
        "20261121T032253.555Z-job-2fe7e4cb8ba",
        "\u0662026112\u0661T032253.555Z-job-2fe7e4cb8ba8",
        "20261121T032253.555Z-" + "x" * 121 + "-2fe7e4cb8ba8",
    ],
)
def test_what_only_resembles_an_id_is_none(text: str) -> None:
    assert not is_container_id(text)


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "0" * 32 + "\n", "A" * 32, "g" * 32])
def test_what_only_resembles_a_volume_id_is_none(text: str) -> None:
    assert not is_volume_id(text)


@given(st.lists(NAME, min_size=1, max_size=5))
def test_joined_names_split_into_themselves(names: list[bytes]) -> None:
    assert split_path(join_path(*names)) == names


@pytest.mark.parametrize("path", [b"", b"/", b"/a", b"a/", b"a//b", b".", b"..", b"a/../b", b"./a", b"a\0b"])
def test_path_that_climbs_or_is_not_plain_is_refused(path: bytes) -> None:
    with pytest.raises(ValueError, match="not a plain relative path"):
        split_path(path)


@given(st.binary(max_size=300))
def test_shown_path_moves_no_cursor(path: bytes) -> None:
    shown = printable(path)
    assert shown.isprintable()
    shown.encode("utf-8")  # no lone surrogate that a terminal's codec refuses


@pytest.mark.parametrize(
    ("path", "shown"),
    [(b"plain", "plain"), ("ä".encode(), "ä"), (b"\x1b[31m", "\\x1b[31m"), (b"\xff\n", "\\xff\\x0a")],
)
def test_only_what_a_terminal_would_obey_is_escaped(path: bytes, shown: str) -> None:
    assert printable(path) == shown


@pytest.mark.parametrize(("victim", "slug"), [("größe-1".encode(), "gr__e-1"), (b"a\xffb c", "a_b_c")])
def test_an_id_has_one_underscore_for_a_character_that_it_can_not_have(victim: bytes, slug: str) -> None:
    assert make_id("20261121T032253", 7, victim, bytes(6)) == f"20261121T032253.007Z-{slug}-000000000000"


@pytest.mark.parametrize(
    ("mark", "n_digits", "base", "pattern"),
    [(b"%", 2, 16, rb"%([0-9A-F]{2})"), (b"\\", 3, 8, rb"\\([0-3][0-7]{2})")],
    ids=["percent", "octal"],
)
@example(parts=[b"\\", b"7", b"7", b"7", b"%", b"7"])
@given(
    parts=st.lists(st.sampled_from([b"%", b"\\", b"0", b"1", b"3", b"7", b"8", b"A", b"F", b"a", b"g", b"/", b"\xff"]))
)
def test_it_reads_as_a_regular_expression_does(
    mark: bytes, n_digits: int, base: int, pattern: bytes, parts: list[bytes]
) -> None:
    text = b"".join(parts)
    assert unescape(text, mark, n_digits, base) == re.sub(pattern, lambda found: bytes([int(found[1], base)]), text)
