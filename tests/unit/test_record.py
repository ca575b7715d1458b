"""The record: as it is written, and read back: what was written, or a BadRecord, whatever bytes a user put there."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.core.errors import BadRecord
from fusefs.core.human_units import DURATION_MAX_S
from fusefs.core.identity import Identity
from fusefs.core.names import ContainerId, Name, RelPath, VolumeId, make_id
from fusefs.core.record import (
    MAX_FAILURES,
    RECORD_MAX_BYTES,
    Entered,
    Failure,
    KeptDirectory,
    Method,
    NewOwner,
    Record,
    TreeSize,
    encode_record,
    quote_path,
    unquote_path,
)
from fusefs.core.record_decoding import decode_record
from tests.unit.test_container_states import record_of


def test_record_is_indented_ascii_with_a_newline_at_its_end() -> None:
    text = encode_record(record_of()._replace(note="ä\x1b", origin=RelPath(b"\xff\n")))
    assert text.isascii()
    assert text.endswith(b"}\n")
    assert text.count(b"\n") > 10
    assert b"\x1b" not in text


def test_record_says_its_format_first() -> None:
    assert next(iter(json.loads(encode_record(record_of())))) == "format"


@pytest.mark.parametrize("method", Method)
def test_method_is_written_as_a_word(method: Method) -> None:
    assert json.loads(encode_record(record_of(method)))["method"] == method.value


def test_record_that_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(ValueError, match="too large"):
        encode_record(record_of()._replace(origin=RelPath(b"x" * RECORD_MAX_BYTES)))


def test_record_with_all_failures_that_are_kept_and_the_longest_names_of_one_level_fits() -> None:
    failures = tuple(Failure(b"tree/" + b"n" * 255, 1, "unlink") for _ in range(MAX_FAILURES))
    assert len(encode_record(record_of()._replace(failures=failures))) <= RECORD_MAX_BYTES


@given(st.binary())
def test_quoted_bytes_are_printable_ascii_and_come_back(path: bytes) -> None:
    text = quote_path(path)
    assert text.isascii()
    assert text.isprintable() or not text
    assert unquote_path(text) == path


@given(st.text(max_size=20))
def test_only_what_quote_writes_is_unquoted(text: str) -> None:
    try:
        raw = unquote_path(text)
    except ValueError:
        return
    assert quote_path(raw) == text


def test_retention_ends_that_long_after_the_swap() -> None:
    record: Record = record_of()._replace(created_ns=5, retention_s=2)
    assert record.expires_ns() == 2_000_000_005


def test_kept_record_never_expires() -> None:
    assert record_of()._replace(retention_s=None).expires_ns() is None


SAMPLE = Path(__file__).parent / "samples/record-1.json"
SWEPT = Path(__file__).parent / "samples/record-1-sweep.json"
KEEPING = SAMPLE.with_name("record-1-keeping.json")
NAME = st.binary(min_size=1, max_size=40).filter(lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b".."))
PATH = st.lists(NAME, min_size=1, max_size=4).map(lambda names: RelPath(b"/".join(names)))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
IDENTITY = st.none() | st.builds(Identity, TEXT, st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KNOWN = {"format", *Record._fields} - {"unknown"}
KEPT = st.none() | st.dictionaries(NAME, st.integers(0, 2**64 - 1), max_size=3).map(
    lambda inos: tuple(KeptDirectory(Name(name), ino) for name, ino in inos.items())
)
N = st.integers(0, 2**63 - 1)
COUNT = st.none() | N
UNKNOWN = st.dictionaries((TEXT | st.just("unknown")).filter(lambda key: key not in KNOWN), JSON, max_size=3)
RECORD = st.builds(
    Record,
    id=st.builds(make_id, st.just("20261121T032253"), st.integers(0, 999), NAME, st.binary(min_size=6, max_size=6)),
    volume=st.binary(min_size=16, max_size=16).map(lambda raw: VolumeId(raw.hex())),
    method=st.sampled_from([*Method]),
    origin=st.none() | PATH,
    parent=IDENTITY,
    fresh=IDENTITY,
    victim=IDENTITY,
    host=TEXT,
    boot=TEXT,
    superblock=TEXT,
    created_ns=st.integers(0, 2**63 - 1),
    boot_ns=st.none() | st.integers(0, 2**63 - 1),
    retention_s=st.none() | st.integers(0, DURATION_MAX_S),
    note=TEXT,
    lent_mode=st.none() | st.integers(0, 0o7777),
    lent_fresh=st.none() | st.integers(0, 0o7777),
    target=st.none() | PATH,
    heir=st.none() | st.builds(NewOwner, st.integers(0, 2**32 - 2), st.none() | st.integers(0, DURATION_MAX_S)),
    kept=KEPT,
    moved_ns=COUNT,
    parts=st.lists(PATH, max_size=3).map(tuple),
    taken_from=COUNT,
    entered=st.dictionaries(TEXT, st.integers(0, 2**63 - 1), max_size=3).map(
        lambda times: tuple(Entered(*one) for one in times.items())
    ),
    partial=st.booleans(),
    failures=st.lists(st.builds(Failure, st.binary(max_size=20), st.integers(1, 133), TEXT), max_size=3).map(tuple),
    size=st.none() | st.builds(TreeSize, COUNT, N, N, COUNT, st.booleans(), TEXT, N),
    unknown=UNKNOWN.map(lambda fields: tuple(fields.items())),
)
FIELDS: dict[str, Any] = json.loads(encode_record(record_of()))
FULL: dict[str, Any] = {
    **FIELDS,
    "victim": {"handle": "1:a", "ino": 1, "btime_ns": -1},
    "superblock": "8:1",
    "boot_ns": 1,
    "target": "a/b",
    "heir": {"uid": 1, "retention_s": None},
    "kept": {"a": 1},
    "moved_ns": 1,
    "taken_from": 1,
    "entered": {"1:a": 1},
    "failures": [{"name": "a", "errno": 1, "call": "unlink"}],
    "invocation": {"id": "a", "session": ""},
    "size": dict(zip(TreeSize._fields, (None, 1, 1, None, False, "count", 1), strict=True)),
}
VALUES = st.one_of(
    JSON,
    st.sampled_from([-1, 0, 0o7777, 0o10000, 2**63 - 1, 2**63, 2**64, 10**30, 1.0, -0.0, True, False, None]),
    st.sampled_from(["", "a", "a/b", "..", "%00", "%FF", "%ff", "%", "%4", "% 1", "é", "\ud800", "\U0001f600"]),
    st.sampled_from([399, 400, 401, 2000, 2001]).map("x".__mul__),
    st.sampled_from([49, 50, 51, 100, 101]).map(lambda n: [FULL["failures"][0]] * n),
    st.sampled_from([99, 100, 101]).map(lambda n: {str(one): one for one in range(n)}),
    st.sampled_from([FULL["failures"], FULL["victim"], FULL["size"], FULL["heir"], FULL["invocation"], "sweep"]),
)
TOKENS = [
    "1e999",
    "-1e400",
    "NaN",
    "Infinity",
    "01",
    "-0",
    "1.",
    "1e2",
    '"\\ud83d\\ude00"',
    '"\\udc00"',
    '"\t"',
    "[1,]",
    "",
]


def changed(**fields: Any) -> bytes:
    return json.dumps({**FIELDS, **fields}).encode()


@given(RECORD)
@example(record_of()._replace(unknown=(("unknown", 1),)))
def test_record_comes_back_as_it_was_written(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=200))
@example(b"")
@example(b"null")
@example(b"[]")
@example(b"\xff\xfe{\0}\0")
@example(b"[" * 60_000)
@example(b'{"format": 1, "deep": ' + b"[" * 30_000 + b"]" * 30_000 + b"}")
@example(b'{"format": ' + b"9" * 5000 + b"}")
@example(b'{"format": 1, "huge": ' + b"9" * 5000 + b"}")
@example(b'{"format": NaN}')
@example(b" " * (RECORD_MAX_BYTES + 1))
def test_decoding_any_bytes_raises_nothing_but_bad_record(text: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_record(text)


@given(st.sampled_from(sorted({*FIELDS, "kept", "moved_ns", "boot_ns", "taken_from", "entered", "size"})), JSON)
@example("note", "\ud800")
@example("origin", "%FF/%zz")
@example("created_ns", 10**400)
@example("retention_s", -1)
@example("victim", {"handle": "", "ino": 10**30, "btime_ns": 0})
@example("lent_mode", 0o10000)
@example("moved_ns", -1)
@example("entered", {"1:00": "now"})
@example("entered", {str(n): n for n in range(1000)})
@example("size", {"n_bytes": -1})
@example("kept", {})
@example("kept", {"a/b": 1})
@example("kept", {"..": 1})
@example("kept", {"a": -1})
@example("kept", ["a"])
def test_decoding_any_value_in_any_field_raises_nothing_but_bad_record(key: str, value: Any) -> None:
    try:
        record = decode_record(changed(**{key: value}))
    except BadRecord:
        return
    assert decode_record(encode_record(record)) == record


@given(st.data())
def test_any_value_anywhere_in_a_record_is_written_again_as_it_is_or_refused(data: st.DataObject) -> None:
    fields = json.loads(json.dumps(FULL))
    at = fields
    key = data.draw(st.sampled_from(sorted(FULL)) | TEXT)
    while isinstance(inner := at.get(key), dict | list) and data.draw(st.booleans()):
        at = inner[0] if isinstance(inner, list) else inner
        key = data.draw(st.sampled_from(sorted(at)) | TEXT)
    if data.draw(st.booleans()):
        at.pop(key, None)
    else:
        at[key] = data.draw(VALUES)
    check_is_stable(json.dumps(fields).encode())


@given(st.sampled_from(["later", *sorted(FULL)]), st.sampled_from(TOKENS))
def test_any_token_in_a_record_is_written_again_as_it_is_or_refused(key: str, token: str) -> None:
    check_is_stable(json.dumps({**FULL, key: "HERE"}).replace('"HERE"', token).encode())


@given(st.data())
def test_a_scratched_record_is_written_again_as_it_is_or_refused(data: st.DataObject) -> None:
    text = bytearray(json.dumps(FULL, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    check_is_stable(bytes(text))


def check_is_stable(text: bytes) -> None:
    with suppress(BadRecord):
        record = decode_record(text)
        assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("n_levels", [1, 100, 900, 30_000])
def test_a_deep_record_raises_nothing_but_bad_record(n_levels: int) -> None:
    with pytest.raises(BadRecord):
        decode_record(b'{"format": 1, "\\u0061": ' + b"[" * n_levels + b"]" * n_levels + b"}")


@pytest.mark.parametrize("path", ["", "/", "/etc", "..", "a/../b", "a//b", "./a", "a/", "%00", "a%2Fb", "%2e"])
def test_origin_that_climbs_or_is_not_plain_is_refused(path: str) -> None:
    with pytest.raises(BadRecord):
        decode_record(changed(origin=path))


def test_origin_of_a_sweep_may_be_the_directory_that_holds_the_store() -> None:
    record = decode_record(changed(origin="", method="sweep"))
    assert record.origin == b""
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("version", [0, 2, -1, 10**18])
def test_record_of_another_format_is_refused_with_a_hint(version: int) -> None:
    with pytest.raises(BadRecord, match="format") as caught:
        decode_record(changed(format=version))
    assert "newer" in caught.value.hint


@pytest.mark.parametrize("key", ["id", "volume"])
def test_record_whose_ids_have_no_form_is_refused(key: str) -> None:
    with pytest.raises(BadRecord):
        decode_record(changed(**{key: "../../etc"}))


def test_key_of_a_later_version_is_kept_when_the_record_is_written_again() -> None:
    record = decode_record(changed(later={"a": [1, "ä", None]}))
    again = decode_record(encode_record(record._replace(partial=True)))
    assert dict(again.unknown) == {"later": {"a": [1, "ä", None]}}


def test_stored_sample_of_format_1_is_read() -> None:
    assert decode_record(SAMPLE.read_bytes()) == Record(
        id=ContainerId("20261121T032253.555Z-job_1-2fe7e4cb8ba8"),
        volume=VolumeId("5d7c8f1e0a9b4c3d8e2f6a7b1c0d9e8f"),
        method=Method.EXCHANGE,
        origin=RelPath(b"scratch/job \xff\n1"),
        parent=Identity("1:0200000048a1bc11", 2, 1_700_000_000_000_000_000),
        fresh=Identity("1:0f00000048a1bc15", 15, 1_800_000_000_000_000_001),
        victim=Identity("1:0c00000048a1bc12", 12, 1_700_000_000_000_000_002),
        host="4c4c4544004d3010804bb9c04f313233",
        boot="7a9b0c6e-52f4-4c1f-9d51-2f3b7f0d6e11",
        created_ns=1_795_231_373_555_000_000,
        retention_s=259_200,
        note="before the upgrade",
        lent_mode=0o555,
        partial=True,
        failures=(Failure(b"tree/fixed", 1, "unlink"),),
        unknown=(("later", [1, 2]),),
    )


def test_stored_sample_of_a_swap_that_keeps_is_read() -> None:
    kept = decode_record(KEEPING.read_bytes()).kept
    assert kept == (KeptDirectory(Name(b"cache"), 17), KeptDirectory(Name(b"job \xff\n%"), 18))


def test_stored_sample_of_a_sweep_is_read() -> None:
    record = decode_record(SWEPT.read_bytes())
    assert (record.method, record.origin, record.fresh) == (Method.SWEEP, RelPath(b""), None)


@pytest.mark.parametrize("sample", [SAMPLE, KEEPING, SWEPT])
def test_stored_sample_of_format_1_is_what_is_written_today(sample: Path) -> None:
    assert encode_record(decode_record(sample.read_bytes())) == sample.read_bytes()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "%00", "a%2Fb"])
def test_kept_name_that_is_not_one_in_the_top_is_refused(name: str) -> None:
    with pytest.raises(BadRecord):
        decode_record(changed(kept={name: 1}))


@pytest.mark.parametrize("part", ["", "../up", "/etc", "a//b"])
def test_a_part_that_climbs_or_is_not_plain_is_refused(part: str) -> None:
    with pytest.raises(BadRecord):
        decode_record(changed(parts=[part]))
