# SPDX-License-Identifier: Apache-2.0
"""Another LMCache: each thing that the take-over and the layouts rely on, changed.

They must then step aside as a whole, and say once what has changed.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import importlib_metadata
import lmcache  # noqa: F401  # Its registry must start before the modules that it loads.
import numpy as np
import pytest
import torch

from lmcache_rbln.lmcache_compat import (
    blocks_first,
    server_guard,
    takeover,
    versions,
    worker_guard,
)
from tests import reference
from tests.reference import Geometry
from tests.stub.interpreter import OURS, SHOW, run

NATIVE = "NL_X_NB_TWO_NH_ONE_BS_HS"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings of the package in this process."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    modules = (blocks_first, server_guard, takeover, versions, worker_guard)
    loggers = [module._logger() for module in modules]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


class TestVersion:
    @pytest.mark.parametrize("version", ["0.5.4", "0.5.6", "0.5.6+local"])
    def test_tested(self, version: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib_metadata, "version", lambda name: version)
        versions.warn_if_untested()
        assert said == []

    @pytest.mark.parametrize("version", ["0.5.7", "0.5.7rc2", "0.5.6.post1", "0.5.6rc1", "0.6.0"])
    def test_untested(self, version: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib_metadata, "version", lambda name: version)
        versions.warn_if_untested()
        (line,) = said
        assert "is tested with lmcache 0.5.4, 0.5.5, 0.5.6, and this is" in line
        assert f"this is lmcache {version}:" in line

    def test_without_metadata(self, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise importlib_metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib_metadata, "version", missing)
        versions.warn_if_untested()
        assert "this is lmcache of an unknown version" in said[0]

    @pytest.mark.parametrize("version", ["0.5.6", "0.5.99"])
    def test_one_line_a_process(self, version: str, tmp_path: Path) -> None:
        info = tmp_path / f"lmcache-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: lmcache\nVersion: {version}\n"
        )
        line, log = run(SHOW, PYTHONPATH=str(tmp_path))
        assert line == f"{OURS} rbln"
        warned = [text for text in log.splitlines() if "is tested with lmcache" in text]
        assert len(warned) == (0 if version in versions.TESTED else 1)
        assert all("WARNING" in text for text in warned)


def bundled_class(base: type = object, **members: Any) -> Any:
    """A spec as LMCache 0.5.6 bundles it, with some members changed; ``None`` leaves one out."""
    from lmcache.v1.platform.base.device_spec import DeviceSpec

    own = {
        "__module__": "lmcache.v1.platform.devices.rbln",
        "device_type": property(lambda self: "rbln"),
        "backend_name": property(lambda self: "rbln"),
        "is_available": lambda self: True,
        **members,
    }
    bases = (DeviceSpec,) if base is object else (base,)
    return type(DeviceSpec)("RblnDeviceSpec", bases, own)


def broken(self: Any) -> str:
    raise OSError("gone")


class Unchangeable(type):
    """A class that takes no new attributes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{name} is read-only")


def unchangeable() -> Any:
    made = bundled_class()
    return Unchangeable(made.__name__, (made,), {"__module__": made.__module__})


def unmoved() -> Any:
    """A class that goes by a name which is not that of the class's property."""

    def attribute(self: Any, name: str) -> Any:
        return "rbln" if name == "backend_name" else object.__getattribute__(self, name)

    return bundled_class(__getattribute__=attribute)


