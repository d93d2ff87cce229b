# SPDX-License-Identifier: Apache-2.0
"""An LMCache that knows blocks-first itself: its own detector and its own format, for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_rbln import simulator
from lmcache_rbln.lmcache_compat import blocks_first
from tests import reference
from tests.reference import Geometry

NATIVE = "NL_X_NB_TWO_NH_ONE_BS_HS"
GEOMETRY = Geometry("blocks_first", 3, 5, 2, 4, 8, 2)


@pytest.fixture(autouse=True)
def kv_format() -> Any:
    """LMCache's own member."""
    import lmcache  # noqa: F401  # Its registry must start before the modules that it loads.
    from lmcache.lmcache_native import EngineKVFormat

    if not hasattr(EngineKVFormat, NATIVE):
        pytest.skip("this LMCache does not know blocks-first itself: nox -s next has one that does")
    return getattr(EngineKVFormat, NATIVE)


def detect(layers: list[torch.Tensor]) -> Any:
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector.kv_format.detectors import get_detector

    return get_detector(EngineType.VLLM).discover(layers, {})


def test_lmcaches_detector_is_left_alone(kv_format: Any) -> None:
    layers = [torch.zeros(GEOMETRY.layer_shape, dtype=torch.bfloat16, device="rbln:0")] * 3
    found, views = detect(layers)
    assert found == kv_format
    assert all(view.is_contiguous() and view.shape == layers[0].shape for view in views)
    assert blocks_first.is_native()
    assert not blocks_first.is_installed()


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_its_format_is_moved_exactly(direction: str, kv_format: Any) -> None:
    import lmcache
    from lmcache.lmcache_native import TransferDirection

    from lmcache_rbln.device_ops import RblnDeviceOps

    assert type(lmcache.device_ops) is RblnDeviceOps
    rng = np.random.default_rng(2)
    layers = [layer.to("rbln:0") for layer in GEOMETRY.layers(rng)]
    chunks = [GEOMETRY.random(GEOMETRY.chunk_shape(), rng) for _ in range(2)]
    ids = [3, 0, 4, 1]
    expected = [reference.to_bytes(tensor).copy() for tensor in (*layers, *chunks)]
    getattr(reference, direction)(GEOMETRY, expected[:3], expected[3:], ids)

    class ShapeDesc:
        bs = GEOMETRY.block_size

    lmcache.device_ops.multi_layer_block_kv_transfer(
        layers,
        chunks,
        ids,
        "rbln",
        {"gather": TransferDirection.D2H, "scatter": TransferDirection.H2D}[direction],
        ShapeDesc(),
        GEOMETRY.chunk_tokens,
        kv_format,
        0,
    )
    for found, want in zip((*layers, *chunks), expected, strict=True):
        assert np.array_equal(reference.to_bytes(found), want)


def test_two_blocks_are_never_guessed() -> None:
    """LMCache takes them for K/V-first; the transfer then refuses."""
    from lmcache_rbln import kv_layout

    layers = [torch.zeros(2, 2, 2, 1, 4, 8, dtype=torch.bfloat16, device="rbln:0")]
    _, views = detect(layers)
    with pytest.raises(ValueError, match="fits blocks-first and K/V-first"):
        kv_layout.resolve(views)


def test_through_a_real_server(tmp_path: Path) -> None:
    page = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_rbln.cli", "demo", "--json", str(page)],
        env=simulator.environment(host=simulator.unique_host("next")),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(page.read_text())["exact"] is True
