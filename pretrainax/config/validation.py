"""Finds what is wrong with a config before anything has run: value got, what is allowed, field to set, in one line."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pretrainax.config.auto import AUTO
from pretrainax.config.choice import Choice
from pretrainax.config.experiment import Experiment, LayersConfig
from pretrainax.config.model import FAMILIES, LayerKind, ModelConfig
from pretrainax.config.phases import phases_of, problems_of_phases
from pretrainax.config.values import fields, range_problems, type_problems
from pretrainax.files.errors import UserError, nearest

_READ = ("tokenizer", "data.source")  # files, as these name them
_POSITIVE = (
    "model.vocab_size model.num_layers model.d_model model.d_ff model.num_heads data.sequence_length train.steps "
    "train.global_batch_size train.accumulate train.spike_steps evaluate.every "
    "checkpoint.every checkpoint.keep"
).split()
_NOT_NEGATIVE = (
    "data.workers data.prepare_workers data.keep_bytes train.z_loss train.pipeline_parts train.scan_unroll "
    "train.loss_chunk train.rollback_steps train.max_rollbacks train.log_every evaluate.batches evaluate.average"
).split()

MOST_PROFILED = 100  # steps of one profile


def get(config: object, path: str) -> Any:
    """Returns a field of a part: `get(experiment, "train.steps")`."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def validate(experiment: Experiment, files: bool = True) -> None:
    """Raises one UserError that lists every problem: value got, values allowed, field to set.

    Args:
      files: False where nothing is read: corpus and tokenizer need not be there, and what they say is not asked for.
    """
    problems = list(_problems(experiment, files))
    if problems:
        raise UserError("; ".join(problems))


def complete(experiment: Experiment) -> None:
    """Lets the objective fill in what follows from it, as the head of a task.

    Raises:
      UserError: values that are not of the types of their fields, which an objective takes for granted.
    """
    if problems := [*type_problems(experiment), *_word_problems(experiment)]:
        raise UserError("; ".join(problems))
    experiment.objective.complete(experiment)


def _problems(e: Experiment, files: bool) -> Iterator[str]:
    found = list(type_problems(e)) or list(_problems_of_values(e, files)) or list(e.objective.validation_problems(e))
    yield from found or _phase_problems(e, files)


def _problems_of_values(e: Experiment, files: bool) -> Iterator[str]:
    yield from range_problems(e)
    yield from _word_problems(e)
    yield from _number_problems(e)
    yield from _average_problems(e)
    yield from _attention_problems(e.model)
    yield from _stack_problems(e.model)
    yield from _head_problems(e.model)
    yield from _brick_problems(e.model)
    yield from _layer_problems(e)
    yield from _spike_problems(e)
    yield from _watching_problems(e)
    yield from _choice_problems(e, files)


def _phase_problems(e: Experiment, files: bool) -> Iterator[str]:
    """Yields what is wrong with a run's phases, each of which is a config too; that without them is sound."""
    found = list(problems_of_phases(e))
    yield from found
    for phase in phases_of(e) if e.phases and not found else ():
        for line in _problems_of_values(phase.experiment, files):
            yield f"phase {phase.number} of config.phases ({phase.changes or 'as the config says'}): {line}"


def _word_problems(e: Experiment) -> Iterator[str]:
    for path, hint, value in fields(e):
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            yield f"{path} is {value!r}, {nearest(str(value), typing.get_args(hint))}"


