# SPDX-License-Identifier: Apache-2.0
"""``lmcache-rbln serve``: vLLM-RBLN's own engine with LMCache, on a simulated NPU, timed.

Starts a real ``lmcache server`` and ``vllm serve`` with a small random model, sends two prompts
twice over HTTP, and shows the times to the first token and how much of each prompt was cached.
Graphs run on the CPU, so the times say how much work a hit saves, not how fast an NPU is.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lmcache_rbln import simulator
from lmcache_rbln.cli._tiny_model import MAX_LENGTH, VOCABULARY
from lmcache_rbln.lmcache_compat.server_process import (
    LMCacheServer,
    ServerFailed,
    free_ports,
    terminate_as_exit,
)
from lmcache_rbln.simulator import engine

_MODEL = "tiny"
_BLOCK_SIZE = 128
_CHUNK_SIZE = 256
_POOL_GB = 0.5
#: Prompts of several chunks and the rest of one, in tokens.
_LENGTHS = (1500, 3000)
_NEW_TOKENS = 16
#: The first prompt of all pays for what an engine does once, so it is not one of them.
_UNTIMED_LENGTH = 300
_START_SECONDS = 600
_ANSWER_SECONDS = 300


class ServeFailed(RuntimeError):  # noqa: N818
    """The engine did not do what it is started for; the text says what and why."""


@dataclass(frozen=True)
class Answer:
    """What the engine made of one prompt.

    Attributes:
        tokens: the ids it generated.
        seconds_to_first: from sending the prompt to the first of them.
        cached: tokens of the prompt that were not computed again.
    """

    tokens: tuple[int, ...]
    seconds_to_first: float
    cached: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``lmcache-rbln``."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a tiny model with vLLM-RBLN and LMCache on a simulated NPU, and time reuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve, measure, print.

    Returns:
        0 if every repeated prompt gave the same tokens and hit all it could; else 1.
    """
    console = Console()
    try:
        with terminate_as_exit(), tempfile.TemporaryDirectory(prefix="lmcache-rbln-") as folder:
            rows = _serve(Path(folder), console)
    except (
        ServeFailed,
        ServerFailed,
        simulator.SimulatorError,
        engine.RealCompilerInstalledError,
        ValueError,  # of a setting of the simulated NPU
    ) as error:
        console.print(f"lmcache-rbln serve: {error}", markup=False, style="red")
        return 1
    console.print(_table(rows))
    return 0 if all(_as_expected(*row) for row in rows) else 1


