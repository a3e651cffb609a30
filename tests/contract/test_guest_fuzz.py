"""The guest's own files under libFuzzer, with the address and undefined-behaviour sanitizers.

`guest/fuzz` says what each fuzzer plays and what must hold. A run here is bounded and always the same: the
corpus, then a fixed number of inputs from a fixed seed. For a long one:
`make -C guest fuzz && guest/build/fuzz-machine -max_total_time=3600 guest/fuzz/corpus/machine`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from guest_fixture import GUEST_SOURCES, make_guest

SEED = 4
HANGS_AFTER_S = 10  # in one input
BOUND_S = 120.0
RUNS = {"frames": 60_000, "exec": 250_000, "machine": 15_000}


@pytest.fixture(scope="module")
def fuzzers() -> Path:
    """The directory with the fuzzers, compiled."""
    make_guest("fuzz")
    return GUEST_SOURCES / "build"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_no_input_breaks_it(fuzzers: Path, name: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.mkdir()
    fuzzer = [str(fuzzers / f"fuzz-{name}"), f"-runs={RUNS[name]}", f"-seed={SEED}", "-max_len=1024"]
    fuzzer += [f"-timeout={HANGS_AFTER_S}", "-len_control=20", f"-artifact_prefix={tmp_path}/"]
    ran = subprocess.run(
        [*fuzzer, str(found), str(GUEST_SOURCES / "fuzz" / "corpus" / name)],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=BOUND_S,
    )
    inputs = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert ran.returncode == 0, f"{inputs}\n{ran.stderr[-6000:]}"
