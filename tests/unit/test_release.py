"""A release is built of a commit that is ready for it, and is whole; the version is said in one place."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fusefs.core.version import VERSION
from hatch_build import without_relative_links
from tests.support.trashd_command import done_well

REPO = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "PYTHON": sys.executable, "TRASHD_NATIVE": "0", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C.UTF-8",
    **{f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}  # fmt: skip
of_a_clone = pytest.mark.skipif(not (REPO / ".git").exists(), reason="a release is made of a clone")


def run(at: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=at, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of this clone as they are, committed, with all changes in the changelog."""
    at = tmp_path / "clone"
    for name in filter(None, run(REPO, "git", "ls-files", "-z").stdout.split("\0")):
        if (REPO / name).is_file():
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, at / name)
    for words in (
        ("git", "init", "--quiet"),
        ("git", "add", "--all"),
        ("git", "commit", "--quiet", "--message=all"),
        (sys.executable, "-m", "towncrier", "build", "--yes", "--version", VERSION),
        ("git", "add", "--all"),
        ("git", "commit", "--quiet", "--allow-empty", "--message=changelog"),
    ):
        done = run(at, *words)
        assert done.returncode == 0 or "already produced" in done.stderr + done.stdout, done
    return at


@pytest.mark.every
@of_a_clone
def test_a_release_is_whole_and_says_what_is_left_to_do(clone: Path) -> None:
    done = run(clone, ".ci/release")
    assert done.returncode == 0, done
    assert f"git tag --sign --message='trashd {VERSION}' v{VERSION}" in done.stdout
    (wheel,) = (clone / "dist").glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    for name in (
        "systemd/trashd-reaper.service",
        "docs/man/trashd.md",
        "man/man1/trashd-swap.1",
        "man/man5/trashd.conf.5",
        "docs/config.example.toml",
        "docs/reference/json.md",
    ):
        assert f"fusefs/share/{name}" in inside
    (metadata,) = (name for name in inside if name.endswith(".dist-info/METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode()
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []
    assert "may still change (docs/reference/compatibility.md)" in page
    with tarfile.open(clone / f"dist/trashd-{VERSION}.tar.gz") as sdist:
        assert {f"trashd-{VERSION}/{name}" for name in ("README.md", "SECURITY.md", ".ci/release")} <= {
            *sdist.getnames()
        }
    assert run(clone, "git", "status", "--porcelain").stdout == ""


@pytest.mark.every
@of_a_clone
def test_what_is_in_no_commit_is_not_released(clone: Path) -> None:
    (clone / "README.md").write_text("changed", encoding="utf-8")
    done = run(clone, ".ci/release")
    assert (done.returncode, "in no commit" in done.stderr) == (1, True)


@pytest.mark.every
@of_a_clone
def test_a_version_is_released_once(clone: Path) -> None:
    run(clone, "git", "tag", f"v{VERSION}")
    done = run(clone, ".ci/release")
    assert (done.returncode, f"v{VERSION} is there already" in done.stderr) == (1, True)


@pytest.mark.every
@of_a_clone
def test_no_change_is_released_that_the_changelog_lacks(clone: Path) -> None:
    (clone / "docs/changes/more.fix.md").write_text("More.", encoding="utf-8")
    run(clone, "git", "add", "--all")
    run(clone, "git", "commit", "--quiet", "--message=more")
    done = run(clone, ".ci/release")
    assert (done.returncode, "lacks 1 changes" in done.stderr) == (1, True)


@pytest.mark.every
@of_a_clone
def test_what_a_build_leaves_out_is_found(clone: Path) -> None:
    project = clone / "pyproject.toml"
    project.write_text(project.read_text(encoding="utf-8").replace('"/systemd", ', ""), encoding="utf-8")
    run(clone, "git", "commit", "--quiet", "--all", "--message=less")
    done = run(clone, ".ci/release")
    assert (done.returncode, "systemd/trashd.slice" in done.stderr) == (1, True)


def test_the_version_that_is_told_is_the_projects() -> None:
    assert done_well("-V").out == f"trashd, version {VERSION}\n", "make setup"


def test_the_version_is_said_in_one_place() -> None:
    """A sample of an output may have any."""
    said = re.compile(rf"(?i)version\W{{1,5}}{re.escape(VERSION)}")
    texts = [*REPO.glob("fusefs/**/*.py"), *REPO.glob("systemd/**/*"), *REPO.glob("docs/man/*"), REPO / "Makefile"]
    assert f"\nVersion:        {VERSION}\n" in (REPO / "trashd.spec").read_text(encoding="utf-8"), (
        "rpmbuild wants it there"
    )
    found = [path for path in texts if path.is_file() and said.search(path.read_text(encoding="utf-8"))]
    assert found == [REPO / "fusefs/core/version.py"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("see [the mount](docs/mount.md#rings).", "see the mount (docs/mount.md#rings)."),
        ("[docs/plan.md](docs/plan.md)", "docs/plan.md"),
        ("[far](https://example.org/a.md)", "[far](https://example.org/a.md)"),
        ("a\n\n![curves](docs/listing.svg)\n\nb", "a\n\nb"),
    ],
)
def test_a_page_elsewhere_names_files_and_links_to_none(text: str, wanted: str) -> None:
    assert without_relative_links(text) == wanted
