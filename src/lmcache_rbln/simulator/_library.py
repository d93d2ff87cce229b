# SPDX-License-Identifier: Apache-2.0
"""Loads the stand-in into this process, and talks to it."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmcache_rbln.simulator import _build, _settings
from lmcache_rbln.simulator._errors import SimulatorError

if TYPE_CHECKING:
    import torch


def library_path() -> Path:
    """Path of the compiled stand-in: the one this process loaded, else built if need be.

    Raises:
        SimulatorError: It cannot be built.
    """
    loaded = _mapped()
    return loaded if loaded is not None and _is_stand_in(loaded) else _build.build()


def environment(base: MutableMapping[str, str] | None = None, **settings: object) -> dict[str, str]:
    """The environment under which a child process has the simulated NPU.

    Args:
        base: What to start from; this process's environment by default. Not changed.
        **settings: As for :func:`activate`.

    Returns:
        A new environment, for ``subprocess`` and the like.

    Raises:
        SimulatorError: The stand-in cannot be built.
        TypeError: There is no setting of that name.
        ValueError: A setting is not valid, or one found in ``base`` is not.
    """
    result = dict(os.environ if base is None else base)
    _settings.validate(result)
    result.update(_settings.variables(settings))
    _prepend(result, library_path().parent)
    return result


def activate(**settings: object) -> None:
    """Makes the simulated NPU the RBLN runtime of this process and of its children.

    Must come before ``torch`` is imported: torch-rbln looks for the runtime then. Settings given
    here, and those found in the environment, hold from then on; they are environment variables,
    so child processes have them too, however they are started.

    Args:
        **settings: ``npus``, ``memory_gb``, ``link_gbps``, ``d2d_gbps``, ``submit_us``,
            ``entry_us``, ``copy``, ``bulk_limit``, ``exclusive``, ``delay_us``, ``seed``,
            ``faults``, ``trace``, ``host``; what each means, its unit and its default are in
            ``lmcache-rbln simulate --help``. None leaves the environment's value.

    Raises:
        SimulatorError: torch or another RBLN runtime was loaded before; or the stand-in was, with
            other settings; or it cannot be built or loaded.
        TypeError: There is no setting of that name.
        ValueError: A setting is not valid.
    """
    wanted = _settings.variables(settings)
    _settings.validate({**os.environ, **wanted})
    loaded = _mapped()
    if loaded is not None:
        if not _is_stand_in(loaded):
            raise SimulatorError(
                f"another RBLN runtime is loaded already ({loaded}); the simulated NPU can only "
                "be used in a process that has none"
            )
        _refuse_changes(wanted)
        return
    if "torch" in sys.modules:
        raise SimulatorError(
            "torch was imported before the simulated NPU was activated; call "
            "lmcache_rbln.simulator.activate() first, or start the program with "
            "lmcache-rbln simulate -- COMMAND"
        )
    path = _build.build()
    os.environ.update(wanted)
    _prepend(os.environ, path.parent)
    library = _load(path)
    error = ctypes.create_string_buffer(512)
    if library.rbln_sim_settings_error(error, ctypes.c_uint64(len(error))):
        raise ValueError(error.value.decode())


def is_active() -> bool:
    """Whether this process's RBLN runtime is the simulated one.

    True once the stand-in is loaded, and before that in a process that was started to use it.
    """
    loaded = _mapped()
    if loaded is not None:
        return _is_stand_in(loaded)
    return _inherited() is not None


def counters() -> dict[str, Any]:
    """What this process asked of the simulated NPUs since the last :func:`reset_counters`.

    Returns:
        ``h2v``, ``v2h``, ``v2v`` (completed copies into, out of and within device memory) and
        ``borrow`` (device memory handed to the host behind an operation; a transfer must have
        none): each a dict of ``submissions``, ``entries``, ``bytes``. ``synchronize``, ``malloc``,
        ``free``, ``open``: calls that were made. ``live_allocations``, ``faults_armed``: as of
        now. ``faults_fired``. ``calls``: calls of each kind that a fault can be injected into,
        failed ones included.

    Raises:
        SimulatorError: The simulated NPU is not in use in this process.
    """
    library = _library()
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = library.rbln_sim_counters(buffer, ctypes.c_uint64(size))
        if length < size:
            return cast("dict[str, Any]", json.loads(buffer.value))
        size = length + 1


def reset_counters() -> None:
    """Sets every counter to zero.

    Raises:
        SimulatorError: The simulated NPU is not in use in this process.
    """
    _library().rbln_sim_reset_counters()


def inject(faults: str) -> None:
    """Adds faults in this process.

    Args:
        faults: ``KIND@N=ACTION;...``: the Nth call of that kind from now on, N from 1. Kinds:
            ``h2v v2h v2v malloc open sync borrow any``. Actions: ``fail`` (the call fails),
            ``lost`` (the NPU is gone from here on), ``short`` (half the bytes are copied, then it
            fails; copies only), ``wrong`` (the halves of each entry arrive exchanged, and the call
            succeeds; copies only), ``hang=SECONDS`` (it takes that much longer). A bulk call is
            one call.

    Raises:
        SimulatorError: The simulated NPU is not in use in this process.
        ValueError: This is not a list of faults.
    """
    expected = _settings.check_faults(faults)
    if expected is not None:
        raise ValueError(f"{faults!r} is not a list of faults: expected {expected}")
    error = ctypes.create_string_buffer(512)
    if _library().rbln_sim_inject(faults.encode(), error, ctypes.c_uint64(len(error))):
        raise ValueError(f"{faults!r} is not a list of faults: expected {error.value.decode()}")


def clear_faults() -> None:
    """Starts afresh: removes faults that have not fired, ends hangs, brings lost NPUs back.

    Failures of asynchronous work that no wait has reported yet are forgotten.

    Raises:
        SimulatorError: The simulated NPU is not in use in this process.
    """
    _library().rbln_sim_clear_faults()


def set_delay(us: float, seed: int = 0) -> None:
    """Changes ``delay_us`` and ``seed`` in this process, from the next asynchronous copy on.

    Args:
        us: Asynchronous copies start up to this much late, microseconds; 0 = no delay.
        seed: Gives the random times, together with a stream's number and a copy's place in it.

    Raises:
        SimulatorError: The simulated NPU is not in use in this process.
        ValueError: A value is not valid.
    """
    _settings.variables({"delay_us": us, "seed": seed})
    _library().rbln_sim_set_delay(ctypes.c_double(us), ctypes.c_uint64(seed))


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the same bytes as an ``rbln`` tensor: only a simulation can have that.

    Not counted as a borrow. Nothing is waited for: asynchronous copies still in flight are the
    caller's to wait for.

    Args:
        tensor: On a simulated NPU; any shape, strides and dtype.

    Returns:
        A CPU tensor of the same shape, strides and dtype; it keeps ``tensor`` alive.

    Raises:
        SimulatorError: The simulated NPU is not in use, or ``tensor`` is not in its memory.
    """
    import torch

    library = _library()
    if tensor.device.type != "rbln":
        raise SimulatorError(f"the tensor is on {tensor.device}, expected a simulated NPU (rbln)")
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    nbytes = span * tensor.element_size()
    address = library.rbln_sim_host_address(
        ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(nbytes)
    )
    if address is None:
        raise SimulatorError(
            f"no simulated device memory at {tensor.data_ptr():#x} ({nbytes} bytes)"
        )
    memory = (ctypes.c_char * nbytes).from_address(address)
    vars(memory)["owner"] = tensor  # the view keeps `memory`, which keeps the tensor
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def unique_host(prefix: str = "host") -> str:
    """A name for ``RBLN_SIM_HOST`` that no other process uses.

    Processes of the same host compete for its NPUs, as on a real machine. Tests that run side by
    side each want a host of their own: ``activate(host=unique_host())``.

    Args:
        prefix: Start of the name: letters, digits, ``.``, ``_``, ``-``.
    """
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(4)}"


