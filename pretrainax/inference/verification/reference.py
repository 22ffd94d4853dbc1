"""Runs a model in transformers: the outputs of its class for rows of token ids, and its generated text."""

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from pretrainax.config import Classify, ModelConfig, RandomBlocks, SlidingWindows, Tag, UserError
from pretrainax.data.batch import HostBatch
from pretrainax.inference.verification.subject import Subject

if TYPE_CHECKING:
    import torch
    import transformers

# Attribute of a transformers output -> name of the array in `Arrays`.
_OUTPUTS = {
    "prediction_logits": "logits",
    "logits": "logits",
    "seq_relationship_logits": "pair logits",
    "sop_logits": "pair logits",
    "start_logits": "span logits",
    "encoder_last_hidden_state": "hidden states",
    "last_hidden_state": "hidden states",
}
PER_TOKEN = ("logits", "span logits", "hidden states")  # arrays [B, T, …]; others are [B, …]
Arrays = Mapping[str, np.ndarray]  # name of an output -> array


class Continuation(NamedTuple):
    """A text that transformers generated."""

    ids: list[int]  # without the prompt and the decoder start token
    scores: np.ndarray  # processed logits before each id, [n, V]


class Reference:
    """A model of transformers in float32 on the CPU."""

    def __init__(self, subject: Subject):
        """Loads the model.

        Raises:
          UserError: transformers lacks the class, or does not load the model.
        """
        import transformers

        self._subject, name = subject, subject.architecture
        self._model: Any  # a model of transformers or peft, whose methods depend on the class
        if (model_class := getattr(transformers, name, None)) is None:
            raise UserError(f"transformers has no class {name}")
        model = subject.model
        options: dict = {"dtype": "float32", "attn_implementation": "eager"}
        if model.experts is not None:  # the other implementations support only some widths
            options["experts_implementation"] = "eager"
        if subject.adapter is not None and isinstance(model.head, (Classify, Tag)):
            options["num_labels"] = int(model.head.num_labels)
        try:
            self._model, info = model_class.from_pretrained(
                subject.directory, output_loading_info=True, local_files_only=True, use_safetensors=True, **options
            )
            self.untaken = _untaken(info, subject)
            if subject.adapter is not None:
                self._model = _with_adapter(self._model, subject.adapter)
        except Exception as e:  # from transformers, torch, safetensors or peft
            raise UserError(f"{name} of transformers does not load it: {type(e).__name__}: {e}") from e
        self._model.eval()

    def outputs(self, batch: HostBatch) -> Arrays:
        """Computes the outputs for a batch, by the names of `_OUTPUTS`; arrays per token are [B, T, …]."""
        import torch

        with torch.no_grad():
            out = self._model(**model_inputs(self._subject.model, self._model, batch))
        if "encoder_last_hidden_state" in out and not self._subject.is_bare:
            out = {name: x for name, x in out.items() if "last_hidden_state" not in name}
        found: dict[str, np.ndarray] = {}
        for key, name in _OUTPUTS.items():
            if key in out and name not in found:
                found[name] = out[key].float().numpy()
        if "span logits" in found:
            found["span logits"] = np.stack([found["span logits"], out["end_logits"].numpy()], axis=-1)
        length = batch["tokens"].shape[1]  # virtual tokens of prompt tuning precede the tokens
        return {name: x[:, -length:] if name in PER_TOKEN and x.ndim > 1 else x for name, x in found.items()}

    def generate(self, ids: np.ndarray, new_tokens: int, banned: Sequence[int]) -> Continuation:
        """Generates a text after the ids of a prompt [n], greedily, with the settings of the model's files.

        Args:
          banned: ids of the model that the tokenizer lacks.
        """
        import torch
        from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

        inputs = torch.from_numpy(ids.astype(np.int64))[None]
        options = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": new_tokens}
        if banned:
            options["logits_processor"] = LogitsProcessorList([SuppressTokensLogitsProcessor([*banned])])
        with torch.no_grad():
            out = self._model.generate(
                inputs=inputs,
                attention_mask=torch.ones_like(inputs),
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        skipped = 1 if self._subject.model.family == "encoder_decoder" else inputs.shape[1]
        return Continuation(out.sequences[0, skipped:].tolist(), torch.cat(out.scores).float().numpy())

    def close(self) -> None:
        """Frees the memory of the parameters before PretrainAX allocates its parameters."""
        del self._model
        gc.collect()


def model_inputs(
    config: ModelConfig, model: "transformers.PreTrainedModel", batch: HostBatch
) -> dict[str, "torch.Tensor"]:
    """Converts a batch to the arguments of a transformers model.

    A class with a task head of an encoder-decoder shifts the decoder inputs itself. A class for multiple choice reads
    [B, choices, T].
    """
    import torch

    tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in batch.items()}
    two_stacks = config.family == "encoder_decoder"
    side = "encoder_" if two_stacks else ""
    mask = (tensors[f"{side}segment_ids"] > 0).long()
    arguments = {"input_ids": tensors[f"{side}tokens"], "attention_mask": mask}
    if two_stacks and config.head is None:
        arguments["decoder_input_ids"] = tensors["tokens"]
        arguments["decoder_attention_mask"] = (tensors["segment_ids"] > 0).long()
    if "token_types" in tensors and config.num_token_types > 1 and "question" not in tensors:
        arguments["token_type_ids"] = tensors["token_types"]  # classes that read a question derive the types
    if isinstance(config.head, Classify) and config.head.kind == "choice":
        arguments = {name: _split_choices(x, tensors["segment_ids"]) for name, x in arguments.items()}
    return arguments | sparse_inputs(config, model, tensors)