class TestTakeOver:
    @pytest.fixture
    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
        """Take one class over, as if it were what LMCache bundles."""
        monkeypatch.setattr(takeover, "_taken_over", "")
        monkeypatch.setattr(takeover, "_left_in_place", "")

        def call(bundled: Any) -> None:
            monkeypatch.setattr(takeover, "_bundled", lambda: iter([bundled]))
            takeover.take_over()

        return call

    def test_unchanged(
        self, take_over: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundled = bundled_class()
        take_over(bundled)
        assert said == []
        assert takeover.taken_over() == "lmcache.v1.platform.devices.rbln.RblnDeviceSpec"
        assert takeover.left_in_place() == ""
        spec = bundled()
        assert (spec.backend_name, spec.device_type, spec.is_available()) == (
            "rbln-bundled", "rbln-bundled", False,
        )  # fmt: skip
        monkeypatch.setenv(takeover.PIN_VARIABLE, "rbln-bundled")
        assert (spec.backend_name, spec.device_type, spec.is_available()) == (
            "rbln-bundled", "rbln", True,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("make", "change"),
        [
            (lambda: bundled_class(__init__=broken), "backend_name cannot be read (OSError"),
            (lambda: bundled_class(backend_name=property(broken)), "backend_name cannot be read"),
            (lambda: bundled_class(backend_name="rbln"), "its backend_name is no property"),
            (lambda: bundled_class(device_type="rbln"), "its device_type is no property"),
            (
                lambda: bundled_class(backend_name=property(lambda self: "rebellions")),
                "its backend_name is 'rebellions', expected 'rbln'",
            ),
            (
                lambda: bundled_class(device_type=property(lambda self: "npu")),
                "its device_type is 'npu', expected 'rbln'",
            ),
            (lambda: bundled_class(is_available=True), "it has no method is_available()"),
            (
                lambda: bundled_class(is_available=lambda self, index: True),
                "it has is_available(self, index), expected (self)",
            ),
            (unchangeable, "it cannot be renamed (backend_name is read-only)"),
            (unmoved, "it cannot be renamed (its backend_name stays 'rbln')"),
        ],
    )
    def test_changed(
        self, make: Callable[[], Any], change: str, take_over: Any, said: list[str]
    ) -> None:
        bundled = make()
        before = dict(vars(bundled))
        take_over(bundled)
        (line,) = said
        name = "lmcache.v1.platform.devices.rbln.RblnDeviceSpec"
        assert line.startswith(f"lmcache-rbln leaves LMCache's bundled backend {name} in place")
        assert change in line
        assert dict(vars(bundled)) == before
        assert (takeover.taken_over(), takeover.left_in_place()) == ("", name)

    def test_found_wherever_lmcache_keeps_it(self) -> None:
        moved = bundled_class(__module__="lmcache.v1.devices.rebellions")
        other = bundled_class(
            __module__="lmcache.v1.platform.devices.other",
            device_type=property(lambda self: "other"),
            backend_name=property(lambda self: "other"),
        )
        unreadable = bundled_class(__init__=broken)
        foreign = bundled_class(__module__="another.rbln")
        found = list(takeover._bundled())
        assert moved in found
        assert unreadable in found
        assert other not in found
        assert foreign not in found

    #: Changes the class that LMCache bundles as soon as LMCache imports it.
    CHANGE = """
    import wrapt
    def change(module):
        bundled = module.RblnDeviceSpec
        {}
    for name in ("lmcache.v1.platform.devices.rbln", "lmcache.v1.platform.rbln"):
        wrapt.register_post_import_hook(change, name)
    """

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ("bundled.is_available = lambda self, index=0: True", "it has is_available("),
            # Another name for the same device: with both available LMCache would not start.
            (
                "bundled.backend_name = property(lambda self: 'rebellions')",
                "its backend_name is 'rebellions'",
            ),
        ],
    )
    def test_lmcache_then_uses_its_own(self, change: str, words: str) -> None:
        line, log = run(textwrap.dedent(self.CHANGE).format(change) + SHOW)
        assert line.startswith("lmcache.v1.platform.")
        assert line.endswith(".RblnDeviceSpec rbln")
        warned = [text for text in log.splitlines() if "lmcache-rbln leaves" in text]
        assert len(warned) == 1, log
        assert words in warned[0]
        assert "is LMCache's backend" not in log


class Formats:
    """LMCache's enumeration of formats, with members left out or added."""

    def __init__(self, *without: str, **more: Any) -> None:
        from lmcache.lmcache_native import EngineKVFormat

        self._real, self._without = EngineKVFormat, without
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(f"type object 'EngineKVFormat' has no attribute {name!r}")
        return getattr(self._real, name)


def change_detector(registry: Any, **members: Any) -> None:
    ((engine, original),) = registry.DETECTORS.items()
    registry.DETECTORS[engine] = type("Changed", (original,), members)


def change_to_instance(registry: Any) -> None:
    ((engine, original),) = registry.DETECTORS.items()
    registry.DETECTORS[engine] = original()


def change_look_up(registry: Any) -> None:
    made = registry.get_detector(*registry.DETECTORS)
    registry.get_detector = lambda engine: made


