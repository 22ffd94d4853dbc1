"""Reads a few hundred damaged files, with fixed seeds; `python -m tests.fuzz` reads 10,000."""

import sys

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.formats import formats

pytestmark = pytest.mark.slow

# Without the formats that start JAX; only `python -m tests.fuzz` has them.
QUICK = [name for name in formats() if not name.startswith(("config_", "checkpoint", "safetensors"))]


@pytest.mark.skipif(sys.platform != "linux", reason="memory measurement needs Linux")
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_file_is_an_error_in_one_line_or_is_read(part):
    counts, faults = fuzz(QUICK[part::2], count=20 * len(QUICK[part::2]))
    assert not faults, "\n".join(faults)
    assert set(counts.values()) == {20}
