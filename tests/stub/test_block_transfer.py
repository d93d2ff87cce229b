# SPDX-License-Identifier: Apache-2.0
"""What ``test_exact`` does not reach: many steps, several threads, errors, forks, streams."""

from __future__ import annotations

import contextlib
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmcache.logging import init_logger

from lmcache_rbln import block_transfer, kv_layout, simulator
from lmcache_rbln.staging import HND_BUFFER, Staging
from lmcache_rbln.transfer_plan import Step, plan
from tests import reference
from tests.reference import Geometry
from tests.stub import interpreter

PAGE = 4096

#: Host and device bounds that cut small transfers into steps as the defaults cut large ones:
#: several blocks a step, or slices of a block; less staging on the device, and none.
BOUNDS = ((3 * PAGE, 2 * PAGE), (30 * PAGE, 4 * PAGE), (30 * PAGE, 20 * PAGE), (3 * PAGE, 0))


@pytest.fixture
def shared() -> Iterator[None]:
    """The process's own staging and threads, put back after a test that needed others."""
    before = block_transfer._current
    yield
    block_transfer._current = before


def use_staging(host: int, device: int) -> None:
    block_transfer._current = block_transfer._Shared(Staging(host, device))


def paged(layers: list[torch.Tensor], geometry: Geometry) -> kv_layout.PagedKV:
    return kv_layout.PagedKV(
        kv_layout.KVLayout(geometry.layout),
        tuple(layers),
        geometry.num_blocks,
        geometry.num_heads,
        geometry.block_size,
        geometry.head_size,
    )


@st.composite
def requests(draw: st.DrawFn, layout: str) -> tuple[Geometry, list[int], list[int], int, int]:
    """Geometry, ids to gather, ids to scatter to, skip and seed."""
    blocks = draw(st.integers(1, 40))
    geometry = Geometry(
        layout=layout,
        num_layers=draw(st.integers(1, 7)),
        num_blocks=blocks,
        num_heads=1 if layout == "mla" else draw(st.sampled_from([1, 2, 3, 8])),
        block_size=draw(st.sampled_from([1, 5, 16, 64])),
        head_size=draw(st.sampled_from([1, 8, 24, 64])),
        blocks_per_chunk=draw(st.integers(1, 12)),
        dtype=draw(st.sampled_from(reference.DTYPES)),
    )
    count = draw(st.integers(1, min(blocks, 24)))
    consecutive = draw(st.booleans())
    start = draw(st.integers(0, blocks - count))
    gathered = draw(st.lists(st.integers(0, blocks - 1), min_size=count, max_size=count))
    scattered = draw(st.permutations(range(blocks)))[:count]
    if consecutive:
        gathered = scattered = list(range(start, start + count))
    return (
        geometry,
        gathered,
        list(scattered),
        draw(st.integers(0, count)),
        draw(st.integers(0, 99)),
    )


def expected_gather(geometry, layers, buffers, ids, skip=0):
    want = [reference.to_bytes(buffer) for buffer in buffers]
    reference.gather(geometry, [reference.to_bytes(layer) for layer in layers], want, ids, skip)
    return want


def same(tensors, arrays) -> bool:
    return all(
        np.array_equal(reference.to_bytes(t), a) for t, a in zip(tensors, arrays, strict=True)
    )


LARGE = (
    Geometry("blocks_first", 6, 24, 8, 16, 64, 8),
    Geometry("kv_first", 6, 24, 8, 16, 64, 8),
    Geometry("mla", 9, 24, 1, 16, 576, 8),
)


