"""docs/howto/recipes/logrotate.md by the distribution's own unit."""

from pathlib import Path

import pytest

from tests.recipes.node import Node
from tests.support.recipe_pages import RecipePage, Step

pytestmark = pytest.mark.needs("systemd")

RECIPE = RecipePage("logrotate")
OLD, RECENT, FOREIGN = "web.log-20261001.gz", "web.log-20261120.gz", "notes"


@pytest.fixture
def logs(node: Node) -> Path:
    """/var/log/app on a volume of its own, with a log of today, two rotated ones, and something else that is old."""
    path = node.volume("/var/log") / "app"
    path.mkdir()
    (path / "web.log").write_text("a line\n")
    for name, age_days in ((OLD, 40), (RECENT, 3), (FOREIGN, 40)):
        node.root(f"echo {name} | gzip >/var/log/app/{name} && touch --date='{age_days} days ago' /var/log/app/{name}")
    RECIPE.put(node.system.root)
    seen = 'logrotate state -- version 2\n"/var/log/app/web.log" 2026-1-1-0:0:0\n'
    node.system.path("var/lib/logrotate/status").write_text(seen)  # it rotates no log that it sees for the first time
    return path


def names(logs: Path) -> set[str]:
    return {path.name for path in logs.iterdir()}


def test_a_night_rotates_and_takes_what_is_too_old_and_it_comes_back(node: Node, logs: Path) -> None:
    RECIPE.follow("Before the first night", node.run)
    RECIPE.follow("In the night", node.run)
    (rotated,) = names(logs) - {"web.log", RECENT, FOREIGN}
    assert rotated.startswith("web.log-2")
    RECIPE.follow("Back again", node.run)
    assert names(logs) - {"web.log"} == {rotated, OLD, RECENT, FOREIGN}


def test_what_can_not_be_taken_is_told_and_fails_logrotate_after_the_rotation(node: Node, logs: Path) -> None:
    node.root(f"trashd init /var/log && chattr +i /var/log/app/{OLD}")
    done = node.run(Step("", True, "logrotate /etc/logrotate.conf", ""))
    assert done.code == 1
    assert f"{OLD}: Operation not permitted" in done.out
    assert len(names(logs) - {"web.log", OLD, RECENT, FOREIGN}) == 1
    node.root(f"chattr -i /var/log/app/{OLD}")
