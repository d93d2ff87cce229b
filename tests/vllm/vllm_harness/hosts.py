# SPDX-License-Identifier: Apache-2.0
"""Two hosts, as far as one machine can have two."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import zmq

from vllm_harness.processes import WorkerProcess

#: Of the range for tests between hosts, RFC 2544.
_ADDRESSES = ("198.18.0.1", "198.18.0.2")
_LOOPBACK = ("127.0.0.2", "127.0.0.3")
#: What ``unshare`` gives a thread for itself, from ``linux/sched.h``.
_CLONE_FS = 0x00000200


class Host:
    """A host: an address, and what runs there.

    Args:
        address: IPv4 address, at which the other host reaches it.
        namespace: The process in whose namespaces it lives; None for this process's own.
    """

    def __init__(self, address: str, namespace: subprocess.Popen[bytes] | None) -> None:
        self.address = address
        self._namespace = namespace
        # The I/O threads of a context live where they are started.
        with self._entered():
            self._context = zmq.Context()
            self._context.socket(zmq.PAIR).close()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Processes, threads and sockets made meanwhile are on this host.

        LMCache's connector takes the one ZeroMQ context of its process; two hosts have two.
        """
        with self._entered(), mock.patch.object(zmq.Context, "instance", lambda: self._context):
            yield

    def worker(self, index: int, folder: Path) -> WorkerProcess:
        """A worker process on this host, with the NPU of that index."""
        with self.inside():
            return WorkerProcess(index, folder, dict(os.environ))

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._namespace is not None:
            assert self._namespace.stdin is not None
            self._namespace.stdin.close()
            self._namespace.wait(10)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        if self._namespace is None:
            yield
            return
        own, theirs = _namespaces_of("thread-self"), _namespaces_of(self._namespace.pid)
        try:
            _enter(theirs)
            try:
                yield
            finally:
                _enter(own)
        finally:
            for opened in (*own, *theirs):
                os.close(opened)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts: network namespaces with a cable between them where the system allows it.

    Elsewhere two loopback addresses of this one.
    """
    with contextlib.ExitStack() as stack:
        try:
            namespaces = _connected_namespaces(stack)
            hosts = [Host(*each) for each in zip(_ADDRESSES, namespaces, strict=True)]
        except (OSError, subprocess.CalledProcessError) as exc:
            print(f"two loopback addresses, for network namespaces are not allowed here: {exc}")
            hosts = [Host(address, None) for address in _LOOPBACK]
        else:
            print("two network namespaces")
        for host in hosts:
            stack.callback(host.close)
        yield hosts[0], hosts[1]


def _connected_namespaces(stack: contextlib.ExitStack) -> list[subprocess.Popen[bytes]]:
    """A process in each of two new network namespaces, which end with the processes.

    Raises:
        OSError: unshare, nsenter or ip is missing.
        subprocess.CalledProcessError: They may not be made.
    """
    namespaces = []
    for _ in _ADDRESSES:
        # /sys shows the network devices of the namespace that mounted it; UCX looks there. Says that
        # it is there, and ends when nobody holds its input any more.
        script = "mount -t sysfs sysfs /sys && echo && exec cat"
        command = ["unshare", "--net", "--mount", "sh", "-c", script]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != b"\n":
            raise subprocess.CalledProcessError(process.wait(), command)
        namespaces.append(process)
    first, second = namespaces
    _ip(first, f"link add cable type veth peer name cable netns {second.pid}")
    for namespace, address in zip(namespaces, _ADDRESSES, strict=True):
        _ip(namespace, f"addr add {address}/30 dev cable")
        for device in ("lo", "cable"):
            _ip(namespace, f"link set {device} up")
    return namespaces


def _ip(namespace: subprocess.Popen[bytes], command: str) -> None:
    enter = ["nsenter", f"--net=/proc/{namespace.pid}/ns/net"]
    subprocess.run([*enter, "ip", *command.split()], check=True, capture_output=True)


def _namespaces_of(process: int | str) -> list[int]:
    """Descriptors of the network and mount namespaces of a process."""
    return [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")]


def _enter(namespaces: list[int]) -> None:
    """Move this thread into these namespaces; it stays in its folder."""
    folder = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    # Threads that share root and folder may not change their mount namespace.
    if libc.unshare(_CLONE_FS) or any(libc.setns(each, 0) for each in namespaces):
        raise OSError(ctypes.get_errno(), "entering the namespaces of a host")
    os.chdir(folder)
