"""What a build of the package does itself: its C, where there is a C compiler, man pages, and the text of its page.

Without a compiler trashd is installed without the two modules of C, and works.

hatchling runs it for each wheel and each install, `make native` when a source is newer than what was built.

TRASHD_NATIVE=0  leaves it out; =1: not to have it is an error
CFLAGS, LDFLAGS  are the compiler's too, as a distribution sets them
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

MODULES: Final = (Path("fusefs/linux/native/_bulk.abi3.so"), Path("fusefs/mount/native/_core.abi3.so"))
"""Each of all C files beside it."""
_FLAGS: Final = (
    "-O2", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror=implicit-function-declaration", "-fvisibility=hidden",
    "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-DPy_LIMITED_API=0x030B0000",
)  # fmt: skip
_TLS: Final = "-ftls-model=initial-exec"
"""ThreadSanitizer takes it for a race that glibc frees what another thread has of a library's variables."""

_IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?://)(?P<file>[^)]+)\)")
_WHERE = """
The files that this page names are in the source distribution; what is in `docs` is installed, too, in
`fusefs/share/docs`.
"""


class ReadmeHook(MetadataHookInterface):
    """README.md as the package's page on an index, where none of the files is that it links to."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add it."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text) + _WHERE}


def without_relative_links(text: str) -> str:
    """Markdown that names files of the repository where it linked to them, and shows none of their pictures."""
    return _LINK.sub(_named, _IMAGE.sub("", text))


def _named(link: re.Match[str]) -> str:
    return link["text"] if link["text"] == link["file"] else f"{link['text']} ({link['file']})"


class NotBuilt(Exception):
    """What is in C can't be had. Its text says why"""


class NativeHook(BuildHookInterface[Any]):
    """A wheel with it is of one platform and of any Python from 3.11 on; one without it is of all."""

    _built: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises  NotBuilt: and it must be"""
        root = Path(self.root)
        if self.target_name != "wheel":
            return
        if version == "editable":
            build_unless_left_out(root, root)
            write_man_pages(root, root / "build/man")
            return
        # The place beside the sources is that of editable installs, whose daemons may be running.
        self._built = tempfile.TemporaryDirectory()
        built = Path(self._built.name)
        write_man_pages(root, built / "man")
        build_data["force_include"][str(built / "man")] = "fusefs/share/man"
        if build_unless_left_out(root, built):
            build_data["force_include"] |= {str(built / module): str(module) for module in MODULES}
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._built is not None:
            self._built.cleanup()


def write_man_pages(root: Path, to: Path) -> None:
    """Made of the help of the commands, for which click and msgspec are needed. Raises  CalledProcessError"""
    # pipx sets PYTHONSAFEPATH, and then `-m` does not find a package in the current directory.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    argv = [sys.executable, "-B", "-m", "build_docs", "man", str(to)]
    subprocess.run(argv, cwd=root, env=env, check=True, stdout=sys.stderr)


def build_unless_left_out(root: Path, to: Path) -> bool:
    """Whether it is there now, below `to`. Where it isn't, none of before is left.

    Raises  NotBuilt: by TRASHD_NATIVE=1 it must be
    """
    wanted = os.environ.get("TRASHD_NATIVE")
    try:
        if wanted == "0":
            raise NotBuilt("TRASHD_NATIVE=0")
        build(root, to)
    except NotBuilt as error:
        for module in MODULES:
            (to / module).unlink(missing_ok=True)  # it would be of other sources
        if wanted == "1":
            raise
        print(f"trashd goes without what it has in C: {error}", file=sys.stderr)
        return False
    return True


def build(root: Path, to: Path, *more: str) -> None:
    """From all C files of the clone or sdist. more: flags of the compiler. Raises  NotBuilt"""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotBuilt("this Python has no stable ABI")
    for module in MODULES:
        library = to / module
        library.parent.mkdir(parents=True, exist_ok=True)
        # Whoever runs has the old file mapped, so it is replaced, not written over.
        new = library.with_name(f".{library.name}.{os.getpid()}")
        try:
            _run(*_compiler(), *_FLAGS, *more, "-shared", "-o", str(new), *_sources(root / module.parent))
            new.replace(library)
        finally:
            new.unlink(missing_ok=True)


def lint(root: Path) -> None:
    """Raises  NotBuilt: the compiler has something to say of a source"""
    for module in MODULES:
        _run(*_compiler(), *_FLAGS, "-Werror", "-fsyntax-only", *_sources(root / module.parent))


def _sources(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.glob("*.c"))


def _compiler() -> list[str]:
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    given = shlex.split(os.environ.get("CFLAGS", "")) + shlex.split(os.environ.get("LDFLAGS", ""))
    return [*shlex.split(command), *given, f"-I{sysconfig.get_path('include')}"]


def _run(*command: str) -> None:
    """Raises  NotBuilt: there is no such command, or it fails"""
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except OSError as error:
        raise NotBuilt(f"no C compiler was found ({command[0]}: {error.strerror})") from error
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{command[0]} failed; are Python's headers there (python3-dev)?") from error


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lint", action="store_true", help="build nothing, have the compiler look at the sources")
    parser.add_argument("--sanitize", metavar="WHAT", help="build it with these sanitizers, such as address,undefined")
    root = Path(__file__).parent
    parser.add_argument("--to", metavar="DIRECTORY", type=Path, default=root, help="not beside the sources")
    told = parser.parse_args()
    try:
        if told.lint:
            lint(root)
        elif told.sanitize:
            build(root, told.to, f"-fsanitize={told.sanitize}", "-g", "-O1", "-fno-omit-frame-pointer", _TLS)
        else:
            build_unless_left_out(root, told.to)
    except NotBuilt as error:
        print(f"hatch_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
