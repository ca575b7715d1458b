"""docs/howto/recipes/ci.md with the real npm, which needs no network for a package in a file."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.recipes.node import ALICE, Node, only_orphan
from tests.support.recipe_pages import RecipePage

pytestmark = pytest.mark.needs("systemd", "npm")

RECIPE = RecipePage("ci")
HOOK = "/usr/local/lib/runner/job-started.sh"


@pytest.fixture
def project(node: Node) -> Path:
    """Alice's project on a volume of its own, with a dependency that is installed, and a file there that is not."""
    node.volume("/home/alice", f"mode=700,uid={ALICE},gid={ALICE}")
    node.root("trashd init /home/alice")
    path = node.system.path("/home/alice/project")
    path.mkdir()
    (path / "dependency.tgz").write_bytes(_package("dependency"))
    depends = {"name": "project", "version": "1.0.0", "dependencies": {"dependency": "file:dependency.tgz"}}
    (path / "package.json").write_text(json.dumps(depends))
    RECIPE.file("ci/npm-ci").put(path)
    node.root("chown -R alice: /home/alice/project")
    node.alice("cd project && npm install --no-audit --no-fund --offline && touch node_modules/stale")
    return path


def _package(name: str) -> bytes:
    """As npm pack makes it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        text = json.dumps({"name": name, "version": "1.0.0"}).encode()
        entry = tarfile.TarInfo("package/package.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return packed.getvalue()


def test_npm_ci_finds_an_empty_directory_and_fills_it(node: Node, project: Path) -> None:
    RECIPE.follow("A build", node.run)
    assert (project / "node_modules/dependency/package.json").exists()
    assert not (project / "node_modules/stale").exists()
    node.alice(f"trashd restore --to ~/old {only_orphan(node, '/home/alice')}")
    assert node.system.path("/home/alice/old/stale").exists()


def test_a_failed_npm_ci_has_the_old_directory_back(node: Node, project: Path) -> None:
    RECIPE.follow("One that fails", node.run)
    assert (project / "node_modules/stale").exists()


def test_without_trashd_npm_deletes_as_ever(node: Node, project: Path) -> None:
    node.alice("cd project && PATH=/usr/bin:/bin ci/npm-ci --no-audit --no-fund --offline")
    assert not (project / "node_modules/stale").exists()
    assert (project / "node_modules/dependency").is_dir()


def test_a_runner_s_hook_empties_the_workspace_and_never_fails(node: Node, project: Path) -> None:
    RECIPE.file(HOOK).put(node.system.root)
    node.alice(f"GITHUB_WORKSPACE=~/project {HOOK}")
    assert not list(project.iterdir())
    assert node.alice(f"GITHUB_WORKSPACE=~/project {HOOK} && GITHUB_WORKSPACE=/nowhere {HOOK}") == ""
