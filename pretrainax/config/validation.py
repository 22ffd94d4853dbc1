"""Validates a config before a run; error messages state the value, the allowed values and the field to set."""

import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pretrainax.config.auto import AUTO
from pretrainax.config.budget import RunBudget
from pretrainax.config.choice import Choice
from pretrainax.config.experiment import Experiment, LayersConfig
from pretrainax.config.heads import HeadConfig
from pretrainax.config.model import FAMILIES, LayerKind, ModelConfig
from pretrainax.config.phases import phases_of, problems_of_phases
from pretrainax.config.positions import NoPositions, RotaryPositions
from pretrainax.config.values import fields, range_problems, type_problems
from pretrainax.files.errors import UserError, nearest

_READS_FILES = ("tokenizer", "data.source")  # fields whose checks read files
_RANGES = (  # allowed values in words, whether a number is allowed, and the paths of the fields
    (
        "at least 1",
        lambda number: number >= 1,
        "model.vocab_size model.num_layers model.d_model model.d_ff model.num_heads data.sequence_length "
        "train.global_batch_size train.accumulate train.spike_steps checkpoint.keep",
    ),
    (
        "at least 0",
        lambda number: number >= 0,
        "model.norm_epsilon model.num_token_types data.workers data.prepare_workers data.keep_bytes train.z_loss "
        "train.pipeline_microbatches train.scan_unroll train.loss_chunk train.rollback_steps train.max_rollbacks "
        "train.log_every evaluate.every evaluate.batches evaluate.task_examples evaluate.average checkpoint.every",
    ),
    (
        "in [0, 1)",
        lambda number: 0 <= number < 1,
        "model.dropout_rate model.attention_dropout_rate train.label_smoothing",
    ),
    ("at least 1; None selects d_model", lambda number: number >= 1, "model.embedding_dim"),
    ("at least 1; None never stops", lambda number: number >= 1, "evaluate.patience"),
    (
        "above 0; None disables it",
        lambda number: number > 0,
        "model.attention_logit_cap model.final_logit_cap model.gate_limit",
    ),
    (
        "above 0; None selects the default",
        lambda number: number > 0,
        "model.attention_scale model.logit_scale model.init_stddev",
    ),
)

MAX_PROFILED_STEPS = 100  # maximum number of steps in one profile


def get(config: object, path: str) -> Any:
    """Returns the value of a nested config field: `get(experiment, "train.steps")`."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def validate(experiment: Experiment, files: bool = True) -> None:
    """Raises a UserError that lists all problems if a config is invalid.

    For each problem, the message states the value, the allowed values, and the field to set.

    Args:
      experiment: the config.
      files: whether to check the files of the dataset and of the tokenizer; if False, they may be missing.
    """
    problems = list(_problems(experiment, files))
    if problems:
        raise UserError("; ".join(problems))


def model_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each invalid value of `e.model`, which was read from a file, except in its head."""
    if problems := [*type_problems(e), *range_problems(e), *_literal_problems(e)]:
        yield from problems
        return
    yield from _number_problems(e)
    yield from _attention_problems(e.model)
    yield from _stack_problems(e.model)
    yield from _component_problems(e.model)
    for _, choice in _choices(e.model):
        yield from choice.problems(e) if not isinstance(choice, HeadConfig) else ()


def complete(experiment: Experiment) -> None:
    """Completes a config in place: the objective sets the fields that depend on it, for example the task head.

    Raises:
      UserError: a value has the wrong type or is not an allowed literal, which the objective itself does not check.
    """
    if problems := [*type_problems(experiment), *_literal_problems(experiment)]:
        raise UserError("; ".join(problems))
    experiment.objective.complete(experiment)


def _problems(e: Experiment, files: bool) -> Iterator[str]:
    problems = list(type_problems(e)) or list(_problems_of_values(e, files)) or list(e.objective.validation_problems(e))
    yield from problems or list(e.tokenizer.vocabulary_problems(e)) or _phase_problems(e, files)


