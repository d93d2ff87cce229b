# SPDX-License-Identifier: Apache-2.0
"""When ``RBLNLMCacheConnectorV1`` registers, and with what.

The worker drives the hooks as vllm-rbln 0.12.0 does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness import probes
from vllm_harness.engine import prompt
from vllm_harness.kv import LAYOUTS, Geometry

CHUNK = 64
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Servers = Callable[[int], str]
Engines = Callable[..., Any]


@every_layout
def test_waits_for_finalize(servers: Servers, engines: Engines, layout: str) -> None:
    engine = engines(servers(CHUNK), Geometry(layout), finalize=False)
    (worker,) = engine.workers
    assert not worker.call("run", probes.is_registered)
    worker.call("finalize")
    assert worker.call("run", probes.is_registered)
    first = worker.call("run", probes.registration)
    worker.call("finalize")
    worker.call("run", probes.register_again)
    worker.call("finalize")
    assert worker.call("run", probes.registration) == first
    engine.run_one(prompt(1, 70))
    assert worker.call("run", probes.registration) == first
    engine.check_over()


@every_layout
def test_the_first_step_registers(servers: Servers, engines: Engines, layout: str) -> None:
    """A skipped warm-up, and plain vLLM: nobody finalizes."""
    engine = engines(servers(CHUNK), Geometry(layout), finalize=False)
    engine.run_one(prompt(2, 140))
    engine.forget_local_cache()
    assert engine.loaded[engine.run_one(prompt(2, 140))] == 128
    engine.check_over()


@every_layout
def test_the_last_caches_win(servers: Servers, engines: Engines, layout: str) -> None:
    """Caches that are replaced after registration, as by a dynamic KV resize."""
    geometry = Geometry(layout)
    engine = engines(servers(CHUNK), geometry)
    (worker,) = engine.workers
    engine.run_one(prompt(3, 140))
    before = worker.call("run", probes.threads)
    engine.forget_local_cache()
    for _ in range(3):
        worker.call("replace_caches", geometry)
    assert engine.loaded[engine.run_one(prompt(3, 140))] == 128
    engine.run_one(prompt(4, 140))
    engine.forget_local_cache()
    assert engine.loaded[engine.run_one(prompt(4, 140))] == 128
    # Those of the old registrations are gone.
    assert worker.call("run", probes.threads) <= before + 2
    engine.check_over()


def test_workers_that_are_silent(own_server: Callable[..., Any], engines: Engines) -> None:
    """Silent for longer than the server's grace: during warm-up, and later in a long compile.

    Thirty seconds are the least that LMCache's server takes. Its own connector registers before
    warm-up and is dropped: nothing is reused any more, but the engine lives.
    """
    limits = ["--worker-reap-timeout-seconds", "30", "--worker-registration-grace-seconds", "30"]
    server = own_server(arguments=limits)
    geometry = Geometry("blocks_first")
    engine = engines(server.url, geometry, finalize=False, workers=(0,))
    soon = {"lmcache.mp.mq_timeout": 5.0}
    stock = engines(server.url, geometry, connector="stock", workers=(1,), extra=soon)
    time.sleep(38)
    engine.workers[0].call("finalize")
    for each in (engine, stock):
        each.run_one(prompt(5, 140))
        each.forget_local_cache()
        each.run_one(prompt(5, 140))
        each.check_over()
    (loaded,) = engine.loaded.values()
    assert loaded == 128

    os.kill(engine.workers[0].pid, signal.SIGSTOP)
    time.sleep(42)
    os.kill(engine.workers[0].pid, signal.SIGCONT)
    started = time.monotonic()
    engine.forget_local_cache()
    engine.run_one(prompt(5, 140))
    assert time.monotonic() - started < 4.0, "the step waited for a server that never answers"
    back: int | None = None
    while not back and time.monotonic() < started + 20:
        engine.forget_local_cache()
        back = engine.loaded.get(engine.run_one(prompt(6, 140)))
    assert back == 128
    engine.check_over()
