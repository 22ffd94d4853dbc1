"""Defines a config of each family, small enough to train in a test.

`tests/support/tiny.py:t5`, `:bert`, `:gpt`, `:elmo`; the decoder of `:t5_narrow` has different sizes than the encoder.
"""

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    DecoderSizes,
    EvaluateConfig,
    Experiment,
    LearnedPositions,
    ModelConfig,
    NoPositions,
    Recurrent,
    RelativePositionBuckets,
    TrainConfig,
)
from pretrainax.data.objectives import BidirectionalLM, CausalLM, MaskedLM, SpanCorruption
from pretrainax.data.sources import TextFiles
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.tokenization import ByteBPE, Unigram, WordPiece, Words


def get_config(variant: str = "t5") -> Experiment:
    model = ModelConfig(vocab_size=512, num_layers=2, d_model=32, d_ff=64, num_heads=4, position=LearnedPositions(64))
    if variant == "t5_narrow":
        model.separate_embeddings, model.num_decoder_layers, variant = True, 3, "t5"
        model.decoder = DecoderSizes(d_model=24, d_ff=48, num_heads=8, num_kv_heads=4, head_dim=4)
    if variant == "t5":
        model.family, model.position, model.use_bias = "encoder_decoder", RelativePositionBuckets(), False
    if variant == "bert":
        model.family, model.masked_lm_head, model.num_token_types = "encoder", True, 2
    if variant == "elmo":
        model.family, model.parts = "recurrent", (Recurrent(character_dim=4, filters=(8, 8, 16)),)
        model.position, model.tie_embeddings, model.output_bias = NoPositions(), False, True
    tokenizer, objective = {
        "t5": (Unigram(vocab_size=400), SpanCorruption()),
        "bert": (WordPiece(vocab_size=400), MaskedLM()),
        "elmo": (Words(vocab_size=200), BidirectionalLM()),
        "gpt": (ByteBPE(vocab_size=400), CausalLM()),
    }[variant]
    return Experiment(
        model=model,
        tokenizer=tokenizer,
        data=DataConfig(source=TextFiles(path="set by the test"), sequence_length=32, prepare_workers=1),
        objective=objective,
        optimizer=AdamW(learning_rate=3e-3),
        schedule=WarmupCosine(warmup_steps=5),
        train=TrainConfig(steps=40, global_batch_size=8, log_every=1),
        evaluate=EvaluateConfig(every=10, batches=2),
        checkpoint=CheckpointConfig(every=5),
    )
