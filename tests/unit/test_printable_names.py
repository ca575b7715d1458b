"""Marks and digits are undone as a regular expression would."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.core.printable_names import unescape


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