def request_of(geometry: Geometry, seed: int = 0):
    """Random layers, shuffled ids of two chunks, and the chunks."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(geometry.num_blocks)[: 2 * geometry.blocks_per_chunk].tolist()
    chunks = [geometry.random(geometry.chunk_shape(), rng) for _ in range(2)]
    return geometry.layers(rng), ids, chunks


@pytest.mark.parametrize("staging", [32 * PAGE, 3 << 20])
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("geometry", LARGE, ids=lambda g: g.layout)
def test_layers_and_chunks_are_parts_of_one_allocation(
    geometry: Geometry, consecutive: bool, staging: int, shared: None
) -> None:
    use_staging(staging, staging)
    layers, ids, chunks = request_of(geometry)
    if consecutive:
        ids = list(range(2 * geometry.blocks_per_chunk))
    want = expected_gather(geometry, layers, chunks, ids)
    whole = torch.stack(layers).to("rbln")
    cache = paged(list(whole.unbind()), geometry)
    pool = torch.zeros_like(torch.stack(chunks))
    block_transfer.gather(cache, ids, pool.unbind(), geometry.blocks_per_chunk)
    assert same(pool.unbind(), want)
    empty = torch.zeros_like(whole)
    other = paged(list(empty.unbind()), geometry)
    block_transfer.scatter(other, ids, pool.unbind(), geometry.blocks_per_chunk)
    want_layers = [reference.to_bytes(torch.zeros_like(layer)) for layer in layers]
    reference.scatter(geometry, want_layers, want, ids)
    assert same(other.layers, want_layers)


@pytest.mark.parametrize(
    ("runs", "nbytes", "collected"),
    [
        (16, 4096, False),
        (17, 4096, True),
        (17, (256 << 10) - 2, True),
        (17, 256 << 10, False),
        (64, 256 << 10, False),
    ],
)
def test_many_small_runs_are_collected_on_the_npu(runs: int, nbytes: int, collected: bool) -> None:
    geometry = LARGE[0]
    cache = paged(geometry.layers(np.random.default_rng(0)), geometry)
    made = Staging(48 * PAGE, 32 * PAGE)
    on_device = made.on_device(torch.device("rbln", 0), cache.dtype, HND_BUFFER)
    part = plan(cache, [0], 1, 1, 0, 1 << 20, True)[0].part
    step = Step(part, range(1), (nbytes // 2,) * runs, nbytes // 2 * runs)
    for staging in (on_device, None):
        route = block_transfer._HndRoute(cache, [], staging, made.host)
        assert route._collector(step) is (staging if collected else None)


@pytest.mark.parametrize("geometry", LARGE, ids=lambda g: g.layout)
def test_submissions(geometry: Geometry, shared: None) -> None:
    """Scattered small blocks are collected and cross together; where a chunk's layers are few runs,
    and without staging on the NPU, nothing is copied within it; no bulk copy has too many."""
    layers, ids, chunks = request_of(geometry)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    runs = len(layers) * len(ids) * (2 if geometry.layout == "kv_first" else 1)
    nbytes = sum(chunk.nbytes for chunk in chunks)
    for device in (3 << 20, 0):
        use_staging(3 << 20, device)
        block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)  # makes buffers
        for direction, kind in (("gather", "v2h"), ("scatter", "h2v")):
            simulator.reset_counters()
            getattr(block_transfer, direction)(cache, ids, chunks, geometry.blocks_per_chunk)
            counted = simulator.counters()
            assert counted[kind]["bytes"] == nbytes
            if device:
                assert 0 < counted["v2v"]["entries"] <= runs
                assert counted["v2v"]["bytes"] == nbytes
                assert counted[kind]["submissions"] <= 2 * len(chunks) + 2
                if geometry.layout == "mla":  # Layers adjoin in the chunks: one copy of all.
                    assert counted[kind]["entries"] == len(chunks)
            else:
                assert counted["v2v"]["entries"] == 0
                assert counted[kind]["entries"] <= 16 * counted[kind]["submissions"]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_one_run_of_mla_is_not_collected(num_layers: int, shared: None) -> None:
    geometry = Geometry("mla", num_layers, 24, 1, 16, 576, 8)
    layers, _, chunks = request_of(geometry)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    use_staging(3 << 20, 3 << 20)
    for direction in (block_transfer.gather, block_transfer.scatter):
        simulator.reset_counters()
        direction(cache, list(range(16)), chunks, geometry.blocks_per_chunk)
        # Each chunk is one run a layer.
        entries = simulator.counters()["v2v"]["entries"]
        assert entries == (0 if num_layers == 1 else 2 * num_layers)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("layout", reference.LAYOUTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_exact_in_many_steps(
    layout: str, bounds: tuple[int, int], data: st.DataObject, shared: None
) -> None:
    """Every byte, both ways, with whole chunks, and such that are windows of larger buffers."""
    use_staging(*bounds)
    geometry, gathered, scattered, skip, seed = data.draw(requests(layout))
    rng = np.random.default_rng(seed)
    layers = geometry.layers(rng)
    per_chunk, block = geometry.blocks_per_chunk, geometry.block_size
    counts = [min(per_chunk, len(gathered) - at) for at in range(0, len(gathered), per_chunk)]
    spare = data.draw(st.sampled_from((0, 3)))
    buffers = [geometry.random(geometry.chunk_shape(n * block + spare), rng) for n in counts]
    chunks = [
        buffer[..., : n * block + min(spare, n % 2), :]
        for buffer, n in zip(buffers, counts, strict=True)
    ]

    want = expected_gather(geometry, layers, buffers, gathered, skip)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    block_transfer.gather(cache, gathered, chunks, per_chunk, skip)
    assert same(buffers, want)

    other = geometry.layers(rng)
    want_layers = [reference.to_bytes(layer) for layer in other]
    reference.scatter(geometry, want_layers, want, scattered, skip)
    cache = paged([layer.to("rbln") for layer in other], geometry)
    block_transfer.scatter(cache, scattered, chunks, per_chunk, skip)
    assert same(cache.layers, want_layers)


@pytest.mark.parametrize("geometry", LARGE, ids=lambda g: g.layout)
def test_eight_threads_share_three_buffers(geometry: Geometry, shared: None) -> None:
    use_staging(48 * PAGE, 32 * PAGE)
    layers, _, _ = request_of(geometry)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    problems: list[str] = []

    def work(number: int) -> None:
        _, ids, chunks = request_of(geometry, seed=number)
        own = paged([torch.zeros_like(layer) for layer in cache.layers], geometry)
        want = expected_gather(geometry, layers, chunks, ids)
        for _ in range(3):
            for chunk in chunks:
                chunk.view(torch.uint8).zero_()
            block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
            if not same(chunks, want):
                problems.append(f"gather {number}")
            block_transfer.scatter(own, ids, chunks, geometry.blocks_per_chunk)
            back = [torch.zeros_like(chunk) for chunk in chunks]
            block_transfer.gather(own, ids, back, geometry.blocks_per_chunk)
            if not same(back, want):
                problems.append(f"scatter {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize("action", ["fail", "short", "lost"])
@pytest.mark.parametrize("geometry", LARGE, ids=lambda g: g.layout)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_copy_fails_in_the_middle(
    direction: str, geometry: Geometry, action: str, shared: None
) -> None:
    """The caller is told, nobody writes any more, and the next transfer is right."""
    use_staging(48 * PAGE, 32 * PAGE)
    layers, ids, chunks = request_of(geometry)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    want = expected_gather(geometry, layers, chunks, ids)
    calls = list(range(1, 12, 3))
    for call in calls:
        # torch-rbln repeats a failed bulk call entry by entry: fail those as well.
        kind = "v2h" if direction == "gather" else "h2v"
        simulator.inject(";".join(f"{kind}@{n}={action}" for n in range(call, call + 40)))
        try:
            with pytest.raises(RuntimeError):
                getattr(block_transfer, direction)(cache, ids, chunks, geometry.blocks_per_chunk)
        finally:
            simulator.clear_faults()
        still = [reference.to_bytes(chunk) for chunk in chunks]
        time.sleep(0.01)
        assert same(chunks, still)
        cache = paged([layer.to("rbln") for layer in layers], geometry)
        block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
        assert same(chunks, want)


def test_an_error_of_the_helper_reaches_the_caller() -> None:
    helper_runs = threading.Event()
    failed = threading.Event()
    caller = threading.get_ident()

    def move(step: object) -> None:
        if threading.get_ident() == caller:
            assert helper_runs.wait(10)
            failed.wait(10)
            return
        helper_runs.set()
        try:
            raise RuntimeError("the helper's copy failed")
        finally:
            failed.set()

    with pytest.raises(RuntimeError, match="the helper's copy failed"):
        block_transfer._share_out(
            range(8), move, torch.device("rbln", 0), block_transfer._shared().helpers
        )


def test_an_error_of_one_helper_waits_for_the_other() -> None:
    """Once the caller knows of it, nothing writes to the chunks any more."""
    both = threading.Barrier(3)
    let_go = threading.Event()
    caller = threading.get_ident()
    late: list[str] = []
    taken = threading.Lock()

    def move(step: object) -> None:
        both.wait(10)
        if threading.get_ident() == caller:
            return
        if taken.acquire(blocking=False):
            raise RuntimeError("one helper's copy failed")
        assert let_go.wait(10)
        late.append("written")

    threading.Timer(0.2, let_go.set).start()
    with pytest.raises(RuntimeError, match="one helper's copy failed"):
        block_transfer._share_out(
            range(3), move, torch.device("rbln", 0), block_transfer._shared().helpers
        )
    assert late == ["written"]


def test_an_interrupt_while_waiting_waits_on() -> None:
    """A second Ctrl-C: it is raised once nobody works on the chunks any more."""
    waits: list[str] = []

    class Interrupted(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            waits.append("waited")
            if len(waits) < 3:
                raise KeyboardInterrupt
            return RuntimeError("the helper's copy failed")

    class Helpers:
        def ask(self, work: object, count: int) -> list[Future[None]]:
            invitation = Interrupted()
            invitation.set_running_or_notify_cancel()
            return [invitation]

    with pytest.raises(KeyboardInterrupt):
        block_transfer._share_out(range(2), lambda _: None, torch.device("rbln", 0), Helpers())
    assert len(waits) == 3


def test_an_error_stops_the_others() -> None:
    helper_runs = threading.Event()
    caller = threading.get_ident()
    moved: list[int] = []

    def move(step: int) -> None:
        if threading.get_ident() == caller:
            assert helper_runs.wait(10)
            raise RuntimeError("the caller's copy failed")
        helper_runs.set()
        time.sleep(0.01)
        moved.append(step)

    helpers = block_transfer._shared().helpers
    with pytest.raises(RuntimeError, match="the caller's copy failed"):
        block_transfer._share_out(range(1000), move, torch.device("rbln", 0), helpers)
    count = len(moved)
    assert count < 900
    time.sleep(0.05)
    assert len(moved) == count


def test_no_memory_for_staging_on_the_device(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower, but right, and said once."""
    said: list[str] = []
    monkeypatch.setattr(
        init_logger("lmcache_rbln.staging"),
        "warning",
        lambda text, *values: said.append(text % values),
    )
    geometry = LARGE[2]
    layers, ids, chunks = request_of(geometry)
    want = expected_gather(geometry, layers, chunks, ids)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    use_staging(48 * PAGE, 32 * PAGE)
    simulator.inject(";".join(f"malloc@{n}=fail" for n in range(1, 9)))
    try:
        for _ in range(2):
            block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
    finally:
        simulator.clear_faults()
    assert same(chunks, want)
    assert len(said) == 1
    assert "KV transfers do without staging there" in said[0]


