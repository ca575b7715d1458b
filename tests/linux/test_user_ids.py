"""Users and groups as people type them, and whose subordinate a uid is by what /etc/subuid says."""

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.linux.user_ids import gid_of, read_subordinates, uid_of

BOTH = pytest.mark.parametrize("number_of", [uid_of, gid_of])


@BOTH
@pytest.mark.parametrize(("text", "number"), [("root", 0), ("0", 0), ("4711000", 4711000), ("4294967294", 4294967294)])
def test_a_name_or_a_number(number_of: Callable[[str], int], text: str, number: int) -> None:
    assert number_of(text) == number


@BOTH
@pytest.mark.parametrize(
    "text", ["", "nobody has that", "-1", "+1", " 1", "1_0", "\u0661", "4294967295", "9" * 5000, "\udcff", "a\nb"]
)
def test_what_is_neither_is_refused_by_its_text(number_of: Callable[[str], int], text: str) -> None:
    with pytest.raises(ValueError, match=r"unknown (user|group): "):
        number_of(text)


def test_a_name_goes_before_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    known = pwd.getpwnam("root")
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: pwd.struct_passwd((*known[:2], 7, *known[3:])))
    assert uid_of("4711") == 7


BOB = 1002


def holders(tmp_path: Path, text: str, *uids: int) -> list[int]:
    """Who is behind each of these users."""
    (tmp_path / "subuid").write_text(text)
    found = read_subordinates(bytes(tmp_path / "subuid"))
    return [found.holder_of(uid) for uid in uids]


def test_the_uids_of_a_range_are_its_holders_and_no_others(tmp_path: Path) -> None:
    text = f"{BOB}:165536:65536\nroot:100000:65536\n"
    uids = (99_999, 100_000, 165_535, 165_536, 231_071, 231_072, BOB)
    assert holders(tmp_path, text, *uids) == [99_999, 0, 0, BOB, BOB, 231_072, BOB]


def test_whom_the_system_does_not_know_is_one_person(tmp_path: Path) -> None:
    one, same, other = holders(tmp_path, "nobody-knows:5000:10\nneither:6000:10\n", 5000, 5009, 6000)
    assert one == same != other
    assert one not in (5000, 5009)


@pytest.mark.parametrize("text", ["", "bob\n", "bob:x:1\n", ":1:2\n", "bob:1:\n", "\xff\0", "bob:-1:5\n"])
def test_what_is_not_understood_says_nothing(tmp_path: Path, text: str) -> None:
    assert holders(tmp_path, text, 0, 1, 4) == [0, 1, 4]


def test_without_a_file_everybody_is_himself(tmp_path: Path) -> None:
    assert read_subordinates(bytes(tmp_path / "none")).holder_of(100_000) == 100_000
