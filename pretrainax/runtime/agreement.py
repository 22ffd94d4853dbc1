"""Checks that all processes of a run have the same inputs, such as data, tokenizer, and a model from the hub."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from pretrainax.config import UserError


def check_same(what: str, value: str, advice: str) -> None:
    """Raises UserError in every process if `value` differs between processes; all processes must call this function.

    Args:
      what: name of the value, which begins the error message.
      value: the value in this process.
      advice: what the user can do, which ends the error message.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)  # [processes, 32]
    different = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if different:
        numbers = f"{'process' if len(different) == 1 else 'processes'} {', '.join(map(str, different))}"
        raise UserError(
            f"{what} differs between hosts: {numbers} found another value than process 0; process "
            f"{jax.process_index()} has {value}: {advice}"
        )