@pytest.mark.parametrize("action", ["hang=0.5", "fail"])
def test_whether_one_runs(action: str, shared: None) -> None:
    """While a copy takes its time, and no longer once the transfer ended or failed."""
    block_transfer._current = None
    assert block_transfer.is_running() is False
    use_staging(48 * PAGE, 32 * PAGE)
    assert block_transfer.is_running() is False
    geometry = LARGE[0]
    layers, ids, chunks = request_of(geometry)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    seen: set[bool] = set()
    ended = threading.Event()

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
        ended.set()

    simulator.inject(";".join(f"v2h@{n}={action}" for n in range(1, 41)))
    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not ended.wait(0.01):
            seen.add(block_transfer.is_running())
            if True in seen:
                simulator.clear_faults()  # Ends a hang; what failed stays failed.
    finally:
        simulator.clear_faults()
        thread.join()
    assert action == "fail" or True in seen
    assert block_transfer.is_running() is False


@pytest.mark.parametrize("geometry", LARGE, ids=lambda g: g.layout)
@pytest.mark.parametrize("caller", [True, False])
def test_inference_mode_is_the_callers_affair(
    geometry: Geometry, caller: bool, shared: None
) -> None:
    """Tensors made in it and out of it, by callers in it and out of it, on the same buffers."""
    use_staging(48 * PAGE, 32 * PAGE)
    layers, ids, chunks = request_of(geometry)
    want = expected_gather(geometry, layers, chunks, ids)
    for made_in_it in (True, False):
        with torch.inference_mode(made_in_it):
            cache = paged([layer.to("rbln") for layer in layers], geometry)
            own = [torch.empty_like(chunk) for chunk in chunks]
        with torch.inference_mode(caller):
            block_transfer.gather(cache, ids, own, geometry.blocks_per_chunk)
            assert same(own, want)
            block_transfer.scatter(cache, ids, own, geometry.blocks_per_chunk)
            assert torch.is_inference_mode_enabled() is caller
    assert same(cache.layers, [reference.to_bytes(layer) for layer in layers])


