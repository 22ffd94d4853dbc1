"""The benchmark of a config runs: nothing else would say that it has fallen behind the code."""

import json
import os
import subprocess
import sys

from tests.support.runs import FAST, ROOT

SMALL = ["--config.data.sequence_length=64", "--config.train.global_batch_size=4", "--config.model.num_layers=1"]


def test_a_config_is_timed(tmp_path):
    """One with sizes that are open, and rows that are packed by a plan."""
    words = ["--config=bert_base:tiny", *SMALL, "--timed_steps=5", f"--json={tmp_path / 'figures.json'}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "benchmarks/train_step.py", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["padded_tokens_per_second"] > 0 and figures["parameters"] > 0
    assert figures["mfu"] is figures["mfu_done"] is None  # the peak of a CPU is unknown
