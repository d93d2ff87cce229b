# SPDX-License-Identifier: Apache-2.0
"""The doctor on a good host and on broken ones; each is made for real, none is described to it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli import _doctor_host, _doctor_report, _doctor_server, _npu_holders, doctor
from lmcache_rbln.cli._doctor_report import Check, Status
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer


class Report:
    """What the command printed with ``--json``."""

    def __init__(self, code: int, page: dict[str, Any]) -> None:
        self.code = code
        self.page = page
        self.checks = {check["name"]: check for check in page["checks"]}
        self.failed = [check["name"] for check in page["checks"] if check["status"] == "failed"]
        self.warned = [check["name"] for check in page["checks"] if check["status"] == "warning"]

    def expect(self, name: str, status: str, found: str, next_step: str) -> None:
        """One check says this, in full enough words, and the exit code agrees with all of them."""
        check = self.checks[name]
        assert check["status"] == status, self.page
        assert found in check["found"], check
        assert next_step in check["next_step"], check
        assert self.code == (1 if self.failed else 0)
        assert self.page["ok"] is (self.code == 0)


def examine(
    *args: str, path: Path | None = None, prefix: tuple[str, ...] = (), **env: str | None
) -> Report:
    """Run the command on the simulated NPU, with some variables changed and a folder imported first."""
    environment = {
        **os.environ,
        "RBLN_SIM_HOST": simulator.unique_host("doctor"),
        **({"PYTHONPATH": str(path)} if path else {}),
        **{key: value for key, value in env.items() if value is not None},
    }
    for key, value in env.items():
        if value is None:
            environment.pop(key, None)
    done = subprocess.run(
        [
            *prefix,
            sys.executable,
            "-m",
            "lmcache_rbln.cli",
            "doctor",
            "--json",
            "--no-engine",
            *args,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    return Report(done.returncode, json.loads(done.stdout))


def distribution(folder: Path, name: str, version: str, **files: str) -> None:
    """An installed distribution as its metadata shows it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{files.pop('METADATA', '')}"
    )
    for file, text in files.items():
        (info / file).write_text(text)


def without_runtime() -> str:
    """``LD_LIBRARY_PATH`` less the simulated runtime."""
    folders = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not Path(folder, "librbln.so").exists())


@contextlib.contextmanager
def holding_npu(host: str) -> Iterator[int]:
    """A process that holds NPU 0 of a simulated host, of its two; its process id."""
    code = "import torch; torch.zeros(1, device='rbln:0'); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "RBLN_SIM_HOST": host, "RBLN_DEVICES": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder.pid
        finally:
            holder.communicate("\n", timeout=60)


def pages(server: LMCacheServer) -> tuple[str, ...]:
    """The arguments that point the doctor at a server."""
    return ("--server", server.url, "--http", f"http://127.0.0.1:{server.http_port}")


# -- a good host -------------------------------------------------------------------------------


def test_good_host() -> None:
    report = examine(LMCACHE_RBLN_KV_LAYOUT="kv_first")
    assert report.failed == [], report.page
    assert "2 simulated visible" in report.checks["NPUs"]["found"]
    assert "instead of the bundled lmcache" in report.checks["LMCache's backend"]["found"]
    assert "LMCACHE_RBLN_KV_LAYOUT=kv_first" in report.checks["settings"]["found"]
    assert report.page["versions"]["torch-rbln"] == "0.12.0"
    assert report.page["simulated"] is True
    report.expect("RBLN runtime", "ok", "ABI 6 to 6", "")