def test_the_callers_threads_and_cpus_stay_as_they_are() -> None:
    geometry = LARGE[0]
    layers, ids, chunks = request_of(geometry)
    cache = paged([layer.to("rbln") for layer in layers], geometry)
    before = (os.sched_getaffinity(0), torch.get_num_threads(), torch.get_num_interop_threads())
    block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
    after = (os.sched_getaffinity(0), torch.get_num_threads(), torch.get_num_interop_threads())
    assert before == after


def run_python(code: str, **settings: object) -> str:
    """Run code in a process of its own, with a simulated host of its own."""
    environment = simulator.environment(npus=2, host=simulator.unique_host("transfer"), **settings)
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = interpreter.fresh(textwrap.dedent(PRELUDE) + textwrap.dedent(code), **environment)
    return done.stdout + done.stderr


PRELUDE = """
    import os, threading, time
    import numpy as np, torch
    from lmcache_rbln import block_transfer
    from tests import reference
    from tests.stub import test_block_transfer as t
    def moves(geometry, device="rbln:0", seed=0):
        layers, ids, chunks = t.request_of(geometry, seed)
        want = t.expected_gather(geometry, layers, chunks, ids)
        cache = t.paged([layer.to(device) for layer in layers], geometry)
        block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
        assert t.same(chunks, want)
        block_transfer.scatter(cache, ids, chunks, geometry.blocks_per_chunk)
        assert t.same(cache.layers, [reference.to_bytes(layer) for layer in layers])
"""


