"""How much a file takes by its stat, and values that a child returns."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.orphan_sums import Survey, taken_bytes

MIB = 1 << 20
BYTES = st.integers(0, 1 << 50)


@given(st.builds(Survey, BYTES, BYTES, BYTES, BYTES, BYTES, st.booleans()))
def test_a_survey_survives_the_way_through_a_child(survey: Survey) -> None:
    assert msgspec.json.decode(msgspec.json.encode(survey), type=Survey) == survey


def test_small_files_take_their_size_where_they_lie_in_the_metadata() -> None:
    assert taken_bytes(700, 8, 4096, 2048) == 700
    assert taken_bytes(700, 8, 4096, 0) == 4096
    assert taken_bytes(700, 4096, 4096, 2048) == 2 * MIB
    assert taken_bytes(0, 8, 4096, 2048) == 4096
    assert taken_bytes(1 << 40, 16, 4096, 2048) == 8192
