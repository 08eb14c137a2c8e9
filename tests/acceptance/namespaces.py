"""Hosts without machines: Linux network, process and mount namespaces on one bridge, by iproute2 and util-linux.

A host is like a pod: an address of its own on the bridge, its own loopback, its own processes, its own folders at
/tmp/ray and `OWN`, its own /etc/hosts; what is started in it is like a container. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.acceptance.running_cluster import wait_until

RAY_FOLDER: Final = Path("/tmp/ray")  # where `ray start` keeps its sockets
OWN: Final = "own"  # beside the folders of the hosts: each sees its own one there
END_TIMEOUT_S: Final = 30.0


class Host:
    """The namespaces are held by a process that does nothing. `link`: the bridge's namespace, and its end of our
    cable."""

    def __init__(self, name: str, address: str, folder: Path, link: tuple[str, str], names: Path) -> None:
        self.name = name
        self.address = address
        self._folder = folder
        self.own = folder / OWN  # as seen from outside
        self._link = link
        ray = folder / "ray"
        ray.mkdir(parents=True)
        self.own.mkdir()
        # No name server could be reached: without one, names that are not in /etc/hosts fail at once.
        binds = {str(ray): str(RAY_FOLDER), str(names): "/etc/hosts", "/dev/null": "/etc/resolv.conf"}
        binds[str(self.own)] = str(folder.parent / OWN)
        mounts = " && ".join(f"mount --bind {source} {target}" for source, target in binds.items())
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", name, *unshare, "sh", "-c", f"{mounts} && echo made && exec sleep infinity"]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"made\n"
        self._holder.stdout.close()
        self._first = _child_of(self._holder.pid)
        self._containers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        """Run a command here; what it says goes to a file. Of our environment it gets the PATH alone: Ray's settings
        stay in a process that has run one."""
        enter = ["nsenter", f"--target={self._first}", "--net", "--mount", "--pid", f"--wdns={self._folder}", "--"]
        with self._log(name).open("wb") as log:
            self._containers[name] = subprocess.Popen(
                [*enter, *command], stdout=log, stderr=log, env={"PATH": os.environ["PATH"]} | environment
            )

    def terminate(self, name: str) -> None:
        """SIGTERM to a container."""
        os.kill(_child_of(self._containers[name].pid), signal.SIGTERM)

    def wait(self, name: str, timeout_s: float) -> int:
        """Exit code of a container that ends."""
        return self._containers[name].wait(timeout_s)

    def cut(self) -> None:
        """Pull the cable: processes go on, nothing comes in or out."""
        namespace, end = self._link
        ip("-n", namespace, "link", "set", end, "down")

    def bytes_sent(self) -> int:
        """By its network card, since it was made."""
        (card,) = json.loads(ip("-n", self.name, "-s", "-j", "link", "show", "eth0"))
        return int(card["stats64"]["tx"]["bytes"])

    def end(self) -> None:
        """Power off: every process of this host ends at once."""
        self._holder.kill()
        for process in (self._holder, *self._containers.values()):
            process.wait(END_TIMEOUT_S)

    def explain(self) -> str:
        """The tails of what its containers said."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {self.name} {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def log(self, name: str) -> str:
        """All that a container said."""
        return self._log(name).read_text(errors="replace")

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[tuple[dict[str, Host], Path]]:
    """So many hosts, reachable from here and from each other, and the file that is /etc/hosts in all of them.
    Afterwards nothing of them is left."""
    assert os.geteuid() == 0, "network namespaces need root"
    prefix = f"td{os.getpid()}"
    hub, subnet = f"{prefix}-hub", f"198.18.{os.getpid() % 250}"  # RFC 2544: of no real network
    made: dict[str, Host] = {}
    etc_hosts = folder / "hosts"
    etc_hosts.write_text("127.0.0.1 localhost\n")
    RAY_FOLDER.mkdir(exist_ok=True)
    (folder / OWN).mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(_delete, prefix)
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        ip("link", "add", prefix, "type", "veth", "peer", "name", "outside", "netns", hub)
        ip("-n", hub, "link", "set", "outside", "master", "bridge", "up")
        ip("address", "add", f"{subnet}.1/24", "dev", prefix)
        ip("link", "set", prefix, "up")
        for number, name in enumerate(names, start=2):
            _add_namespace(f"{prefix}-{name}", f"{subnet}.{number}", hub, f"card{number}")
            link = (hub, f"card{number}")
            made[name] = Host(f"{prefix}-{name}", f"{subnet}.{number}", folder / name, link, etc_hosts)
            stack.callback(made[name].end)
        yield made, etc_hosts


def _add_namespace(name: str, address: str, hub: str, end: str) -> None:
    ip("netns", "add", name)
    ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", end, "netns", hub)
    ip("-n", hub, "link", "set", end, "master", "bridge", "up")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "route", "add", "default", "dev", "eth0")  # programs find their own address by it


def _delete(prefix: str) -> None:
    """Every namespace of ours; with the bridge's goes our own end of its cable."""
    ours = [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(f"{prefix}-")]
    deadline_s = time.monotonic() + END_TIMEOUT_S
    # Killed with their host, of which the kernel takes the last ones apart after their parent is gone.
    while (left := _processes(ours)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for name in ours:
        ip("netns", "delete", name)
    with contextlib.suppress(OSError):
        RAY_FOLDER.rmdir()  # unless it was there before
    assert not left, f"processes outlived their host: {left}"
    wait_until(lambda: not Path(f"/sys/class/net/{prefix}").exists(), 10.0)


def _processes(namespaces: list[str]) -> dict[str, list[str]]:
    """The command of each process, by namespace."""
    found: dict[str, list[str]] = {}
    for name in namespaces:
        for pid in ip("netns", "pids", name).split():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.setdefault(name, []).append(f"{pid} {command[:100]}")
    return found


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def ip(*arguments: str) -> str:
    """What iproute2's command says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
