"""Verifies that PretrainAX and transformers compute the same model from a Hugging Face directory.

`verify` compares token ids, the interpretation of the config files, the outputs for probe rows, and text from greedy
decoding. The functions import transformers and torch on first use.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Optional

from pretrainax.config import UserError
from pretrainax.inference.verification.comparison import Comparison, Verification, not_compared
from pretrainax.inference.verification.outputs import compare_outputs, memory_problem
from pretrainax.inference.verification.reference import quiet, versions
from pretrainax.inference.verification.settings import compare_config, compare_dtype, compare_generation
from pretrainax.inference.verification.subject import Subject, open_subject
from pretrainax.inference.verification.tokens import compare_tokens
from pretrainax.interop.sentence_transformers import MODULES

__all__ = ["Comparison", "Verification", "verify"]
NOT_INSTALLED = "transformers or torch is not installed: pip install 'pretrainax[parity]'"


def verify(
    directory: str | os.PathLike[str],
    *,
    model: Optional[str | os.PathLike[str]] = None,
    base: Optional[str | os.PathLike[str]] = None,
    check_memory: bool = True,
) -> Verification:
    """Compares a Hugging Face directory in transformers with the same model in PretrainAX.

    Both compute in float32; transformers runs on the CPU.

    Args:
      directory: a Hugging Face directory, a PEFT directory, or a model of the Hub (hf:org/name[@revision]).
      model: the run into which `directory` was imported, or, for a PEFT directory, also the run from which it was
        exported. PretrainAX then loads this run instead of `directory`.
      base: base model of an adapter that does not name it.
      check_memory: whether to omit the comparison of outputs if the machine has too little memory.

    Raises:
      UserError: transformers or torch is not installed, or PretrainAX does not support the model.
    """
    if (found := versions()) is None:
        raise UserError(NOT_INSTALLED)
    started = time.perf_counter()
    run, base_model = (None if path is None else os.fspath(path) for path in (model, base))
    with quiet(), open_subject(os.fspath(directory), run, base_model) as subject:
        name = f"{directory} in {found}, and {subject.origin.description} in PretrainAX"
        return Verification(name, tuple(_comparisons(subject, check_memory)), time.perf_counter() - started)


def _comparisons(subject: Subject, check_memory: bool) -> Iterator[Comparison]:
    """Yields all comparisons; if a comparison is not possible, its result has the reason."""
    parts: list[tuple[str, Callable[[Subject], Iterator[Comparison]]]] = []
    if subject.adapter is None:  # an adapter uses the files of its base model
        parts = [("token ids", compare_tokens), ("config.json", compare_config), ("dtype", compare_dtype)]
    parts.append(("generation settings", compare_generation))
    problem = memory_problem(subject) if check_memory else None
    if problem is None:
        parts.append(("outputs", compare_outputs))
    for what, compare in parts:
        try:
            yield from compare(subject)
        except UserError as e:
            yield not_compared(what, str(e))
    if problem is not None:
        yield not_compared("outputs and greedy tokens", problem)
    if os.path.exists(os.path.join(subject.directory, MODULES)):
        yield not_compared("sentence-transformers", "the hidden states below its pooling are compared")
