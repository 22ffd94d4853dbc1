"""Plants faults in a copy of this code, one at a time, and prints which faults the tests of `make check` notice.

`python -m tests.planted_faults [--only=WORD,…] [--tests="tests/optim tests/layers"]` prints a line for each fault, and
the number of noticed faults.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Fault(NamedTuple):
    name: str
    file: str  # path below pretrainax/
    right: str  # text that occurs exactly once in the file
    wrong: str


FAULTS = (
    # An earlier `make check` missed three of these four faults.
    Fault(
        "attention: weights halved",
        "layers/attention.py",
        "else drop(weights)\n",
        "else drop(weights)\n    left *= 0.5\n",
    ),
    Fault("optimizer: update reversed", "optim/optimizers.py", "lambda u: -rate * u", "lambda u: rate * u"),
    Fault(
        "loss: half of the target's logit",
        "models/heads/vocabulary_loss.py",
        "log_z - stats.target\n",
        "log_z - 0.5 * stats.target\n",
    ),
    Fault(
        "mask: a token sees the next",
        "layers/attention_mask.py",
        "allowed = (distance <= 0)[:, None]",
        "allowed = (distance <= 1)[:, None]",
    ),
    # Losses
    Fault(
        "loss: gradient of the target halved",
        "models/heads/vocabulary_loss.py",
        "(1 - smoothing) * weights[..., None], 0.0)",
        "0.5 * (1 - smoothing) * weights[..., None], 0.0)",
    ),
    Fault(
        "loss: z-loss has half of its gradient",
        "models/heads/vocabulary_loss.py",
        "1.0 + 2 * settings.z_loss * log_z",
        "1.0 + settings.z_loss * log_z",
    ),
    Fault(
        "loss: experts' balance not divided by k",
        "layers/feed_forward/router.py",
        "even_assignments = settings.top_k * jnp.maximum",
        "even_assignments = jnp.maximum",
    ),
    # Attention
    Fault(
        "attention: key heads interleaved",
        "layers/attention_mask.py",
        "q = q.reshape(b, t, g, r, d).transpose(0, 2, 3, 1, 4)",
        "q = q.reshape(b, t, r, g, d).transpose(0, 3, 2, 1, 4)",
    ),
    Fault(
        "attention: logits capped at half",
        "layers/attention_mask.py",
        "logits = logit_cap * jnp.tanh(logits / logit_cap)",
        "logits = 0.5 * logit_cap * jnp.tanh(2 * logits / logit_cap)",
    ),
    # Masks
    Fault(
        "mask: texts of a row see each other",
        "layers/attention_mask.py",
        "allowed = allowed & same",
        "allowed = allowed | same",
    ),
    Fault(
        "mask: window a token too wide",
        "layers/attention_mask.py",
        "return self.window - 1, 0 if",
        "return self.window, 0 if",
    ),
    Fault(
        "mask: a prefix is not seen",
        "layers/attention_mask.py",
        "allowed |= self.prefix[:, None, None, :] > 0",
        "allowed |= self.prefix[:, None, None, :] > 1",
    ),
    # Positions
    Fault(
        "positions: turned backwards",
        "layers/positions/rotary.py",
        "[a * cosines - b * sines, b * cosines + a * sines, rest]",
        "[a * cosines + b * sines, b * cosines + a * sines, rest]",
    ),
    Fault(
        "positions: no ranges of far distances",
        "layers/positions/relative_buckets.py",
        "np.where(distance < exact, distance,",
        "np.where(distance < num_buckets, distance,",
    ),
    # Optimizers and schedules
    Fault(
        "optimizer: norms and biases decay",
        "optim/decay.py",
        '(r"bias", "biases"),\n    (r"scale", "norms"),',
        '(r"bias", "matrices"),\n    (r"scale", "matrices"),',
    ),
    Fault(
        "optimizer: gradient not clipped",
        "optim/optimizers.py",
        "return optax.clip_by_global_norm(self.clip_norm) if",
        "return optax.clip(self.clip_norm) if",
    ),
    Fault(
        "optimizer: an update that is not finite is made",
        "training/train_step.py",
        "jnp.where(finite, new, old)",
        "jnp.where(finite, new, new)",
    ),
    Fault(
        "schedule: cosine falls to zero",
        "optim/schedules.py",
        "optax.cosine_decay_schedule(peak, steps, self.final_fraction)",
        "optax.cosine_decay_schedule(peak, steps)",
    ),
    Fault(
        "schedule: the warm-up begins at zero",
        "optim/schedules.py",
        "start_fraction, steps_to_peak = 1 / max(self.warmup_steps, 1), self.warmup_steps - 1",
        "start_fraction, steps_to_peak = 0.0, self.warmup_steps - 1",
    ),
    # Objectives
    Fault(
        "objective: [MASK] and random tokens change places",
        "data/objectives/masked.py",
        "kind_draws < self.mask_fraction\n",
        "kind_draws > self.mask_fraction\n",
    ),
    Fault(
        "objective: a next token of another text",
        "data/objectives/causal.py",
        "(segment_ids[1:] == segment_ids[:-1]).astype",
        "(segment_ids[1:] >= segment_ids[:-1]).astype",
    ),
    Fault(
        "objective: sentinels of targets begin anew",
        "data/objectives/spans.py",
        "sentinel_positions = np.append(sentinel_positions, len(mask) - 1)",
        "sentinel_positions = np.append(sentinel_positions, len(mask) - 2)",
    ),
    # Accumulation and sharding
    Fault(
        "accumulation: only the last micro-batch",
        "training/train_step.py",
        "return jax.tree.map(jnp.add, total, gradients), values",
        "return jax.tree.map(lambda _, g: g, total, gradients), values",
    ),
    Fault(
        "sharding: keys of a ring one device too far",
        "layers/sequence_parallel.py",
        "(jax.lax.axis_index(LENGTH_AXIS) - step)",
        "(jax.lax.axis_index(LENGTH_AXIS) + step)",
    ),
    Fault(
        "sharding: the batch is not split over fsdp",
        "sharding/axes.py",
        "BATCH_AXES = (DATA_AXIS, PIPELINE_AXIS, FSDP_AXIS, EXPERT_AXIS)",
        "BATCH_AXES = (DATA_AXIS, PIPELINE_AXIS, EXPERT_AXIS)",
    ),
)


def copy(to: pathlib.Path) -> None:
    """Copies the current versions of all files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def checked_by_default() -> list[str]:
    """Returns the test files that `make check` runs."""
    line = ["make", "--silent", "--eval=planted: ; @echo $(FAST)", "planted"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def notices(tree: pathlib.Path, fault: Fault, tests: list[str]) -> str:
    """Returns the first test that fails because of the fault, or "" if none fails."""
    file = tree / "pretrainax" / fault.file
    right = file.read_text()
    file.write_text(right.replace(fault.right, fault.wrong))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        assert bool(failed) == bool(done.returncode), done.stdout[-2000:] + done.stderr[-2000:]
        return failed[0].partition(" - ")[0] if failed else ""
    finally:
        file.write_text(right)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--only", default="", help="words that the name of a fault begins with, with commas")
    flags.add_argument("--tests", default="", help="files or folders; those of `make check`")
    given = flags.parse_args()
    faults = [fault for fault in FAULTS if fault.name.startswith(tuple(given.only.split(",")))]
    tests, missed = given.tests.split() or checked_by_default(), 0
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        copy(tree := pathlib.Path(folder))
        for fault in faults:
            started = time.perf_counter()
            test = notices(tree, fault, tests)
            missed += not test
            print(f"{fault.name}: {test or 'NOT NOTICED'}, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} noticed")


if __name__ == "__main__":
    main()