def _problems_of_values(e: Experiment, files: bool) -> Iterator[str]:
    """Yields an error message for each invalid value in a config whose value types have already been checked."""
    yield from range_problems(e)
    yield from _literal_problems(e)
    yield from _number_problems(e)
    yield from _length_problems(e)
    yield from _average_problems(e)
    yield from _products_problems(e)
    yield from _attention_problems(e.model)
    yield from _stack_problems(e.model)
    yield from _head_problems(e.model)
    yield from _component_problems(e.model)
    yield from _unused_problems(e.model)
    yield from _layer_problems(e)
    yield from _spike_problems(e)
    yield from _monitoring_problems(e)
    yield from _choice_problems(e, files)


def _phase_problems(e: Experiment, files: bool) -> Iterator[str]:
    """Yields an error message for each problem in a phase's config; the run's own config must be valid."""
    problems = list(problems_of_phases(e))
    yield from problems
    for phase in phases_of(e) if e.phases and not problems else ():
        lines = list(_problems_of_values(phase.experiment, files))
        for line in lines or e.tokenizer.vocabulary_problems(phase.experiment):
            yield f"phase {phase.number} of config.phases ({phase.changes or 'as the config says'}): {line}"


def _literal_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each Literal field with a value that is not allowed."""
    for path, hint, value in fields(e):
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            yield f"{path} is {value!r}, {nearest(str(value), typing.get_args(hint))}"


def _choices(config: Any, path: str = "") -> Iterator[tuple[str, Choice]]:
    """Yields (path, value) for each config field that holds a Choice; a path is, for example, "data.source"."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Choice):
            yield f"{path}{field.name}", value
        elif dataclasses.is_dataclass(value):
            yield from _choices(value, f"{path}{field.name}.")


def _choice_problems(e: Experiment, files: bool) -> Iterator[str]:
    for path, choice in _choices(e):
        if files or path not in _READS_FILES:
            for line in choice.problems(e):
                yield line.replace("config.objective", f"config.{path}") if path == "evaluate.objective" else line
    for item in (*e.checkpoint.adapt, *e.trackers, *e.callbacks, *e.model.parts):
        yield from item.problems(e)


def _number_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each out-of-range number and for each invalid combination of related settings."""
    for allowed, is_allowed, paths in _RANGES:
        for path in paths.split():
            if (value := get(e, path)) not in (None, AUTO) and not is_allowed(value):
                yield f"config.{path} is {value}, it must be {allowed}"
    if not e.data.cache_dir:
        yield "config.data.cache_dir is empty, it must be the path of a folder"
    if e.train.accumulate > 0 and e.train.global_batch_size % e.train.accumulate:
        yield (
            f"config.train.global_batch_size {e.train.global_batch_size} is not a multiple of "
            f"config.train.accumulate {e.train.accumulate}"
        )
    if e.mesh.slices < 1:
        yield f"config.mesh.slices is {e.mesh.slices}, it must be at least 1"
    last = e.train.steps or math.inf
    if e.checkpoint.keep_at != "log" and (invalid := [n for n in e.checkpoint.keep_at if not 0 <= n <= last]):
        yield (
            f"config.checkpoint.keep_at has {', '.join(map(str, invalid))}: steps must be from 0 to "
            f"config.train.steps, {e.train.steps}"
        )
    if e.checkpoint.fresh_heads and not e.checkpoint.init_from:
        yield "config.checkpoint.fresh_heads requires config.checkpoint.init_from, which is not set"


def _length_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each problem with the length of the run, `train.steps` or `train.budget`."""
    steps, budget = e.train.steps, e.train.budget
    try:
        RunBudget.parse("1 epoch" if budget is None else budget)
    except ValueError as error:
        yield f"config.train.budget is {budget!r}, {error}"
    else:
        yield from epoch_problems(e)
    if steps < 0 or (steps == 0 and budget is None):
        yield f"config.train.steps is {steps}, it must be at least 1, or config.train.budget must be set"
    if steps > 0 and budget is not None:
        yield f"config.train.steps is {steps} and config.train.budget is {budget!r}: set only one of them"
    if steps == 0 and e.phases:
        yield "config.train.budget does not support config.phases: set config.train.steps"


