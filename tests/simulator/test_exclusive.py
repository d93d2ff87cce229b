# SPDX-License-Identifier: Apache-2.0
"""An NPU belongs to the process that opened it, until that process is gone."""

from __future__ import annotations

import os
import signal

import pytest

from lmcache_rbln import simulator

HOLD = """
    import sys
    from native import Runtime
    runtime = Runtime()
    assert all(runtime.register(device, device) == 0 for device in range({npus}))
    print("ready", flush=True)
    sys.stdin.read()
"""

TRY = """
    from native import Runtime
    runtime = Runtime()
    print(runtime.device_count(), *(runtime.register(npu, npu) for npu in range({npus})))
"""


@pytest.fixture
def host() -> str:
    return simulator.unique_host()


def test_two_processes_cannot_hold_one_npu(script, background, host):
    holder = background(HOLD.format(npus=1), npus=2, host=host)
    result = script(TRY.format(npus=2), npus=2, host=host)
    assert result.stdout == "2 1 0\n", "NPU 0 is taken, NPU 1 is free"
    assert f"NPU 0 is held by another process (pid {holder.process.pid})" in result.stderr


def test_torch_says_so_at_the_first_use_and_not_before(script, background, host):
    background(HOLD.format(npus=1), host=host)
    result = script(
        """
        import torch
        assert torch.rbln.is_available() and torch.rbln.device_count() == 1
        print(torch.rbln.get_device_name(0), torch.rbln.get_device_properties(0).total_memory)
        assert torch.zeros(3).pin_memory().is_pinned()
        try:
            torch.zeros(3, device="rbln")
        except RuntimeError as error:
            print(error)
        """,
        host=host,
    )
    assert "RBLN-SIMULATED 17179869184" in result.stdout
    assert "the device(s) may be in use by another process" in result.stdout
    assert result.stderr.count("held by another process") == 1


@pytest.mark.parametrize("ending", ["kill", "end"])
def test_a_holder_that_is_gone_holds_nothing(script, background, host, ending):
    holder = background(HOLD.format(npus=1), host=host)
    assert script(TRY.format(npus=1), host=host).stdout == "1 1\n"
    getattr(holder, ending)()
    assert script(TRY.format(npus=1), host=host).stdout == "1 0\n"


def test_other_hosts_are_other_hosts(script, background, host):
    background(HOLD.format(npus=1), host=host)
    assert script(TRY.format(npus=1), host=simulator.unique_host()).stdout == "1 0\n"


def test_exclusiveness_can_be_turned_off(script, background, host):
    background(HOLD.format(npus=1), host=host, exclusive=False)
    assert script(TRY.format(npus=1), host=host, exclusive=False).stdout == "1 0\n"


def test_what_a_process_cannot_have_it_does_not_keep_half_of(script, background, host):
    """Joining NPUs 0 and 1 fails over NPU 1; NPU 0 is not kept from others."""
    background(
        """
        import sys
        from native import Runtime
        assert Runtime().register(0, 1) == 0
        print("ready", flush=True)
        sys.stdin.read()
        """,
        npus=2,
        host=host,
    )
    background(
        """
        import sys
        from native import Runtime
        assert Runtime().register(0, 0, 1) == 1
        print("ready", flush=True)
        sys.stdin.read()
        """,
        npus=2,
        host=host,
    )
    assert script(TRY.format(npus=2), npus=2, host=host).stdout == "2 0 1\n"


def test_programs_that_a_holder_starts_do_not_inherit_the_npu(script, host):
    result = script(
        """
        import subprocess
        from native import Runtime
        assert Runtime().register(0, 0) == 0
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        print(subprocess.Popen(["sleep", "60"], close_fds=False, **nothing).pid)
        """,
        host=host,
    )
    try:
        assert script(TRY.format(npus=1), host=host).stdout == "1 0\n"
    finally:
        os.kill(int(result.stdout), signal.SIGKILL)


FORK = """
    import os, sys, time
    import torch
    from lmcache_rbln import simulator
    source = torch.arange(1000).to("rbln")
    out = torch.zeros(1000, dtype=torch.int64).pin_memory()
    stream = torch.rbln.Stream()
    with torch.rbln.stream(stream):
        out.copy_(source, non_blocking=True)  # a worker thread exists, and is busy
    child = os.fork()
    if child == 0:
        code = 1
        try:
            simulator.inject("h2v@9=fail")
            assert torch.rbln.is_available()
            for use in (lambda: source.cpu(), lambda: torch.ones(3, device="rbln"),
                        lambda: torch.rbln.synchronize(), lambda: stream.synchronize()):
                try:
                    use()
                except RuntimeError:
                    pass
                else:
                    raise AssertionError("a forked child has no NPU")
            del source, stream
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    torch.rbln.synchronize()
    assert torch.equal(out, source.cpu())
    del source
"""


def test_a_forked_child_neither_hangs_nor_uses_the_parents_npu(script):
    result = script(FORK, delay_us=200_000)
    assert "start workers with spawn" in result.stderr


def test_a_child_that_is_forked_before_the_npu_is_opened_may_open_it(script):
    script("""
        import os
        import torch
        assert torch.rbln.is_available()
        child = os.fork()
        if child == 0:
            ok = torch.ones(3, device="rbln").cpu().tolist() == [1, 1, 1]
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.ones(3, device="rbln").cpu().tolist() == [1, 1, 1]
        """)


def test_a_forked_child_does_not_keep_the_npu_of_a_parent_that_died(script, background, host):
    parent = background(
        """
        import os, sys, time
        from native import Runtime
        assert Runtime().register(0, 0) == 0
        child = os.fork()
        if child == 0:
            os.close(0), os.close(1), os.close(2)
            time.sleep(60)
            os._exit(0)
        print("ready", flush=True)
        print(child, flush=True)
        sys.stdin.read()
        """,
        host=host,
    )
    child = int(parent.process.stdout.readline())
    parent.kill()
    try:
        assert script(TRY.format(npus=1), host=host).stdout == "1 0\n"
    finally:
        os.kill(child, signal.SIGKILL)


def test_start_methods(tmp_path, script):
    """Children see the NPUs however they are started, since the settings are in the environment."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import multiprocessing
from lmcache_rbln import simulator


def child():
    import torch
    raise SystemExit(0 if torch.rbln.device_count() == 3 and simulator.is_active() else 1)


if __name__ == "__main__":
    simulator.activate(npus=3, host=simulator.unique_host())
    for method in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0, method
"""
    )
    script(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')", npus=3)
