"""A server and two clients on a network of their own: the link of each client can be cut, and what was sent is late."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

SERVER = "10.99.0.1"
"""The server's address, whichever link one comes by; some servers refuse 127.0.0.1."""
_LIMIT_S = 20.0


class Host(NamedTuple):
    """A network namespace; pid is of the process that keeps it."""

    pid: int

    def enter(self) -> tuple[str, ...]:
        """What is put before a command that runs there; the pid stays that of the command."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def run(self, *command: str | Path) -> str:
        """What a command says there, which has to succeed. Raises  OSError with what it said else"""
        done = subprocess.run(
            [*self.enter(), *command], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False
        )
        if done.returncode:
            raise OSError(f"{command}: {(done.stderr or done.stdout).decode(errors='replace').strip()}")
        return os.fsdecode(done.stdout)


class Network(NamedTuple):
    """Each client has one link to the server."""

    server: Host
    clients: Sequence[Host]

    def cut(self, client: int) -> None:
        """Nothing arrives any more, in either direction; nobody is told."""
        self.server.run("ip", "link", "set", f"to{client}", "down")

    def mend(self, client: int) -> None:
        """What is sent again arrives."""
        self.server.run("ip", "link", "set", f"to{client}", "up")

    def wait_for(self, port: int) -> None:
        """Wait until somebody listens there. Raises  OSError, subprocess.TimeoutExpired"""
        self.server.run("bash", "-c", f"until : </dev/tcp/{SERVER}/{port}; do sleep 0.05; done 2>/dev/null")


@contextmanager
def network() -> Iterator[Network]:
    """One that nothing else of this machine is on; it ends with the block."""
    with ExitStack() as stack:
        server, *clients = (stack.enter_context(_host()) for _ in range(3))
        server.run("ip", "link", "set", "lo", "up")
        server.run("ip", "addr", "add", f"{SERVER}/32", "dev", "lo")
        for n, client in enumerate(clients):
            names = f"to{n}", "up0"
            server.run(
                "ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1], "netns", str(client.pid)
            )
            server.run("ip", "addr", "add", f"10.99.{n + 1}.1/24", "dev", names[0])
            server.run("ip", "link", "set", names[0], "up")
            client.run("ip", "link", "set", "lo", "up")
            client.run("ip", "addr", "add", f"10.99.{n + 1}.2/24", "dev", names[1])
            client.run("ip", "link", "set", names[1], "up")
            client.run("ip", "route", "add", "default", "via", f"10.99.{n + 1}.1")
        yield Network(server, clients)


@contextmanager
def _host() -> Iterator[Host]:
    """A process that says when it is in a namespace of its own, and does nothing more."""
    argv = ("unshare", "--net", "--", "bash", "-c", "echo; read -r")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            if not keeper.stdout.readline():
                raise OSError("no network namespace")
            yield Host(keeper.pid)
        finally:
            keeper.kill()