def test_it_imports_neither_torch_nor_lmcache(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    import sys
    from lmcache_rbln.cli import main
    code = main(["doctor"])
    print("LOADED", [name for name in ("torch", "lmcache", "vllm") if name in sys.modules])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    screen = capfd.readouterr().out
    assert "LOADED []" in screen
    assert ", on simulated NPUs." in screen
    assert "\x1b[" not in screen


def test_it_opens_no_npu() -> None:
    code = """
    from lmcache_rbln import simulator
    from lmcache_rbln.cli import _doctor_probe as probe
    for look in (probe._torch, probe._runtime, probe._npu, probe._lmcache):
        look()
    opened = simulator.counters()["open"]
    probe._open()
    print("OPENED", opened, simulator.counters()["open"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "RBLN_SIM_HOST": simulator.unique_host("doctor")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OPENED 0 2" in done.stdout


# -- broken hosts ------------------------------------------------------------------------------


def test_wrong_torch(tmp_path: Path) -> None:
    distribution(tmp_path, "torch", "2.14.0+cu130", INSTALLER="pip\n")
    distribution(tmp_path, "eager", "3.1", METADATA="Requires-Dist: torch==2.14.0\n")
    (tmp_path / "torch.py").write_text("__version__ = '2.14.0+cu130'\n")
    report = examine(path=tmp_path)
    assert report.failed[0] == "torch"
    report.expect(
        "torch",
        "failed",
        "2.14.0+cu130; torch-rbln 0.12.0 needs 2.13.0+cpu",
        "pip uninstall torch, then pip install torch==2.13.0+cpu",
    )
    assert "by pip, as asked for by eager 3.1 (torch==2.14.0)" in report.checks["torch"]["found"]


def test_no_runtime_library() -> None:
    report = examine(LD_LIBRARY_PATH=without_runtime())
    assert report.failed == ["RBLN runtime", "NPUs", "LMCache's backend"]
    report.expect("RBLN runtime", "failed", "librbln.so is not found", "install rebel-compiler")


def runtime(folder: Path, source: str) -> Path:
    """A runtime library made of C source."""
    (folder / "librbln.c").write_text(source + "\n")
    library = folder / "librbln.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "librbln.c"], check=True)
    return library


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a runtime with")
def test_abi_mismatch(tmp_path: Path) -> None:
    library = runtime(
        tmp_path,
        "unsigned rbln_abi_min_supported(void) { return 7; }\n"
        "unsigned rbln_abi_current(void) { return 9; }",
    )
    report = examine(LD_LIBRARY_PATH=f"{tmp_path}:{without_runtime()}")
    assert report.failed[0] == "RBLN runtime"
    report.expect(
        "RBLN runtime",
        "failed",
        f"{library}, ABI 7 to 9, torch-rbln was built for 6: they do not fit",
        "install the rebel-compiler that belongs to this torch-rbln",
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a runtime with")
def test_a_runtime_that_crashes(tmp_path: Path) -> None:
    source = "#include <stdlib.h>\n__attribute__((constructor)) void die(void) { abort(); }"
    runtime(tmp_path, source)
    report = examine(LD_LIBRARY_PATH=f"{tmp_path}:{without_runtime()}")
    report.expect("probe", "failed", "ended with exit code -6 at runtime", "_doctor_probe")


def test_no_npu() -> None:
    report = examine(RBLN_SIM_NPUS="0")
    assert report.failed == ["NPUs", "LMCache's backend"]
    report.expect("NPUs", "failed", "none visible", "load the RBLN kernel driver")


def test_a_selection_of_none() -> None:
    report = examine(RBLN_DEVICES="7")
    report.expect("NPUs", "failed", "none visible with RBLN_DEVICES=7", "unset RBLN_DEVICES")


def test_npu_held() -> None:
    host = simulator.unique_host("doctor")
    with holding_npu(host) as pid:
        alone = examine(RBLN_SIM_HOST=host, RBLN_SIM_NPUS="1")
        opened = examine("--open", RBLN_SIM_HOST=host)
        beside = examine("--open", RBLN_SIM_HOST=host, RBLN_DEVICES="1")
    who = f"held: NPU 0 by {Path(sys.executable).name} (pid {pid})"
    assert alone.failed == opened.failed == ["NPUs in use"]
    alone.expect("NPUs in use", "failed", who, f"end process {pid}")
    opened.expect(
        "NPUs in use", "failed", who, f"end process {pid}, or use what is free: RBLN_DEVICES=1"
    )
    assert (
        "opening failed: rbln:0: rbln_register_device_id" in opened.checks["NPUs in use"]["found"]
    )
    assert beside.failed == [], beside.page
    beside.expect("NPUs in use", "ok", "opened rbln:0 and gave them back", "")


def test_unsupported_lmcache(tmp_path: Path) -> None:
    distribution(tmp_path, "lmcache", "0.6.1")
    report = examine(path=tmp_path)
    assert report.failed == ["lmcache"]
    report.expect("lmcache", "failed", "0.6.1", "pip install 'lmcache>=0.5.4,<0.6'")


def test_server_down() -> None:
    report = examine("--server", "tcp://127.0.0.1:9")
    assert report.failed == ["server"]
    report.expect(
        "server",
        "failed",
        "nothing answers at tcp://127.0.0.1:9: Connection refused",
        "lmcache server --host 127.0.0.1 --port 9 --chunk-size 1024",
    )


def test_something_else_at_the_servers_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        report = examine("--server", address, "--http", "127.0.0.1:9")
    assert report.failed[0] == "server"
    report.expect("server", "failed", "does not answer as an LMCache server", "check the port")


def test_server_in_lmcache_driven_mode() -> None:
    with LMCacheServer(
        chunk_size=1024, pool_gb=0.05, arguments=["--supported-transfer-mode", "lmcache_driven"]
    ) as server:
        report = examine(*pages(server))
        blind = examine("--server", server.url, "--http", "127.0.0.1:9")
    assert report.failed == ["transfer mode"]
    restart = "restart the server with --supported-transfer-mode engine_driven"
    report.expect("transfer mode", "failed", "lmcache_driven", restart)
    # Without the pages, the server's own protocol tells.
    blind.expect("transfer mode", "failed", "engine-driven requests are not answered", restart)
    assert "server's pages" in blind.warned


def test_pickle_transport_and_two_versions(tmp_path: Path) -> None:
    distribution(tmp_path, "lmcache", "0.5.99")
    with LMCacheServer(chunk_size=2048, pool_gb=0.05, shared_memory=False) as server:
        report = examine(*pages(server), path=tmp_path)
    assert report.failed == []
    flags = "restart the server with --shm-name lmcache_kv --no-l1-use-lazy"
    report.expect("transport", "warning", "pickle (no --shm-name)", flags)
    report.expect("chunk size", "ok", "2048 tokens: for blocks of 1024, 2048", "")
    report.expect("server's LMCache", "warning", "0.5.99 here", "install the same release")
    report.expect("lmcache", "warning", "0.5.99; tested: 0.5.4", "pip install lmcache==")


def test_chunk_size_that_is_no_multiple() -> None:
    with LMCacheServer(chunk_size=256, pool_gb=0.05) as server:
        usual = examine(*pages(server))
        other = examine(*pages(server), "--block-size", "192")
        fitting = examine(*pages(server), "--block-size", "128")
    assert usual.failed == other.failed == ["chunk size"]
    usual.expect("chunk size", "failed", "256 tokens fit no block size usual", "1024 for blocks")
    other.expect("chunk size", "failed", "no multiple of a block of 192", "--chunk-size 384")
    assert fitting.failed == [], fitting.page
    fitting.expect("chunk size", "ok", "2 blocks of 128", "")
    fitting.expect("transport", "ok", "shared memory (lmcache_l1_pool_", "")
    fitting.expect("L1 and /dev/shm", "ok", "L1 51 MiB", "")


def test_shared_memory_too_small(tmp_path: Path) -> None:
    """The server in a mount namespace whose /dev/shm is smaller than its L1."""
    unshare = ["unshare", "--mount"] + (["--map-root-user", "--user"] if os.geteuid() else [])
    script = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    wrap = (*unshare, "sh", "-c", script, "sh")
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no mount namespace; the worker's side is tested without")
    code = """
    import sys
    from lmcache_rbln.cli import main
    from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
    with LMCacheServer(chunk_size=1024, pool_gb=0.05) as server:
        http = f"http://127.0.0.1:{server.http_port}"
        sys.exit(main(["doctor", "--json", "--no-engine", "--server", server.url, "--http", http]))
    """
    done = subprocess.run(
        [*wrap, sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "RBLN_SIM_HOST": simulator.unique_host("doctor")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    report = Report(done.returncode, json.loads(done.stdout))
    assert report.failed == ["transport", "L1 and /dev/shm"], report.page
    bigger = "mount -o remount,size=2G /dev/shm (docker: --shm-size 2g)"
    report.expect("transport", "failed", "the server's /dev/shm had less than the 51 MiB", bigger)
    report.expect("L1 and /dev/shm", "failed", "/dev/shm 16 MiB", bigger)


@pytest.mark.parametrize("name", ["aaa_other", "zzz_other"])
def test_two_providers(name: str, tmp_path: Path) -> None:
    distribution(
        tmp_path,
        "another-rbln",
        "9.0",
        **{"entry_points.txt": f"[lmcache.device_plugins]\nrbln = {name}:RblnDeviceSpec\n"},
    )
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        from lmcache.v1.platform.base.device_spec import DeviceSpec
        class RblnDeviceSpec(DeviceSpec):
            device_type = property(lambda self: "rbln")
            torch_module_name = property(lambda self: "rbln")
            def is_available(self): return True
        """)
    )
    report = examine(path=tmp_path)
    ours = name > "lmcache_rbln"
    assert report.failed == ([] if ours else ["backend providers", "LMCache's backend"])
    report.expect(
        "backend providers",
        "warning" if ours else "failed",
        f"LMCache takes {'lmcache-rbln 0.12.0' if ours else 'another-rbln 9.0'}",
        "pip uninstall another-rbln",
    )


