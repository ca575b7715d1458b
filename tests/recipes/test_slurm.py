"""docs/howto/recipes/slurm.md under Debian's slurmctld, slurmd and munge."""

from collections.abc import Iterator

import pytest

from tests.recipes.node import ALICE, Node
from tests.support.recipe_pages import RecipePage
from tests.support.slurm_cluster import slurm_conf

pytestmark = pytest.mark.needs("systemd", "slurm")

RECIPE = RecipePage("slurm")
UNITS = ("munge.service", "slurmctld.service", "slurmd.service")
PLACES = {
    "SlurmUser": "slurm",
    "StateSaveLocation": "/var/lib/slurm/slurmctld",
    "SlurmdSpoolDir": "/var/lib/slurm/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "MailProg": "/bin/true",
}

# Slurm takes no name for a node's that leads to the loopback alone.
ADDRESS = "10.98.0.1"
NETWORK = (
    f"ip link add node type veth peer name nobody && ip addr add {ADDRESS}/24 dev node && ip link set node up",
    f"hostname node1 && echo {ADDRESS} node1 >>/etc/hosts",
)
MUNGE_KEY = "head -c 1024 /dev/urandom | install -m 400 -o munge /dev/stdin /etc/munge/munge.key"
_LIMIT_S = 20.0


@pytest.fixture(scope="session")
def installed(booted: Node) -> Node:
    """The recipe's files and what Slurm needs on one node, once: a worker may leave this module and come back."""
    for words in (*NETWORK, MUNGE_KEY):
        booted.root(words)
    booted.system.path("etc/slurm/slurm.conf").write_text(slurm_conf("node1", ADDRESS, PLACES))
    booted.system.path("etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    RECIPE.put(booted.system.root)
    return booted


@pytest.fixture
def cluster(installed: Node) -> Iterator[Node]:
    """It has /scratch with a store, is idle, and its first job is 1."""
    installed.volume("/scratch")
    installed.root("trashd init /scratch")
    installed.root("rm -rf /var/lib/slurm/* && install -d -o slurm /var/lib/slurm/slurmctld /var/lib/slurm/slurmd")
    installed.system.systemctl("start", *UNITS)
    installed.system.wait_for(lambda: "idle" in state_of(installed), "the node is idle", _LIMIT_S)
    yield installed
    installed.system.systemctl("stop", *UNITS)
    installed.leave()


def state_of(cluster: Node) -> str:
    """What Slurm says of the node: idle, alloc, drain…"""
    return cluster.root("sinfo --noheader --format=%T 2>&1 || true")


def wait_until_done(cluster: Node) -> None:
    """Until the epilogs have run."""
    cluster.system.wait_for(lambda: not cluster.root("squeue --noheader"), "no job is left", _LIMIT_S)


def test_a_job_has_its_own_scratch_which_goes_to_the_trash_at_its_end(cluster: Node) -> None:
    RECIPE.follow("What a user sees", cluster.run)
    wait_until_done(cluster)
    RECIPE.follow("After it", cluster.run)
    assert cluster.system.path("/scratch/alice/1/1").stat().st_uid == ALICE


def test_tasks_of_an_array_share_what_is_due(cluster: Node) -> None:
    cluster.root("install -d -o alice /scratch/alice")
    cluster.alice("cd /scratch/alice && for n in 1 2 3 4; do mkdir $n && trashd rm --keep-for 0s $n; done")
    RECIPE.follow("Many nodes delete", cluster.run)


def test_an_epilog_that_fails_is_told_and_does_not_drain_the_node(cluster: Node) -> None:
    job = cluster.alice("sbatch --hold --parsable --wrap true").strip()
    there = f"/scratch/alice/{job}"
    cluster.root(f"install -d -o alice /scratch/alice {there} && mount -t tmpfs -o uid={ALICE} tmpfs {there}")
    cluster.alice(f"scontrol release {job}")
    wait_until_done(cluster)
    said = cluster.root("journalctl --sync && journalctl --output=cat --identifier=trashd-epilog")
    assert f"{there}: is a mount point\n" in said
    assert state_of(cluster).strip() == "idle"
    cluster.root(f"umount {there}")


def test_a_prolog_that_fails_drains_the_node_and_keeps_the_job(cluster: Node) -> None:
    cluster.system.path("/scratch/alice").touch()
    job = cluster.alice("sbatch --parsable --wrap true").strip()
    text = f"squeue --noheader --format='%T %r' --job {job}"
    is_held = "PENDING launch failed requeued held"
    cluster.system.wait_for(lambda: cluster.root(text).strip() == is_held, "it waits again", _LIMIT_S)
    assert state_of(cluster).strip() == "drained"
    assert "Reason=Prolog error" in cluster.root("scontrol show node node1")
