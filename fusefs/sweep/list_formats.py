"""Lists of names as several programs write them, each read in bounded memory and no further than what is asked for.

What a line that is understood says is a path, and perhaps an inode number: who looks compares that with what he finds.
Lines end where a newline in a name would end them too; formats that escape it, or end names with NUL, can't be misled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from fusefs.core.listed_names import Listed, ListedName, ListFormat
from fusefs.sweep.names_from_list import read_names

_Reads = Callable[[bytes], ListedName | None]
"""What a line says; None: it belongs to the list's head or foot."""

_POLICY = re.compile(rb" *([0-9]+) +[0-9]+ +[0-9]+(?: .*)?", re.DOTALL)
_DELIMITER = b" -- "
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|%00")
_REPORT = re.compile(rb" *(?:file|dir|symlink|chr|blk|fifo|sock) *,.*", re.DOTALL)
_REPORT_BESIDE = re.compile(rb" *type *,.*, *path *|Total: [0-9]+ entries,.*")
_INDEX_BESIDE = re.compile(rb"Total records found: +[0-9]+|Time elapsed: +[0-9].*")
_NUMBER = re.compile(rb"-?[0-9]+")


def read_listed(fd: int, how: ListFormat) -> Iterator[Listed]:
    """What a list says, as soon as it can be read. Raises  as `read_names`"""
    reads = _READS.get(how)
    if reads is None:
        return read_names(fd, b"\0" if how is ListFormat.NUL else b"\n")
    return _understood(read_names(fd, b"\n"), reads)


def _understood(lines: Iterator[bytes], reads: _Reads) -> Iterator[Listed]:
    for line in lines:
        one = reads(line)
        if one is not None:
            yield one


def _unclear(line: bytes) -> ListedName:
    return ListedName(line, is_understood=False)


def _policy_line(line: bytes, *, is_escaped: bool) -> ListedName:
    """A line of mmapplypolicy: inode, generation and snapshot, what SHOW tells, `--`, the path.

    What others can put into SHOW, or into a path, may look like that delimiter: with two of them it is not understood.
    Without ESCAPE a newline is told as `\\n`, and so may be a name that has these two characters.
    Source  Storage Scale's "File list format", and "Policy rules: Terms" on ESCAPE
    """
    head, _delimiter, path = line.partition(_DELIMITER)
    numbers = _POLICY.fullmatch(head)
    if numbers is None or _DELIMITER in path or (_BROKEN_ESCAPE.search(path) if is_escaped else b"\\" in path):
        return _unclear(line)
    if is_escaped:
        path = _ESCAPED.sub(_unescape, path)
    return ListedName(path, int(numbers[1])) if path.startswith(b"/") else _unclear(line)


def _unescape(found: re.Match[bytes]) -> bytes:
    return bytes.fromhex(found[1].decode())


def _report_line(line: bytes) -> ListedName | None:
    """A line of `rbh-report --dump --csv`: what it is, then some columns that have no slash, and the path at the end.

    Source  Robinhood 3's rbh_report.c (dump_entries): the path is always last
    """
    head, found, rest = line.partition(b", /")
    if found and _REPORT.fullmatch(head + b","):
        return ListedName(b"/" + rest)
    return None if _REPORT_BESIDE.fullmatch(line) else _unclear(line)


def _index_line(line: bytes) -> ListedName | None:
    """A line of brindexer's query: path, size, and the time of the last change.

    Source  brindexer's PrintQueryCallback.go
    """
    path, *numbers = line.rsplit(b" ", 2)
    if line.startswith(b"/") and len(numbers) == 2 and all(map(_NUMBER.fullmatch, numbers)):
        return ListedName(path)
    return None if _INDEX_BESIDE.fullmatch(line) else _unclear(line)


_READS: dict[ListFormat, _Reads] = {
    ListFormat.MMAPPLYPOLICY: partial(_policy_line, is_escaped=True),
    ListFormat.MMAPPLYPOLICY_PLAIN: partial(_policy_line, is_escaped=False),
    ListFormat.ROBINHOOD: _report_line,
    ListFormat.BRINDEXER: _index_line,
}
