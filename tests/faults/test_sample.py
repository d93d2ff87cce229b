# SPDX-License-Identifier: Apache-2.0
"""A few hundred cases of the fault matrix, a different few for each seed; ``python -m tests.faults``
runs all of them."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

import pytest

from lmcache_rbln.cli._known_kv import LAYOUTS
from tests.faults import matrix

SEED = int(os.environ.get("FAULTS_SEED", "1"))

#: Cases of each layout, direction and context.
CASES = 12


@pytest.fixture(scope="module")
def servers() -> Iterator[matrix.Servers]:
    with matrix.Servers() as servers:
        yield servers


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    """Pytest would keep the tracebacks of failures, and with them the buffers they were met with."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mode", matrix.MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sample_of_the_matrix(layout, mode, servers, record_property):
    tally = matrix.Tally()
    for base in matrix.bases((layout,), ("shm",), ("small",)):
        if base.mode != mode:
            continue
        bench = matrix.Bench(servers[base.transport], base, SEED)
        try:
            every = list(matrix.cases(base, bench.calls()))
            for case in random.Random(SEED).sample(every, min(CASES, len(every))):
                try:
                    bench.run(case, tally)
                except matrix.WrongError as error:
                    pytest.fail(
                        f"{error}; replay with: python -m tests.faults --seed {SEED} "
                        f"--replay '{case}'"
                    )
        finally:
            bench.close()
    assert tally.injected > tally.cases / 2
    assert tally.reported and tally.harmless, "the sample shows one side only"
    record_property("faults", str(tally))
