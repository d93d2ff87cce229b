# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.faults.stress``: workers of one process race, under random delays of the device.

Each thread has a worker of its own on one server, and all of them share LMCache's one operations
object. Pairs of threads share a model, and so their chunks: they store and retrieve the same
contents at the same time. Stores overlap each other, and after ``flush_inflight_stores`` their
blocks are overwritten at once. Whatever is retrieved is compared, every byte of it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import traceback
from collections import Counter

from lmcache_rbln import simulator


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.stress", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30, help="of each thread")
    parser.add_argument("--delay-us", type=int, default=2000, help="at most, of each copy")
    parser.add_argument("--faults", action="store_true", help="with faults at random calls")
    options = parser.parse_args()
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    simulator.activate(
        npus=1,
        delay_us=options.delay_us,
        seed=options.seed,
        host=simulator.unique_host("stress"),
    )
    from lmcache_rbln.cli._known_kv import LAYOUTS
    from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
    from tests.faults.rig import CHUNK, l1

    totals: Counter[str] = Counter()
    wrong: list[str] = []
    with LMCacheServer(chunk_size=CHUNK, pool_gb=0.05, arguments=["--max-workers", "4"]) as server:
        threads = [
            threading.Thread(
                target=guarded,
                args=(server, LAYOUTS[index // 2 % 3], index, options, totals, wrong),
                name=f"stress-{index}",
            )
            for index in range(options.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        simulator.clear_faults()
        after = l1(server)
        if after.write_locked or after.read_locked:
            wrong.append(f"locks are left: {after}")
    print("stress:", dict(totals), f"seed {options.seed};", f"wrong: {len(wrong)}")
    for line in wrong[:10]:
        print("  ", line)
    return 1 if wrong else 0


def guarded(server, layout, index, options, totals, wrong) -> None:
    try:
        race(server, layout, index, options, totals, wrong)
    except Exception:
        wrong.append(f"thread {index}: {traceback.format_exc()}")


def insist(action, *arguments):
    """Where a fault may be met beside the transfers, such as the rig's own copies."""
    for _ in range(20):
        try:
            return action(*arguments)
        except RuntimeError:
            continue
    return action(*arguments)


def race(server, layout, index, options, totals, wrong) -> None:
    from tests.faults.rig import CHUNK, PER_CHUNK, Peer, small, token_ids

    chosen = random.Random(f"{options.seed}/{index}")
    modes = ("sync", "async")
    with Peer(
        server, f"pair-{index // 2}", small(layout), mode=modes[index % 3 != 0], timeout=60
    ) as peer:
        for _ in range(options.rounds):
            chunks = chosen.randint(1, 3)
            # Both of a pair draw from the same few contents.
            content = chosen.randint(1, 6) + 10 * (index // 2)
            blocks = chosen.sample(range(24), chunks * PER_CHUNK)
            if options.faults and chosen.random() < 0.2:
                action = chosen.choice(("fail", "short", "hang=0.01"))
                simulator.inject(f"any@{chosen.randint(1, 30)}={action}")
            if chosen.random() < 0.6:
                insist(peer.write, content, blocks)
                pending = [
                    peer.client.submit_store(
                        token_ids(content, chunks)[: CHUNK * part],
                        blocks[: PER_CHUNK * part],
                        request_id=f"{index}/{totals['stores']}/{part}/{chosen.random()}",
                    )
                    for part in range(1, chunks + 1)
                ]
                if chosen.random() < 0.5:
                    # A wait that failed says so, and may be repeated: nothing is known of the blocks.
                    insist(peer.client.flush_inflight_stores)
                    insist(peer.cache.wipe)  # As an engine that gave the blocks to another request.
                for one in pending:
                    totals["stored" if one.result() else "not stored"] += 1
            else:
                insist(peer.write, 0, [])
                got = peer.retrieve(content, blocks, chunks=chunks)
                totals[{True: "retrieved", False: "failed", None: "missed"}[got]] += 1
                if got and (difference := insist(peer.difference, content, blocks)):
                    wrong.append(f"thread {index}, {layout}: {difference}")


if __name__ == "__main__":
    sys.exit(main())
