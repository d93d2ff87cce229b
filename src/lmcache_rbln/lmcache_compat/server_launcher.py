# SPDX-License-Identifier: Apache-2.0
"""Run ``lmcache server`` in this process, tied to its starter.

``python -m lmcache_rbln.lmcache_compat.server_launcher ARGS`` is ``lmcache server ARGS``, except
that the process ends itself when its standard input does: a starter that was killed leaves no
server behind.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
import threading
import time

#: Seconds that a server gets to stop by itself once its starter is gone.
_GRACE = 20.0


def _stop_with_starter() -> None:
    # os.read, not sys.stdin: a thread blocked in the latter holds a lock that the interpreter
    # needs at exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


def main() -> None:
    """Run the server until it is told to stop."""
    threading.Thread(target=_stop_with_starter, daemon=True).start()
    arguments = sys.argv[1:]
    # What: without the package openai, the server's own module, which reads the same arguments,
    # instead of the command.
    # Why: the command `lmcache` sets up its benchmark too, which imports openai; LMCache does not
    # require that package.
    # Versions: 0.5.4, 0.5.5 (0.5.6 asks for openai only when the benchmark runs).
    # Obsolete: with the last of them.
    if importlib.util.find_spec("openai") is None:
        sys.argv = ["http_server", *arguments]
        runpy.run_module("lmcache.v1.multiprocess.http_server", run_name="__main__")
    else:
        sys.argv = ["lmcache", "server", *arguments]
        runpy.run_module("lmcache.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
