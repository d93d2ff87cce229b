# SPDX-License-Identifier: Apache-2.0
"""What is refused, with what words, and that nothing was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests import reference
from tests.reference import Geometry

GEOMETRY = Geometry("blocks_first", 2, 5, 2, 4, 8, 2)


@pytest.fixture
def request_of(transfer: Callable[..., None]) -> Callable[..., None]:
    """A good request of which single parts are replaced; refused, with nothing written."""

    def refuse(
        message: str,
        *,
        error: type[Exception] = ValueError,
        direction: Any = "scatter",
        geometry: Geometry = GEOMETRY,
        **parts: Any,
    ) -> None:
        rng = np.random.default_rng(0)
        layers = [layer.to("rbln:0") for layer in geometry.layers(rng)]
        chunks = [geometry.random(geometry.chunk_shape(), rng) for _ in range(2)]
        before = [reference.to_bytes(x) for x in (*layers, *chunks)]
        arguments = {
            "layers": layers,
            "chunks": chunks,
            "block_ids": [3, 0, 4, 1],
            "block_size": geometry.block_size,
            "chunk_tokens": geometry.chunk_tokens,
            "mla": geometry.layout == "mla",
        }
        for name, value in parts.items():
            arguments[name] = value(layers, chunks) if callable(value) else value
        with pytest.raises(error, match=message):
            transfer(direction, **arguments)
        for tensor, want in zip((*layers, *chunks), before, strict=True):
            assert np.array_equal(reference.to_bytes(tensor), want)

    return refuse


def test_unsupported_shape(request_of: Any) -> None:
    for shape in [(5, 2, 2, 4, 8), (5, 3, 2, 1, 4, 8), (40, 8)]:
        request_of(
            rf"\[{', '.join(map(str, shape))}\].*supported: blocks-first HND",
            layers=[torch.zeros(shape, device="rbln:0", dtype=torch.bfloat16)] * 2,
        )


def test_ambiguous(request_of: Any) -> None:
    two = Geometry("blocks_first", 2, 2, 2, 4, 8, 2)
    request_of("fits blocks-first and K/V-first", geometry=two, block_ids=[0, 1])


def test_meta(request_of: Any) -> None:
    layers = [torch.empty(GEOMETRY.layer_shape, device="meta", dtype=torch.bfloat16)] * 2
    request_of("VLLM_RBLN_USE_DEVICE_TENSOR=1", layers=layers)


def test_not_on_the_npu(request_of: Any) -> None:
    request_of("moves caches on rbln", layers=lambda layers, _: [x.cpu() for x in layers])


def test_not_contiguous(request_of: Any) -> None:
    double = torch.zeros(10, 2, 2, 1, 4, 8, dtype=torch.bfloat16, device="rbln:0")
    request_of("not contiguous", layers=[double[::2], double[::2]])


def test_layers_that_differ(request_of: Any) -> None:
    request_of("layer 1 is", layers=lambda layers, _: [layers[0], layers[1].to("rbln:1")])


def test_pointers(request_of: Any) -> None:
    request_of("not pointers", layers=torch.tensor([1, 2]))
    request_of("expected one tensor a layer", layers=[1, 2])
    request_of("not pointers", chunks=[1, 2])


def test_format_of_another_layout(request_of: Any) -> None:
    from lmcache.lmcache_native import EngineKVFormat

    request_of("calls the KV cache .* NL_X_NB_BS_HS", kv_format=EngineKVFormat.NL_X_NB_BS_HS)


@pytest.mark.parametrize("tokens", [0, -8, 3, 6])
def test_chunk_size_that_is_no_multiple(tokens: int, request_of: Any) -> None:
    request_of(rf"chunk size is {tokens} tokens, expected a multiple", chunk_tokens=tokens)


def test_wrong_block_size(request_of: Any) -> None:
    request_of("block size is given as 2 tokens", block_size=2)


@pytest.mark.parametrize("block", [-1, 5, 2**40])
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_block_out_of_range(block: int, direction: str, request_of: Any) -> None:
    request_of(
        rf"block id {block} is out of range: .* blocks 0 to 4",
        direction=direction,
        block_ids=[3, 0, block, 1],
    )


def test_block_written_twice(request_of: Any) -> None:
    request_of("block id 0 is to be written twice", block_ids=[3, 0, 4, 0])


@pytest.mark.parametrize("second", [slice(0, 8), slice(4, 12), slice(7, 15)])
def test_chunks_that_overlap(second: slice, request_of: Any) -> None:
    shared = torch.zeros(2, 2, 15, 16, dtype=torch.bfloat16)
    request_of(
        "chunks overlap in memory",
        direction="gather",
        chunks=[shared[:, :, :8], shared[:, :, second]],
    )


@pytest.mark.parametrize("shared_elements", [0, 1])
def test_chunks_one_after_the_other(
    shared_elements: int, request_of: Any, transfer: Callable[..., None]
) -> None:
    shape, count = (2, 2, 8, 16), 2 * 2 * 8 * 16
    memory = torch.zeros(2 * count, dtype=torch.bfloat16)
    starts = (0, count - shared_elements)
    chunks = [memory[start : start + count].view(shape) for start in starts]
    if shared_elements:
        request_of("chunks overlap in memory", direction="gather", chunks=chunks)
    else:
        layers = [layer.to("rbln:0") for layer in GEOMETRY.layers(np.random.default_rng(1))]
        transfer("gather", layers, chunks, [3, 0, 4, 1], block_size=4, chunk_tokens=8)


def test_chunks_between_each_others_layers(transfer: Callable[..., None]) -> None:
    """As slots of one buffer; they share no element."""
    rng = np.random.default_rng(1)
    layers = [layer.to("rbln:0") for layer in GEOMETRY.layers(rng)]
    shared = torch.zeros(2, 2, 16, 16, dtype=torch.bfloat16)
    apart = [torch.zeros(GEOMETRY.chunk_shape(), dtype=torch.bfloat16) for _ in range(2)]
    for chunks in ([shared[:, :, :8], shared[:, :, 8:]], apart):
        transfer("gather", layers, chunks, [3, 0, 4, 1], block_size=4, chunk_tokens=8)
    assert reference.to_bytes(shared).tolist() == reference.to_bytes(torch.cat(apart, 2)).tolist()


def test_layers_that_overlap(request_of: Any) -> None:
    both = torch.zeros(6, *GEOMETRY.layer_shape[1:], dtype=torch.bfloat16, device="rbln:0")
    request_of("layers of the KV cache overlap", layers=[both[:5], both[1:]])


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("block_size", 4.9, r"shape_desc\.bs, is 4\.9, expected a whole number of tokens"),
        ("block_size", None, r"shape_desc\.bs, is None"),
        ("chunk_tokens", "8", "lmcache_chunk_size is '8', expected a whole number of tokens"),
        ("skip", 1.0, r"skip_prefix_n_blocks is 1\.0, expected a whole number of blocks"),
        ("block_ids", {3: 0, 4: 1}, r"block_ids is \{3: 0, 4: 1\}, expected a list or a tensor"),
        ("block_ids", {3, 0, 4, 1}, "expected a list or a tensor"),
        ("block_ids", 3, "block_ids is 3"),
        ("block_ids", [False, True, True, False], "block_ids holds booleans"),
        ("block_ids", torch.tensor([False, True, True, False]), "a mask names none"),
        ("block_ids", [3, 0, 4, 1.0], "block_ids holds something else than whole numbers"),
    ],
)
def test_wrong_type(part: str, value: Any, message: str, request_of: Any) -> None:
    request_of(message, error=TypeError, **{part: value})


@pytest.mark.parametrize("kind", [tuple, torch.tensor, np.array])
def test_block_ids_of_any_sequence(kind: Any, transfer: Callable[..., None]) -> None:
    layers = [torch.zeros(GEOMETRY.layer_shape, dtype=torch.bfloat16, device="rbln:0")] * 2
    chunks = [torch.zeros(GEOMETRY.chunk_shape(), dtype=torch.bfloat16) for _ in range(2)]
    transfer("gather", layers, chunks, kind([3, 0, 4, 1]), block_size=4, chunk_tokens=8)


def test_a_repeat_among_the_skipped_is_fine(transfer: Callable[..., None]) -> None:
    layers = [torch.zeros(GEOMETRY.layer_shape, dtype=torch.bfloat16, device="rbln:0")] * 2
    chunks = [torch.zeros(GEOMETRY.chunk_shape(), dtype=torch.bfloat16)] * 2
    transfer("scatter", layers, chunks, [0, 0, 0, 1], block_size=4, chunk_tokens=8, skip=2)


def test_negative_skip(request_of: Any) -> None:
    request_of("skip_prefix_n_blocks is -1", skip=-1)


def test_unknown_direction(request_of: Any) -> None:
    request_of("unknown transfer direction 7", direction=7)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_ids_that_do_not_fill_the_chunks(count: int, request_of: Any) -> None:
    request_of(rf"{count} block ids do not fit 2 chunks", block_ids=[i % 5 for i in range(count)])


@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 8, 8),  # another width
        (2, 3, 8, 16),  # another number of layers
        (2, 2, 4, 16),  # too few tokens
        (1, 2, 8, 16),
        (2, 8, 16),  # an MLA chunk
        (0,),
    ],
)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_chunk_of_another_shape(shape: tuple[int, ...], direction: str, request_of: Any) -> None:
    odd = torch.zeros(shape, dtype=torch.bfloat16)
    request_of(
        r"chunk 1 is .*expected \[2, 2, 8, 16\] bfloat16",
        direction=direction,
        chunks=lambda _, chunks: [chunks[0], odd],
    )


def test_chunk_of_another_dtype(request_of: Any) -> None:
    request_of("chunk 0 is .* float16", chunks=lambda _, c: [c[0].view(torch.float16), c[1]])


def test_chunk_on_a_device(request_of: Any) -> None:
    request_of("on rbln:0, expected", chunks=lambda _, c: [c[0].to("rbln:0"), c[1]])


def test_chunk_whose_tokens_are_not_dense(request_of: Any) -> None:
    sparse = torch.zeros(2, 2, 16, 16, dtype=torch.bfloat16)[:, :, ::2]
    overlapping = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16).expand(2, 2, 8, 16)
    for chunk in (sparse, overlapping):
        request_of("must lie side by side", direction="gather", chunks=[chunk, chunk])


def test_wrong_types_raise_only_what_lmcache_catches(transfer: Callable[..., None]) -> None:
    layers = [torch.zeros(GEOMETRY.layer_shape, dtype=torch.bfloat16, device="rbln:0")] * 2
    chunks = [torch.zeros(GEOMETRY.chunk_shape(), dtype=torch.bfloat16)] * 2
    for bad in ([1.5, 0, 2, 3], ["0", 1, 2, 3], None, 3, [[0], [1], [2], [3]]):
        with pytest.raises((ValueError, TypeError)):
            transfer("scatter", layers, chunks, bad, block_size=4, chunk_tokens=8)


def test_other_errors_are_wrapped(
    transfer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_rbln import block_transfer

    def fail(*_: object) -> None:
        raise MemoryError("no staging")

    monkeypatch.setattr(block_transfer, "gather", fail)
    layers = [torch.zeros(GEOMETRY.layer_shape, dtype=torch.bfloat16, device="rbln:0")] * 2
    chunks = [torch.zeros(GEOMETRY.chunk_shape(), dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(RuntimeError, match="MemoryError: no staging") as caught:
        transfer("gather", layers, chunks, [0, 1, 2, 3], block_size=4, chunk_tokens=8)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_nothing_to_do(transfer: Callable[..., None]) -> None:
    layers = [torch.zeros(GEOMETRY.layer_shape, dtype=torch.bfloat16, device="rbln:0")] * 2
    transfer("gather", layers, [], [], block_size=4, chunk_tokens=8)


class TestAtRegistration:
    """Caches that LMCache must refuse to register, through its own layout computation."""

    @pytest.fixture
    def compute(self) -> Callable[..., Any]:
        from lmcache.v1.multiprocess.transfer_context.base import compute_kv_layout

        return compute_kv_layout

    def test_supported_layouts_register(self, compute: Callable[..., Any]) -> None:
        for layout in reference.LAYOUTS:
            geometry = Geometry(layout, 3, 7, 1 if layout == "mla" else 2, 4, 8, 1)
            caches = {
                f"layer.{i}": torch.zeros(geometry.layer_shape, device="rbln:0") for i in range(3)
            }
            block_size, num_layers, width, dtype, _, planes = compute(
                caches, layout_hints={"kv_layout": "of no meaning here"}
            )
            assert (block_size, num_layers, dtype) == (4, 3, "float32")
            assert width == geometry.num_heads * 8
            assert planes == (1 if layout == "mla" else 2)

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ([((5, 2, 2, 1, 4, 8), "meta")], "meta tensor has no memory"),
            ([((5, 2, 2, 1, 4, 8), "rbln:0"), ((5, 2, 2, 1, 4, 8), "rbln:1")], "layers .* differ"),
            ([((5, 2, 2, 1, 4, 8), "rbln:0"), ((5, 4, 8), "rbln:0")], "layers .* differ"),
            ([((5, 2, 2, 1, 4, 8), "rbln:0"), ((5, 2, 2, 1, 4, 8), "cpu")], "layers .* differ"),
            ([((2, 2, 2, 1, 4, 8), "rbln:0")], "Set LMCACHE_RBLN_KV_LAYOUT"),
            ([((5, 2, 4, 2, 8), "rbln:0")], "supported: blocks-first HND"),
        ],
    )
    def test_refused(self, layers: Any, message: str, compute: Callable[..., Any]) -> None:
        caches = {
            f"layer.{i}": torch.zeros(shape, device=device)
            for i, (shape, device) in enumerate(layers)
        }
        with pytest.raises(ValueError, match=message):
            compute(caches)

    def test_padded_blocks(self, compute: Callable[..., Any]) -> None:
        pool = torch.zeros(5, 100, device="rbln:0")
        with pytest.raises(ValueError, match="not contiguous"):
            compute({"layer.0": pool.as_strided((5, 4, 8), (100, 8, 1))})
