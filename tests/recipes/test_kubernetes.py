"""docs/howto/recipes/kubernetes.md: the schemas, and the rights of the manifests' users."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.node import ALICE, Node
from tests.support.machine_capabilities import FOR_RECIPES
from tests.support.recipe_pages import RecipePage

pytestmark = pytest.mark.needs("kubernetes")

RECIPE = RecipePage("kubernetes")
MANIFESTS = ("trashd.yaml", "job.yaml")
TO_JSON = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
# What a runtime makes of a pod: the node's directory and the configuration mounted, the root read-only.
POD = """
mount --bind /srv/node /scratch
mkdir -p /etc/trashd && mount -t tmpfs -o mode=755 etc /etc/trashd && cat >/etc/trashd/config.toml
for path in /run/trashd /var/lib/trashd; do mkdir -p "$path" && mount -t tmpfs -o mode=755 pod "$path"; done
mount -o remount,bind,ro /
exec setpriv --no-new-privs "$@"
"""


def objects(name: str) -> list[dict[str, Any]]:
    argv = [str(FOR_RECIPES / "bin/python"), "-c", TO_JSON]
    done = subprocess.run(argv, input=RECIPE.file(name).text, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_as_the_schemas_have_it(name: str, tmp_path: Path) -> None:
    path = RECIPE.file(name).put(tmp_path)
    argv: list[str | Path] = [FOR_RECIPES / "bin/kubernetes-validate", "--strict", path]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stdout.count("passed for") == len(objects(name))


def test_the_schemas_refuse_a_word_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(RECIPE.file("job.yaml").text.replace("backoffLimit", "backofLimit"))
    argv: list[str | Path] = [FOR_RECIPES / "bin/kubernetes-validate", "--strict", path]
    assert subprocess.run(argv, capture_output=True, check=False).returncode != 0


class Pods:
    """What runs the manifests' containers on a node."""

    def __init__(self, node: Node) -> None:
        _, configuration, self.reapers = objects("trashd.yaml")
        (self.job,) = objects("job.yaml")
        # An orphan that expired before the reaper started would be kept for an hour.
        self._node, self._config = node, 'grace = "0s"\n' + configuration["data"]["config.toml"]

    def argv(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Sequence[str | Path]:
        """Runs a container's process, whose standard input has to be the configuration."""
        rights = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        bounding = ["-all", *(f"+{name.lower()}" for name in rights.get("capabilities", {}).get("add", ()))]
        uid, gid = rights["runAsUser"], rights.get("runAsGroup", 0)
        as_whom = [f"--bounding-set={','.join(bounding)}", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        words = container.get("command", ["trashd", *container.get("args", ())])
        namespaces = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private")
        return self._node.system.argv("unshare", *namespaces, "bash", "-euc", POD, "pod", *as_whom, *words)

    def run(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
        """Let it do its work. Raises  AssertionError: it failed"""
        done = subprocess.run(
            self.argv(pod, container), input=self._config, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done

    @contextlib.contextmanager
    def running(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[None]:
        """It runs for the block, and is killed."""
        with subprocess.Popen(self.argv(pod, container), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                assert process.stdin is not None
                process.stdin.write(self._config.encode())
                process.stdin.close()
                yield
            finally:
                process.kill()


def orphans(scratch: Path) -> list[Path]:
    """The job's user's, also where no root has looked at his folder yet."""
    return list(scratch.glob(f".trashd/*/{ALICE}/*/2*"))


@pytest.mark.needs("systemd")
def test_a_pod_s_user_swaps_and_the_reaper_has_the_rights_to_reap(node: Node) -> None:
    scratch = node.volume("/srv/node")
    node.root(
        "mkdir -p /scratch /srv/node/team/work && touch /srv/node/team/work/left && chown -R alice: /srv/node/team"
    )
    pods = Pods(node)
    reaper, job = (one["spec"]["template"]["spec"] for one in (pods.reapers, pods.job))
    pods.run(reaper, reaper["initContainers"][0])
    pods.run(job, swap := job["initContainers"][0])
    assert not list((scratch / "team/work").iterdir())
    pods.run(job, job["containers"][0])
    assert len(list((scratch / "team/work").iterdir())) == 1000
    expired = [word.replace("1h", "0s") for word in swap["args"]]
    pods.run(job, {**swap, "args": expired})
    assert len(orphans(scratch)) == 2
    with pods.running(reaper, reaper["containers"][0]):
        node.system.wait_for(lambda: len(orphans(scratch)) == 1, "what has expired is reaped")
