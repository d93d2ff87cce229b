# SPDX-License-Identifier: Apache-2.0
"""The stand-in compiler itself, as a process under `lmcache-rbln simulate --engine` sees it."""

import subprocess
import sys
import textwrap

import pytest

from lmcache_rbln.simulator import engine
from tests.engine import processes

pytestmark = pytest.mark.engine


def run(tmp_path, program, command=processes.simulated, **settings):
    """Run a program and return its completed process."""
    return subprocess.run(
        command([sys.executable, "-c", textwrap.dedent(program)]),
        env=processes.environment(tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_only_the_option_makes_it_importable(tmp_path):
    find = "import importlib.util as u; print(u.find_spec('rebel'))"
    plain = run(tmp_path, find, command=list)
    assert plain.stdout.strip() == "None", plain.stderr
    simulated = run(tmp_path, find)
    assert str(engine.site_directory()) in simulated.stdout, simulated.stderr


def test_a_real_compiler_is_never_hidden(tmp_path):
    package = tmp_path / "installed" / "rebel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    refused = run(tmp_path, "print('ran')", PYTHONPATH=str(package.parent))
    assert refused.returncode == 2
    assert "ran" not in refused.stdout
    assert f"'rebel' is installed at {package}" in refused.stderr
    assert "without --engine" in refused.stderr


def test_graphs_run_over_device_memory(tmp_path):
    done = run(
        tmp_path,
        """
        import torch
        from lmcache_rbln import simulator

        @torch.compile(backend="rbln", options={"use_static_output": True})
        def step(weight, cache, x):
            cache[1].copy_(x)
            return weight @ x + torch.ones(2, device="rbln")

        weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="rbln")
        cache = torch.zeros(3, 2, device="rbln")
        simulator.reset_counters()
        first = step(weight, cache, torch.tensor([1.0, 1.0], device="rbln"))
        assert first.device.type == "rbln" and first.tolist() == [4.0, 8.0], first
        assert cache.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
        second = step(weight, cache, torch.tensor([0.0, 1.0], device="rbln"))
        assert second.tolist() == [3.0, 5.0]
        assert first.data_ptr() == second.data_ptr(), "a launch reuses the output of the last"
        assert simulator.counters()["borrow"]["submissions"] == 0

        @torch.compile(backend="rbln")
        def double(x):
            return x * 2

        x = torch.tensor([1.0, 2.0], device="rbln")
        a, b = double(x), double(x)
        assert a.data_ptr() != b.data_ptr() and a.tolist() == b.tolist() == [2.0, 4.0]

        # torch-rbln's own eager operators are graphs as well.
        assert (x + x).tolist() == [2.0, 4.0]
        out = torch.empty(2, device="rbln")
        torch.mul(x, x, out=out)
        torch.mul(out, x, out=out)
        assert out.tolist() == [1.0, 8.0]
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_launch_waits_for_what_is_queued(tmp_path):
    done = run(
        tmp_path,
        """
        import torch

        @torch.compile(backend="rbln")
        def total(x):
            return x.sum()

        x = torch.zeros(1 << 20, device="rbln")
        ones = torch.ones(1 << 20, pin_memory=True)
        for _ in range(20):
            x.zero_()
            x.copy_(ones, non_blocking=True)
            assert total(x).item() == 1 << 20
        """,
        RBLN_SIM_DELAY_US="2000",
    )
    assert done.returncode == 0, done.stdout + done.stderr


NOT_MODELLED = {
    "torch.compile(lambda x: x + 1, backend='rbln', options={'dtype': 'fp8'})(x)":
        "compile option dtype='fp8'",
    "torch.compile(lambda x: x + 1, backend='rbln', options={'mode': 'compile_only'})(x)":
        "compile option mode='compile_only'",
    "torch.compile(lambda x: torch.ops.rbln.rejection_sample(x), backend='rbln', fullgraph=True)(x)":
        "operator rbln::rejection_sample",
    "torch.ops.rbln_custom_ops.sparse_attn_deepseek_mla(x)":
        "operator rbln_custom_ops::sparse_attn_deepseek_mla",
    "torch.ops.rbln_custom_ops.custom_moe_glu_mxfp4(x)":
        "operator rbln_custom_ops::custom_moe_glu_mxfp4",
    "torch.ops.rbln_custom_ops.sliding_window_attention_v1(y, y, y, y, x, x, x, 4, False)":
        "sliding_window_attention_v1 with is_causal=False",
    "rebel.compile(None)": "ahead-of-time rebel.compile()",
    "torch.rbln.huge_host_empty(4096)": "rebel.host_memory.HugeHostBuffer",
}  # fmt: skip


def test_what_has_no_model_says_so(tmp_path):
    done = run(
        tmp_path,
        f"""
        import torch
        import rebel
        import rebel.core.torch_compile

        x = torch.ones(4)
        y = torch.ones(1, 2, 1, 1, 4, 4)
        for program in {list(NOT_MODELLED)!r}:
            try:
                exec(program)
            except Exception as error:
                print(repr(str(error)))
            else:
                print(program, "ran")
        """,
    )
    errors = done.stdout.splitlines()
    assert len(errors) == len(NOT_MODELLED), done.stdout + done.stderr
    for error, name in zip(errors, NOT_MODELLED.values(), strict=True):
        # Each error is the repr of its text, some quotes escaped.
        assert f"{name} is not modelled" in error.replace("\\", ""), done.stderr
