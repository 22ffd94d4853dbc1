"""Compares what each process of a run has found by itself: its text, its tokenizer, a model of the hub."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from pretrainax.config import UserError


def check_same(what: str, value: str, advice: str) -> None:
    """Raises UserError in all processes of a run, which call it together, unless they have the same value.

    Args:
      what: begins the line of the error.
      value: of this process, for people.
      advice: ends that line.
    """
    if jax.process_count() == 1:
        return
    own = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(own)  # [processes, 32]
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        numbers = f"{'process' if len(others) == 1 else 'processes'} {', '.join(map(str, others))}"
        raise UserError(
            f"{what} differs between hosts: {numbers} found another than process 0, and process {jax.process_index()} "
            f"has {value}: {advice}"
        )
