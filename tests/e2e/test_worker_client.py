# SPDX-License-Identifier: Apache-2.0
"""What the worker client refuses, and what it says of itself."""

from __future__ import annotations

import pytest
import torch

from lmcache_rbln.lmcache_compat.worker import StoreMode, Transport, WorkerClient
from tests.e2e.e2e_workers import CHUNK, new_request

BLOCK = 16


@pytest.fixture
def client(request, shm_server):
    with WorkerClient(shm_server.url, model_name=request.node.name, timeout=30) as client:
        yield client


@pytest.fixture
def layers() -> dict[str, torch.Tensor]:
    return {"layer": torch.zeros(8, 2, 1, 1, BLOCK, 8, dtype=torch.bfloat16).to("rbln:0")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 2, "worker_id": 2}, "worker_id=2 with world_size=2"),
        ({"worker_id": -1}, "worker_id=-1"),
        ({"kv_readers": 0}, "kv_readers=0"),
    ],
)
def test_ranks_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        WorkerClient("tcp://127.0.0.1:9", model_name="m", **arguments)


def test_registration(client, layers):
    with pytest.raises(RuntimeError, match="register"):
        client.store([*range(CHUNK)], [0, 1, 2, 3], request_id=new_request())
    with pytest.raises(ValueError, match=r"block_size=24 does not divide .* 64 tokens"):
        client.register(layers, block_size=24)
    assert client.register(layers, block_size=BLOCK) is Transport.SHARED_MEMORY
    assert client.is_async
    with pytest.raises(RuntimeError, match="registered already"):
        client.register(layers, block_size=BLOCK)
    client.unregister()
    client.unregister()
    assert client.register(layers, block_size=BLOCK, store_mode=StoreMode.SYNC)
    assert not client.is_async
    client.ping()


def test_refused_caches_leave_no_registration(client, layers):
    with pytest.raises(ValueError, match="meta"):
        client.register({"layer": layers["layer"].to("meta")}, block_size=BLOCK)
    with pytest.raises(RuntimeError, match="register"):
        client.transfer_context  # noqa: B018
    client.register(layers, block_size=BLOCK)


def test_lmcache_driven_transfer_is_refused(client, layers, monkeypatch):
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "lmcache_driven")
    with pytest.raises(ValueError, match="lmcache_driven"):
        client.register(layers, block_size=BLOCK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_ids": [0, 1, 2]}, r"3 block ids for tokens \[0, 64\): expected 4"),
        ({"end": 60}, r"\[0, 60\) of 64"),
        ({"start": 16}, r"\[16, 64\) of 64"),
        ({"end": 128}, r"\[0, 128\) of 64"),
        ({"start": 64}, r"\[64, 64\) of 64"),
        ({"start": -64}, r"\[-64, 64\) of 64"),
    ],
)
@pytest.mark.parametrize("operation", ["store", "retrieve"])
def test_ranges_that_do_not_fit(client, layers, operation, arguments, message):
    client.register(layers, block_size=BLOCK)
    wanted = {"token_ids": [*range(CHUNK)], "block_ids": [0, 1, 2, 3], "request_id": new_request()}
    with pytest.raises(ValueError, match=message):
        getattr(client, operation)(**{**wanted, **arguments})


def test_locks_that_are_given_back_let_the_server_clear(client, layers):
    tokens = [*range(2 * CHUNK)]
    client.register(layers, block_size=BLOCK)
    pending = client.submit_store(tokens, [*range(8)], request_id=new_request())
    client.flush_inflight_stores()
    assert pending.result()
    assert pending.done()
    request = new_request()
    assert client.lookup(tokens, request_id=request) == 2 * CHUNK
    client.free_lookup(tokens, request_id=request)
    client.end_session(request)
    client.clear()
    assert client.lookup(tokens, request_id=new_request()) == 0


def test_float8_over_pickle_fails_and_leaves_nothing(servers, request):
    """torch 2.13 cannot unpickle float8 tensors, so LMCache's server does not answer."""
    layer = torch.zeros(8, 2, 1, 1, BLOCK, 8, dtype=torch.float8_e4m3fn).to("rbln:0")
    with WorkerClient(servers("pickle").url, model_name=request.node.name, timeout=2) as client:
        client.register({"layer": layer}, block_size=BLOCK)
        assert not client.submit_store(
            [*range(CHUNK)], [0, 1, 2, 3], request_id=new_request()
        ).result(20)
        assert client.lookup([*range(CHUNK)], request_id=new_request()) == 0
