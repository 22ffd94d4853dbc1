"""ELMo (Peters et al. 2018, arXiv 1802.05365): a forward and a backward LSTM over character-encoded words.

The published parameter counts (93.6 M, 28.0 M, 13.6 M) exclude the output matrix over words (`unembedding` in this
package), which has another 407 M parameters in the variant `original`. `interop/elmo_files.py` imports the released
weights, which are HDF5 files for TensorFlow. There is no export, because transformers has no class for ELMo.
"""

from pretrainax.config import ModelConfig, NoPositions, Recurrent
from pretrainax.zoo.family import Family, config_variants
from pretrainax.zoo.variants import pick

# variant -> (width of an LSTM's output, width of an LSTM's cell state, number of highway layers)
SIZES = {"original": (512, 4096, 2), "medium": (256, 2048, 1), "small": (128, 1024, 1)}


def elmo(variant: str = "original") -> ModelConfig:
    """Builds the model config of ELMo; raises UserError for an unknown variant."""
    d_model, d_ff, highways = pick("elmo", variant, SIZES)
    return ModelConfig(
        family="recurrent",
        vocab_size=793_471,
        num_layers=2,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=1,
        position=NoPositions(),
        tie_embeddings=False,
        output_bias=True,
        dropout_rate=0.1,
        init_stddev=None,
        parts=(Recurrent(highways=highways),),
    )


FAMILIES = (
    Family(
        name="ELMo",
        prefix="elmo_",
        preset=elmo,
        sizes=SIZES,
        paper="Peters et al. 2018, arXiv 1802.05365",
        objective="language modelling in both directions",
        configs=config_variants("elmo", SIZES),
        huggingface=None,
    ),
)
