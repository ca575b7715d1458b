"""docs/recording.svg: what a terminal shows during a swap, an undo and a deletion by the service.

As root, on an ext4 of its own that no other process sees:  python -m bench.recording docs/recording.svg
"""

import fcntl
import html
import itertools
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from bench.support import TRASHD, make_tree, running
from tests.support.mount_namespaces import see_own_mounts_only

N_FILES = 100_000
WATCH = "trashd status --watch"
COMMANDS = (
    "time trashd swap /scratch/job   # 100,000 files",
    "time rm -rf /scratch/copy       # as many",
    "trashd list",
    "trashd undo",
    "trashd swap --keep-for 1s /scratch/job",
    WATCH,
)
_FIRST = "until trashd status; do sleep 1; done; cd /scratch; mkdir first && trashd swap first && trashd undo"
"""Run first, so that the bytecode is on disk, as after an installation."""
_UID, _COLUMNS, _LINES = 1000, 80, 24
Frame = tuple[float, list[str]]
"""What a command shows, from so many seconds after its start."""
_TYPED_S, _PAUSE_S, _LIMIT_S, _N_FRAMES = 0.04, 1.5, 300.0, 5  # a character; after a command or frame; a command
_FONT_PX, _ROW_PX, _WIDTH_PX, _LEFT_PX = 14, 18, 720, 16
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_COMMENT = re.compile(r" +#.*")
_STYLE = """
rect { fill: #f6f8fa; stroke: #59636e } text { fill: #1f2328; white-space: pre } .faint { fill: #59636e }
@media screen and (prefers-color-scheme: dark) {
  rect { fill: #161b22 } text { fill: #e6edf3 } .faint { fill: #9198a1 }
}
@keyframes typed { from { clip-path: inset(0 100% 0 0) } to { clip-path: inset(0) } }
@keyframes hidden { from, to { opacity: 0 } }
@keyframes visible { from, to { opacity: 1 } }
@media print, (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


def make_scene(base: Path) -> None:
    """Mount a new ext4 with two trees of alice's at /scratch, for this process and its children only."""
    see_own_mounts_only()
    (base / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nalice:x:{_UID}:{_UID}::{base}/home:/bin/sh\n")
    (base / "config.toml").write_text('audit = "none"\n')
    for command in (
        f"mkdir -p /scratch {base}/home",
        f"truncate -s 1G {base}/image",
        f"mkfs.ext4 -q -F -m 0 -N 450000 {base}/image",
        f"mount -o loop {base}/image /scratch",
        f"mount --bind {base}/passwd /etc/passwd",
        "mount -t tmpfs run /run",
        f"{TRASHD} init /scratch",
    ):
        subprocess.run(command.split(), stdout=subprocess.DEVNULL, check=True)
    for name in ("job", "copy"):
        make_tree(Path("/scratch", name), N_FILES)
    subprocess.run(["chown", "-R", f"{_UID}:{_UID}", base / "home", "/scratch/job", "/scratch/copy"], check=True)
    base.chmod(0o755)
    Path("/scratch").chmod(0o1777)
    subprocess.run(["sync", "-f", "/scratch"], check=True)  # or the first command would wait for it


def record(command: str, home: Path) -> list[Frame]:
    """Run a command as alice on a terminal; the live status until all is deleted, with some frames in quick succession.

    Raises  TimeoutError
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    environment = {"HOME": str(home), "TERM": "xterm", "LC_ALL": "C.UTF-8", "TIMEFORMAT": "real %3R s"}
    environment |= {"PATH": f"{Path(TRASHD).parent}:/usr/bin:/bin", "PYTHONPYCACHEPREFIX": f"{home}/bytecode"}
    began_s, text, frames = time.monotonic(), b"", list[Frame]()
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}" if command == WATCH else command],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, user=_UID, group=_UID, extra_groups=[],
    ) as process:  # fmt: skip
        os.close(theirs)
        while select.select([ours], [], [], _LIMIT_S)[0] and time.monotonic() - began_s < _LIMIT_S:
            try:
                text += os.read(ours, 1 << 16)
            except OSError:  # EIO: the command has ended
                os.close(ours)
                shown = [*frames[: -1 : len(frames) // _N_FRAMES + 1], frames[-1]] if command == WATCH else frames[-1:]
                return [(at_s if len(shown) == 1 else _PAUSE_S * n, lines) for n, (at_s, lines) in enumerate(shown, 1)]
            picture = _CONTROL.sub("", text.decode(errors="replace").rpartition("\x1b[H")[2])  # the top of the screen
            if command != WATCH or picture.count("\n") == _LINES - 1:
                lines = [line.rstrip() for line in picture.rstrip().split("\n")]
                frames.append((time.monotonic() - began_s, lines))
                if command == WATCH and len(frames) > 2 and "backlog  0 orphans" in picture:
                    process.send_signal(signal.SIGINT)
        process.kill()
    raise TimeoutError(command)


def row(text: str, y: int, style: str = "") -> str:
    """A line of the terminal; its width is that of its columns in every font."""
    marked = _COMMENT.sub(lambda match: f'<tspan class="faint">{match[0]}</tspan>', html.escape(text))
    width_px = len(text) * _FONT_PX * 0.6
    return f'<text x="{_LEFT_PX}" y="{y}" textLength="{width_px:.1f}" xml:space="preserve" {style}>{marked}</text>\n'


def draw(recorded: list[tuple[str, list[Frame]]]) -> str:
    """The picture. Without animation it shows all commands, each with its last frame."""
    now_s, y, body = 1.0, 2 * _ROW_PX, ""
    for command, frames in recorded:
        typed_s = len(command) * _TYPED_S
        how = f'style="animation: typed {typed_s:.2f}s steps({len(command)}) {now_s:.2f}s backwards"'
        body += row(f"$ {command}", y, f'font-weight="bold" {how if body else ""}')  # never an empty picture
        now_s += typed_s
        for (at_s, lines), (until_s, _) in itertools.pairwise([*frames, (0.0, [])]):
            later = f'opacity="0" style="animation: visible {until_s - at_s:.2f}s {now_s + at_s:.2f}s"'
            how = later if until_s else f'style="animation: hidden {now_s + at_s:.2f}s"'
            body += f"<g {how}>\n{''.join(row(line, y + n * _ROW_PX) for n, line in enumerate(lines, 1))}</g>\n"
        now_s += at_s + _PAUSE_S
        y += (len(lines) + 1) * _ROW_PX + _ROW_PX // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{y}" viewBox="0 0 {_WIDTH_PX} {y}" '
        f'role="img" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{_FONT_PX}">\n'
        f"<title>A swap, a list, an undo, and the service deleting a tree</title>\n<style>{_STYLE}</style>\n"
        f'<rect x="0.5" y="0.5" width="{_WIDTH_PX - 1}" height="{y - 1}" rx="8"/>\n{body}</svg>\n'
    )


def main() -> None:
    """Write it."""
    with tempfile.TemporaryDirectory() as base:
        make_scene(Path(base))
        with running([TRASHD, "service", "run", "--config", base]):
            recorded = [(command, record(command, Path(base, "home"))) for command in (_FIRST, *COMMANDS)]
    Path(sys.argv[1]).write_text(draw(recorded[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
