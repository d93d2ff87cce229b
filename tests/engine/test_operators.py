# SPDX-License-Identifier: Apache-2.0
"""The stand-in's operators against dense attention over each sequence's full history.

The reference never sees a block, a table or a cache: it keeps every sequence's tokens in a list
and lets torch's own attention do the math, one query row at a time.
"""

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.engine import simulated_compiler  # noqa: E402

attention = simulated_compiler.load("ops.attention")
paged = simulated_compiler.load("ops.paged")
sampling = simulated_compiler.load("ops.sampling")
moe = simulated_compiler.load("ops.moe")


@dataclass
class Sequence:
    """Everything one sequence has stored: keys and values [heads, tokens, dim]."""

    keys: list = field(default_factory=list)
    values: list = field(default_factory=list)

    def append(self, k, v):
        self.keys += list(k.unbind(1))
        self.values += list(v.unbind(1))

    def attend(self, q, position, scale, window=None, sinks=None):
        """Attention of one row, q [heads, group, dim], over positions up to `position`."""
        first = 0 if window is None else max(0, position + 1 - window)
        keys = torch.stack(self.keys[first : position + 1], 1).double()
        values = torch.stack(self.values[first : position + 1], 1).double()
        heads, group, _ = q.shape
        rows = []
        for h in range(heads):
            for g in range(group):
                logits = keys[h] @ q[h, g].double() * scale
                if sinks is not None:
                    logits = torch.cat([logits, sinks[h * group + g].reshape(1).double()])
                weights = torch.exp(logits - logits.logsumexp(0))[: len(keys[h])]
                rows.append(weights @ values[h])
        return torch.stack(rows).reshape(heads, group, -1)


@dataclass(frozen=True)
class Geometry:
    heads: int
    group: int
    dim: int
    block: int
    chunks: tuple
    padded: int
    seed: int

    @property
    def blocks(self):
        return -(-sum(self.chunks) // self.block)


geometries = st.builds(
    Geometry,
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([4, 8]),
    block=st.sampled_from([2, 3, 5, 8]),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple),
    padded=st.integers(7, 9),
    seed=st.integers(0, 2**31),
)


def random_tokens(generator, g, length, padded):
    """q, k, v of one sequence; rows from `length` on are padding."""
    q = torch.randn(1, g.heads, g.group, padded, g.dim, generator=generator)
    k = torch.randn(1, g.heads, 1, padded, g.dim, generator=generator)
    v = torch.randn(1, g.heads, 1, padded, g.dim, generator=generator)
    return q, k, v


def new_cache(g, generator, spare=3, *, block_axis):
    shape = [2, g.heads, 1, g.block, g.dim]
    shape.insert(block_axis, g.blocks + spare)
    # Memory of a device is not cleared: nothing may depend on what it held.
    cache = torch.full(shape, float("nan"))
    table = (torch.randperm(g.blocks + spare - 1, generator=generator) + 1)[: g.blocks]
    return cache, table.to(torch.int16)


@pytest.mark.parametrize("block_axis", [0, 1])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@settings(max_examples=25, deadline=None)
@given(g=geometries)
def test_prefill_in_padded_chunks(g, block_axis, window, with_sinks):
    generator = torch.Generator().manual_seed(g.seed)
    cache, table = new_cache(g, generator, block_axis=block_axis)
    sinks = torch.randn(g.heads * g.group, 1, generator=generator) if with_sinks else None
    sequence, start = Sequence(), 0
    for length in g.chunks:
        q, k, v = random_tokens(generator, g, length, g.padded)
        out = attention.paged_attention(
            q,
            k,
            v,
            cache,
            0.3,
            torch.tensor([[start]]),
            table,
            block_axis=block_axis,
            window=window,
            sinks=sinks,
        )
        sequence.append(k[0, :, 0, :length], v[0, :, 0, :length])
        for row in range(length):
            expected = sequence.attend(q[0, :, :, row], start + row, 0.3, window, sinks)
            torch.testing.assert_close(out[0, :, :, row].double(), expected, rtol=1e-4, atol=1e-5)
        assert out.isfinite().all(), "padding must not poison later layers"
        start += length


