"""The bytes that a step moves through memory at least, on paper, beside which a compiled step is held.

Of one device and update, w bytes a number in the dtype of the run, 4 in float32:

    kept        2 w a number of what a layer must keep: its input, queries, keys and values, attention's result, and
                what is before the activation (of a gated feed-forward two such); written forward, read backward
    logits      2 w a number: they are written, and read once
    parameters  2 · 4 bytes each in a micro-batch: they are read forward and backward
    gradients   2 · 4 bytes each in a micro-batch: they are written, and read by what adds or applies them
    update      parameters, the optimizer's state and the moving average: read and written

Nothing that is read within a cache's reach of where it was written counts twice, so no program comes as low; one that
keeps less, and makes more again, may (`config.train.remat`).
"""

from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.batch import lengths_of
from pretrainax.layers.feed_forward import feed_forwards_of, kinds_of_layers
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.recurrent import RecurrentBlock
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.models.active import predicted_vocabulary
from pretrainax.models.electra import models_of
from pretrainax.planning.activations import local, micro_rows, shapes_of, width_on
from pretrainax.planning.memory import Memory
from pretrainax.sharding.axes import LENGTH_AXIS


def least_bytes(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory) -> dict[str, int]:
    """Returns the bytes of each part of one update; memory: of the same step, whose state's bytes are exact."""
    lengths, passes = lengths_of(shapes_of(experiment)), experiment.train.accumulate
    rows = passes * micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    width = width_on(experiment, platform)
    model = local(experiment, mesh_sizes).model
    kept = sum(_kept(one, lengths.inputs, lengths.targets) for one in models_of(model))
    predicted = lengths.targets * predicted_vocabulary(model)
    state = memory.parameters + memory.optimizer + memory.ema
    parts = {
        "kept": 2 * width * rows * kept,
        "logits": 2 * width * rows * predicted,
        "parameters": 2 * passes * memory.parameters,
        "gradients": 2 * passes * memory.parameters,
        "update": 2 * state,
    }
    return {name: round(size) for name, size in parts.items()}


def _kept(config: ModelConfig, inputs: int, targets: int) -> int:
    """Counts the numbers that the layers keep of one example."""

    if config.recurrent is not None:
        return config.num_layers * inputs * RecurrentBlock.kept(config)

    def of_token(stack: ModelConfig) -> int:
        # input, attention's, inside
        attention = stack.d_model + sum(self_attention_of(stack).kept(stack))
        inside = sum(
            len(kind.numbers) * part.kind.kept(part.config)
            for kind in kinds_of_layers(stack, stack.num_layers)
            for part in feed_forwards_of(kind.config)
        )
        return stack.num_layers * attention + inside

    stacks = zip(config.stacks.values(), (inputs, targets), strict=False)
    kept = sum(length * of_token(stack) for stack, length in stacks)
    if config.family == "encoder_decoder":
        decoder = config.last_stack
        asking, read = MultiHeadAttention.kept(decoder)  # of attention to the encoder
        kept += decoder.num_layers * (targets * asking + inputs * read)
    return kept