def test_pinned_to_another() -> None:
    report = examine(LMCACHE_DEVICE_BACKEND="rbln-bundled")
    report.expect("LMCache's backend", "failed", "pins", "set LMCACHE_DEVICE_BACKEND=rbln")


# -- single checks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "status", "text"),
    [
        ({"RBLN_DEVICES": "0,1", "RBLN_NPUS_PER_DEVICE": "2"}, "ok", "RBLN_DEVICES=0,1"),
        ({"RBLN_DEVICES": "0,,1"}, "failed", "0,,1"),
        ({"RBLN_DEVICES": "0,0"}, "failed", "0,0"),
        ({"RBLN_VISIBLE_DEVICES": "npu0"}, "failed", "npu0"),
        ({"RBLN_NPUS_PER_DEVICE": "0"}, "failed", "RBLN_NPUS_PER_DEVICE='0'"),
        ({"RBLN_DEVICE_MAP": "[0,1],[2,3]"}, "ok", "[0,1]"),
        ({"RBLN_DEVICE_MAP": "0,1"}, "failed", "RBLN_DEVICE_MAP='0,1'"),
        ({"RBLN_DEVICES": ""}, "ok", ""),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "failed", "does not load torch-rbln"),
        ({"RBLN_DEVICES": "0", "RBLN_VISIBLE_DEVICES": "1"}, "warning", "the first one counts"),
    ],
)
def test_selection(environment: dict[str, str], status: str, text: str) -> None:
    check = _doctor_host._selection(environment)
    assert check.status.value == status
    assert text in check.found


