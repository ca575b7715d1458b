"""The record as it is written: readable text, bytes of any kind, never larger than a reader accepts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.names import RelPath
from fusefs.core.record import MAX_FAILURES, RECORD_MAX_BYTES, Failure, Method, Record, encode, quote, unquote
from tests.unit.test_container_states import record_of


def test_record_is_indented_ascii_with_a_newline_at_its_end() -> None:
    text = encode(record_of()._replace(note="ä\x1b", origin=RelPath(b"\xff\n")))
    assert text.isascii()
    assert text.endswith(b"}\n")
    assert text.count(b"\n") > 10
    assert b"\x1b" not in text


def test_record_says_its_format_first() -> None:
    assert next(iter(json.loads(encode(record_of())))) == "format"


@pytest.mark.parametrize("method", Method)
def test_method_is_written_as_a_word(method: Method) -> None:
    assert json.loads(encode(record_of(method)))["method"] == method.value


def test_record_that_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(ValueError, match="too large"):
        encode(record_of()._replace(origin=RelPath(b"x" * RECORD_MAX_BYTES)))


def test_record_with_all_failures_that_are_kept_and_the_longest_names_of_one_level_fits() -> None:
    failures = tuple(Failure(b"tree/" + b"n" * 255, 1, "unlink") for _ in range(MAX_FAILURES))
    assert len(encode(record_of()._replace(failures=failures))) <= RECORD_MAX_BYTES


@given(st.binary())
def test_quoted_bytes_are_printable_ascii_and_come_back(path: bytes) -> None:
    text = quote(path)
    assert text.isascii()
    assert text.isprintable() or not text
    assert unquote(text) == path


@given(st.text(max_size=20))
def test_only_what_quote_writes_is_unquoted(text: str) -> None:
    try:
        raw = unquote(text)
    except ValueError:
        return
    assert quote(raw) == text


def test_retention_ends_that_long_after_the_swap() -> None:
    record: Record = record_of()._replace(created_ns=5, retention_s=2)
    assert record.expires_ns() == 2_000_000_005


def test_kept_record_never_expires() -> None:
    assert record_of()._replace(retention_s=None).expires_ns() is None