def epoch_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message if steps or intervals follow from epochs, but the rows have no common epoch.

    The budget must be valid.
    """
    has_epochs = e.train.budget is None or RunBudget.parse(e.train.budget).unit == "epochs"
    needs_epoch = has_epochs and 0 in (e.train.steps, e.evaluate.every, e.checkpoint.every)
    sources = e.data.source.components() if needs_epoch else ()
    if sum(len(e.objective.components(source.pairs)) for source in sources) > 1:
        yield (
            "config.train.budget in epochs, and evaluate.every or checkpoint.every 0, need an epoch, but "
            "config.data.source and config.objective mix several streams of rows: set config.train.steps and both "
            "intervals"
        )


def _average_problems(e: Experiment) -> Iterator[str]:
    decay = e.train.ema_decay
    if decay is not None and not 0 < decay < 1:
        yield f"config.train.ema_decay is {decay}, it must be in (0, 1), such as 0.999; None disables the average"
    if e.evaluate.parameters == "ema" and decay is None:
        yield "config.evaluate.parameters is 'ema', and config.train.ema_decay is None: set it, for example to 0.999"
    if e.evaluate.average > e.checkpoint.keep:
        yield (
            f"config.evaluate.average is {e.evaluate.average}, and config.checkpoint.keep is {e.checkpoint.keep}: "
            "increase config.checkpoint.keep to at least the same number"
        )


def _products_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each setting that does not support 8-bit products."""
    products = e.train.products
    if e.train.products_in_head and not products:
        yield "config.train.products_in_head is True, and config.train.products is '': set it to fp8 or int8"
    if products and e.model.family not in FAMILIES:
        yield f"config.train.products is {products!r}, and {e.model.family} models do not support it: set it to ''"


def _attention_problems(m: ModelConfig) -> Iterator[str]:
    """Yields an error message for each problem with the attention settings: head counts, layer pattern and windows."""
    for path, stack in m.sized.items():
        if stack.head_dim is None and stack.num_heads > 0 and stack.d_model % stack.num_heads:
            yield f"{path}.d_model {stack.d_model} is not a multiple of {path}.num_heads {stack.num_heads}"
        for name in ("num_kv_heads", "head_dim"):
            if (value := getattr(stack, name)) is not None and value < 1:  # None stands for the default
                yield f"{path}.{name} is {value}, it must be at least 1, or None"
        if stack.kv_heads > 0 and stack.num_heads % stack.kv_heads:
            yield f"{path}.num_heads {stack.num_heads} is not a multiple of {path}.num_kv_heads {stack.kv_heads}"
    kinds = set(m.layer_pattern)
    if not kinds or kinds - set(typing.get_args(LayerKind)):
        yield f"config.model.layer_pattern is {m.layer_pattern}, it must be a tuple of 'global' and 'local'"
    if ("local" in kinds) != (m.window is not None):
        yield f"config.model.window is {m.window}: it must be set if and only if config.model.layer_pattern has 'local'"
    elif m.window is not None and m.window < 2:
        yield f"config.model.window is {m.window}, it must be at least 2"
    if m.encoder_window is not None and (m.window is None or m.encoder_window < 2):
        yield f"config.model.encoder_window is {m.encoder_window}: it must be at least 2, with config.model.window set"