class TestLayouts:
    @pytest.fixture(autouse=True)
    def _released(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An LMCache that does not know blocks-first, with nothing installed yet."""
        # Its own table first: who imports it later installs the detector there.
        import_module("lmcache.v1.gpu_connector.kv_format.detectors.registry")
        monkeypatch.setattr(blocks_first, "_installed", False)
        monkeypatch.setattr("lmcache.lmcache_native.EngineKVFormat", Formats(NATIVE))

    @pytest.fixture
    def registry(self) -> Any:
        """A table of detectors as LMCache's, with LMCache's own detector in it."""
        from lmcache.utils import EngineType
        from lmcache.v1.gpu_connector.kv_format.detectors.vllm import VLLM_Detector

        made: Any = ModuleType("registry")
        made.DETECTORS = {EngineType.VLLM: VLLM_Detector}
        made.get_detector = lambda engine: made.DETECTORS[engine]()
        return made

    def test_unchanged(self, registry: Any, said: list[str]) -> None:
        before = dict(registry.DETECTORS)
        blocks_first._install(registry)
        assert said == []
        assert blocks_first.is_installed()
        ((engine, detector),) = registry.DETECTORS.items()
        assert issubclass(detector, before[engine])
        assert detector is not before[engine]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda r: delattr(r, "DETECTORS"), "no attribute 'DETECTORS'"),
            (lambda r: delattr(r, "get_detector"), "no attribute 'get_detector'"),
            (lambda r: r.DETECTORS.clear(), "DETECTORS has no"),
            (change_to_instance, "no class"),
            (
                lambda r: change_detector(r, __init__=lambda self, engine: None),
                "missing 1 required positional argument",
            ),
            (change_look_up, "get_detector() does not look into DETECTORS"),
            (
                lambda r: change_detector(r, discover=lambda self, kv_caches: None),
                "Changed.discover(self, kv_caches)",
            ),
            (lambda r: change_detector(r, discover=None), "None is not a callable object"),
        ],
    )
    def test_changed_table(
        self, change: Callable[[Any], None], words: str, registry: Any, said: list[str]
    ) -> None:
        change(registry)
        before = dict(getattr(registry, "DETECTORS", {}))
        blocks_first._install(registry)
        self.check_stepped_aside(said, words)
        assert dict(getattr(registry, "DETECTORS", {})) == before

    @pytest.mark.parametrize(
        ("path", "value", "words"),
        [
            ("lmcache.lmcache_native.EngineKVFormat", None, "cannot import name 'EngineKVFormat'"),
            ("lmcache.utils.EngineType", None, "cannot import name 'EngineType'"),
            ("lmcache.utils.EngineType", SimpleNamespace(), "no attribute 'VLLM'"),
            (
                "lmcache.v1.platform.current_device_spec",
                None,
                "cannot import name 'current_device_spec'",
            ),
        ],
    )
    def test_changed_names(
        self,
        path: str,
        value: Any,
        words: str,
        registry: Any,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        before = dict(registry.DETECTORS)
        if value is None:
            monkeypatch.delattr(path)
        else:
            monkeypatch.setattr(path, value)
        blocks_first._install(registry)
        self.check_stepped_aside(said, words)
        assert dict(registry.DETECTORS) == before

    @pytest.mark.parametrize("name", ["NL_X_TWO_NB_NH_ONE_BS_HS", "NL_X_NB_BS_HS"])
    def test_changed_formats(
        self, name: str, registry: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = dict(registry.DETECTORS)
        monkeypatch.setattr("lmcache.lmcache_native.EngineKVFormat", Formats(NATIVE, name))
        blocks_first._install(registry)
        self.check_stepped_aside(said, f"no attribute '{name}'")
        assert dict(registry.DETECTORS) == before

    def test_moved_table(self, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            blocks_first, "_REGISTRY_MODULE", "lmcache.v1.gpu_connector.kv_format.detectors.moved"
        )
        blocks_first.install_when_needed()
        self.check_stepped_aside(said, "detectors.moved has changed: there is no such module")

    def check_stepped_aside(self, said: list[str], words: str) -> None:
        (line,) = said
        assert line.startswith("lmcache-rbln cannot add its KV layouts to LMCache")
        assert words in line
        assert not blocks_first.is_installed()

    def test_another_backend_gets_lmcaches_own_answer(self) -> None:
        """Two blocks fit both layouts: LMCache guesses, this package refuses."""
        code = """
        import torch, lmcache
        from lmcache.utils import EngineType
        from lmcache.v1.gpu_connector.kv_format.detectors import get_detector
        layers = [torch.zeros(2, 2, 1, 1, 4, 5, device="rbln")]
        print("SPEC", get_detector(EngineType.VLLM).discover(layers, {})[0].name)
        """
        line, _ = run(code, LMCACHE_DEVICE_BACKEND="rbln-bundled")
        assert line == "NL_X_TWO_NB_NH_ONE_BS_HS"


class TestLMCacheKnowsBlocksFirst:
    """A double for the one member of LMCache's enumeration that released LMCache does not have."""

    MEMBER = SimpleNamespace(name=NATIVE)

    @pytest.fixture(autouse=True)
    def _formats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        double = Formats(**{NATIVE: self.MEMBER})
        monkeypatch.setattr(blocks_first, "_installed", False)
        monkeypatch.setattr("lmcache.lmcache_native.EngineKVFormat", double)

    def test_ours_is_not_installed(self, said: list[str]) -> None:
        registry: Any = ModuleType("registry")
        registry.DETECTORS = table = {"vllm": object()}
        before = dict(table)
        blocks_first._install(registry)
        assert table == before
        assert said == []
        assert blocks_first.is_native()
        assert not blocks_first.is_installed()

    @pytest.mark.parametrize("direction", ["gather", "scatter"])
    def test_its_format_is_accepted(self, direction: str, transfer: Callable[..., None]) -> None:
        geometry = Geometry("blocks_first", 3, 5, 2, 4, 8, 2)
        rng = np.random.default_rng(1)
        layers = [layer.to("rbln:0") for layer in geometry.layers(rng)]
        chunks = [geometry.random(geometry.chunk_shape(), rng) for _ in range(2)]
        ids = [3, 0, 4, 1]
        expected_layers = [reference.to_bytes(layer).copy() for layer in layers]
        expected_chunks = [reference.to_bytes(chunk).copy() for chunk in chunks]
        getattr(reference, direction)(geometry, expected_layers, expected_chunks, ids)
        transfer(
            direction,
            layers,
            chunks,
            ids,
            block_size=geometry.block_size,
            chunk_tokens=geometry.chunk_tokens,
            kv_format=self.MEMBER,
        )
        for found, want in zip(
            (*layers, *chunks), (*expected_layers, *expected_chunks), strict=True
        ):
            assert np.array_equal(reference.to_bytes(found), want)

    def test_not_for_mla(self, transfer: Callable[..., None]) -> None:
        layers = [torch.zeros(5, 4, 8, dtype=torch.bfloat16, device="rbln:0")]
        chunk = torch.zeros(1, 8, 8, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=f"{NATIVE}, expected NL_X_NB_BS_HS"):
            transfer(
                "gather", layers, [chunk], [0, 1],
                block_size=4, chunk_tokens=8, kv_format=self.MEMBER,
            )  # fmt: skip


def changed_method(self: Any, *_: Any, one_more: Any = None) -> None:
    """A method of other parameters than any that a guard replaces."""


class TestGuards:
    """A method that a guard replaces takes other parameters now: LMCache's own stays."""

    @pytest.mark.parametrize(
        ("kind", "method"),
        [
            ("strategy", "prepare_store"),
            ("strategy", "commit_store"),
            ("strategy", "__init__"),
            ("module", "_release_entry"),
            ("module", "report_status"),
        ],
    )
    def test_server(
        self, kind: str, method: str, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lmcache.v1.multiprocess.modules import engine_driven_transfer, server_transfer

        said.clear()  # Of an LMCache that has changed already.
        strategy = type("Strategy", (server_transfer.ShmTransferStrategy,), {})
        module = type("Module", (engine_driven_transfer.EngineDrivenTransferModule,), {})
        changed = {"strategy": strategy, "module": module}[kind]
        setattr(changed, method, changed_method)
        before = dict(vars(strategy)), dict(vars(module))
        monkeypatch.setattr(server_transfer, "ShmTransferStrategy", strategy)
        double: Any = ModuleType("double")
        double.EngineDrivenTransferModule = module
        server_guard._install(double)
        (line,) = said
        assert line.startswith("lmcache-rbln cannot guard this LMCache server")
        assert (dict(vars(strategy)), dict(vars(module))) == before

    @pytest.mark.parametrize(
        "method",
        [
            "__init__",
            "prepare_store",
            "commit_store",
            "prepare_retrieve",
            "commit_retrieve",
            "_build_slot_tensors",
        ],
    )
    def test_worker(self, method: str, said: list[str]) -> None:
        from lmcache.v1.multiprocess.transfer_context import shm

        said.clear()
        context = type("Context", (shm.EngineDrivenContextShm,), {method: changed_method})
        before = dict(vars(context))
        double: Any = ModuleType("double")
        double.EngineDrivenContextShm = context
        worker_guard._checked(worker_guard._install_shared_memory)(double)
        (line,) = said
        assert line.startswith("lmcache-rbln cannot guard LMCache's transfers (double has changed")
        assert f"Context.{method}(" in line
        assert dict(vars(context)) == before

    def test_moved_contexts(self, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_guard, "_CONTEXTS", "lmcache.v1.multiprocess.moved")
        worker_guard.install_when_needed()
        assert len(said) == 3
        assert all("has changed: there is no such module" in line for line in said)
