# SPDX-License-Identifier: Apache-2.0
"""Engines and their processes: started on the simulated NPU, watched, and never left behind."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = Path(__file__).parent / "child"
# Beyond this an answer is not slow but missing: the slowest takes a tenth of it on two cores.
ANSWER_SECONDS = 240


class HangError(AssertionError):
    """No answer in time. The message holds the stacks of every process involved."""


class EndedError(AssertionError):
    """The process ended by itself. The message holds the end of its output."""


def environment(folder, **settings):
    """Variables for an engine or a server of the tests.

    Args:
        folder: where the engine may cache things.
        settings: more variables; they win.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "RBLN_")) and name != "TORCH_DEVICE_BACKEND_AUTOLOAD"
    }
    paths = [str(CHILD), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "VLLM_CACHE_ROOT": str(folder),
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "HF_HUB_OFFLINE": "1",
        # Tiny models on two cores: threads only get in each other's way.
        "OMP_NUM_THREADS": "1",
        "RBLN_NUM_THREADS": "1",
        # An NPU belongs to one process; tests of other workers have hosts of their own.
        "RBLN_SIM_HOST": f"engine-{secrets.token_hex(4)}",
        **settings,
    }


def simulated(command, *options):
    """`command` on the simulated NPU, as a user types it."""
    return [
        *(sys.executable, "-m", "lmcache_rbln.cli", "simulate", "--engine", *options, "--"),
        *command,
    ]


def descendants(pid):
    """`pid` and the processes below it, those with the parent first."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command's name stands in parentheses and may hold blanks.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def _is_python(pid):
    with contextlib.suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").resolve().name
    return False


def stacks(pid, log):
    """The stacks of all threads of `pid` and all Python processes below it.

    Args:
        log: the file that is their stderr.
    """
    found = []
    for each in filter(_is_python, descendants(pid)):
        before = log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGUSR2)
        time.sleep(1)  # the handler writes when its process gets to run
        text = log.read_bytes()[before:].decode(errors="replace")
        found.append(f"--- process {each}\n{text}")
    return "\n".join(found)


class Process:
    """A child process with its output in a file."""

    def __init__(self, command, env, log, **popen):
        self.log = Path(log)
        self._output = self.log.open("ab")
        self._process = subprocess.Popen(
            command,
            env=env,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **popen,
        )

    @property
    def pid(self):
        return self._process.pid

    @property
    def stdin(self):
        return self._process.stdin

    def running(self):
        return self._process.poll() is None

    def tail(self, lines=60):
        """The end of the output, without what torch-rbln says of each tensor left at exit."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in text if "rbln_free skipped" not in line][-lines:])

    def stop(self, seconds=30):
        """SIGTERM; SIGKILL to all that is left of it."""
        pids = descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


class Engine:
    """A vLLM engine in a process of its own.

    Args:
        folder: for its log and its caches.
        settings: environment variables.
        options: of `lmcache-rbln simulate`.
        watched: more processes whose stacks matter if this one hangs; each has `pid` and `log`.
        llm: arguments of `vllm.LLM`.
    """

    def __init__(self, folder, *, settings=None, options=(), watched=(), **llm):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.watched = watched
        reading, writing = os.pipe()
        command = [sys.executable, str(CHILD / "engine_process.py"), str(writing)]
        self.process = Process(
            simulated(command, *options),
            environment(folder, **(settings or {})),
            folder / "engine.log",
            stdin=subprocess.PIPE,
            pass_fds=[writing],
        )
        os.close(writing)
        self._answers = reading
        self._pending = b""
        self._hangs = False
        try:
            self._order(llm)
            self.num_gpu_blocks = self._answer()["num_gpu_blocks"]
        except BaseException:
            self.stop()
            raise

    def generate(self, prompts, max_tokens=16, seconds=ANSWER_SECONDS, **sampling):
        """Greedy tokens unless `sampling` says otherwise.

        Returns:
            "tokens" and "cached", one entry a prompt, and "metrics" by name.

        Raises:
            HangError: there is no answer after `seconds`.
        """
        sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
        self._order({"prompts": prompts, "sampling": sampling})
        return self._answer(seconds)

    def _order(self, order):
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self):
        return EndedError(f"the engine ended; its output ends:\n{self.process.tail()}")

    def _answer(self, seconds=ANSWER_SECONDS):
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                self._hangs = True
                found = "\n".join(stacks(p.pid, p.log) for p in (self.process, *self.watched))
                raise HangError(f"no answer in {seconds} s. {self.process.tail(30)}\n{found}")
            if select.select([self._answers], [], [], min(left, 1.0))[0]:
                data = os.read(self._answers, 1 << 20)
                if not data:
                    raise self._ended()
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def log(self):
        return self.process.log.read_text(errors="replace")

    def stop(self):
        """End the engine: by closing its input, and by force if that does not do."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        patience = 0 if self._hangs else 30
        deadline = time.monotonic() + patience
        while self.process.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.process.stop(patience)
        os.close(self._answers)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.stop()
