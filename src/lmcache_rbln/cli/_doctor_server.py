# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of a running ``lmcache server``, by its HTTP pages and one request.

The pages are those of LMCache 0.5.4 to 0.5.6: ``/config``, ``/status``, ``/lmc_version``.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_rbln.cli._doctor_host import Facts, installed
from lmcache_rbln.cli._doctor_report import Check, failed, ok, warning
from lmcache_rbln.lmcache_compat import guard_protocol
from lmcache_rbln.lmcache_compat.shared_memory import (
    SHARED_MEMORY_FLAGS,
    SHM_FOLDER,
    SHM_PREFIX,
)

#: LMCache's default ports (0.5.4 to 0.5.6).
DEFAULT_PORT = 5555
DEFAULT_HTTP_PORT = 8080

#: Tokens a block that vLLM-RBLN's attention is usually compiled for.
USUAL_BLOCK_SIZES = (1024, 2048, 4096, 8192)

#: Seconds to connect, and to be answered: a busy server may take its time.
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5.0

#: Where ``/config`` has the configuration of L1.
_MEMORY = ("storage_manager", "l1_manager_config", "memory_config")
_NOT_LMCACHES = "the page /config is not LMCache's"


@dataclass(frozen=True)
class Server:
    """What a server's HTTP pages say.

    Attributes:
        host: where engines reach it.
        port: its port for engines.
        http_host: where its HTTP pages are.
        http_port: their port.
        unreachable: why nothing accepts connections at the port for engines; "" if something does.
        pages_missing: why the HTTP pages cannot be read; "" if they can.
        unknown_host: whether it is unreachable because its host's name has no address.
        config: its ``/config`` page.
        status: its ``/status`` page.
        version: LMCache's version there.
    """

    host: str
    port: int
    http_host: str
    http_port: int
    unreachable: str
    pages_missing: str
    unknown_host: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""

    @property
    def url(self) -> str:
        """The address for engines."""
        return f"tcp://{_bracketed(self.host)}:{self.port}"

    @property
    def http_url(self) -> str:
        """The address of its HTTP pages."""
        return f"http://{_bracketed(self.http_host)}:{self.http_port}"

    @property
    def is_local(self) -> bool:
        """Whether the server is on this host, as far as its address tells."""
        return self.host in ("127.0.0.1", "::1", "localhost", socket.gethostname())

    @property
    def memory(self) -> Mapping[str, Any]:
        """The configuration of its L1 memory."""
        return _part(self.config, *_MEMORY)

    @property
    def pool_nbytes(self) -> int | None:
        """Bytes of its L1 memory; None if the pages do not tell."""
        size = self.memory.get("size_in_bytes")
        return int(size) if size else None

    @property
    def mode(self) -> str:
        """Its ``--supported-transfer-mode``; "" if the pages do not tell."""
        return str(self.config.get("mp", {}).get("supported_transfer_mode", ""))


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``, ``http://HOST:PORT``, ``HOST:PORT`` or ``HOST``.

    Raises:
        ValueError: the text is no address.
    """
    match = re.fullmatch(
        r"(?:[a-z]+://)?(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]*]+)(?::(\d{1,5}))?/?", text.strip()
    )
    port = int(match[2]) if match and match[2] else default_port
    if match is None or not 0 < port < 65536:
        raise ValueError(f"{text!r} is no address; expected one like 127.0.0.1:{default_port}")
    return match[1].strip("[]"), port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def look(server: str, http_address: str) -> Server:
    """Read what the server's HTTP pages say, and whether its port for engines accepts connections.

    Args:
        server: address for engines, or "" if only the pages are known.
        http_address: address of the pages, or "" for LMCache's default port on the same host.

    Raises:
        ValueError: an address is none.
    """
    if server:
        host, port = parse_address(server, DEFAULT_PORT)
    else:
        host, port = parse_address(http_address, DEFAULT_HTTP_PORT)[0], 0
    if http_address:
        http_host, http_port = parse_address(http_address, DEFAULT_HTTP_PORT)
    else:
        http_host, http_port = host, DEFAULT_HTTP_PORT
    pages: dict[str, Any] = {}
    missing = ""
    try:
        for page, kind in (("config", dict), ("status", dict), ("lmc_version", str)):
            pages[page] = _page(http_host, http_port, page, kind)
        _check_config(pages["config"])
        # The default port may be another server's.
        theirs = pages["config"].get("mp", {}).get("port")
        if port and theirs and theirs != port:
            missing = f"they are those of the server at port {theirs}"
    except (OSError, http.client.HTTPException, ValueError) as exc:
        missing = f"{type(exc).__name__}: {exc}"
    if missing:
        pages = {}
    if not port:
        port = int(pages.get("config", {}).get("mp", {}).get("port", DEFAULT_PORT))
    unreachable, unknown_host = _connect(host, port)
    return Server(
        host=host,
        port=port,
        http_host=http_host,
        http_port=http_port,
        unreachable=unreachable,
        unknown_host=unknown_host,
        pages_missing=missing,
        config=pages.get("config", {}),
        status=pages.get("status", {}),
        version=str(pages.get("lmc_version", "")),
    )


def _page(host: str, port: int, name: str, kind: type) -> Any:
    connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(_ANSWER_SECONDS)
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise ValueError(f"the page /{name} answered {response.status}")
    page = json.loads(body)
    if not isinstance(page, kind):
        raise ValueError(f"the page /{name} is not LMCache's")
    return page


def _check_config(page: Mapping[str, Any]) -> None:
    """What is read of ``/config`` is of the type that LMCache gives it, or missing.

    Raises:
        ValueError: It is not.
    """
    parts = [_part(page, "mp"), *(_part(page, *_MEMORY[: depth + 1]) for depth in range(3))]
    for part in parts:
        for key in ("port", "chunk_size", "size_in_bytes"):
            if not isinstance(part.get(key), int | None):
                raise ValueError(_NOT_LMCACHES)


def _part(page: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A part of ``/config``, by the names on the way to it; empty if it is missing.

    Raises:
        ValueError: One on the way is no object.
    """
    for name in names:
        page = page.get(name, {})
        if not isinstance(page, dict):
            raise ValueError(_NOT_LMCACHES)
    return page


