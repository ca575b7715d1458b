"""What people do with many small files: an archive unpacked, a repository cloned, a program built, packages installed.

All that is read lies where the filesystem lies; what is written goes through the mount. Everything is made here:
nothing comes from a network. npm finds its packages in a cache, as after an earlier install.

Source  the cache's layout: cacache, lib/content/path.js, where what is found by its digest needs no index
"""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from bench.listing_steps import Work, mounted
from bench.subjects import CPU, NATIVE, cpu_s
from bench.support import make_tree, time_command

# Where a file takes 2 ms, which is five times the slowest.
LIMIT_S = 600.0
_N_PER_SOURCE, _N_PER_COMMIT, _N_PER_PACKAGE = 2000, 10, 500
"""Of so many files of the archive there is one more to compile, to clone, or package of _N_IN_PACKAGE files."""
_N_IN_PACKAGE = 25
_SMALL = b"x" * 511 + b"\n"
_INPUTS, _MADE = "inputs", "made"
_CFLAGS = "-O1"


def make(source: Path, n: int) -> None:
    """The tree that is mounted, and beside it what is read; once done natively, so that programs are in memory."""
    source.mkdir()
    inputs = source.with_name(_INPUTS)
    inputs.mkdir()
    _make_archive(inputs, n)
    _make_repository(inputs / "repository", n // _N_PER_COMMIT)
    _make_program(inputs / "program", n // _N_PER_SOURCE)
    _make_packages(inputs, n // _N_PER_PACKAGE)
    take(Work(NATIVE, "", source, n, None))


def take(work: Work) -> dict[str, float]:
    """Seconds of each, and of the daemon's processor time.

    Raises  Unable
    """
    made = work.source / _MADE
    made.mkdir()
    shutil.copytree(work.source.with_name(_INPUTS) / "packages", made / "packages")
    try:
        with mounted(work, work.source, LIMIT_S) as (path, fuse):
            before_s = cpu_s(fuse)
            found = {
                name: time_command(command(work.source.with_name(_INPUTS), path / _MADE), timeout_s=LIMIT_S)
                for name, command in STEPS.items()
                if name not in missing()
            }
            return found | {CPU: cpu_s(fuse) - before_s}
    finally:
        shutil.rmtree(made)


Command = Callable[[Path, Path], list[str]]
"""By where the inputs are, and where it is to write."""


def _unpack(inputs: Path, made: Path) -> list[str]:
    return ["tar", "-x", "-f", str(inputs / "small.tar"), "-C", str(made)]


def _clone(inputs: Path, made: Path) -> list[str]:
    return ["git", "clone", "--quiet", str(inputs / "repository"), str(made / "clone")]


def _build(inputs: Path, made: Path) -> list[str]:
    program = inputs / "program"
    return ["make", "-s", "-j2", "-C", str(made), "-f", str(program / "Makefile"), f"S={program}"]


def _install(inputs: Path, made: Path) -> list[str]:
    quiet = ("--offline", "--ignore-scripts", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error")
    own = (f"--cache={inputs / 'cache'}", "--logs-max=0", "--update-notifier=false")
    return ["npm", "ci", *quiet, *own, "--prefix", str(made / "packages")]


STEPS = MappingProxyType[str, Command]({"tar -x": _unpack, "git clone": _clone, "make -j2": _build, "npm ci": _install})


def missing() -> list[str]:
    """Programs that are not installed, so that their steps are left out."""
    return [step for step in STEPS if not shutil.which(step.split()[0])]


def _make_archive(inputs: Path, n: int) -> None:
    with tempfile.TemporaryDirectory(dir=inputs) as scratch:
        make_tree(Path(scratch, "small"), n, _SMALL)
        _run_command("tar", "-c", "-f", inputs / "small.tar", "-C", scratch, "small")


def _make_repository(top: Path, n: int) -> None:
    for number in range(n):
        path = top / f"{number // 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n" * 64, encoding="ascii")
    settings = ("user.name=bench", "user.email=bench@localhost", "maintenance.auto=false")  # that disturbs gc
    git: tuple[str | Path, ...] = ("git", "-C", top, *(word for setting in settings for word in ("-c", setting)))
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "all"), ("gc", "--quiet")):
        _run_command(*git, *words)


def _make_program(top: Path, n: int) -> None:
    """Functions that call each other in a row, one a file."""
    top.mkdir()
    names = [f"part{number}" for number in range(max(2, n))]
    (top / "parts.h").write_text("".join(f"int {name}(int);\n" for name in names), encoding="ascii")
    for name, next_one in zip(names, [*names[1:], ""], strict=True):
        lines = "".join(f"    n = n * {number} + (n >> {number % 7});\n" for number in range(100))
        called = f"{next_one}(n)" if next_one else "n"
        text = f'#include <stdio.h>\n#include "parts.h"\nint {name}(int n) {{\n{lines}    return {called};\n}}\n'
        (top / f"{name}.c").write_text(text, encoding="ascii")
    main = '#include "parts.h"\nint main(void) { return part0(1) == 0; }\n'
    (top / "main.c").write_text(main, encoding="ascii")
    rules = (
        f"program: {' '.join(f'{name}.o' for name in (*names, 'main'))}\n\tgcc -o $@ $^\n"
        f"%.o: $(S)/%.c $(S)/parts.h\n\tgcc {_CFLAGS} -c -o $@ $<\n"
    )
    (top / "Makefile").write_text(rules, encoding="ascii")


def _make_packages(inputs: Path, n: int) -> None:
    """A package.json with its lock, and the cache where npm finds each package by its digest."""
    locked: dict[str, object] = {}
    dependencies = {f"bench-{number}": "1.0.0" for number in range(n)}
    own = {"name": "bench", "version": "1.0.0", "dependencies": dependencies}
    for name in dependencies:
        packed = _pack(name)
        digest = hashlib.sha512(packed)
        kept = digest.hexdigest()
        content = inputs / "cache/_cacache/content-v2/sha512" / kept[:2] / kept[2:4] / kept[4:]
        content.parent.mkdir(parents=True, exist_ok=True)
        content.write_bytes(packed)
        locked[f"node_modules/{name}"] = {
            "version": "1.0.0",
            "resolved": f"https://registry.npmjs.org/{name}/-/{name}-1.0.0.tgz",
            "integrity": f"sha512-{base64.b64encode(digest.digest()).decode()}",
        }
    lock = own | {"lockfileVersion": 3, "requires": True, "packages": {"": own, **locked}}
    top = inputs / "packages"
    top.mkdir()
    (top / "package.json").write_text(json.dumps(own), encoding="ascii")
    (top / "package-lock.json").write_text(json.dumps(lock), encoding="ascii")


def _pack(name: str) -> bytes:
    files = {"package.json": json.dumps({"name": name, "version": "1.0.0"}).encode()}
    files |= {f"lib/f{number}.js": f"// {name}\n".encode() * 40 for number in range(_N_IN_PACKAGE)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"package/{path}")
            member.size, member.mode = len(text), 0o644
            archive.addfile(member, io.BytesIO(text))
    return packed.getvalue()


def _run_command(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
