"""Checks that all processes of a run use the same inputs: data, tokenizer, and the model from the hub."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from pretrainax.config import UserError


def check_same(what: str, value: str, advice: str) -> None:
    """Raises UserError in all processes unless all have the same `value`; every process must call this function.

    Args:
      what: name of the value, at the start of the error message.
      value: value in this process, as text.
      advice: what the user can do, at the end of the error message.
    """
    if jax.process_count() == 1:
        return
    own = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(own)  # [processes, 32]
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        numbers = f"{'process' if len(others) == 1 else 'processes'} {', '.join(map(str, others))}"
        raise UserError(
            f"{what} differs between hosts: {numbers} found another value than process 0; process "
            f"{jax.process_index()} has {value}: {advice}"
        )
