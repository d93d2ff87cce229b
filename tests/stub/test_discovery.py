# SPDX-License-Identifier: Apache-2.0
"""How LMCache finds and selects the backend: each case a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.stub.interpreter import OURS, SHOW, run

#: Makes torch_rbln look as if it were not installed.
NO_TORCH_RBLN = "import sys; sys.modules['torch_rbln'] = None\n"


def test_selected_where_an_npu_is_seen() -> None:
    line, log = run(SHOW)
    assert line == f"{OURS} rbln"
    said = [text for text in log.splitlines() if "lmcache-rbln" in text]
    assert len(said) == 1, log
    assert "INFO" in said[0]
    assert "instead of the bundled lmcache.v1.platform." in said[0]
    assert "LMCACHE_DEVICE_BACKEND=rbln-bundled" in said[0]


@pytest.mark.parametrize("pin", ["rbln", " RBLN "])
def test_pinned(pin: str) -> None:
    assert run(SHOW, LMCACHE_DEVICE_BACKEND=pin)[0] == f"{OURS} rbln"


def test_chosen_by_device_type() -> None:
    line, log = run(SHOW, DEVICE_TYPE="rbln")
    assert line == f"{OURS} rbln"
    assert "lmcache-rbln 0.12.0 is LMCache's backend 'rbln'" in log


def test_the_bundled_backend_can_be_pinned() -> None:
    line, log = run(SHOW, LMCACHE_DEVICE_BACKEND="rbln-bundled")
    assert line.startswith("lmcache.v1.platform.")
    assert line.endswith(".RblnDeviceSpec rbln")
    assert "is LMCache's backend" not in log


@pytest.mark.parametrize(
    "first",
    [
        "import lmcache_rbln.device_spec",
        "from lmcache_rbln.device_spec import RblnDeviceSpec",
        "import lmcache_rbln.device_ops",
        "from lmcache_rbln.device_ops import RblnDeviceOps",
        "import lmcache_rbln.self_check",
        "import lmcache_rbln.telemetry",
        "import lmcache_rbln.block_transfer",
        "import lmcache_rbln.kv_layout",
        "import lmcache_rbln.pin_memory",
        "import lmcache_rbln.integration.vllm",
        "import lmcache",
        "import torch",
        "import lmcache.v1.gpu_connector.utils",
        "import lmcache_rbln.lmcache_compat.takeover",
        "import lmcache_rbln.lmcache_compat.blocks_first",
        "import lmcache_rbln.lmcache_compat.registration",
        "import lmcache_rbln.lmcache_compat.server_guard",
        "import lmcache_rbln.lmcache_compat.worker_guard",
    ],
)
def test_any_import_order(first: str) -> None:
    assert run(first + SHOW)[0] == f"{OURS} rbln"


def test_each_class_is_one() -> None:
    code = """
    from lmcache_rbln.device_ops import RblnDeviceOps
    from lmcache_rbln.device_spec import RblnDeviceSpec
    import lmcache
    from lmcache.v1.platform import current_device_spec
    assert type(current_device_spec) is RblnDeviceSpec
    assert type(lmcache.device_ops) is RblnDeviceOps
    """
    run(code)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("parent", ["", "import lmcache"])
def test_start_methods(method: str, parent: str, tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        f"import multiprocessing\n{parent}\n"
        f"def show():\n{textwrap.indent(SHOW, '    ')}\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context({method!r}).Process(target=show)\n"
        "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"SPEC {OURS} rbln" in done.stdout


class TestNoNpu:
    """The host has torch-rbln but no NPU."""

    def test_unpinned_falls_back_and_says_why_once(self) -> None:
        line, log = run(SHOW, RBLN_SIM_NPUS="0")
        assert line.endswith(" cpu")
        said = [text for text in log.splitlines() if "lmcache_rbln" in text]
        assert len(said) == 1, log
        assert "WARNING" in said[0]
        assert "torch_rbln sees no NPU" in said[0]

    @pytest.mark.parametrize("pin", ["rbln", " RBLN "])
    def test_pinned_fails_and_says_why(self, pin: str) -> None:
        line, log = run(SHOW, check=False, RBLN_SIM_NPUS="0", LMCACHE_DEVICE_BACKEND=pin)
        assert line == ""
        said = [text for text in log.splitlines() if "LMCache ERROR" in text]
        assert len(said) == 1, log
        assert "LMCACHE_DEVICE_BACKEND=rbln asks for an NPU, but torch_rbln sees no NPU" in said[0]
        assert "is registered but not available on this host" in log

    def test_a_selection_of_none_is_named(self) -> None:
        _, log = run(SHOW, RBLN_SIM_NPUS="0", RBLN_DEVICES="0")
        assert "RBLN_DEVICES=0" in log

    def test_the_dummy_device_is_no_npu(self) -> None:
        line, log = run(SHOW, RBLN_DUMMY_DEVICE="1")
        assert line.endswith(" cpu")
        assert "dummy device, which is not an NPU; unset RBLN_DUMMY_DEVICE" in log

    def test_autoload_off_is_named(self) -> None:
        line, log = run(SHOW, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert line.endswith(" cpu")
        assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in log


class TestNotInstalled:
    """The host has no torch-rbln."""

    def test_unpinned_nothing_is_said(self) -> None:
        line, log = run(NO_TORCH_RBLN + SHOW, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert line.endswith(" cpu")
        assert "lmcache_rbln" not in log
        assert "NPU" not in log

    @pytest.mark.parametrize("env", [{"LMCACHE_DEVICE_BACKEND": "rbln"}, {"DEVICE_TYPE": "rbln"}])
    def test_asked_for_it_is_said(self, env: dict[str, str]) -> None:
        _, log = run(NO_TORCH_RBLN + SHOW, check=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **env)
        assert "the package torch_rbln is not installed" in log


def test_is_available_never_raises_and_opens_no_npu() -> None:
    code = """
    from lmcache_rbln.device_spec import RblnDeviceSpec
    import lmcache, torch
    from lmcache_rbln import simulator
    assert RblnDeviceSpec().is_available()
    assert torch.rbln.device_count() == 2
    assert simulator.counters()["open"] == 0, simulator.counters()
    def broken(*_): raise OSError("driver gone")
    torch.rbln.is_available = broken
    assert not RblnDeviceSpec().is_available()
    """
    _, log = run(code)
    assert "asking torch_rbln for an NPU failed: OSError: driver gone" in log


@pytest.mark.parametrize("name", ["aaa_other", "zzz_other"])
def test_two_providers(name: str, tmp_path: Path) -> None:
    """The first by the entry point's value wins; the outcome is said."""
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        from lmcache.v1.platform.base.device_spec import DeviceSpec
        class RblnDeviceSpec(DeviceSpec):
            device_type = property(lambda self: "rbln")
            torch_module_name = property(lambda self: "rbln")
            def is_available(self): return True
        """)
    )
    info = tmp_path / "another_rbln-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-rbln\nVersion: 9.0\n")
    (info / "entry_points.txt").write_text(
        f"[lmcache.device_plugins]\nrbln = {name}:RblnDeviceSpec\n"
    )
    line, log = run(SHOW, PYTHONPATH=str(tmp_path))
    winner = f"{name}.RblnDeviceSpec" if name < "lmcache_rbln" else OURS
    assert line == f"{winner} rbln"
    expected = "another-rbln 9.0" if name < "lmcache_rbln" else "lmcache-rbln 0.12.0"
    warning = next(text for text in log.splitlines() if "2 installed distributions provide" in text)
    assert f"LMCache uses {expected}" in warning


class TestTransferMode:
    """LMCache-driven transfer is refused where LMCache validates it; auto is engine-driven."""

    CODE = """
    import torch, lmcache
    from lmcache.v1.multiprocess.transfer_context import worker_transfer as wt
    import inspect
    kv = {"layer": torch.zeros(3, 4, 5, device="rbln")}
    client = object()
    names = inspect.signature(wt.create_transfer_context).parameters
    kwargs = {"instance_id": 1}
    for name in ("req_client", "mq_client"):
        if name in names: kwargs[name] = client
    print("SPEC", type(wt.create_transfer_context(kv, **kwargs)).__name__)
    """

    @pytest.mark.parametrize("mode", ["auto", "engine_driven"])
    def test_engine_driven(self, mode: str) -> None:
        line, _ = run(self.CODE, LMCACHE_MP_TRANSFER_MODE=mode)
        assert line == "AsyncEngineDrivenTransferContext"

    def test_lmcache_driven_is_refused(self) -> None:
        line, log = run(self.CODE, check=False, LMCACHE_MP_TRANSFER_MODE="lmcache_driven")
        assert line == ""
        assert "ValueError" in log
        assert "MP transfer mode 'lmcache_driven' is not supported for device type 'rbln'" in log
        assert "Use mode 'engine_driven'" in log