@pytest.mark.parametrize(
    ("environment", "status", "text"),
    [
        ({}, "ok", "defaults"),
        ({"LMCACHE_RBLN_PREFAULT": "0", "LMCACHE_RBLN_STAGING_MB": "12"}, "ok", "STAGING_MB=12"),
        ({"LMCACHE_RBLN_LAYOUT": "mla"}, "warning", "without effect: LMCACHE_RBLN_LAYOUT"),
        ({"LMCACHE_RBLN_KV_LAYOUT": "mla"}, "failed", "LMCACHE_RBLN_KV_LAYOUT='mla'"),
        ({"LMCACHE_RBLN_STAGING_MB": "much"}, "failed", "LMCACHE_RBLN_STAGING_MB='much'"),
        ({"LMCACHE_RBLN_STAGING_MB": "9" * 30}, "failed", "LMCACHE_RBLN_STAGING_MB='9999"),
        ({"LMCACHE_RBLN_STAGING_MB": "0"}, "failed", "LMCACHE_RBLN_STAGING_MB='0'"),
    ],
)
def test_settings(environment: dict[str, str], status: str, text: str) -> None:
    check = _doctor_host._settings(environment)
    assert check.status.value == status
    assert text in check.found


def test_holders_of_device_nodes(tmp_path: Path) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    for pid, name, targets in [
        (11, "python3", ["rbln1", "null"]),
        (12, "rbln_daemon", ["rbln0"]),
        (13, "bash", ["tty"]),
    ]:
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "comm").write_text(f"{name}\n")
        for number, target in enumerate(targets):
            (proc / str(pid) / "fd" / str(number)).symlink_to(dev / target)
    dev.mkdir()
    for node in ("rbln0", "rbln1", "rbln10", "rblnfs0"):
        (dev / node).touch()
    assert _npu_holders.of_nodes(proc, dev) == [_npu_holders.Holder(1, 11, "python3")]
    assert _npu_holders.device_nodes(dev) == [0, 1, 10]
    assert _doctor_host.chosen_npus({"RBLN_DEVICES": "2, 0"}, [0, 1, 10]) == [10, 0]
    assert _doctor_host.chosen_npus({"RBLN_VISIBLE_DEVICES": "1"}, [4, 5]) == [5]
    assert _doctor_host.chosen_npus({}, [4, 5]) == [4, 5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://127.0.0.1:5556", ("127.0.0.1", 5556)),
        ("kv-host", ("kv-host", 5555)),
        ("[::1]:7", ("::1", 7)),
        ("http://kv/", ("kv", 5555)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert _doctor_server.parse_address(text, 5555) == expected


@pytest.mark.parametrize(
    "page",
    [
        "[]",
        "{}",
        "nonsense",
        '{"mp": {"port": 7}}',
        '{"mp": null}',
        '{"mp": {"chunk_size": "many"}}',
        '{"storage_manager": {"l1_manager_config": {"memory_config": 3}}}',
    ],
)
def test_pages_that_are_not_this_servers(page: str) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((page if self.path != "/lmc_version" else '"1.0"').encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        seen = _doctor_server.look("127.0.0.1:9", f"127.0.0.1:{web.server_port}")
        web.shutdown()
        thread.join()
    # An empty object is a page that tells nothing.
    assert bool(seen.pages_missing) is (page != "{}")
    assert seen.config == {}
    list(_doctor_server.checks(seen, {}, None))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--server", "a b"],
        ["--server", "tcp://*:5555"],
        ["--http", "x:99999"],
        ["--block-size", "0"],
        ["--block-size", "x"],
        ["--block-size", "1024"],  # against no server
    ],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from lmcache_rbln.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_help_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from lmcache_rbln.cli import COMMANDS, main

    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert "`" not in said
        assert f"lmcache-rbln {command}" in said


@pytest.mark.parametrize("pages", ["", "they cannot be read"])
def test_a_port_that_does_not_answer_is_no_server(pages: str) -> None:
    """Whatever the pages, which may be another server's, say."""
    server = dataclasses.replace(server_with({}), pages_missing=pages)
    asked = {"error": "ServerUnreachable: the LMCache server did not answer 'get_chunk_size'"}
    check = next(iter(_doctor_server.checks(server, {"server": asked}, None)))
    assert check.status is Status.FAILED
    assert "does not answer as an LMCache server" in check.found


@pytest.mark.parametrize(
    ("server", "found", "next_step"),
    [
        ("[::1]:9", "nothing answers at tcp://[::1]:9: ", "lmcache server --host ::1 --port 9 "),
        ("no-such-host.invalid", "no-such-host.invalid has no address: ", "check the name"),
        ("x" * 70, "has no address: ", "check the name"),
    ],
)
def test_nobody_there(server: str, found: str, next_step: str) -> None:
    seen = _doctor_server.look(server, "")
    (check,) = _doctor_server.checks(seen, {}, None)
    assert check.status.value == "failed"
    assert found in check.found
    assert next_step in check.next_step


def server_with(memory: dict[str, Any], *, host: str = "127.0.0.1", **mp: Any) -> Any:
    return _doctor_server.Server(
        host=host,
        port=5555,
        http_host=host,
        http_port=8080,
        unreachable="",
        pages_missing="",
        config={
            "mp": {"supported_transfer_mode": "engine_driven", **mp},
            "storage_manager": {"l1_manager_config": {"memory_config": memory}},
        },
        version="0.5.6",
    )


def test_l1_larger_than_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(2**26, 0, 2**26)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check = _doctor_server._pool(server_with({"size_in_bytes": 20 * 2**30}))
    assert check.status is Status.FAILED
    assert check.found == "L1 20.0 GiB, /dev/shm 64 MiB of which 64 MiB free"
    assert "size=21G" in check.next_step


def test_server_in_another_ipc_namespace() -> None:
    memory = {"size_in_bytes": 2**30, "shm_name": "not-there", "use_lazy": False}
    check = _doctor_server._transport(server_with(memory, shm_name="not-there"))
    assert check.status is Status.FAILED
    assert "/dev/shm/lmcache_l1_pool_not-there is not visible here" in check.found
    assert "--ipc=host" in check.next_step
    elsewhere = server_with(memory, host="kv-host", shm_name="not-there")
    # A name that is not 127.0.0.1 may be the container beside, or another host: no worker here
    # reaches the segment in either case.
    check = _doctor_server._transport(elsewhere)
    assert check.status is Status.FAILED
    assert "without --shm-name" in check.next_step


def test_no_next_step_replaces_the_vendors_torch() -> None:
    """LMCache's and others' requirements include torch."""
    for module in (_doctor_host, _doctor_server):
        source = inspect.getsource(module)
        for at in re.finditer("--force-reinstall", source):
            line_end = source[at.end() : at.end() + 60]
            torch_itself = "{reinstall}" in source[at.start() - 40 : at.start()]
            assert "--no-deps" in line_end or torch_itself


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LMCACHE_RBLN_STAGING_MB", "0"),
        ("LMCACHE_RBLN_SERVER", "tcp://h:99999"),
        ("LMCACHE_RBLN_GUARD", "off"),
    ],
)
def test_a_setting_that_the_package_refuses_fails(name: str, value: str) -> None:
    check = _doctor_host._settings({name: value, "LMCACHE_RBLN_STAGNG_MB": "1"})
    assert check.status is Status.FAILED
    assert f"{name}={value!r}" in check.found
    assert "LMCACHE_RBLN_STAGNG_MB" in check.found
    assert f"set {name} to" in check.next_step


