# SPDX-License-Identifier: Apache-2.0
"""The measuring process of the benchmark.

It reads one JSON object from its standard input, and writes one JSON object a line to the
descriptor that its only argument names: ``{"step": ...}`` as it goes on, ``{"result": ...}`` for
each thing measured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import IO, Any

import torch

from lmcache_rbln import block_transfer, kv_layout, simulator, staging
from lmcache_rbln.cli._bench_models import Row
from lmcache_rbln.transfer_plan import plan

#: Between samples: threads that others left spinning (torch's, for a few milliseconds after a
#: parallel copy) must not slow the next down.
_REST_S = 0.01

#: Samples of what is not compared: the host transpose, the link.
_SIDE_SAMPLES = 5

_BUNDLED = ("lmcache.v1.platform.devices.rbln.kv_ops", "lmcache.v1.platform.rbln.kv_ops")


@dataclass
class Way:
    """One implementation's transfer of a row: no arguments, no result."""

    store: Callable[[], None]
    retrieve: Callable[[], None]


class Setup:
    """A paged cache, chunks and block ids as a row says.

    Args:
        row: The row.
        layers: Layers to make; the row's by default.
    """

    def __init__(self, row: Row, layers: int | None = None) -> None:
        self.row = row
        count = row.blocks
        # More blocks than move: scattered ones leave gaps, and two blocks would fit two layouts.
        blocks = 4 * count if row.scattered else count + 2
        hnd = (row.heads, 1, row.block_size, row.head_size)
        shape = {
            "blocks_first": (blocks, 2, *hnd),
            "kv_first": (2, blocks, *hnd),
            "mla": (blocks, row.block_size, row.head_size),
        }[row.layout]
        tokens = row.blocks_per_chunk * row.block_size
        num_layers = layers or row.layers
        planes = () if row.layout == "mla" else (2,)
        chunk_shape = (*planes, num_layers, tokens, row.heads * row.head_size)
        dtype = getattr(torch, row.dtype)
        self.layers = [torch.empty(shape, dtype=dtype, device="rbln") for _ in range(num_layers)]
        # Written once, so that their pages are there.
        self.chunks = [torch.zeros(chunk_shape, dtype=dtype) for _ in range(row.chunks)]
        self.block_ids = list(range(1, count + 1))
        if row.scattered:
            self.block_ids = random.Random(0).sample(range(blocks), count)

    @property
    def nbytes(self) -> int:
        """Bytes that a transfer moves."""
        return sum(chunk.numel() * chunk.element_size() for chunk in self.chunks)

    def ours(self) -> Way:
        """This package, as LMCache calls it: all checks included."""
        import lmcache  # first: it loads backends while it initialises
        from lmcache.lmcache_native import EngineKVFormat, TransferDirection

        class Shape:
            bs = self.row.block_size

        formats = EngineKVFormat
        mla = self.row.layout == "mla"
        move = functools.partial(
            lmcache.device_ops.multi_layer_block_kv_transfer,
            self.layers,
            self.chunks,
            self.block_ids,
            "rbln",
            shape_desc=Shape,
            lmcache_chunk_size=self.row.blocks_per_chunk * self.row.block_size,
            engine_kv_format=formats.NL_X_NB_BS_HS if mla else formats.NL_X_TWO_NB_NH_ONE_BS_HS,
            skip_prefix_n_blocks=0,
        )
        return Way(
            functools.partial(move, direction=TransferDirection.D2H),
            functools.partial(move, direction=TransferDirection.H2D),
        )

    def theirs(self, kernels: ModuleType) -> Way | None:
        """The torch kernels of a bundled backend, chunk by chunk; None if they lack the layout."""
        suffix = _suffix(kernels, self.row.layout)
        gather = getattr(kernels, f"gather_blocks_to_chunk{suffix}", None)
        scatter = getattr(kernels, f"scatter_chunk_to_blocks{suffix}", None)
        if gather is None or scatter is None:
            return None
        hnd = self.row.layout != "mla"
        layers = [layer.squeeze(3) for layer in self.layers] if hnd else self.layers
        each = self.row.blocks_per_chunk
        parts = [
            (layers, self.block_ids[at * each : (at + 1) * each], chunk)
            for at, chunk in enumerate(self.chunks)
        ]

        def all_parts(kernel: Callable[..., None]) -> None:
            for part in parts:
                kernel(*part)

        return Way(functools.partial(all_parts, gather), functools.partial(all_parts, scatter))

    def transpose_alone(self, gathering: bool) -> Callable[[], None] | None:
        """What of our transfer is the host's work, on as many threads; None for MLA: nothing."""
        if self.row.layout == "mla":
            return None
        shared = block_transfer._shared()
        paged = kv_layout.resolve(self.layers)
        on_device = shared.staging.on_device(paged.device, paged.dtype, staging.HND_BUFFER)
        route = block_transfer._HndRoute(paged, self.chunks, on_device, shared.staging.host)
        steps = plan(
            paged,
            self.block_ids,
            len(self.chunks),
            self.row.blocks_per_chunk,
            0,
            route.step_nbytes,
            gathering,
        )

        def move(step: Any) -> None:
            with shared.staging.host.lease() as staged:
                for rows, order, chunk_rows in route._transposes(step, staged):
                    if gathering:
                        rows.take(order, out=chunk_rows, mode="clip")
                    else:
                        rows.put(order, chunk_rows, mode="clip")

        return functools.partial(
            block_transfer._share_out, steps, move, paged.device, shared.helpers
        )


