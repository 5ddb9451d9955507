"""The Triton kernels without a GPU: right in the interpreter, and accepted by the compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton has no wheel for this platform"
)

ROOT = Path(__file__).parents[2]


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(300)
def test_kernels_are_right_in_the_interpreter():
    done = program(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted.py",
        TRITON_INTERPRET="1", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = re.search(r"(\d+) passed in", done.stdout)
    assert summary, "tests were left out: " + done.stdout[-500:]
    assert int(summary[1]) >= 60


CHOSEN = {
    "sm_90": ["gpt-oss/bf16/ragged", "/odd-block", "kv-fp8-odd-block", "kv_write_fp8/odd-dim"],
    "sm_80": ["kv_write/deepseek-mla", "int4-zeros", "int8-prefill/fp16"],
}
"""The variants that differ in code, for one GPU each: every option, uneven dims, odd blocks."""

SEVERAL = """
import json, runpy, sys
script, codes = "scripts/aot_compile.py", []
for chosen in json.loads(sys.argv[1]):
    sys.argv = [script, "--json", *chosen]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        codes.append(ended.code)
sys.path.insert(0, "scripts")
import aot_compile
variant = aot_compile.kv_write("broken", "fp16", 8, 128, 128)
variant.constants["KEY_BLOCK"] = 1000
print(json.dumps([codes, aot_compile.compile_variant(variant, "sm_80")["error"]]))
"""
"""Runs the script several times in one process, since imports take longer than a variant."""


def rows_of(lines: list[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(300)
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """And one that does not compile is reported: the check must be able to fail."""
    runs = [
        ["--target", target, *(part for name in names for part in ("--match", name))]
        for target, names in CHOSEN.items()
    ]
    done = program("-c", SEVERAL, json.dumps(runs), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    rows = rows_of(lines)
    targets = [target for target, names in CHOSEN.items() for _ in names]
    assert [row["target"] for row in rows] == targets
    assert all(int(str(row["cubin_bytes"])) > 1000 for row in rows)
    codes, error = json.loads(last)
    assert codes == [0, 0]
    assert "power of 2" in error


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_variant_compiles(tmp_path):
    targets = ("--target", "sm_80", "--target", "sm_86", "--target", "sm_90")
    done = program("scripts/aot_compile.py", "--json", *targets, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = rows_of(done.stdout.splitlines())
    assert len({row["kernel"] for row in rows}) == len(rows) / 3