@pytest.mark.parametrize("geometry", LARGE, ids=lambda g: g.layout)
def test_another_npu_than_the_current_one(geometry: Geometry) -> None:
    layers, ids, chunks = request_of(geometry)
    want = expected_gather(geometry, layers, chunks, ids)
    with torch.rbln.device(0):
        cache = paged([layer.to("rbln:1") for layer in layers], geometry)
        block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
        assert torch.rbln.current_device() == 0
    assert same(chunks, want)


@pytest.fixture
def late() -> Iterator[None]:
    """Asynchronous work starts up to 3 ms late, at random."""
    simulator.set_delay(3000, seed=7)
    yield
    simulator.set_delay(0)


@pytest.mark.parametrize("geometry", (LARGE[0], LARGE[2]), ids=lambda g: g.layout)
def test_nothing_is_read_before_what_the_engine_queued(geometry: Geometry, late: None) -> None:
    """The ways in which a caller can be ordered after the engine: on its stream, on a stream that
    waits for its event, on the default stream, with another NPU as the current one."""
    layers, ids, chunks = request_of(geometry)
    want = expected_gather(geometry, layers, chunks, ids)
    pinned = [layer.pin_memory() for layer in layers]
    engine, copies = torch.rbln.Stream(device=1), torch.rbln.Stream(device=1)

    def write(cache: kv_layout.PagedKV) -> None:
        # The last layer first, so that what is read last is ready first.
        for target, source in reversed(list(zip(cache.layers, pinned, strict=True))):
            target.copy_(source, non_blocking=True)

    def fresh() -> kv_layout.PagedKV:
        return paged([torch.zeros_like(x, device="rbln:1") for x in layers], geometry)

    def check(cache: kv_layout.PagedKV) -> None:
        own = [torch.zeros_like(chunk) for chunk in chunks]
        block_transfer.gather(cache, ids, own, geometry.blocks_per_chunk)
        assert same(own, want)

    for _ in range(3):
        with torch.rbln.device(1):
            cache = fresh()
            write(cache)
            check(cache)
            with torch.rbln.stream(engine):
                cache = fresh()
                write(cache)
                check(cache)
                cache = fresh()
                write(cache)
                written = torch.rbln.Event()
                written.record(engine)
            with torch.rbln.stream(copies):
                written.wait(stream=copies)
                check(cache)
            with torch.rbln.stream(engine):
                cache = fresh()
                write(cache)
            check(cache)  # From the default stream.
            with torch.rbln.stream(engine):
                cache = fresh()
                write(cache)
        with torch.rbln.device(0):
            check(cache)
        with torch.rbln.device(1):
            with torch.rbln.stream(engine):
                cache = fresh()
                write(cache)
            with torch.rbln.stream(copies), torch.rbln.device(0):
                check(cache)