def _suffix(kernels: ModuleType, layout: str) -> str:
    """How a release calls the kernels of a layout; names that it lacks are not found."""
    if layout == "mla":
        return "_mla"
    if hasattr(kernels, "gather_blocks_to_chunk_hnd_kv_first"):  # 0.5.7rc3: both HND layouts
        return "_hnd" if layout == "blocks_first" else "_hnd_kv_first"
    if layout == "blocks_first":
        return "_blocks_first"
    return "_hnd" if hasattr(kernels, "gather_blocks_to_chunk_hnd") else ""  # 0.5.6; 0.5.4, 0.5.5


def bundled_kernels() -> ModuleType | None:
    """The torch kernels of the installed LMCache's own RBLN backend."""
    for name in _BUNDLED:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


def kernels_from(path: str) -> ModuleType:
    """The torch kernels in a file."""
    found = importlib.util.spec_from_file_location("rbln_kv_ops_of_another_release", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def seconds(work: Callable[[], None]) -> float:
    """How long something takes, after a rest."""
    time.sleep(_REST_S)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def submissions(work: Callable[[], None]) -> int | None:
    """Copies that were submitted to the NPU; None where nothing counts them."""
    if not simulator.is_active():
        work()
        return None
    simulator.reset_counters()
    work()
    counted = simulator.counters()
    return sum(int(counted[way]["submissions"]) for way in ("h2v", "v2h", "v2v"))


def extra_memory(way: Way) -> int:
    """Bytes by which the memory of this process rises, at most, in the first transfers."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the peak starts anew at what is there now
    before = _status("VmRSS")
    way.store()
    way.retrieve()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure_row(
    row: Row, samples: int, kernels: dict[str, ModuleType], said: Callable[[], None]
) -> dict[str, Any]:
    """Measure a row in both directions, the implementations taking turns.

    Args:
        row: The row.
        samples: Of each implementation and direction; the fastest counts.
        kernels: Other implementations by name.
        said: Called after each sample.
    """
    setup = Setup(row)
    ways = {"ours": setup.ours()}
    for name, module in kernels.items():
        way = setup.theirs(module)
        if way is not None:
            ways[name] = way
    result: dict[str, Any] = {"nbytes": setup.nbytes, "ways": {}, "transpose_s": {}}
    for name, way in ways.items():
        figures: dict[str, Any] = {"extra_bytes": extra_memory(way)}
        result["ways"][name] = figures
        for direction in ("store", "retrieve"):
            work = getattr(way, direction)
            figures[direction] = {"seconds": float("inf"), "submissions": submissions(work)}
    for direction in ("store", "retrieve"):
        alone = setup.transpose_alone(direction == "store")
        result["transpose_s"][direction] = (
            min(seconds(alone) for _ in range(_SIDE_SAMPLES)) if alone else 0.0
        )
        for _ in range(samples):
            for name, way in ways.items():
                figures = result["ways"][name][direction]
                figures["seconds"] = min(figures["seconds"], seconds(getattr(way, direction)))
            said()
    return result


def check_row(row: Row, kernels: dict[str, ModuleType]) -> list[str]:
    """Move random bytes; what went wrong."""
    # Two layers and chunks at most: the plan's steps are as many, and this is no speed test.
    fewer = Row(**{**row.__dict__, "chunks": min(2, row.chunks)})
    setup = Setup(fewer, layers=min(2, row.layers))
    for layer in setup.layers:
        filled = torch.randint(0, 256, (layer.numel() * layer.element_size(),), dtype=torch.uint8)
        layer.copy_(filled.view(layer.dtype).view(layer.shape))
    before = [layer.cpu() for layer in setup.layers]
    ours = setup.ours()
    ours.store()
    chunks = [chunk.clone() for chunk in setup.chunks]
    problems = []
    for name, module in kernels.items():
        way = setup.theirs(module)
        if way is not None:
            way.store()
            if not _same(setup.chunks, chunks):
                problems.append(f"{fewer.title}: the chunks are not those of {name}")
    used = torch.zeros(_num_blocks(fewer, setup), dtype=torch.bool)
    used[setup.block_ids] = True
    axis = 1 if fewer.layout == "kv_first" else 0
    for layer in setup.layers:
        layer.zero_()
    for chunk, kept in zip(setup.chunks, chunks, strict=True):
        chunk.copy_(kept)
    ours.retrieve()
    for layer, kept in zip(setup.layers, before, strict=True):
        moved = layer.cpu().movedim(axis, 0)
        if not _same([moved[used]], [kept.movedim(axis, 0)[used]]):
            problems.append(f"{fewer.title}: the blocks are not those that were stored")
            break
        if moved[~used].contiguous().view(torch.uint8).any():
            problems.append(f"{fewer.title}: blocks were written that are not of the request")
            break
    return problems


def _num_blocks(row: Row, setup: Setup) -> int:
    return int(setup.layers[0].shape[1 if row.layout == "kv_first" else 0])


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(some, others, strict=True)
    )


def link_gbps(nbytes: int = 256 << 20) -> dict[str, float]:
    """What one large copy reaches in each direction, GB/s: what an NPU's link is taken to be."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="rbln")
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    host.copy_(device)
    found = {}
    for direction, to, source in (("store", host, device), ("retrieve", device, host)):
        took = min(seconds(lambda t=to, s=source: t.copy_(s)) for _ in range(_SIDE_SAMPLES))  # type: ignore[misc]
        found[direction] = nbytes / took / 1e9
    return found


def about() -> dict[str, str]:
    """Versions, and what is measured."""
    import lmcache

    if not type(lmcache.device_ops).__module__.startswith("lmcache_rbln."):
        raise RuntimeError(f"LMCache uses {type(lmcache.device_ops)}, not this package's backend")
    name = "simulated NPU"
    if not simulator.is_active():
        name = str(torch.rbln.get_device_name(0))  # type: ignore[attr-defined]
    from importlib.metadata import version

    return {
        "device": name,
        "lmcache": lmcache.__version__,
        "torch": torch.__version__,
        "torch-rbln": version("torch-rbln"),
        "cpus": str(len(os.sched_getaffinity(0))),
    }


def answer(request: dict[str, Any], tell: Callable[..., None]) -> None:
    """Measure what is asked for, telling each result."""
    if request["what"] == "end_to_end":
        from lmcache_rbln.cli import _bench_worker

        tell(result=_bench_worker.measure(request, lambda text: tell(step=text)))
        return
    rows = [Row(**row) for row in request["rows"]]
    kernels = {}
    if request["bundled"]:
        module = bundled_kernels()
        if module is not None:
            kernels["bundled"] = module
    if request["peer"]:
        kernels["pre-release"] = kernels_from(request["peer"])
    tell(result=about())
    if request["what"] == "check":
        for row in rows:
            tell(result=check_row(row, kernels))
        return
    if request["what"] == "link":
        tell(result=link_gbps())
    for row in rows:
        tell(result=measure_row(row, request["samples"], kernels, lambda: tell(step="")))


def main() -> None:
    """Measure what the standard input asks for."""
    out: IO[str] = os.fdopen(int(sys.argv[1]), "w")

    def tell(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        answer(json.loads(sys.stdin.read()), tell)
    except Exception:
        tell(error=traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    main()