def _connect(host: str, port: int) -> tuple[str, bool]:
    """Why no connection is accepted, "" if one is, and whether the name has no address."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as exc:
        return f"{exc.strerror or exc}", isinstance(exc, socket.gaierror)
    # Of a label that is too long for a host name.
    except UnicodeError as exc:
        return str(exc), True
    return "", False


def checks(server: Server, facts: Facts, block_size: int | None) -> Iterator[Check]:
    """Every check of a server, in the order of the report."""
    asked = facts.get("server", {})
    reachable = _reachable(server, asked)
    yield reachable
    if server.unreachable:
        return
    if server.pages_missing:
        yield warning(
            "server's pages",
            f"{server.http_url} cannot be read ({server.pages_missing}): "
            "version, guard, transport and size are not known",
            "give the server's --http-host and --http-port: lmcache-rbln doctor --server "
            f"{server.url} --http http://HOST:PORT",
        )
    else:
        yield _version(server)
        yield _guard(server)
    yield _mode(server, asked)
    chunk_size = int(server.config.get("mp", {}).get("chunk_size", 0) or asked.get("chunk_size", 0))
    if chunk_size:
        yield _chunk_size(chunk_size, block_size)
    if not server.pages_missing:
        yield _transport(server)
        yield _pool(server)


def _reachable(server: Server, asked: Mapping[str, Any]) -> Check:
    name = "server"
    if server.unknown_host:
        return failed(
            name,
            f"{server.host} has no address: {server.unreachable}",
            "check the name in --server, or give the server's IP address",
        )
    if server.unreachable:
        return failed(
            name,
            f"nothing answers at {server.url}: {server.unreachable}",
            f"start it there: LMCACHE_TRACK_USAGE=false lmcache server --host {server.host} --port "
            f"{server.port} --chunk-size 1024 --supported-transfer-mode engine_driven --l1-size-gb "
            f"20 --eviction-policy LRU {SHARED_MEMORY_FLAGS}; it needs some 20 s to come up",
        )
    error = str(asked.get("error", ""))
    # Other errors than silence may be this host's own.
    if error and (server.pages_missing or error.startswith("ServerUnreachable")):
        return failed(
            name,
            f"something accepts connections at {server.url}, but does not answer as an LMCache "
            f"server: {error}",
            "check the port (lmcache server --port), and that both ends have the same LMCache",
        )
    return ok(name, f"{server.url} answers")


def _version(server: Server) -> Check:
    name = "server's LMCache"
    here = installed("lmcache")
    if here and server.version != here:
        return warning(
            name,
            f"{server.version} there, {here} here",
            f"install the same release at both ends: pip install lmcache=={here} beside the server",
        )
    return ok(name, server.version)


def _guard(server: Server) -> Check:
    name = "lmcache-rbln there"
    version = server.status.get(guard_protocol.STATUS_FIELD)
    if version:
        return ok(name, f"{version}: unfinished writes are discarded")
    return warning(
        name,
        "not beside the server, or switched off: a chunk whose store failed may be served as zeros",
        "pip install lmcache-rbln in the server's environment, unset LMCACHE_RBLN_GUARD there, "
        "restart the server",
    )


def _mode(server: Server, asked: Mapping[str, Any]) -> Check:
    name = "transfer mode"
    change = (
        "restart the server with --supported-transfer-mode engine_driven "
        "(or auto, if workers of another device need the other mode)"
    )
    if server.mode in ("engine_driven", "auto"):
        return ok(name, server.mode)
    if server.mode:
        return failed(
            name, f"{server.mode}: the server would have to open the NPU's memory", change
        )
    if asked.get("engine_driven"):
        return ok(name, "engine-driven requests are answered")
    if "engine_driven" in asked:
        return failed(name, "engine-driven requests are not answered", change)
    return warning(
        name,
        "not known: neither the pages nor LMCache here could be asked",
        "mend the lines above first, or give --http",
    )


def _chunk_size(chunk_size: int, block_size: int | None) -> Check:
    name = "chunk size"
    if block_size is not None:
        if chunk_size % block_size == 0:
            return ok(
                name, f"{chunk_size} tokens, {chunk_size // block_size} blocks of {block_size}"
            )
        multiple = max(1, -(-chunk_size // block_size)) * block_size
        return failed(
            name,
            f"{chunk_size} tokens are no multiple of a block of {block_size}",
            f"restart the server with --chunk-size {multiple}",
        )
    fitting = [size for size in USUAL_BLOCK_SIZES if chunk_size % size == 0]
    if not fitting:
        return failed(
            name,
            f"{chunk_size} tokens fit no block size usual on this device "
            f"({', '.join(map(str, USUAL_BLOCK_SIZES))})",
            "restart the server with --chunk-size equal to vLLM's --block-size or a multiple: "
            f"{USUAL_BLOCK_SIZES[0]} for blocks of {USUAL_BLOCK_SIZES[0]}, {USUAL_BLOCK_SIZES[-1]} "
            "for any of these; for another block size: lmcache-rbln doctor --block-size N",
        )
    if len(fitting) < len(USUAL_BLOCK_SIZES):
        return ok(
            name,
            f"{chunk_size} tokens: for blocks of {', '.join(map(str, fitting))} (--block-size N "
            "checks yours)",
        )
    return ok(name, f"{chunk_size} tokens")


def _transport(server: Server) -> Check:
    name = "transport"
    memory = server.memory
    asked = server.config.get("mp", {}).get("shm_name")
    pool = server.pool_nbytes or 0
    if server.mode == "lmcache_driven":
        return ok(name, "not looked at: the transfer mode is the other one")
    if memory.get("shm_name") and not memory.get("use_lazy") and not memory.get("devdax_path"):
        segment = SHM_FOLDER / _segment(str(memory["shm_name"]))
        if not segment.exists():
            return failed(
                name,
                f"shared memory, but {segment} is not visible here: server and engine are in "
                "different IPC namespaces or on different hosts, and workers refuse to register",
                "run both with the same /dev/shm: docker --ipc=host for both, or "
                "--ipc=container:SERVER for the engine; for engines on other hosts, restart the "
                "server without --shm-name",
            )
        return ok(name, f"shared memory ({segment.name})")
    if asked and not memory.get("shm_name"):
        return failed(
            name,
            f"pickle, though --shm-name {asked} was given: the server's /dev/shm had less than the "
            f"{_size(pool)} of --l1-size-gb free",
            f"give it more: mount -o remount,size={_gib(pool) + 1}G /dev/shm (docker: --shm-size "
            f"{_gib(pool) + 1}g), or a smaller --l1-size-gb; then restart the server",
        )
    reason = "--l1-use-lazy is on" if memory.get("use_lazy") and asked else "no --shm-name"
    return warning(
        name,
        f"pickle ({reason}): 10 to 50 times slower than shared memory",
        f"restart the server with {SHARED_MEMORY_FLAGS}"
        + ("" if server.is_local else ", on the host of the engine"),
    )


def _segment(name: str) -> str:
    bare = name.lstrip("/")
    return bare if bare.startswith(SHM_PREFIX) else f"{SHM_PREFIX}{bare}"


def _pool(server: Server) -> Check:
    name = "L1 and /dev/shm"
    pool = server.pool_nbytes
    if pool is None:
        return warning(name, "the size of L1 is not known", "give --http")
    if not server.is_local:
        return ok(name, f"L1 {_size(pool)}; the server is on another host")
    try:
        usage = shutil.disk_usage(SHM_FOLDER)
    except OSError as exc:
        return failed(name, f"/dev/shm cannot be looked at: {exc}", "mount a tmpfs on /dev/shm")
    found = f"L1 {_size(pool)}, /dev/shm {_size(usage.total)} of which {_size(usage.free)} free"
    if usage.total < pool:
        return failed(
            name,
            found,
            f"mount -o remount,size={_gib(pool) + 1}G /dev/shm (docker: --shm-size "
            f"{_gib(pool) + 1}g), or a smaller --l1-size-gb; then restart the server",
        )
    return ok(name, found)


def _gib(nbytes: int) -> int:
    return -(-nbytes // 2**30)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