def _serve(folder: Path, console: Console) -> list[tuple[int, Answer, Answer]]:
    """For each prompt its length, and the answers to the first and the second time."""
    vllm = _vllm()
    variables = simulator.environment(host=simulator.unique_host())
    variables.update(engine.environment(variables))
    variables["VLLM_CACHE_ROOT"] = str(folder / "cache")
    variables["VLLM_NO_USAGE_STATS"] = "1"
    variables["PYTHONHASHSEED"] = "0"
    variables["LMCACHE_TRACK_USAGE"] = "false"
    # The server and the model's maker have no NPU; torch would load torch-rbln for nothing.
    without_npu = {**variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with console.status("making a small random model"):
        _make_model(folder / _MODEL, without_npu)
    server = LMCacheServer(chunk_size=_CHUNK_SIZE, pool_gb=_POOL_GB, environment=without_npu)
    with contextlib.ExitStack() as stack:
        with console.status("starting lmcache server"):
            stack.enter_context(server)
        console.print(f"lmcache server listens at {server.url}")
        (port,) = free_ports(1)
        with console.status("starting vllm serve (half a minute or more)"):
            stack.enter_context(_vllm_serve(vllm, folder, port, server, variables))
        console.print(f"vllm serve listens at http://127.0.0.1:{port}")
        with console.status("sending prompts"):
            _ask(port, _prompt(_UNTIMED_LENGTH))
            stored = _UNTIMED_LENGTH // _CHUNK_SIZE
            rows = []
            for length in _LENGTHS:
                prompt = _prompt(length)
                first = _ask(port, prompt)
                stored += length // _CHUNK_SIZE
                _wait_until_stored(server, stored)
                rows.append((length, first, _ask(port, prompt)))
    return rows


def _vllm() -> str:
    """The path of vLLM's command.

    Raises:
        ServeFailed: vLLM or vLLM-RBLN is not installed.
    """
    for package in ("vllm", "vllm-rbln"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ServeFailed(
                f"{package} is not installed in this environment; `nox -s serve` makes one with "
                "all that is needed, docs/engine.md lists it"
            ) from None
    beside = Path(sys.executable).parent
    path = shutil.which("vllm", path=os.pathsep.join([str(beside), os.environ.get("PATH", "")]))
    if path is None:
        raise ServeFailed(f"vLLM is installed, but its command `vllm` is neither in {beside} nor "
                          "on PATH")  # fmt: skip
    return path


def _make_model(folder: Path, variables: dict[str, str]) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "lmcache_rbln.cli._tiny_model", str(folder)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise ServeFailed(f"the model could not be made:\n{made.stderr}")


@contextlib.contextmanager
def _vllm_serve(
    vllm: str, folder: Path, port: int, server: LMCacheServer, variables: dict[str, str]
) -> Iterator[None]:
    """``vllm serve`` for as long as the block lasts.

    Raises:
        ServeFailed: it ended, or did not answer in time.
    """
    transfer = {
        "kv_connector": "RBLNLMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": int(server.url.rpartition(":")[2]),
        },
    }
    command = [vllm, "serve", str(folder / _MODEL), "--served-model-name", _MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model-impl", "vllm"]
    command += ["--dtype", "float32", "--block-size", str(_BLOCK_SIZE)]
    command += ["--max-model-len", str(MAX_LENGTH), "--max-num-batched-tokens", str(_CHUNK_SIZE)]
    command += ["--enable-prompt-tokens-details"]
    # Else the second time would be served by vLLM's own cache in device memory.
    command += ["--no-enable-prefix-caching"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if process.poll() is not None:
                raise ServeFailed(f"vllm serve ended; its log ends:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise ServeFailed(
                    f"vllm serve was not ready in {_START_SECONDS} s; its log ends:\n{_tail(log)}"
                )
            time.sleep(0.5)
        yield
    finally:
        _end_session(process)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: in order if it can, by force if not."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    # The engine's own processes are of the same session and may outlive their parent.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _prompt(length: int) -> list[int]:
    """Random tokens, none of them special."""
    chosen = random.Random(length)
    return [chosen.randrange(4, VOCABULARY) for _ in range(length)]


def _ask(port: int, prompt: Sequence[int]) -> Answer:
    """Send a prompt and read the streamed answer.

    Raises:
        ServeFailed: the engine refused, or its answer has no tokens.
    """
    body = {
        "model": _MODEL,
        "prompt": list(prompt),
        "max_tokens": _NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    try:
        start = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ServeFailed(f"vllm serve answered {response.status}: {response.read().decode()}")
        tokens: list[int] = []
        first = cached = 0.0
        for line in response:
            kind, _, text = line.decode().strip().partition(": ")
            if kind != "data" or text == "[DONE]":
                continue
            event = json.loads(text)
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    first = first or time.monotonic() - start
                    tokens += choice["token_ids"]
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or 0
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ServeFailed(f"vllm serve did not answer a prompt: {error!r}") from error
    finally:
        connection.close()
    if not tokens:
        raise ServeFailed("vllm serve answered a prompt without a token")
    return Answer(tuple(tokens), first, int(cached))


def _wait_until_stored(server: LMCacheServer, chunks: int) -> None:
    """Stores run behind the answer; wait until the server holds ``chunks`` complete chunks.

    Raises:
        ServeFailed: they are not all there within a minute.
    """
    deadline = time.monotonic() + 60
    while (held := _stored(server)) < chunks:
        if time.monotonic() > deadline:
            raise ServeFailed(
                f"the server holds {held} chunks, expected {chunks}; its log ends:\n"
                f"{server.log_tail()}"
            )
        time.sleep(0.1)


def _stored(server: LMCacheServer) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    try:
        connection.request("GET", "/status")
        memory = json.loads(connection.getresponse().read())["storage_manager"]["l1_manager"]
        return int(memory["total_object_count"] - memory["write_locked_count"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ServeFailed(f"lmcache server does not tell its status: {error!r}") from error
    finally:
        connection.close()


def _expected_hits(length: int) -> int:
    """Whole chunks, but never the last token: its logits are what the next one comes from."""
    return min(length // _CHUNK_SIZE * _CHUNK_SIZE, length - 1)


def _as_expected(length: int, first: Answer, second: Answer) -> bool:
    return (
        first.tokens == second.tokens
        and first.cached == 0
        and second.cached == _expected_hits(length)
    )


def _table(rows: Sequence[tuple[int, Answer, Answer]]) -> Table:
    table = Table(title="the same prompt twice; the second time from LMCache")
    for heading in ("prompt", "first token, cold", "first token, warm", "cached", "same tokens"):
        table.add_column(heading, justify="right")
    for length, first, second in rows:
        hits = f"{second.cached} of {length}"
        if (first.cached, second.cached) != (0, _expected_hits(length)):
            hits = f"{first.cached}, then {hits}; expected 0, then {_expected_hits(length)}"
        table.add_row(
            f"{length} tokens",
            f"{first.seconds_to_first:.2f} s",
            f"{second.seconds_to_first:.2f} s",
            hits,
            "yes" if first.tokens == second.tokens else "no",
        )
    return table
