# SPDX-License-Identifier: Apache-2.0
"""The worker of the end-to-end benchmark does what it times."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from lmcache_rbln.cli import _bench_measure
from lmcache_rbln.cli._bench_models import Model, row_of
from tests.e2e.e2e_workers import CHUNK


@pytest.mark.parametrize("layout", ["blocks_first", "mla"])
def test_it_measures_stores_and_retrieves(layout, server):
    model = Model(2, 1 if layout == "mla" else 2, 16, mla=layout == "mla")
    row = row_of(layout, model, 16, CHUNK // 16, False, mib=0.1)
    request = {
        "what": "end_to_end", "url": server.url, "row": asdict(row), "samples": 1,
        "fresh": 2, "warm": 2,
    }  # fmt: skip
    said: list[str] = []
    results = []

    def tell(step: str = "", result: dict[str, object] | None = None) -> None:
        said.append(step)
        results.append(result)

    _bench_measure.answer(request, tell)
    assert said == [
        "device operation alone", "stores into fresh memory",
        "stores into used memory, retrieves", "",
    ]  # fmt: skip
    result = results[-1]
    assert result["nbytes"] == row.chunks * CHUNK * 2 * 16 * 2 * (1 if layout == "mla" else 4)
    assert result["transport"] == ("shared memory" if server.shared_memory else "pickle")
    assert (result["prefault_s"] is None) is not server.shared_memory
    for what in ("alone_store", "alone_retrieve", "fresh_store", "warm_store", "retrieve"):
        assert result[what] > 0