def _stack_problems(m: ModelConfig) -> Iterator[str]:
    """Yields an error message for an invalid model family and for each field that the family does not support."""
    families = FAMILIES if m.own_model is None else (m.own_model.family,)
    if m.family not in families:
        yield f"config.model.family is {m.family!r}, {nearest(m.family, families)}"
    for name, unset in (("encoder_window", None), ("separate_embeddings", False)):
        if getattr(m, name) != unset and m.family != "encoder_decoder":
            yield (
                f"config.model.{name} requires an encoder_decoder, config.model.family is {m.family!r}: "
                f"set it to {unset}"
            )
    if m.num_decoder_layers is not None and (m.num_decoder_layers < 1 or m.family != "encoder_decoder"):
        yield f"config.model.num_decoder_layers is {m.num_decoder_layers}: it must be at least 1, in an encoder_decoder"
    if m.embedding_dim is not None and not (m.masked_lm_head or m.replaced_token_head or m.head):
        yield f"config.model.embedding_dim is {m.embedding_dim}, which requires a masked_lm_head"


def _head_problems(m: ModelConfig) -> Iterator[str]:
    if (m.pair_head or m.replaced_token_head) and m.family != "encoder":
        yield f"config.model.pair_head and replaced_token_head require an encoder, config.model.family is {m.family!r}"
    if m.replaced_token_head != (m.generator is not None):
        yield "config.model.replaced_token_head requires config.model.generator: set both or neither"
    pretraining = ("masked_lm_head", "pair_head", "replaced_token_head", "enhanced_mask_decoder")
    if m.head is not None and (conflicts := [f"config.model.{name}" for name in pretraining if getattr(m, name)]):
        yield (
            f"config.model.head is {type(m.head).__name__}, which excludes others: set {', '.join(conflicts)} to False"
        )


def _layer_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each problem in config.layers."""
    layers, m = e.layers, e.model
    if layers == LayersConfig():
        return
    if m.generator is not None:
        yield (
            f"config.layers ({layers.describe()}) does not support config.model.generator, which adds a second "
            "encoder: use the default, and set config.layers when the discriminator is fine-tuned"
        )
    if not 0 < layers.rate_decay <= 1:
        yield f"config.layers.rate_decay is {layers.rate_decay}, it must be in (0, 1]; 1 gives all layers the same rate"
    for name in ("unfreeze_every", "unfreeze_warmup"):
        if getattr(layers, name) < 0:
            yield f"config.layers.{name} is {getattr(layers, name)}, it must be at least 0"
    if layers.unfreeze_warmup > 0 and layers.unfreeze_every == 0:
        yield (
            f"config.layers.unfreeze_warmup is {layers.unfreeze_warmup}, which requires "
            "config.layers.unfreeze_every. For a warmup of all layers set config.schedule.warmup_steps"
        )
    if not 0 <= layers.frozen <= min(m.stack_blocks):
        sharing = ", which config.model.share_layers reduces to 1" * m.share_layers
        limit = f"{min(m.stack_blocks)}, the number of blocks of a stack{sharing}"
        yield f"config.layers.frozen is {layers.frozen}, it must be from 0 to {limit}"


def _spike_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each problem in the loss-spike and rollback settings."""
    train, covered_steps = e.train, (e.checkpoint.keep - 1) * min(e.checkpoint.every, e.evaluate.every)
    if train.spike_deviations <= 0:
        yield f"config.train.spike_deviations is {train.spike_deviations}, it must be greater than 0"
    if train.spike_window < 2:
        yield f"config.train.spike_window is {train.spike_window}, it must be at least 2"
    if train.on_spike == "rollback" and train.rollback_skip <= train.rollback_steps:
        yield (
            f"config.train.rollback_skip is {train.rollback_skip}, it must be more than config.train.rollback_steps "
            f"{train.rollback_steps}, or the batches of the spike would repeat"
        )
    if train.on_spike == "rollback" and 0 < covered_steps < train.rollback_steps:
        yield (
            f"config.checkpoint.keep {e.checkpoint.keep} covers the last {covered_steps} steps, "
            f"config.train.rollback_steps is {train.rollback_steps}: increase config.checkpoint.keep or "
            "config.checkpoint.every"
        )


