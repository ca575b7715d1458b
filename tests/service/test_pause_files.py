"""Pauses as files: what is there is in force, and what can't be understood pauses everything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.service.state_files import Pause, pause_dir, read_pauses, remove_pause, write_pause

NOW_S = 1000.0
FOREVER = Pause("paused by root until it is resumed", None)


@pytest.fixture
def runtime(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path)


def test_without_a_pause_there_is_none(runtime: bytes) -> None:
    assert read_pauses(runtime, NOW_S) == {}


@pytest.mark.parametrize("volume", [None, b"/scratch", b"/a b/%/\xff\n", b"/" + b"x" * 4000])
def test_what_is_paused_is_read_back(runtime: bytes, volume: bytes | None) -> None:
    write_pause(runtime, volume, FOREVER)
    assert read_pauses(runtime, NOW_S) == {volume: FOREVER}


def test_pause_ends_at_its_time(runtime: bytes) -> None:
    pause = Pause("for a minute", NOW_S + 60)
    write_pause(runtime, b"/scratch", pause)
    assert read_pauses(runtime, NOW_S + 59) == {b"/scratch": pause}
    assert pause.left_s(NOW_S + 59) == 1.0
    assert read_pauses(runtime, NOW_S + 60) == {}


def test_another_pause_takes_the_place_of_the_old_one(runtime: bytes) -> None:
    write_pause(runtime, b"/scratch", Pause("for a minute", NOW_S + 60))
    write_pause(runtime, b"/scratch", FOREVER)
    assert read_pauses(runtime, NOW_S) == {b"/scratch": FOREVER}


def test_pause_of_one_is_not_ended_by_the_end_of_another(runtime: bytes) -> None:
    for volume in (None, b"/scratch", b"/data"):
        write_pause(runtime, volume, FOREVER)
    assert remove_pause(runtime, b"/data")
    assert read_pauses(runtime, NOW_S).keys() == {None, b"/scratch"}


def test_what_is_not_paused_is_not_resumed(runtime: bytes) -> None:
    assert not remove_pause(runtime, b"/scratch")
    write_pause(runtime, b"/scratch", FOREVER)
    assert not remove_pause(runtime, None)


def test_unfinished_file_is_no_pause(runtime: bytes) -> None:
    Path(os.fsdecode(pause_dir(runtime)), "all.new").write_text("{")
    assert read_pauses(runtime, NOW_S) == {}


def test_nobody_else_can_write_there(runtime: bytes) -> None:
    assert os.stat(pause_dir(runtime)).st_mode & 0o022 == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.binary(max_size=100) | st.sampled_from([b"null", b"{}", b'{"volume":"%","why":"","until_s":null}']))
def test_file_that_says_nothing_sensible_pauses_everything(runtime: bytes, text: bytes) -> None:
    Path(os.fsdecode(pause_dir(runtime)), "all").write_bytes(text)
    (pause,) = [read_pauses(runtime, NOW_S)[None]]
    assert pause.until_s is None
    assert "can't be read" in pause.why


def test_a_fifo_pauses_everything_and_holds_up_nobody(runtime: bytes) -> None:
    os.mkfifo(Path(os.fsdecode(pause_dir(runtime)), "all"))
    assert "can't be read" in read_pauses(runtime, NOW_S)[None].why
