# SPDX-License-Identifier: Apache-2.0
"""Settings: the package and the library accept and refuse the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.simulator import _settings

GOOD = {
    "npus": ["0", "1", "64"],
    "memory_gb": ["0.001", "16", "1.5", "4096"],
    "link_gbps": ["0", "8", "13.5", "1e2"],
    "d2d_gbps": ["200"],
    "submit_us": ["30", "0.5"],
    "entry_us": ["2"],
    "copy": ["0", "1"],
    "bulk_limit": ["24:12", "1:1"],
    "exclusive": ["0", "1"],
    "delay_us": ["100"],
    "seed": ["0", "18446744073709551615"],
    "faults": ["h2v@1=fail", "any@10=lost;v2v@2=short;sync@1=hang=0.5;", "borrow@1=hang=1"],
    "host": ["a", "A.b_c-9", "x" * 64],
}
BAD = {
    "npus": ["-1", "65", "two", "1.5", "1 ", " 1", "+1"],
    "memory_gb": ["0", "-1", "nan", "inf", "5000", "16GB", "1_0"],
    "link_gbps": ["-1", "fast", "inf", "nan", " 8", "8 "],
    "d2d_gbps": ["-0.1"],
    "submit_us": ["1e8"],
    "entry_us": ["x"],
    "copy": ["yes", "2", "true", "-1"],
    "bulk_limit": ["24", "24:", ":12", "0:12", "24:0", "-1:12", "24:12:1", "24:12 ", "2.5:1"],
    "exclusive": ["on"],
    "delay_us": ["-5"],
    "seed": ["-1", "18446744073709551616", "0x1"],
    "faults": ["h2v", "h2v@0=fail", "h2v@1=fail,v2h@1=fail", "open@1=short", "sync@1=hang="],
    "host": ["a/b", "a b", "x" * 65, "ä"],
}
#: One process for all: the settings are read by the first call, in a forked child of it each time.
PROBE = """
import ctypes, os, sys
library = ctypes.CDLL
for line in sys.stdin.read().splitlines():
    variable, text = line.split("=", 1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ[variable] = text
        os.dup2(write, 2)
        count = ctypes.c_int()
        code = ctypes.CDLL(sys.argv[1]).rbln_get_device_count(ctypes.byref(count))
        os._exit(code)
    os.close(write)
    with open(read) as stderr:
        said = stderr.read().splitlines()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *said[:1])
"""


def variable(name: str) -> str:
    return next(each.variable for each in _settings.SETTINGS if each.name == name)


def pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, texts in table.items() for text in texts]


@pytest.fixture(scope="module")
def library_says() -> dict[tuple[str, str], str]:
    """What the library answers to each value: its return code, and its first line on stderr."""
    asked = pairs(GOOD) + pairs(BAD)
    result = subprocess.run(
        [sys.executable, "-S", "-c", PROBE, str(simulator.library_path())],
        input="\n".join(f"{variable(name)}={text}" for name, text in asked),
        env={"LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(asked, result.stdout.splitlines(), strict=True))


def test_every_setting_is_tried():
    assert {setting.name for setting in _settings.SETTINGS} == {*GOOD, "trace"} == {*BAD, "trace"}


@pytest.mark.parametrize(("name", "text"), pairs(GOOD))
def test_good_values(library_says, name, text):
    assert _settings.variables({name: text}) == {variable(name): text}
    assert library_says[name, text] == "0"


@pytest.mark.parametrize(("name", "text"), pairs(BAD))
def test_bad_values(library_says, name, text):
    with pytest.raises(ValueError, match="is not valid: expected") as refused:
        _settings.variables({name: text})
    assert str(refused.value).startswith(f"{variable(name)}={text} ")
    assert library_says[name, text].startswith("1 rbln-sim[")
    assert f"{variable(name)}={text} is not valid: expected" in library_says[name, text]


def test_booleans_and_numbers():
    assert _settings.variables({"copy": False, "npus": 2, "trace": None}) == {
        "RBLN_SIM_COPY": "0",
        "RBLN_SIM_NPUS": "2",
    }


def test_unknown_settings():
    with pytest.raises(TypeError, match="no setting 'npu'; there are npus, memory_gb"):
        simulator.environment(npu=2)


def test_a_trace_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "trace"):
        with pytest.raises(ValueError, match="RBLN_SIM_TRACE=.*a file in a folder"):
            simulator.environment(trace=path)


def test_settings_of_the_environment_are_checked():
    with pytest.raises(ValueError, match="RBLN_SIM_NPUS=x"):
        simulator.environment({"RBLN_SIM_NPUS": "x"})


@pytest.mark.parametrize(
    ("variables", "count", "complaint"),
    [
        ({}, 4, ""),
        ({"RBLN_DEVICES": ""}, 4, ""),
        ({"RBLN_DEVICES": "0"}, 1, ""),
        ({"RBLN_DEVICES": "3,0,1"}, 3, ""),
        ({"RBLN_DEVICES": " 1 , 2 "}, 2, ""),
        ({"RBLN_VISIBLE_DEVICES": "1,2"}, 2, ""),
        ({"RBLN_DEVICES": "1", "RBLN_VISIBLE_DEVICES": "1,2,3"}, 1, ""),
        ({"RBLN_DEVICES": "4"}, -1, "NPU 4 does not exist (4 simulated; RBLN_SIM_NPUS)"),
        ({"RBLN_DEVICES": "1,1"}, -1, "NPU 1 is named twice"),
        ({"RBLN_DEVICES": "-1"}, -1, "RBLN_DEVICES=-1 is not a comma-separated list"),
        ({"RBLN_DEVICES": "0,"}, -1, "is not a comma-separated list"),
        ({"RBLN_DEVICES": "0 1"}, -1, "is not a comma-separated list"),
        ({"RBLN_DEVICES": "99999999999999999999"}, -1, "does not exist"),
        ({"RBLN_VISIBLE_DEVICES": "all"}, -1, "RBLN_VISIBLE_DEVICES=all is not a"),
    ],
)
def test_selection(script, variables, count, complaint):
    result = script(
        "from native import Runtime; print(Runtime().device_count())", variables=variables, npus=4
    )
    assert result.stdout == f"{count}\n"
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == (1 if complaint else 0)


def test_selected_npus_are_the_ones_that_are_opened(script, background):
    host = simulator.unique_host()
    background(
        """
        import os, sys
        os.environ["RBLN_DEVICES"] = "2,0"  # a launcher may still choose, before the first use
        from native import Runtime
        assert Runtime().register(0, 0) == 0
        print("ready", flush=True)
        sys.stdin.read()
        """,
        npus=4,
        host=host,
    )
    result = script(
        "from native import Runtime; r = Runtime(); print(*(r.register(n, n) for n in range(4)))",
        npus=4,
        host=host,
    )
    assert result.stdout == "0 0 1 0\n"