@pytest.mark.parametrize("geometry", (LARGE[0], LARGE[2]), ids=lambda g: g.layout)
def test_an_event_is_enough(geometry: Geometry) -> None:
    """A stream that waits for the cache's event waits for nothing that was queued since."""
    layers, ids, chunks = request_of(geometry)
    cache = paged([layer.to("rbln:0") for layer in layers], geometry)
    want = expected_gather(geometry, layers, chunks, ids)
    engine, copies = torch.rbln.Stream(device=0), torch.rbln.Stream(device=0)
    other = torch.zeros(4096, dtype=torch.uint8, device="rbln:0")
    source = torch.ones(4096, dtype=torch.uint8).pin_memory()
    simulator.inject("h2v@1=hang=30")  # Who waits for the engine finds that it has ended.
    try:
        with torch.rbln.stream(engine):
            other.copy_(source, non_blocking=True)
        with torch.rbln.stream(copies):
            block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
        # Nor does a transfer of nothing, whatever its stream.
        block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk, len(ids))
        assert not engine.query()
    finally:
        simulator.clear_faults()
    engine.synchronize()
    assert same(chunks, want)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(method: str) -> None:
    """A child has threads and staging of its own, even when the parent's were busy as it forked."""
    run_python(
        f"""
        import multiprocessing
        def child():
            for seed in range(3):
                for geometry in t.LARGE:
                    moves(geometry, seed=seed)
            block_transfer._close_at_exit()
        def busy():
            while not ended:
                block_transfer._shared().helpers.ask(lambda: time.sleep(0.001), 1)
                with block_transfer._shared().staging.host.lease():
                    time.sleep(0.001)
        if __name__ == "__main__":
            ended = []
            threads = [threading.Thread(target=busy, daemon=True) for _ in range(4)]
            for thread in threads: thread.start()
            time.sleep(0.05)
            context = multiprocessing.get_context({method!r})
            if {method!r} == "fork":
                for _ in range(3):
                    process = context.Process(target=child)
                    process.start()
                    process.join(60)
                    assert process.exitcode == 0
            else:
                with context.Pool(1) as pool:
                    assert pool.apply(t.in_child, (1,)) is True
            ended.append(True)
            for thread in threads: thread.join()
            moves(t.LARGE[0])
        """,
    )


def in_child(device: int) -> bool:
    """What a spawned process runs: one transfer of each layout."""
    for geometry in LARGE:
        layers, ids, chunks = request_of(geometry)
        want = expected_gather(geometry, layers, chunks, ids)
        cache = paged([layer.to(f"rbln:{device}") for layer in layers], geometry)
        block_transfer.gather(cache, ids, chunks, geometry.blocks_per_chunk)
        if not same(chunks, want):
            return False
    return True


def test_no_thread_is_left_at_exit_nor_when_idle() -> None:
    said = run_python(
        """
        block_transfer._IDLE_S = 0.2
        moves(t.LARGE[0])
        helpers = [x for x in threading.enumerate() if x.name == "lmcache-rbln"]
        assert len(helpers) == block_transfer._HELPERS
        deadline = time.monotonic() + 20
        while any(x.is_alive() for x in helpers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(x.is_alive() for x in helpers)
        staging = block_transfer._shared().staging
        assert staging.host.release_unused(0)
        moves(t.LARGE[2])
        import atexit
        helpers = [x for x in threading.enumerate() if x.name == "lmcache-rbln"]
        assert len(helpers) == block_transfer._HELPERS
        # Run after the package's own handler: handlers run last in, first out.
        atexit._run_exitfuncs()
        print("alive", [x.is_alive() for x in helpers])
        """
    )
    assert "alive [False, False]" in said
    assert "rbln_free skipped" not in said