@settings(max_examples=25, deadline=None)
@given(
    g=geometries,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    padding=st.integers(0, 2),
)
def test_decode_of_a_batch(g, lengths, padding):
    generator = torch.Generator().manual_seed(g.seed)
    width = -(-(max(lengths) + 1) // g.block)
    ids = torch.randperm(width * len(lengths), generator=generator) + 1
    tables = ids.reshape(len(lengths), width)
    cache = torch.zeros(width * len(lengths) + 1, 2, g.heads, 1, g.block, g.dim)
    sequences = [Sequence() for _ in lengths]
    for table, length, sequence in zip(tables, lengths, sequences, strict=True):
        q, k, v = random_tokens(generator, g, length, length)
        attention.paged_attention(q, k, v, cache, 1.0, torch.tensor([[0]]), table, block_axis=0)
        sequence.append(k[0, :, 0], v[0, :, 0])
    rows = len(lengths) + padding
    q = torch.randn(rows, g.heads, g.group, 1, g.dim, generator=generator)
    k = torch.randn(rows, g.heads, 1, 1, g.dim, generator=generator)
    v = torch.randn(rows, g.heads, 1, 1, g.dim, generator=generator)
    seq_idx = torch.zeros(rows, 1, dtype=torch.int64)
    seq_idx[: len(lengths), 0] = torch.tensor(lengths)
    padded_tables = torch.zeros(rows, width, dtype=torch.int64)
    padded_tables[: len(lengths)] = tables
    out = attention.paged_attention(q, k, v, cache, 0.5, seq_idx, padded_tables, block_axis=0)
    for b, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        sequence.append(k[b, :, 0], v[b, :, 0])
        expected = sequence.attend(q[b, :, :, 0], length, 0.5)
        torch.testing.assert_close(out[b, :, :, 0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype_and_rounds_once(dtype):
    generator = torch.Generator().manual_seed(3)
    g = Geometry(2, 2, 8, 4, (6,), 6, 0)
    q, k, v = (t.to(dtype) for t in random_tokens(generator, g, 6, 6))
    cache = torch.zeros(3, 2, 2, 1, 4, 8, dtype=dtype)
    table = torch.tensor([2, 1])
    out = attention.paged_attention(q, k, v, cache, 0.4, torch.tensor([[0]]), table, block_axis=0)
    sequence = Sequence()
    sequence.append(k[0, :, 0], v[0, :, 0])
    for row in range(6):
        expected = sequence.attend(q[0, :, :, row], row, 0.4)
        torch.testing.assert_close(
            out[0, :, :, row].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4
        )
    assert out.dtype == dtype
    assert torch.equal(cache[2, 0, :, 0], k[0, :, 0, :4])
    assert torch.equal(cache[1, 1, :, 0, :2], v[0, :, 0, 4:])


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@settings(max_examples=15, deadline=None)
@given(g=geometries)
def test_fp8_cache(g, cache_dtype):
    generator = torch.Generator().manual_seed(g.seed)
    cache, table = new_cache(g, generator, block_axis=0)
    cache = torch.zeros(cache.shape, dtype=torch.uint8)
    k_scale, v_scale = 0.5, 0.25
    limit = torch.finfo(cache_dtype).max

    def rounded(x, unit):
        return (x / unit).clamp(-limit, limit).to(cache_dtype).float() * unit

    sequence, start = Sequence(), 0
    for length in g.chunks:
        q, k, v = random_tokens(generator, g, length, g.padded)
        out = attention.fp8_paged_attention(
            q,
            k,
            v,
            cache,
            0.3,
            torch.tensor([[start]]),
            table,
            block_axis=0,
            k_scale=k_scale,
            v_scale=v_scale,
            cache_dtype=cache_dtype,
        )
        sequence.append(
            rounded(k[0, :, 0, :length], k_scale), rounded(v[0, :, 0, :length], v_scale)
        )
        for row in range(length):
            expected = sequence.attend(q[0, :, :, row], start + row, 0.3)
            torch.testing.assert_close(out[0, :, :, row].double(), expected, rtol=1e-4, atol=1e-5)
        start += length


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates(cache_dtype):
    q, k, v = random_tokens(torch.Generator(), Geometry(1, 1, 4, 2, (1,), 1, 0), 1, 1)
    k[:], v[:] = 1e9, -1e9
    cache = torch.zeros(1, 2, 1, 1, 2, 4, dtype=torch.uint8)
    attention.fp8_paged_attention(
        q,
        k,
        v,
        cache,
        1.0,
        torch.tensor([[0]]),
        torch.tensor([0]),
        block_axis=0,
        k_scale=1.0,
        v_scale=1.0,
        cache_dtype=cache_dtype,
    )
    stored = cache.view(cache_dtype)[0, :, 0, 0, 0].float()
    limit = torch.finfo(cache_dtype).max
    assert stored[0].eq(limit).all()
    assert stored[1].eq(-limit).all()


def test_fp8_needs_bytes():
    q, k, v = random_tokens(torch.Generator(), Geometry(1, 1, 4, 2, (1,), 1, 0), 1, 1)
    with pytest.raises(ValueError, match="kept as uint8, this one is"):
        attention.fp8_paged_attention(
            q,
            k,
            v,
            torch.zeros(1, 2, 1, 1, 2, 4),
            1.0,
            torch.tensor([[0]]),
            torch.tensor([0]),
            block_axis=0,
            k_scale=1.0,
            v_scale=1.0,
            cache_dtype=torch.float8_e4m3fn,
        )


@pytest.mark.parametrize("block_axis", [0, 1])
@settings(max_examples=25, deadline=None)
@given(g=geometries, window=st.integers(1, 6), steps=st.integers(0, 3))
def test_shifting_window(g, block_axis, window, steps):
    generator = torch.Generator().manual_seed(g.seed)
    shape = [2, g.heads, 1, window, g.dim]
    shape.insert(block_axis, 3)
    cache = torch.full(shape, float("nan"))
    table = torch.tensor([[2]])
    sequence, start = Sequence(), 0
    for length, padded in [*((c, g.padded) for c in g.chunks), *[(1, 1)] * steps]:
        q, k, v = random_tokens(generator, g, length, padded)
        held = min(start, window)
        out = attention.shifting_window_attention(
            q,
            k,
            v,
            cache,
            torch.tensor([[held]]),
            torch.tensor([[held + length]]),
            0.3,
            table,
            block_axis=block_axis,
        )
        sequence.append(k[0, :, 0, :length], v[0, :, 0, :length])
        for row in range(length):
            expected = sequence.attend(q[0, :, :, row], start + row, 0.3, window)
            torch.testing.assert_close(out[0, :, :, row].double(), expected, rtol=1e-4, atol=1e-5)
        start += length


@settings(max_examples=25, deadline=None)
@given(g=geometries, rank=st.sampled_from([4, 6]), rope=st.sampled_from([2, 4]))
def test_latent_attention(g, rank, rope):
    generator = torch.Generator().manual_seed(g.seed)
    cache = torch.full((g.blocks + 2, g.block, rank + rope), float("nan"))
    table = torch.randperm(g.blocks + 1, generator=generator)[: g.blocks] + 1
    sequence, start = Sequence(), 0
    for length in g.chunks:
        q = torch.randn(1, g.heads, g.padded, rank + rope, generator=generator)
        latent = torch.randn(1, g.padded, rank, generator=generator)
        rope_key = torch.randn(1, g.padded, rope, generator=generator)
        out = attention.latent_attention(
            q, latent, rope_key, cache, 0.3, torch.tensor([[start]]), table
        )
        keys = torch.cat([latent, rope_key], -1)[:, :length]
        sequence.append(keys, latent[:, :length])
        for row in range(length):
            expected = sequence.attend(q[:, :, row], start + row, 0.3)[0]
            torch.testing.assert_close(out[0, :, row].double(), expected, rtol=1e-4, atol=1e-5)
        start += length


def test_padding_behind_the_table_is_dropped():
    pages = torch.zeros(3, 1, 2, 4)
    paged.write(pages, [2], 1, torch.ones(1, 5, 4))
    assert pages[2, 0, 1].eq(1).all()
    assert pages.sum() == 4


def test_a_cache_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\[2, 5, 3, 1, 4, 8\]; expected \[num_blocks, 2, heads"):
        paged.kv_pages(torch.zeros(2, 5, 3, 1, 4, 8), 0)


def test_argmax_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    assert sampling.argmax(logits).tolist() == [1, 0]
    assert sampling.argmax(logits).dtype == torch.int32


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    k=st.none() | st.integers(1, 12),
    p=st.none() | st.floats(0.01, 1.0),
)
def test_top_k_top_p_keeps_what_the_definition_says(seed, k, p):
    probabilities = torch.rand(2, 10, generator=torch.Generator().manual_seed(seed))
    probabilities /= probabilities.sum(-1, keepdim=True)
    left = sampling.filtered(
        probabilities,
        None if k is None else torch.full((2,), k, dtype=torch.int32),
        None if p is None else torch.full((2,), p),
    )
    for row, kept in zip(probabilities.tolist(), left.tolist(), strict=True):
        order = sorted(range(10), key=lambda i: -row[i])
        before = 0.0
        for rank, i in enumerate(order):
            stays = rank == 0 or ((k is None or rank < k) and (p is None or before < p))
            if p is None or abs(before - p) > 1e-5:  # at the edge float rounding decides
                assert (kept[i] > 0) == stays
            before += row[i]


def test_draws_follow_the_seed_and_the_probabilities():
    probabilities = torch.tensor([[0.5, 0.3, 0.2]]).expand(4000, 3)
    sampling.seed(7)
    first = sampling.top_k_top_p(probabilities, None, None)
    sampling.seed(7)
    assert torch.equal(first, sampling.top_k_top_p(probabilities, None, None))
    share = torch.bincount(first.long(), minlength=3) / 4000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.04)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 5), experts=st.integers(1, 4))
def test_mixture_of_experts(seed, tokens, experts):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, generator=generator)
    gate = torch.randn(experts, 5, 6, generator=generator)
    up = torch.randn(experts, 5, 6, generator=generator)
    down = torch.randn(experts, 6, 5, generator=generator)
    routing = torch.rand(experts, tokens, generator=generator)
    routing[torch.rand(routing.shape, generator=generator) < 0.5] = 0.0
    out = moe.moe_glu(hidden, gate, up, down, routing, "silu")
    for t in range(tokens):
        expected = torch.zeros(6)
        for e in range(experts):
            a = gate[e] @ hidden[t]
            expected += routing[e, t] * (down[e] @ (a * a.sigmoid() * (up[e] @ hidden[t])))
        torch.testing.assert_close(out[t], expected, rtol=1e-4, atol=1e-4)


def test_another_activation_is_not_modelled():
    one = torch.ones(1, 1, 1)
    with pytest.raises(NotImplementedError, match="activation 'gelu' is not modelled"):
        moe.moe_glu(one[0], one, one, one, one[0], "gelu")
