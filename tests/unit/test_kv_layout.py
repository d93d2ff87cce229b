# SPDX-License-Identifier: Apache-2.0
"""Recognising the three layouts, on host tensors: only shapes and strides matter here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_rbln import kv_layout
from lmcache_rbln.kv_layout import KVLayout

sizes = st.integers(1, 5)


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kv_layout.LAYOUT_VARIABLE, raising=False)


def layers(*shape: int, count: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


@given(blocks=sizes.filter(lambda n: n != 2), heads=sizes, block=sizes, head=sizes)
def test_blocks_first_is_told_by_shape(blocks: int, heads: int, block: int, head: int) -> None:
    paged = kv_layout.resolve(layers(blocks, 2, heads, 1, block, head))
    assert paged.layout is KVLayout.BLOCKS_FIRST
    assert (paged.num_blocks, paged.num_heads, paged.block_size, paged.head_size) == (
        blocks, heads, block, head,
    )  # fmt: skip
    assert paged.chunk_shape(7) == (2, 2, 7, heads * head)
    assert paged.block_nbytes == 2 * heads * block * head * 2


@given(blocks=sizes.filter(lambda n: n != 2), heads=sizes, block=sizes, head=sizes)
def test_kv_first_is_told_by_shape(blocks: int, heads: int, block: int, head: int) -> None:
    paged = kv_layout.resolve(layers(2, blocks, heads, 1, block, head))
    assert paged.layout is KVLayout.KV_FIRST
    assert (paged.num_blocks, paged.num_heads, paged.block_size, paged.head_size) == (
        blocks, heads, block, head,
    )  # fmt: skip


@given(blocks=sizes, block=sizes, head=sizes)
def test_mla_is_told_by_rank(blocks: int, block: int, head: int) -> None:
    paged = kv_layout.resolve(layers(blocks, block, head, count=3))
    assert paged.layout is KVLayout.MLA
    assert paged.planes == 1
    assert paged.chunk_shape(7) == (3, 7, head)


@pytest.mark.parametrize("apart", [2, 3, 1])
def test_layers_that_overlap(apart: int) -> None:
    """Views of one buffer, so many blocks apart; in any order."""
    whole = torch.zeros(9, 4, 8, dtype=torch.bfloat16)
    caches = [whole[2 * apart : 2 * apart + 3], whole[:3], whole[apart : apart + 3]]
    if apart == 3:
        assert len(kv_layout.resolve(caches).layers) == 3
        return
    with pytest.raises(ValueError) as refused:
        kv_layout.resolve(caches)
    assert str(refused.value) == (
        "layers of the KV cache overlap: [3, 4, 8] bfloat16 on cpu takes 192 bytes, and two of them "
        f"begin {64 * apart} bytes apart; each needs memory of its own"
    )


def test_layers_may_share_a_cache() -> None:
    (cache,) = layers(3, 4, 8, count=1)
    assert len(kv_layout.resolve([cache, cache]).layers) == 2


@given(blocks=sizes, heads=sizes, block=sizes, head=sizes)
def test_the_exchanged_view_of_a_blocks_first_cache_is_undone(
    blocks: int, heads: int, block: int, head: int
) -> None:
    own = layers(blocks, 2, heads, 1, block, head)
    paged = kv_layout.resolve([layer.transpose(0, 1) for layer in own])
    assert paged.num_blocks == blocks
    assert paged.layers[0].is_contiguous()
    if blocks > 1:  # With one block both readings are the same bytes.
        assert paged.layout is KVLayout.BLOCKS_FIRST
        assert paged.layers[0].shape == own[0].shape


@pytest.mark.parametrize("layout", [KVLayout.BLOCKS_FIRST, KVLayout.KV_FIRST])
def test_two_blocks_need_the_setting(layout: KVLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"\[2, 2, 3, 1, 4, 5\].*Set LMCACHE_RBLN_KV_LAYOUT"):
        kv_layout.resolve(layers(2, 2, 3, 1, 4, 5))
    monkeypatch.setenv(kv_layout.LAYOUT_VARIABLE, f" {layout.value.upper()} ")
    assert kv_layout.resolve(layers(2, 2, 3, 1, 4, 5)).layout is layout


def test_an_exchanged_view_of_two_blocks_is_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [layer.transpose(0, 1) for layer in layers(2, 2, 3, 1, 4, 5)]
    assert kv_layout.resolve(views).layout is KVLayout.BLOCKS_FIRST
    monkeypatch.setenv(kv_layout.LAYOUT_VARIABLE, "kv_first")
    with pytest.raises(ValueError, match="kv_first does not fit"):
        kv_layout.resolve(views)


@pytest.mark.parametrize(
    ("setting", "shape", "message"),
    [
        ("kv_first", (3, 2, 1, 1, 4, 5), "kv_first does not fit .* which is blocks_first"),
        ("blocks_first", (2, 3, 1, 1, 4, 5), "blocks_first does not fit .* which is kv_first"),
        ("blocks_first", (3, 4, 5), "blocks_first does not fit .* which is MLA"),
        ("nhd", (3, 2, 1, 1, 4, 5), "'nhd' is unknown; expected blocks_first or kv_first"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(
    setting: str, shape: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kv_layout.LAYOUT_VARIABLE, setting)
    with pytest.raises(ValueError, match=message):
        kv_layout.resolve(layers(*shape))


@pytest.mark.parametrize(
    "shape",
    [
        (4, 5),
        (3, 2, 4, 5),  # fused
        (3, 2, 4, 2, 5),  # split, five axes
        (3, 3, 1, 1, 4, 5),  # no axis of two
        (3, 2, 1, 4, 1, 5),  # the single axis elsewhere
        (3, 2, 1, 1, 4, 5, 1),
        (),
    ],
)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="supported: blocks-first HND"):
        kv_layout.resolve(layers(*shape))


@pytest.mark.parametrize("shape", [(0, 2, 1, 1, 4, 5), (3, 2, 1, 1, 0, 5), (3, 4, 0)])
def test_caches_that_hold_nothing_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        kv_layout.resolve(layers(*shape))


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        kv_layout.resolve([torch.empty(3, 4, 5, device="meta")])


def test_strided_layers_are_refused() -> None:
    padded = torch.zeros(6, 2, 1, 1, 4, 5)[::2]
    with pytest.raises(ValueError, match="not contiguous"):
        kv_layout.resolve([padded])
    with pytest.raises(ValueError, match="not contiguous"):
        kv_layout.resolve([torch.zeros(3, 5, 4).transpose(1, 2)])


@pytest.mark.parametrize(
    "view",
    [
        # The exchanged views of what is not blocks-first, and blocks-first exchanged and padded.
        torch.zeros(2, 3, 1, 1, 4, 5).transpose(0, 1),
        torch.zeros(3, 2, 5).transpose(0, 1),
        torch.zeros(4, 3, 1, 1, 4, 5)[::2],
        torch.zeros(6, 2, 1, 1, 4, 5)[::2].transpose(0, 1),
    ],
)
def test_only_blocks_first_is_exchanged_back(view: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        kv_layout.resolve([view])


def test_one_layer_is_a_cache() -> None:
    for shape in ((3, 2, 1, 1, 4, 5), (2, 3, 1, 1, 4, 5), (3, 4, 5)):
        paged = kv_layout.resolve(layers(*shape, count=1))
        assert (paged.num_blocks, paged.dtype, paged.device.type) == (3, torch.bfloat16, "cpu")


def test_a_message_has_strides_where_they_matter() -> None:
    tensor = torch.zeros(3, 4, 5, dtype=torch.float16)
    assert kv_layout.describe(tensor) == "[3, 4, 5] float16 on cpu"
    assert kv_layout.describe(tensor[::2]) == "[2, 4, 5] strides [40, 5, 1] float16 on cpu"


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 2, 1, 1, 4, 5),
        torch.zeros(3, 2, 1, 1, 4, 5, dtype=torch.float16),
        torch.zeros(3, 4, 5),
        torch.zeros(3, 2, 1, 1, 4, 5, device="meta"),
    ],
)
def test_layers_that_differ_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="layers of the KV cache differ: .* layer 1 is"):
        kv_layout.resolve([torch.zeros(3, 2, 1, 1, 4, 5), other])


@pytest.mark.parametrize("bad", [[], [1234], [None], [[torch.zeros(3, 4, 5)] * 2]])
def test_what_is_no_list_of_tensors_is_refused(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="no layers|expected one tensor"):
        kv_layout.resolve(bad)