def _monitoring_problems(e: Experiment) -> Iterator[str]:
    """Yields an error message for each invalid value of `train.stuck_after` and `train.profile_steps`.

    A profile has at most MAX_PROFILED_STEPS steps, because trace viewers cannot open longer profiles of a large model.
    """
    profile_steps, stuck_after = e.train.profile_steps, e.train.stuck_after
    if stuck_after and not stuck_after >= 60:
        yield f"config.train.stuck_after is {stuck_after}, it must be at least 60 seconds, or 0 to disable it"
    if profile_steps and re.fullmatch(r"\d{1,10}:\d{1,10}", profile_steps) is None:
        yield f"config.train.profile_steps is {profile_steps!r}, it must be the first and last step, such as 10:13"
        return
    steps = e.train.profiled
    if profile_steps and not steps:
        yield f"config.train.profile_steps is {profile_steps!r}, the last step must not be before the first"
    elif profile_steps and (steps[0] < 2 or steps[-1] > (e.train.steps or math.inf)):
        yield (
            f"config.train.profile_steps is {profile_steps!r}, steps must be from 2, because the first step compiles, "
            f"to config.train.steps, {e.train.steps}"
        )
    elif len(steps) > MAX_PROFILED_STEPS:
        yield (
            f"config.train.profile_steps is {profile_steps!r}, {len(steps)} steps: the maximum is {MAX_PROFILED_STEPS}"
        )


def _component_problems(m: ModelConfig) -> Iterator[str]:
    if m.parallel and (m.norm_at != "pre" or m.family == "encoder_decoder"):
        yield (
            f"config.model.parallel requires norm_at='pre' and one stack, config.model.norm_at is {m.norm_at!r} and "
            f"family is {m.family!r}: set parallel to False"
        )
    if m.input_convolution is not None and (m.input_convolution < 1 or m.input_convolution % 2 == 0):
        yield f"config.model.input_convolution is {m.input_convolution}, it must be odd"
    if m.input_convolution is not None and m.family != "encoder":
        yield f"config.model.input_convolution requires an encoder, config.model.family is {m.family!r}"
    if m.replaced_token_context and not m.replaced_token_head:
        yield "config.model.replaced_token_context requires a replaced_token_head, which is False"


def _unused_problems(m: ModelConfig) -> Iterator[str]:
    """Yields an error message for each field that is set and has no effect.

    Models that are read from files may have such fields, because they do no harm there.
    """
    rows = (  # field, its default, whether it has an effect, and the requirement
        ("gate_limit", None, m.gated, "config.model.gated=True"),
        ("scale_tied_logits", False, m.tie_embeddings, "config.model.tie_embeddings=True"),
        ("qk_norm_heads", "each", m.qk_norm, "config.model.qk_norm=True"),
        ("norm_starts_stream", False, m.norm_at in ("pre", "both"), "config.model.norm_at='pre' or 'both'"),
        ("num_token_types", 0, m.family == "encoder", "an encoder"),
        ("masked_lm_head", False, m.generator is None, "config.model.generator=None"),
    )
    if isinstance(m.position, RotaryPositions):
        is_local = "local" in m.layer_pattern
        rows += (("position.local_theta", None, is_local, "'local' in config.model.layer_pattern"),)
    if m.experts is not None:
        rows += (("experts.group_score", "best", m.experts.groups is not None, "config.model.experts.groups"),)
    for name, default, has_effect, requirement in rows:
        if (value := get(m, name)) != default and not has_effect:
            yield f"config.model.{name} is {value!r}, which requires {requirement}: set it to {default!r}"
    if m.experts is not None and m.experts.top_k == 1 and m.experts.normalized:
        yield (
            "config.model.experts.normalized is True, and with config.model.experts.top_k 1 all weights are 1, so that "
            "the loss does not train the router: set normalized to False"
        )
    is_bidirectional = m.family in ("encoder", "encoder_decoder")
    if isinstance(m.position, NoPositions) and is_bidirectional and m.input_convolution is None:
        yield (
            "config.model.position is NoPositions, and without positions an encoder ignores the order of tokens: "
            "set it, for example to RotaryPositions()"
        )
