# SPDX-License-Identifier: Apache-2.0
"""The server goes away under the engine, and comes back empty: right tokens all the while."""

import time

import pytest

from tests.engine import engines
from tests.engine.test_cache import LENGTHS, cached_engine, hits, prompts

pytestmark = pytest.mark.engine

#: Seconds; LMCache's own are 300 and 10.
IMPATIENT = {"lmcache.mp.mq_timeout": 5.0, "lmcache.mp.heartbeat_interval": 1.0}


@pytest.mark.parametrize("connector", ["RBLNLMCacheConnectorV1", "LMCacheMPConnector"])
def test_killed_and_started_again(tmp_path, model, reference, server, connector):
    expected = [reference("llama").tokens(p, 16) for p in prompts()]
    transfer = server.connector(connector, **IMPATIENT)
    with cached_engine(
        tmp_path / "engine", model("llama"), server, kv_transfer_config=transfer
    ) as engine:
        assert engine.generate(prompts())["tokens"] == expected
        server.wait_for(engines.chunks(LENGTHS))
        server.process.kill()
        lost = engine.generate(prompts())
        assert lost["tokens"] == expected
        assert lost["cached"] == [0] * len(LENGTHS)
        server.process.start()
        # The engine notices at a heartbeat, and registers its caches again.
        deadline = time.monotonic() + 120
        while server.chunks() < engines.chunks(LENGTHS):
            assert time.monotonic() < deadline, "the engine did not use the new server"
            assert engine.generate(prompts())["tokens"] == expected
            time.sleep(1)
        warm = engine.generate(prompts())
        assert warm["tokens"] == expected
        assert warm["cached"] == hits()
