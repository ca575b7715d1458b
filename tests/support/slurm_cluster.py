"""A Slurm cluster of one machine, from the distribution's packages, with daemons, keys and ports of its own."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
_LIMIT_S, _GLANCE_S = 30, 0.1
_ONE_NODE = """\
ClusterName=tests
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldHost={node}({address})
NodeName={node} NodeAddr={address} CPUs=8 State=UNKNOWN
PartitionName=all Nodes={node} Default=YES State=UP
"""


def slurm_conf(node: str, address: str, settings: Mapping[str, object]) -> str:
    """A slurm.conf of one node that takes eight tasks at a time. settings: its user, places and ports"""
    return _ONE_NODE.format(node=node, address=address) + "".join(f"{key}={settings[key]}\n" for key in settings)


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """The variables by which commands find it; eight tasks at a time."""
    with ExitStack() as owned:
        top = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="trashd-slurm-")))
        top.chmod(0o755)
        for name, mode in (("open", 0o755), ("closed", 0o700), ("state", 0o755), ("spool", 0o755)):
            (top / name).mkdir()
            (top / name).chmod(mode)
        key = top / "closed/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        conf = top / "slurm.conf"
        port = _free_port()
        places = {
            "SlurmUser": "root",
            "SlurmctldPort": port,
            "SlurmdPort": port + 1,
            "AuthInfo": f"socket={top}/open/munge",
            "StateSaveLocation": top / "state",
            "SlurmdSpoolDir": top / "spool",
            "SlurmctldPidFile": top / "slurmctld.pid",
            "SlurmdPidFile": top / "slurmd.pid",
        }
        conf.write_text(slurm_conf(socket.gethostname().partition(".")[0], "127.0.0.1", places))
        munge = {"key-file": key, "socket": top / "open/munge", "seed-file": top / "closed/seed"}
        munge |= {"log-file": top / "closed/log", "pid-file": top / "closed/pid"}
        for argv in (
            ["munged", "--foreground", "--force", *(f"--{name}={value}" for name, value in munge.items())],
            ["slurmctld", "-D", "-c", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf)],
        ):
            daemon = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            owned.callback(_end, daemon)
            if argv[0] == "munged":
                _wait(munge["socket"].exists)
        variables = {"SLURM_CONF": str(conf)}
        _wait(lambda: _is_idle(variables))
        yield variables


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(is_there: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + _LIMIT_S
    while not is_there():
        assert time.monotonic() < ends_s, "Slurm did not come up"
        time.sleep(_GLANCE_S)


def _is_idle(variables: dict[str, str]) -> bool:
    asked = ["sinfo", "--noheader", "--format=%T"]
    done = subprocess.run(asked, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "idle"


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    daemon.wait(_LIMIT_S)
