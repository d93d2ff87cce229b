# SPDX-License-Identifier: Apache-2.0
"""The commands that a user types: `lmcache server` and `vllm serve`, over HTTP, streaming."""

import http.client
import json
import shutil
import time

import pytest

from lmcache_rbln.lmcache_compat.server_process import free_ports
from tests.engine import engines, processes

pytestmark = pytest.mark.engine

LENGTH = 301


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def wait_until_up(process, port, path, seconds=400):
    deadline = time.monotonic() + seconds
    while get(port, path) != 200:
        assert process.running(), process.tail()
        assert time.monotonic() < deadline, process.tail() + processes.stacks(
            process.pid, process.log
        )
        time.sleep(0.5)


def complete(port, prompt, tokens):
    """A streamed completion: its tokens, the time to the first, the cached part of the prompt."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=processes.ANSWER_SECONDS)
    start = time.monotonic()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first, ids, cached = None, [], None
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        if event["choices"] and event["choices"][0].get("token_ids"):
            first = first or time.monotonic() - start
            ids += event["choices"][0]["token_ids"]
        if event.get("usage"):
            cached = (event["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    connection.close()
    return ids, first, cached


@pytest.mark.parametrize("connector", ["RBLNLMCacheConnectorV1", "LMCacheMPConnector"])
def test_cold_then_warm(tmp_path, model, reference, connector, record_property):
    from tests.engine import models
    from tests.engine.conftest import Server

    cache_port, status_port, metrics_port, port = free_ports(4)
    environment = processes.environment(tmp_path)
    # What the README starts, with this test's ports and sizes.
    cache = processes.Process(
        [
            *(shutil.which("lmcache"), "server", "--host", "127.0.0.1"),
            *("--port", str(cache_port), "--http-port", str(status_port)),
            *("--prometheus-port", str(metrics_port), "--chunk-size", "64"),
            *("--supported-transfer-mode", "engine_driven", "--l1-size-gb", "0.5"),
            *("--eviction-policy", "LRU"),
            *("--no-l1-use-lazy", "--shm-name", f"lmcache_kv_{cache_port}"),
        ],
        {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        tmp_path / "server.log",
    )
    try:
        wait_until_up(cache, status_port, "/healthcheck")
        server = Server(cache, cache.log, cache_port, status_port)
        serve = processes.Process(
            processes.simulated(
                [
                    *(shutil.which("vllm"), "serve", str(model("llama")), "--port", str(port)),
                    *("--served-model-name", "tiny", "--dtype", "float32"),
                    *("--model-impl", "vllm", "--block-size", "64", "--max-model-len", "512"),
                    *("--max-num-batched-tokens", "128", "--max-num-seqs", "4"),
                    *("--num-gpu-blocks-override", "48", "--no-enable-prefix-caching"),
                    "--enable-prompt-tokens-details",
                    *("--kv-transfer-config", json.dumps(server.connector(connector))),
                ]
            ),
            {**environment, "VLLM_RBLN_USE_DEVICE_TENSOR": "1"},
            tmp_path / "engine.log",
        )
        try:
            wait_until_up(serve, port, "/health")
            # Neither time shall contain the first request's own costs.
            complete(port, models.prompt(LENGTH, 50), 4)
            prompt = models.prompt(LENGTH, 51)
            expected = reference("llama").tokens(prompt, 16)
            ids, cold, cached = complete(port, prompt, 16)
            assert (ids, cached) == (expected, 0)
            server.wait_for(2 * engines.chunks([LENGTH]))
            ids, warm, cached = complete(port, prompt, 16)
            assert (ids, cached) == (expected, engines.reusable(LENGTH))
            record_property("seconds_to_first_token", {"cold": cold, "warm": warm})
            print(f"time to first token: cold {cold:.3f} s, warm {warm:.3f} s")
        finally:
            serve.stop()
    finally:
        cache.stop()