def test_lazy_l1_is_not_shared() -> None:
    memory = {"size_in_bytes": 2**30, "shm_name": "kv", "use_lazy": True}
    check = _doctor_server._transport(server_with(memory, shm_name="kv"))
    assert check.status is Status.WARNING
    assert "--l1-use-lazy is on" in check.found


def test_memlock(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    from lmcache_rbln import host_memory

    monkeypatch.setattr(host_memory, "_has_capability", lambda _: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**23, 2**23))
    assert host_memory.may_lock(2**30) == (False, "ulimit -l is 8192 KiB")
    assert host_memory.may_lock(2**22) == (True, "")
    check = _doctor_host.memlock(2**30)
    assert check.status is Status.WARNING
    assert "at most 8 MiB" in check.found
    assert "ulimit -l unlimited" in check.next_step
    assert _doctor_host.memlock(2**22).status is Status.OK


def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_doctor_host, "installed", lambda name: "")
    assert "--no-engine" in _doctor_host._engine().next_step
    found = {"vllm": "0.30.0", "vllm-rbln": "0.12.0"}
    monkeypatch.setattr(_doctor_host, "installed", lambda name: found.get(name, ""))
    monkeypatch.delenv("VLLM_RBLN_USE_DEVICE_TENSOR", raising=False)
    assert "VLLM_RBLN_USE_DEVICE_TENSOR=1" in _doctor_host._engine().next_step
    monkeypatch.setenv("VLLM_RBLN_USE_DEVICE_TENSOR", "1")
    assert _doctor_host._engine().status is Status.OK
    found["vllm"] = "0.29.0"
    assert _doctor_host._engine().status is Status.WARNING
    del found["vllm"]
    assert "vllm is not installed" in _doctor_host._engine().found


