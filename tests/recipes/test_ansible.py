"""docs/howto/recipes/ansible.md against the machine itself."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.recipes.node import Node, booted_node
from tests.support.booted_systemd import REPO
from tests.support.machine_capabilities import FOR_RECIPES
from tests.support.recipe_pages import RecipePage
from tests.support.trashd_command import CommandResult
from tests.systemd.machine import REAPER

pytestmark = [pytest.mark.needs("systemd", "ansible", "minutes"), pytest.mark.timeout(400)]

RECIPE = RecipePage("ansible")
PLAYS = "/srv/ansible"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree as a wheel without its native parts, which only a compiler adds."""
    made = tmp_path_factory.mktemp("wheel")
    argv: list[str | Path] = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, REPO]
    subprocess.run(argv, check=True, capture_output=True, env={**os.environ, "TRASHD_NATIVE": "0"})
    (one,) = made.iterdir()
    return one


@pytest.fixture(scope="module")
def bare(wheel: Path) -> Iterator[Node]:
    """A machine without trashd, where the recipe's files, the wheels and Ansible are."""
    with booted_node(has_trashd=False) as node:
        RECIPE.put(node.system.path(PLAYS), "")
        node.system.path("/usr/local/bin/ansible-playbook").symlink_to(FOR_RECIPES / "bin/ansible-playbook")
        node.volume("/scratch")
        wheels = node.system.path("/srv/wheels")
        wheels.mkdir()
        for path in (wheel, *(FOR_RECIPES / "wheels").iterdir()):
            (wheels / path.name).write_bytes(path.read_bytes())
        yield node
        node.leave()


def play(node: Node, variables: Mapping[str, object]) -> CommandResult:
    """The page's playbook once more, with other variables than those of its files."""
    step = RECIPE.steps("Twice")[0]
    words = f"site.yml --extra-vars {shlex.quote(json.dumps(variables))}"
    return node.run(step._replace(command=step.command.replace("site.yml", words).partition(" | ")[0]))


@pytest.fixture(scope="module")
def played(bare: Node) -> Node:
    """After the page's two runs, of which the second changed nothing."""
    RECIPE.follow("Twice", bare.run)
    return bare


def test_it_serves_all_users_after_the_first_run(played: Node) -> None:
    played.root("install -d -o alice -g alice /scratch/alice /scratch/alice/job && touch /scratch/alice/job/file")
    played.alice("trashd swap --keep-for 0s /scratch/alice/job")
    played.system.wait_for(lambda: not played.alice("trashd list --json"), "it is reaped")
    assert played.system.trashd("doctor", "/scratch") == ""


def test_a_changed_configuration_is_in_force_without_a_restart(played: Node) -> None:
    pid = played.system.main_pid(REAPER)
    done = play(played, {"trashd_config": {"defaults": {"max_rate": "4000/s"}}})
    assert done.code == 0, done
    assert re.search(r"changed=2 .*failed=0 ", done.out), done
    assert played.system.main_pid(REAPER) == pid
    assert "4000/s" in played.root("trashd config show")


def test_a_wrong_configuration_is_told_and_the_old_one_stays(played: Node) -> None:
    before = played.root("cat /etc/trashd/config.d/ansible.toml")
    done = play(played, {"trashd_config": {"defaults": {"max_rat": "1/s"}}})
    assert done.code == 2
    assert "max_rat" in done.out
    assert played.root("cat /etc/trashd/config.d/ansible.toml") == before
