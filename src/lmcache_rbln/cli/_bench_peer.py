# SPDX-License-Identifier: Apache-2.0
"""The RBLN backend that a pre-release of LMCache bundles: what the benchmark compares against."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lmcache_rbln.simulator._build import cache_folder

REQUIREMENT = "lmcache-cli==0.5.7rc3.dev0"
_FILE = "lmcache/v1/platform/devices/rbln/kv_ops.py"


class PeerNotFound(RuntimeError):  # noqa: N818
    """The pre-release could not be downloaded, or is not what it should be."""


def kernels() -> Path:
    """The pre-release's file of torch kernels; downloaded once, and kept in the cache folder.

    Raises:
        PeerNotFound: It cannot be had.
    """
    kept = cache_folder() / REQUIREMENT.replace("==", "-") / "kv_ops.py"
    if kept.is_file():
        return kept
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
            "--dest", folder, REQUIREMENT,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise PeerNotFound(
                f"pip could not download {REQUIREMENT}: {done.stderr.strip()[-500:]}; to measure "
                "without it, leave --peer out"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            try:
                text = wheel.read(_FILE)
            except KeyError:
                raise PeerNotFound(f"there is no {_FILE} in {wheels[0].name}") from None
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(text)
    return kept