def _split_choices(x: "torch.Tensor", segment_ids: "torch.Tensor") -> "torch.Tensor":
    """Splits the choices of each row, [B, T] -> [B, choices, T of the longest choice], padded with zeros."""
    import torch

    choices = range(1, int(segment_ids.max()) + 1)
    parts = [row[ids == choice] for row, ids in zip(x, segment_ids, strict=True) for choice in choices]
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return padded.reshape(len(x), len(choices), -1)


def sparse_inputs(
    config: ModelConfig, model: "transformers.PreTrainedModel", tensors: Mapping[str, "torch.Tensor"]
) -> dict[str, "torch.Tensor"]:
    """Returns the arguments of a model with sparse attention, and sets whether it draws random blocks.

    transformers' Longformer has global tokens only at the positions that the caller requests. Its BigBird draws blocks
    only in training mode.
    """
    match config.sparse_attention:
        case SlidingWindows(global_tokens="first"):
            return {"global_attention_mask": (tensors["positions"] == 0).long()}
        case RandomBlocks(drawn=drawn):
            for module in model.modules():
                if type(module).__name__ == "BigBirdBlockSparseAttention":
                    module.train(drawn == "always")
    return {}


def _untaken(info: Mapping[str, Iterable], subject: Subject) -> list[str]:
    """Lists the tensors that a class lacks, that the files lack, or whose shapes differ.

    Args:
      info: the loading information of `from_pretrained`.
    """
    # The pooler of a class without heads does not affect its hidden states.
    unread = re.compile("|".join((*subject.family.ignored, r"pooler\..*" if subject.is_bare else "(?!)")))
    missing = [name for name in info["missing_keys"] if not unread.fullmatch(name)]
    if subject.adapter is not None:  # the adapter contains the head
        missing = []
    zeros = subject.family.zeros(subject.model)
    unexpected = [name for name in info["unexpected_keys"] if not unread.fullmatch(name) and name not in zeros]
    return [
        *(f"the files lack {name}, which transformers initializes randomly" for name in sorted(missing)),
        *(f"transformers ignores {name}" for name in sorted(unexpected) if subject.adapter is None),
        *(f"{name} has another shape in transformers" for name in sorted(map(str, info["mismatched_keys"]))),
    ]


def _with_adapter(model: "transformers.PreTrainedModel", adapter: str) -> "torch.nn.Module":
    """Adds the adapter of a PEFT directory to a transformers model."""
    import peft

    adapted = peft.PeftModel.from_pretrained(model, adapter)
    # PEFT's wrapper for question answering drops the token types.
    return adapted.get_base_model() if str(adapted.peft_type) in ("PeftType.LORA", "PeftType.IA3") else adapted


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the warnings and progress bars of transformers."""
    from transformers import logging

    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()


def versions() -> Optional[str]:
    """Returns the versions of transformers and torch, or None if one of them is not installed."""
    import importlib.metadata

    try:
        return f"transformers {importlib.metadata.version('transformers')}, torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return None