def _refuse_changes(wanted: dict[str, str]) -> None:
    for variable, text in wanted.items():
        held = os.environ.get(variable, "")
        if held != text:
            raise SimulatorError(
                f"the simulated NPU is loaded already, with {variable}={held or '(default)'}; "
                f"{variable}={text} would come too late"
            )


def _prepend(environment: MutableMapping[str, str], folder: Path) -> None:
    """Puts the folder first on the path that dynamic loaders, torch-rbln's included, search."""
    others = [
        entry
        for entry in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        if entry and entry != str(folder)
    ]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *others])


def _mapped() -> Path | None:
    """The ``librbln.so`` in this process's memory, whoever loaded it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6:
                path = fields[5].removesuffix(" (deleted)")
                if os.path.basename(path) == _build.LIBRARY:
                    return Path(path)
    return None


def _inherited() -> Path | None:
    """The stand-in that torch-rbln will load here, judging by the environment."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        candidate = Path(folder) / _build.LIBRARY
        if folder and candidate.is_file():
            return candidate if b"rbln_sim_version" in candidate.read_bytes() else None
    return None


def _is_stand_in(path: Path) -> bool:
    return hasattr(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD), "rbln_sim_version")


def _load(path: Path) -> ctypes.CDLL:
    try:
        # torch-rbln's extensions find its symbols in the global scope.
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SimulatorError(f"cannot load the simulated NPU: {error}") from error
    library.rbln_sim_host_address.restype = ctypes.c_void_p
    return library


@functools.cache  # once loaded it stays
def _library() -> ctypes.CDLL:
    path = _mapped() or _inherited()
    if path is None or (_mapped() is not None and not _is_stand_in(path)):
        raise SimulatorError(
            "the simulated NPU is not in use in this process; call "
            "lmcache_rbln.simulator.activate() before importing torch, or start the program with "
            "lmcache-rbln simulate -- COMMAND"
        )
    return _load(path)
