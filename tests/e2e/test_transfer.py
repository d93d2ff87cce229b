# SPDX-License-Identifier: Apache-2.0
"""Blocks stored by one process and retrieved by another, through a real server.

Every test compares every byte of the whole cache, so that a block which must not change is seen
to change. What a block must hold is worked out by each process for itself.
"""

from __future__ import annotations

import pytest

from lmcache_rbln.cli._known_kv import LAYOUTS, known_bytes
from tests.e2e.e2e_workers import CHUNK, scattered, small


@pytest.mark.parametrize("store_mode", ["sync", "async"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_chunks(join, server, layout, store_mode):
    geometry = small(layout)
    stored, into = scattered(geometry, 3 * CHUNK)
    storing = join(0, server, geometry, store_mode=store_mode)
    storing.write(stored)
    assert storing.store(stored)
    assert storing.difference(stored) == "", "a store must not touch the cache"

    retrieving = join(1, server, geometry, store_mode=store_mode)
    assert retrieving.lookup() == 3 * CHUNK
    assert retrieving.retrieve(into)
    assert retrieving.difference(into) == ""


@pytest.mark.parametrize("skipped_blocks", [1, 3, 4, 6, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_prefix_is_not_written(join, server, layout, skipped_blocks):
    geometry = small(layout)
    stored, into = scattered(geometry, 3 * CHUNK)
    storing = join(0, server, geometry)
    storing.write(stored)
    assert storing.store(stored)

    retrieving = join(1, server, geometry)
    assert retrieving.lookup() == 3 * CHUNK
    skip = skipped_blocks * geometry.block_size
    assert retrieving.retrieve(into, skip=skip)
    assert retrieving.difference(into[skipped_blocks:], first_token=skip) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_longer_prompt_hits_the_stored_prefix(join, server, layout):
    geometry = small(layout)
    stored, into = scattered(geometry, 2 * CHUNK)
    # The last tokens do not fill a chunk: they are not stored.
    storing = join(0, server, geometry)
    storing.tokens = [*range(2 * CHUNK + 17)]
    storing.write(stored)
    assert storing.store(stored)

    retrieving = join(1, server, geometry)
    assert retrieving.lookup([*range(4 * CHUNK)]) == 2 * CHUNK
    retrieving.tokens = [*range(4 * CHUNK)]
    assert retrieving.retrieve(into, end=2 * CHUNK)
    assert retrieving.difference(into) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_that_differs_hits_up_to_there(join, server, layout):
    geometry = small(layout)
    stored, into = scattered(geometry, 3 * CHUNK)
    storing = join(0, server, geometry)
    storing.write(stored)
    assert storing.store(stored)

    retrieving = join(1, server, geometry)
    retrieving.tokens = [*range(2 * CHUNK + 5), 999_999, *range(2 * CHUNK + 6, 3 * CHUNK)]
    assert retrieving.lookup() == 2 * CHUNK
    hit = into[: 2 * CHUNK // geometry.block_size]
    assert retrieving.retrieve(hit, end=2 * CHUNK)
    assert retrieving.difference(hit) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_stored_and_retrieved_in_parts(join, server, layout):
    geometry = small(layout)
    stored, into = scattered(geometry, 3 * CHUNK)
    per_chunk = CHUNK // geometry.block_size
    storing = join(0, server, geometry)
    storing.write(stored)
    assert storing.store(stored[:per_chunk], end=CHUNK)
    # The first chunk is known already: only the others are written.
    assert storing.store(stored)

    retrieving = join(1, server, geometry)
    assert retrieving.lookup() == 3 * CHUNK
    assert retrieving.retrieve(into[per_chunk:], start=CHUNK)
    assert retrieving.difference(into[per_chunk:], first_token=CHUNK) == ""
    assert retrieving.lookup() == 3 * CHUNK
    assert retrieving.retrieve(into[:per_chunk], end=CHUNK)
    assert retrieving.difference(into) == ""


@pytest.mark.parametrize(
    ("first", "second"), [("blocks_first", "kv_first"), ("kv_first", "blocks_first")]
)
def test_chunks_do_not_depend_on_layout_or_block_size(join, server, first, second):
    # Only the chunk's token-major form can carry this.
    from_geometry = small(first, block_size=16)
    into_geometry = small(second, block_size=32, blocks=16)
    stored, _ = scattered(from_geometry, 3 * CHUNK)
    _, into = scattered(into_geometry, 3 * CHUNK)
    storing = join(0, server, from_geometry)
    storing.write(stored)
    assert storing.store(stored)

    retrieving = join(1, server, into_geometry)
    assert retrieving.lookup() == 3 * CHUNK
    assert retrieving.retrieve(into)
    assert retrieving.difference(into) == ""


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes(join, server, layout, dtype):
    if dtype.startswith("float8") and not server.shared_memory:
        pytest.skip("torch cannot unpickle float8: see test_float8_over_pickle_fails_...")
    # The content is random bytes, so the floats include every kind of NaN.
    geometry = small(layout, dtype=dtype)
    stored, into = scattered(geometry, 3 * CHUNK)
    storing = join(0, server, geometry)
    storing.write(stored)
    assert storing.store(stored)

    retrieving = join(1, server, geometry)
    assert retrieving.lookup() == 3 * CHUNK
    assert retrieving.retrieve(into)
    assert retrieving.difference(into) == ""


def test_nothing_is_found_that_was_not_stored(join, server):
    geometry = small("blocks_first")
    stored, into = scattered(geometry, 3 * CHUNK)
    storing = join(0, server, geometry)
    storing.write(stored)
    assert storing.store(stored)

    other_model = join(1, server, geometry, model_name="another model")
    assert other_model.lookup() == 0
    other_tokens = join(1, server, geometry)
    other_tokens.tokens = [token + 1 for token in other_tokens.tokens]
    assert other_tokens.lookup() == 0
    assert not other_tokens.retrieve(into)
    assert other_tokens.difference([]) == ""


@pytest.mark.parametrize("layout", ["blocks_first", "kv_first"])
def test_tensor_parallel_workers_keep_their_own_part(join, server, layout):
    geometry = small(layout)
    stored, into = scattered(geometry, 3 * CHUNK)
    ranks = [join(rank, server, geometry, world_size=2, worker_id=rank) for rank in (0, 1)]
    for rank, worker in enumerate(ranks):
        worker.seed = 10 + rank
        worker.write(stored)
        # A prefix counts only when every rank has its part.
        assert worker.lookup() == 0
        assert worker.store(stored)
    # One lookup takes the locks for all ranks, as the scheduler's does.
    assert ranks[0].lookup() == 3 * CHUNK
    for worker in ranks:
        worker.request = ranks[0].request
        worker.write([])
        assert worker.retrieve(into)
        assert worker.difference(into) == ""


def test_mla_ranks_share_one_copy(join, server):
    geometry = small("mla")
    stored, into = scattered(geometry, 3 * CHUNK)
    ranks = [join(rank, server, geometry, kv_readers=2) for rank in (0, 1)]
    ranks[0].write(stored)
    assert ranks[0].store(stored)
    assert ranks[0].lookup() == 3 * CHUNK
    for worker in ranks:
        worker.request = ranks[0].request
        worker.write([])
        assert worker.retrieve(into)
        assert worker.difference(into) == ""


def test_a_wrong_byte_on_the_server_is_seen(join, shm_server):
    """The comparison bites: one byte turned in the server's memory is reported, with its place."""
    geometry = small("blocks_first")
    stored, into = scattered(geometry, 3 * CHUNK)
    storing = join(0, shm_server, geometry)
    storing.seed = 77
    storing.write(stored)
    assert storing.store(stored)
    # Found by its content: 16 bytes of token 3 in layer 0, as the chunk holds them.
    content = known_bytes(77, 0, [3], planes=2, heads=2, row_nbytes=16)[0, 0, 0].tobytes()
    with shm_server.shm_path.open("r+b") as pool:
        place = pool.read().index(content)
        pool.seek(place + 5)
        pool.write(bytes([content[5] ^ 1]))

    retrieving = join(1, shm_server, geometry)
    retrieving.seed = 77
    assert retrieving.lookup() == 3 * CHUNK
    assert retrieving.retrieve(into)
    assert retrieving.difference(into) == (
        f"1 bytes are wrong; the first: layer 0, block {into[0]}: found {content[5] ^ 1}, "
        f"expected {content[5]} at [{into[0]}, 0, 0, 0, 3, 5]"
    )