def _choices(config: Any, path: str = "") -> Iterator[tuple[str, Choice]]:
    """Yields path ("data.source") and value of each choice of a config and its parts."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Choice):
            yield f"{path}{field.name}", value
        elif dataclasses.is_dataclass(value):
            yield from _choices(value, f"{path}{field.name}.")


def _choice_problems(e: Experiment, files: bool) -> Iterator[str]:
    for path, choice in _choices(e):
        if files or path not in _READ:
            for line in choice.problems(e):
                yield line.replace("config.objective", f"config.{path}") if path == "evaluate.objective" else line
    for part in (*e.checkpoint.adapt, *e.trackers, *e.callbacks, *e.model.parts):
        yield from part.problems(e)


def _number_problems(e: Experiment) -> Iterator[str]:
    for path in _POSITIVE:
        if (value := get(e, path)) != AUTO and value < 1:
            yield f"config.{path} is {value}, it must be at least 1"
    for path in _NOT_NEGATIVE:
        if (get(e, path) or 0) < 0:
            yield f"config.{path} is {get(e, path)}, it must be at least 0"
    if not e.data.cache_dir:
        yield "config.data.cache_dir is empty, it must name a folder"
    for name in ("dropout_rate", "attention_dropout_rate"):
        if not 0 <= getattr(e.model, name) < 1:
            yield f"config.model.{name} is {getattr(e.model, name)}, it must be in [0, 1)"
    if e.train.accumulate > 0 and e.train.global_batch_size % e.train.accumulate:
        yield (
            f"config.train.global_batch_size {e.train.global_batch_size} is not a multiple of "
            f"config.train.accumulate {e.train.accumulate}"
        )
    if e.mesh.slices < 1:
        yield f"config.mesh.slices is {e.mesh.slices}, it must be at least 1"
    if e.checkpoint.keep_at != "log" and (never := [n for n in e.checkpoint.keep_at if not 0 <= n <= e.train.steps]):
        yield (
            f"config.checkpoint.keep_at has {', '.join(map(str, never))}: they must be steps of the run, from 0 to "
            f"config.train.steps, {e.train.steps}"
        )
    if e.checkpoint.fresh_heads and not e.checkpoint.init_from:
        yield "config.checkpoint.fresh_heads is of heads that config.checkpoint.init_from lacks, which is not set"


def _average_problems(e: Experiment) -> Iterator[str]:
    decay = e.train.ema_decay
    if decay is not None and not 0 < decay < 1:
        yield f"config.train.ema_decay is {decay}, it must be in (0, 1), as 0.999; None: no average is kept"
    if e.evaluate.parameters == "ema" and decay is None:
        yield "config.evaluate.parameters is 'ema', and config.train.ema_decay is None: set it, as 0.999"
    if e.evaluate.average > e.checkpoint.keep:
        yield (
            f"config.evaluate.average is {e.evaluate.average}, and config.checkpoint.keep {e.checkpoint.keep} keeps "
            "fewer checkpoints: raise config.checkpoint.keep"
        )


def _attention_problems(m: ModelConfig) -> Iterator[str]:
    for path, stack in m.sized.items():
        if stack.head_dim is None and stack.num_heads > 0 and stack.d_model % stack.num_heads:
            yield f"{path}.d_model {stack.d_model} is not a multiple of {path}.num_heads {stack.num_heads}"
        if stack.kv_heads < 1 or stack.num_heads % stack.kv_heads:
            yield f"{path}.num_heads {stack.num_heads} is not a multiple of {path}.num_kv_heads {stack.kv_heads}"
    kinds = set(m.layer_pattern)
    if not kinds or kinds - set(typing.get_args(LayerKind)):
        yield f"config.model.layer_pattern is {m.layer_pattern}, it must be a tuple of 'global' and 'local'"
    if ("local" in kinds) != (m.window is not None):
        yield f"config.model.window is {m.window}: it must be set if and only if config.model.layer_pattern has 'local'"
    elif m.window is not None and m.window < 2:
        yield f"config.model.window is {m.window}, it must be at least 2"
    if m.encoder_window is not None and (m.window is None or m.encoder_window < 2):
        yield f"config.model.encoder_window is {m.encoder_window}: at least 2, and beside config.model.window only"


def _stack_problems(m: ModelConfig) -> Iterator[str]:
    families = FAMILIES if m.own_model is None else (m.own_model.family,)
    if m.family not in families:
        yield f"config.model.family is {m.family!r}, {nearest(m.family, families)}"
    for name, unset in (("encoder_window", None), ("separate_embeddings", False)):
        if getattr(m, name) != unset and m.family != "encoder_decoder":
            yield (
                f"config.model.{name} is of an encoder_decoder, config.model.family is {m.family!r}: set it to {unset}"
            )
    if m.num_decoder_layers is not None and (m.num_decoder_layers < 1 or m.family != "encoder_decoder"):
        yield f"config.model.num_decoder_layers is {m.num_decoder_layers}: at least 1, and of an encoder_decoder only"
    if m.embedding_dim is not None and not (m.masked_lm_head or m.replaced_token_head or m.head):
        yield f"config.model.embedding_dim is {m.embedding_dim}, which only a model with a masked_lm_head can have"


def _head_problems(m: ModelConfig) -> Iterator[str]:
    if (m.pair_head or m.replaced_token_head) and m.family != "encoder":
        yield f"config.model.pair_head and replaced_token_head are for an encoder, config.model.family is {m.family!r}"
    if m.replaced_token_head != (m.generator is not None):
        yield "config.model.replaced_token_head learns from config.model.generator: set both or neither"
    pretraining = ("masked_lm_head", "pair_head", "replaced_token_head", "enhanced_mask_decoder")
    if m.head is not None and (others := [f"config.model.{name}" for name in pretraining if getattr(m, name)]):
        yield f"config.model.head is {type(m.head).__name__}, beside which there is no other: set {others} to False"


def _layer_problems(e: Experiment) -> Iterator[str]:
    layers, m = e.layers, e.model
    if layers == LayersConfig():
        return
    if m.generator is not None:
        yield (
            f"config.layers is for a model of one encoder ({layers.describe()}), and config.model.generator makes two "
            "of ELECTRA: leave it as it is, and set it where the discriminator goes on to a task"
        )
    if not 0 < layers.rate_decay <= 1:
        yield f"config.layers.rate_decay is {layers.rate_decay}, it must be in (0, 1]; 1: all layers have one rate"
    for name in ("unfreeze_every", "unfreeze_warmup"):
        if getattr(layers, name) < 0:
            yield f"config.layers.{name} is {getattr(layers, name)}, it must be at least 0"
    if layers.unfreeze_warmup > 0 and layers.unfreeze_every == 0:
        yield (
            f"config.layers.unfreeze_warmup is {layers.unfreeze_warmup}, and no layer waits for it: set "
            "config.layers.unfreeze_every; of all layers together the warm-up is config.schedule.warmup_steps"
        )
    if not 0 <= layers.frozen <= min(m.stack_blocks):
        shared = ", which are one by config.model.share_layers" * m.share_layers
        most = f"{min(m.stack_blocks)}, the blocks of a stack{shared}"
        yield f"config.layers.frozen is {layers.frozen}, it must be from 0 to {most}"


def _spike_problems(e: Experiment) -> Iterator[str]:
    train, kept = e.train, (e.checkpoint.keep - 1) * min(e.checkpoint.every, e.evaluate.every)
    if train.spike_deviations <= 0:
        yield f"config.train.spike_deviations is {train.spike_deviations}, it must be greater than 0"
    if train.spike_window < 2:
        yield f"config.train.spike_window is {train.spike_window}, it must be at least 2"
    if train.on_spike == "rollback" and train.rollback_skip <= train.rollback_steps:
        yield (
            f"config.train.rollback_skip is {train.rollback_skip}, it must be more than config.train.rollback_steps "
            f"{train.rollback_steps}, or the data of the spike would come again"
        )
    if train.on_spike == "rollback" and kept < train.rollback_steps:
        yield (
            f"config.checkpoint.keep {e.checkpoint.keep} holds the last {kept} steps, config.train.rollback_steps is "
            f"{train.rollback_steps}: raise config.checkpoint.keep or config.checkpoint.every"
        )


def _watching_problems(e: Experiment) -> Iterator[str]:
    """Yields what is wrong with `train.stuck_after` and `train.profile_steps`; of more steps no reader opens the trace
    of a large model."""
    given, stuck_after = e.train.profile_steps, e.train.stuck_after
    if stuck_after and not stuck_after >= 60:
        yield f"config.train.stuck_after is {stuck_after}, it must be at least 60 seconds, or 0: never"
    if given and re.fullmatch(r"\d{1,10}:\d{1,10}", given) is None:
        yield f"config.train.profile_steps is {given!r}, it must be its first and its last step, as 10:13"
        return
    steps = e.train.profiled
    if given and not steps:
        yield f"config.train.profile_steps is {given!r}, the last step must not be before the first"
    elif given and (steps[0] < 2 or steps[-1] > e.train.steps):
        yield (
            f"config.train.profile_steps is {given!r}, it must be of steps from 2, as the first one is compiled, to "
            f"config.train.steps, {e.train.steps}"
        )
    elif len(steps) > MOST_PROFILED:
        yield f"config.train.profile_steps is {given!r}, of {len(steps)} steps: set it to at most {MOST_PROFILED}"


def _brick_problems(m: ModelConfig) -> Iterator[str]:
    if m.parallel and (m.norm_at != "pre" or m.family == "encoder_decoder"):
        yield (
            f"config.model.parallel needs norm_at='pre' and one stack, and config.model.norm_at is {m.norm_at!r}, "
            f"family {m.family!r}: set it to False"
        )
    if m.input_convolution is not None and (m.input_convolution < 1 or m.input_convolution % 2 == 0):
        yield f"config.model.input_convolution is {m.input_convolution}, it must be odd"
    if m.input_convolution is not None and m.family != "encoder":
        yield f"config.model.input_convolution is for an encoder, config.model.family is {m.family!r}"
    if m.replaced_token_context and not m.replaced_token_head:
        yield "config.model.replaced_token_context is of a replaced_token_head, which this model does not have"
