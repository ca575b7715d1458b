"""docs/browse.svg: what `trashd browse` looks like, with orphans that are made up.

python -m bench.browse_picture docs/browse.svg
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fusefs.browse.browser import Browser

_SHOWN = (
    # what came from where under /scratch, hours ago, hours left, whose, bytes, the note
    ("alice/genome/run-0412", 2.1, 21.9, 0, 48_318_382_080, "before the upgrade"),
    ("alice/genome/run-0411", 5.3, 163.0, 0, 51_002_736_640, ""),
    ("build", 6.0, 18.0, 0, 734_003_200, ""),
    ("new\nline", 7.2, 16.8, 33, None, ""),
    ("www/cache", 11.4, 12.6, 33, 2_147_483_648, ""),
    ("climate/checkpoint-17", 20.5, None, 0, 96_636_764_160, ""),
    ("old-results", 23.4, 0.6, 0, 8_589_934, ""),
)


def _to_list_row(
    path: str, hours_ago: float, hours_left: float | None, uid: int, n_bytes: int | None, note: str
) -> Any:
    now_ns, hour_ns = time.time_ns(), 3600 * 10**9
    identifier = f"20261127T0{int(hours_ago) % 10}1544.439Z-{path.rsplit('/', 1)[-1]}-112865ff1414".replace("\n", "_")
    return {
        "id": identifier, "uid": uid, "state": "orphans", "path": f"/scratch/.trashd/u/{uid}/orphans/{identifier}",
        "origin": f"/scratch/{path}", "method": "exchange", "created_ns": now_ns - int(hours_ago * hour_ns),
        "expires_ns": None if hours_left is None else now_ns + int(hours_left * hour_ns), "note": note, "problem": "",
        "clock_set_ns": 0, "size": None if n_bytes is None else {"n_bytes": n_bytes, "is_at_least": False},
    }  # fmt: skip


async def _draw(listed: Path) -> str:
    """The picture. listed: what `trashd list --json` is to tell"""
    app = Browser(("sh", "-c", f"cat {listed}"), [b"/scratch"])
    async with app.run_test(size=(80, 24)) as pilot:
        while "alice" not in (picture := app.export_screenshot(title="trashd browse")):
            await pilot.pause(0.1)
        await app.commands.end()
    return picture


def main() -> None:
    """Write it."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as listed:
        listed.write("".join(json.dumps(_to_list_row(*one)) + "\n" for one in _SHOWN))
        listed.flush()
        picture = asyncio.run(_draw(Path(listed.name)))
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # nothing is fetched to look at it
    picture = picture.replace("<svg ", '<svg xml:space="preserve" ', 1)
    Path(sys.argv[1]).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
