# SPDX-License-Identifier: Apache-2.0
"""Loads that together need more than the pool are admitted one after the other."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from lmcache_rbln.integration.vllm.load_reservations import LoadReservations

BLOCK = 16


@dataclass
class Request:
    request_id: str
    num_tokens: int


@dataclass
class Pool:
    free: int

    def get_num_free_blocks(self):
        return self.free


def blocks(request):
    return -(-request.num_tokens // BLOCK)


def test_the_first_load_is_the_schedulers_own_affair():
    reservations = LoadReservations(BLOCK)
    reservations.bind(Pool(0))
    assert reservations.admits(Request("a", 100))


def test_the_case_that_stalls():
    reservations, pool = LoadReservations(BLOCK), Pool(17)
    reservations.bind(pool)
    short, long, other = (Request(name, 8 * BLOCK - 7) for name in "abc")
    assert reservations.admits(short)
    reservations.start(short, held=1)
    pool.free -= 1
    assert reservations.admits(long), "8 blocks beside the 7 that are reserved, of 16"
    reservations.start(long, held=7)
    pool.free -= 7
    assert not reservations.admits(other), "8 blocks beside the 7 and the 1, of 9"
    assert reservations.admits(short), "what is reserved for a request does not exclude it"
    reservations.end(["a"])
    pool.free -= 7
    assert not reservations.admits(other)
    pool.free += 8
    assert reservations.admits(other)


def test_a_load_of_everything_reserves_nothing():
    reservations = LoadReservations(BLOCK)
    reservations.bind(Pool(3))
    reservations.start(Request("a", 2 * BLOCK), held=2)
    assert reservations.admits(Request("b", 100 * BLOCK))


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1)), min_size=1, max_size=20),
    st.integers(13, 60),
)
def test_every_admitted_load_can_finish(arrivals, free):
    """Whatever arrives, in any order the loads can be turned into whole requests together."""
    reservations, pool = LoadReservations(BLOCK), Pool(free)
    reservations.bind(pool)
    missing = 0
    for number, (tokens, share) in enumerate(arrivals):
        request = Request(str(number), tokens)
        if blocks(request) <= pool.free and reservations.admits(request):
            held = max(1, int(blocks(request) * share))
            reservations.start(request, held)
            pool.free -= held
            missing += blocks(request) - held
        assert missing <= pool.free