def test_connector_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the sources of both ends, without vLLM."""
    assert _doctor_host._connector().status is Status.OK
    (tmp_path / "vllm_rbln" / "patches").mkdir(parents=True)
    (tmp_path / "vllm_rbln" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not register the name" in _doctor_host._connector().found
    factory = tmp_path / "vllm_rbln" / "patches" / "kv_connector_factory.py"
    factory.write_text("NAME = 'RBLNLMCacheConnectorV1'\n")
    check = _doctor_host._connector()
    assert check.status is Status.OK
    assert "registered by vllm-rbln" in check.found


def test_every_bad_check_has_a_next_step() -> None:
    with pytest.raises(ValueError, match="without a next step"):
        Check("x", Status.FAILED, "broken")
    assert _doctor_report.ok("x", "fine").next_step == ""


def test_the_versions_are_those_of_the_distribution() -> None:
    from lmcache_rbln.lmcache_compat import versions

    root = Path(__file__).parents[2]
    low, high = versions.SUPPORTED
    assert f'"lmcache>={low},<{high}"' in (root / "pyproject.toml").read_text()
    listed = ", ".join(f'"{version}"' for version in versions.TESTED)
    assert f"LMCACHE = ({listed})" in (root / "noxfile.py").read_text()
    assert [versions.is_supported(v) for v in ("0.5.3", "0.5.4", "0.5.9", "0.6.0", "x")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert versions.is_tested("0.5.6+local")
    assert not versions.is_tested("0.5.7rc3")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a runtime with")
def test_a_runtime_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(
        tmp_path, "#include <unistd.h>\n__attribute__((constructor)) void hang(void) { pause(); }"
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{without_runtime()}")
    monkeypatch.setattr(doctor, "_SILENT_SECONDS", 3.0)
    facts, ended = doctor._Probe(open_npus=False, server=None).finish()
    assert "runtime" not in facts
    assert facts["torch"]["version"] == "2.13.0+cpu"
    assert ended is not None
    assert "hung at runtime" in ended.found
