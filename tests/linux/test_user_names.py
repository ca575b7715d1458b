"""Users and groups as people type them."""

import pwd
from collections.abc import Callable

import pytest

from fusefs.linux.user_ids import gid_of, uid_of

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
    with pytest.raises(ValueError, match=r"there is no (user|group) "):
        number_of(text)


def test_a_name_goes_before_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    known = pwd.getpwnam("root")
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: pwd.struct_passwd((*known[:2], 7, *known[3:])))
    assert uid_of("4711") == 7
