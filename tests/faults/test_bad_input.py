# SPDX-License-Identifier: Apache-2.0
"""Bad input: an error of a kind that LMCache expects, and not a byte moved."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lmcache_rbln import kv_layout, simulator
from lmcache_rbln.staging import Staging
from tests import reference
from tests.faults.rig import PER_CHUNK, Peer, small
from tests.reference import Geometry

#: All that LMCache's retrieve catches.
EXPECTED = (ValueError, RuntimeError, TypeError, IndexError)

CHUNKS = 3
BLOCKS = list(range(CHUNKS * PER_CHUNK))

nonsense = st.one_of(
    st.none(),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**63, -(2**63)]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(-3, 9), max_size=4),
    st.lists(st.one_of(st.none(), st.floats(), st.text(max_size=2)), max_size=3),
    st.sampled_from([torch.zeros(0), torch.zeros(3, 4), torch.tensor(1.5), object(), {}, ()]),
    st.sampled_from([torch.zeros(2, 3, dtype=torch.int64), torch.tensor([True, False])]),
)
ids = st.one_of(
    nonsense,
    st.lists(st.integers(-2, 7), max_size=8),
    st.lists(st.sampled_from([0, 1, 2**40, -(2**40)]), min_size=1, max_size=6),
    st.sampled_from([torch.tensor([1.0, 2.0]), torch.tensor([[1], [2]]), torch.tensor(3)]),
)


def shaped(chunk: torch.Tensor) -> list[torch.Tensor]:
    """Chunks that are nearly right."""
    flat = torch.zeros(2 * chunk.numel(), dtype=chunk.dtype)
    return [
        chunk[..., :-1],
        chunk[..., :-1, :],
        chunk.to(torch.float32),
        chunk.transpose(-1, -2),
        chunk[:0],
        chunk.to("meta"),
        chunk.to("rbln"),
        chunk.unsqueeze(0),
        flat.as_strided(chunk.shape, (0,) * chunk.ndim),
        flat.as_strided(chunk.shape, [stride // 2 for stride in chunk.stride()]),
        flat[:: 2 if chunk.numel() else 1].view(chunk.shape),
    ]


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_requests(layout, data, transfer):
    geometry = Geometry(layout, 2, 5, 1 if layout == "mla" else 2, 4, 6, 2)
    rng = np.random.default_rng(0)
    layers = [layer.to("rbln") for layer in geometry.layers(rng)]
    chunks = [geometry.random(geometry.chunk_shape(), rng) for _ in range(2)]
    request: dict[str, Any] = {
        "direction": data.draw(st.sampled_from(["gather", "scatter"])),
        "layers": layers,
        "chunks": chunks,
        "block_ids": [3, 0, 4],
        "block_size": 4,
        "chunk_tokens": 8,
        "skip": 0,
        "kv_format": None,
    }
    spoiled = data.draw(st.sets(st.sampled_from(sorted(request)), min_size=1, max_size=3))
    for name in sorted(spoiled):
        if name == "block_ids":
            request[name] = data.draw(ids)
        elif name == "chunks":
            wrong = st.sampled_from(shaped(chunks[0]))
            request[name] = data.draw(
                st.one_of(
                    nonsense,
                    st.lists(st.one_of(nonsense, wrong, st.sampled_from(chunks)), max_size=3),
                )
            )
        elif name == "layers":
            wrong = st.sampled_from([*shaped(layers[0].cpu()), layers[0][:1], layers[0].cpu()])
            request[name] = data.draw(
                st.one_of(
                    nonsense,
                    st.lists(st.one_of(nonsense, wrong, st.sampled_from(layers)), max_size=3),
                )
            )
        elif name != "kv_format":
            request[name] = data.draw(nonsense)
        else:
            from lmcache.lmcache_native import EngineKVFormat

            request[name] = data.draw(
                st.one_of(nonsense, st.sampled_from([EngineKVFormat.NL_X_TWO_NB_BS_NH_HS]))
            )
    before = [reference.to_bytes(tensor) for tensor in (*layers, *chunks)]
    try:
        transfer(mla=layout == "mla", **request)
    except EXPECTED as error:
        assert str(error), "an error without a word"
        after = [reference.to_bytes(tensor) for tensor in (*layers, *chunks)]
        for one, two in zip(before, after, strict=True):
            assert np.array_equal(one, two), "a refused request moved bytes"


def test_a_chunk_of_another_models_geometry_is_not_scattered(shared_server, request):
    """Two models of one name: keys are equal, chunks are not."""
    model = request.node.name
    with (
        Peer(shared_server, model, small("kv_first")) as writer,
        Peer(shared_server, model, small("kv_first", layers=2)) as other,
        Peer(shared_server, model, small("mla")) as third,
    ):
        writer.write(1, BLOCKS)
        assert writer.store(1, BLOCKS, chunks=CHUNKS) is True
        for reader in (other, third):
            reader.write(0, [])
            assert reader.retrieve(1, BLOCKS, chunks=CHUNKS) in (None, False)
            assert reader.difference(0, []) == ""
        into = BLOCKS[::-1]
        writer.write(0, [])
        assert writer.retrieve(1, into, chunks=CHUNKS) is True
        assert writer.difference(1, into) == ""


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("LMCACHE_RBLN_STAGING_MB", ["", "abc", "-1", "1.5", "nan", "0", "1e3", "9" * 30]),
        ("LMCACHE_RBLN_DEVICE_STAGING_MB", ["", "abc", "-1", "1.5", "nan", "9" * 30]),
    ],
)
def test_nonsense_in_a_staging_setting_names_it(name, values, monkeypatch):
    for value in values:
        monkeypatch.setenv(name, value)
        try:
            Staging.from_environment()
        except ValueError as error:
            assert name in str(error)


@example(value="kv_second")
@given(value=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nonsense_in_the_layout_setting_names_it(value, monkeypatch):
    monkeypatch.setenv("LMCACHE_RBLN_KV_LAYOUT", value)
    both = [torch.zeros(2, 2, 2, 1, 4, 4)]
    try:
        kv_layout.resolve(both)
    except ValueError as error:
        assert "LMCACHE_RBLN_KV_LAYOUT" in str(error)
    else:
        assert value.strip().lower() in ("blocks_first", "kv_first")


def test_threads_that_ask_for_nonsense_do_not_disturb_others(transfer):
    geometry = Geometry("kv_first", 2, 9, 2, 4, 6, 2)
    rng = np.random.default_rng(1)
    layers = geometry.layers(rng)
    on_device = [layer.to("rbln") for layer in layers]
    stop = threading.Event()
    unexpected = []

    def nag() -> None:
        while not stop.is_set():
            try:
                transfer("scatter", on_device, [torch.zeros(1)], [99], block_size=4, chunk_tokens=8)
            except ValueError:
                continue
            unexpected.append("no error")

    nagging = [threading.Thread(target=nag) for _ in range(7)]
    for thread in nagging:
        thread.start()
    try:
        for _ in range(50):
            chunk = geometry.random(geometry.chunk_shape(), rng)
            expected = [reference.to_bytes(chunk)]
            reference.gather(
                geometry, [reference.to_bytes(one) for one in layers], expected, [5, 2]
            )
            transfer("gather", on_device, [chunk], [5, 2], block_size=4, chunk_tokens=8)
            assert np.array_equal(reference.to_bytes(chunk), expected[0])
    finally:
        stop.set()
        for thread in nagging:
            thread.join()
    assert not unexpected
    assert simulator.counters()["faults_armed"] == 0
