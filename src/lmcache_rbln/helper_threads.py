# SPDX-License-Identifier: Apache-2.0
"""A few threads that help whoever has work to share, and go away when nobody has.

They are guests: they never hold up a caller (who does the work alone if none is free), run where
the caller may run, and are gone after some idle seconds, at exit, and in a forked child.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

_libc = ctypes.CDLL(None)

#: Its outcome, the work, and the CPU on which the caller does its own share.
_Invitation: TypeAlias = tuple[Future[None], Callable[[], None], int]


class HelperThreads:
    """Up to ``limit`` threads, started when they are first asked for.

    Args:
        limit: How many at most.
        idle_s: A thread ends after so many seconds without work.
        may_end: Asked then; a thread whose answer is False waits again.
    """

    def __init__(self, limit: int, idle_s: float, may_end: Callable[[], bool]) -> None:
        self.limit = limit
        self._idle_s = idle_s
        self._may_end = may_end
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._asked: queue.SimpleQueue[_Invitation | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Have all threads running; as many as the system allows."""
        if len(self._threads) == self.limit:
            return
        with self._lock:
            while len(self._threads) < self.limit:
                # The others go where the scheduler puts them.
                apart = not self._threads
                thread = threading.Thread(
                    target=self._serve, args=(apart,), name="lmcache-rbln", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the interpreter is ending
                    return
                self._threads.add(thread)

    def ask(self, work: Callable[[], None], count: int) -> list[Future[None]]:
        """Ask ``count`` threads to run ``work``, each once; those not started can be cancelled."""
        invitations: list[Future[None]] = [Future() for _ in range(min(count, self.limit))]
        cpu = _libc.sched_getcpu()
        for invitation in invitations:
            self._asked.put((invitation, work, cpu))
        return invitations

    def close(self) -> None:
        """End all threads, for good: nobody helps any more."""
        with self._lock:
            threads = list(self._threads)
            self.limit = 0
        for _ in threads:
            self._asked.put(None)
        for thread in threads:
            thread.join(timeout=10)

    def _serve(self, apart: bool) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=self._idle_s)
            except queue.Empty:
                if self._may_end():
                    break
                continue
            if asked is None:
                break
            invitation, work, cpu = asked
            if invitation.set_running_or_notify_cancel():
                if apart:
                    _keep_off(cpu)
                try:
                    work()
                except BaseException as exc:
                    invitation.set_exception(exc)
                else:
                    invitation.set_result(None)
            del invitation, work, asked  # they may hold tensors
        with self._lock:
            self._threads.discard(threading.current_thread())


def _keep_off(cpu: int) -> None:
    """Keep this thread off a CPU, where its process has others: the scheduler often leaves it on
    the CPU of the thread that woke it, and then the two take turns."""
    process = os.sched_getaffinity(os.getpid())
    others = process - {cpu}
    if others:
        os.sched_setaffinity(0, others)
