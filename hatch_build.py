"""Build the C modules (if there is a C compiler), the man pages, and the text of the package's page on an index.

Without a compiler, trashd is installed without the two C modules, and works without them.

hatchling runs this for each wheel and each install; `make native` runs it if a source is newer than what was built.

TRASHD_NATIVE=0  do not build the C modules; =1: fail if they can't be built
CFLAGS, LDFLAGS  further options for the compiler, as distributions set them
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
"""The C modules; each is built from all C files in the same directory."""
_FLAGS: Final = (
    "-O2", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror=implicit-function-declaration", "-fvisibility=hidden",
    "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-DPy_LIMITED_API=0x030B0000",
)  # fmt: skip
_TLS: Final = "-ftls-model=initial-exec"
"""Otherwise ThreadSanitizer reports a race when glibc frees another thread's copy of a library's variables."""

_IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?://)(?P<file>[^)]+)\)")
_WHERE = """
The files that this page names are in the source distribution. Those in `docs` are also installed, in
`fusefs/share/docs`.
"""


class ReadmeHook(MetadataHookInterface):
    """Uses README.md as the package's page on an index, which does not have the files that README.md links to."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the page to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text) + _WHERE}


def without_relative_links(text: str) -> str:
    """Replace links to files in the repository with the names of the files, and remove images from there."""
    return _LINK.sub(_named, _IMAGE.sub("", text))


def _named(link: re.Match[str]) -> str:
    return link["text"] if link["text"] == link["file"] else f"{link['text']} ({link['file']})"


class NotBuilt(Exception):
    """The C modules are not available. The text gives the reason"""


class NativeHook(BuildHookInterface[Any]):
    """Builds the C modules. A wheel with them is for one platform and Python 3.11 or later; one without is for all."""

    _built: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what the wheel or the editable install needs. Raises  NotBuilt: required C modules can't be built"""
        root = Path(self.root)
        if self.target_name != "wheel":
            return
        if version == "editable":
            build_unless_left_out(root, root)
            write_man_pages(root, root / "build/man")
            return
        # Built outside of the source directory: daemons of an editable install may be running modules from there.
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
    """Generate the man pages from the commands' help, which needs click and msgspec. Raises  CalledProcessError"""
    # pipx sets PYTHONSAFEPATH, and then `-m` does not find a package in the current directory.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    argv = [sys.executable, "-B", "-m", "build_docs", "man", str(to)]
    subprocess.run(argv, cwd=root, env=env, check=True, stdout=sys.stderr)


def build_unless_left_out(root: Path, to: Path) -> bool:
    """Build the C modules below `to`, and return whether they were built; if not, remove earlier ones.

    Raises  NotBuilt: TRASHD_NATIVE=1 requires them
    """
    wanted = os.environ.get("TRASHD_NATIVE")
    try:
        if wanted == "0":
            raise NotBuilt("TRASHD_NATIVE=0")
        build(root, to)
    except NotBuilt as error:
        for module in MODULES:
            (to / module).unlink(missing_ok=True)  # an earlier build may be from other sources
        if wanted == "1":
            raise
        print(f"trashd is built without its C modules: {error}", file=sys.stderr)
        return False
    return True


def build(root: Path, to: Path, *more: str) -> None:
    """Build the modules from all C files in the clone or sdist. more: further compiler flags. Raises  NotBuilt"""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotBuilt("this Python has no stable ABI")
    for module in MODULES:
        library = to / module
        library.parent.mkdir(parents=True, exist_ok=True)
        # Running processes have the old file mapped, so it is replaced and not overwritten.
        new = library.with_name(f".{library.name}.{os.getpid()}")
        try:
            _run(*_compiler(), *_FLAGS, *more, "-shared", "-o", str(new), *_sources(root / module.parent))
            new.replace(library)
        finally:
            new.unlink(missing_ok=True)


def lint(root: Path) -> None:
    """Check the sources with the compiler. Raises  NotBuilt: there are warnings or errors"""
    for module in MODULES:
        _run(*_compiler(), *_FLAGS, "-Werror", "-fsyntax-only", *_sources(root / module.parent))


def _sources(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.glob("*.c"))


def _compiler() -> list[str]:
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    given = shlex.split(os.environ.get("CFLAGS", "")) + shlex.split(os.environ.get("LDFLAGS", ""))
    return [*shlex.split(command), *given, f"-I{sysconfig.get_path('include')}"]


def _run(*command: str) -> None:
    """Run a command. Raises  NotBuilt: the command does not exist, or fails"""
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except OSError as error:
        raise NotBuilt(f"no C compiler was found ({command[0]}: {error.strerror})") from error
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{command[0]} failed; are Python's headers installed (python3-dev)?") from error


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lint", action="store_true", help="build nothing; only check the sources with the compiler")
    parser.add_argument("--sanitize", metavar="WHAT", help="build with these sanitizers, such as address,undefined")
    root = Path(__file__).parent
    parser.add_argument("--to", metavar="DIRECTORY", type=Path, default=root, help="build here, not beside the sources")
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
