"""The configuration of a recurrent model of words that are read by their characters (ELMo)."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Optional

from pretrainax.config.heads import Classify, Kind
from pretrainax.config.kinds import ModelPart, Use
from pretrainax.config.positions import NoPositions

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment
    from pretrainax.config.model import ModelConfig

WORD_LENGTH = 50  # characters of a word, bytes of UTF-8, with the marks of its begin and end (bilm-tf)
# what bilm-tf tells apart: 0, no word; 256 bytes; begin and end of a text, and of a word; what is behind a word's end
NUM_CHARACTERS = 262

# Fields of config.model whose bricks a recurrent model does not have -> what they have to be.
_WITHOUT = {
    "tie_embeddings": False,
    "embedding_dim": None,
    "embedding_norm": False,
    "scale_embeddings": False,
    "num_token_types": 0,
    "latent_attention": None,
    "experts": None,
    "input_convolution": None,
    "masked_lm_head": False,
    "enhanced_mask_decoder": False,
    "generator": None,
}


@dataclasses.dataclass
class Recurrent(ModelPart):
    """LSTMs over words, one from left to right and one from right to left, instead of blocks (ELMo: Peters et al.
    2018, arXiv 1802.05365, section 3). A word's vector is made of its characters (Jozefowicz et al. 2016, arXiv
    1602.02410, section 3.1), so that there is no table of words but that of the softmax.

    The memory of a cell is config.model.d_ff wide, what it says is projected to config.model.d_model.
    """

    character_dim: int = 16  # width of a character's vector
    filters: tuple[int, ...] = (32, 32, 64, 128, 256, 512, 1024)  # of convolutions over one character, over two, …
    highways: int = 2  # layers above the convolutions (Srivastava et al. 2015, arXiv 1505.00387)
    clip: Optional[float] = 3.0  # bound of a cell's memory and of its output; None: no bound

    family: ClassVar[str] = "recurrent"
    objective: ClassVar[str] = "BidirectionalLM"
    unsupported: ClassVar[Mapping[Use, str]] = {
        "generation": "is a recurrent model, which generates no text here: it embeds text and is fine-tuned",
        "distillation": "is recurrent",
        "virtual tokens": "is recurrent and has no table of tokens",
        "sequence parallelism": "is an LSTM, which reads a text word by word",
    }
    task_modules: ClassVar[tuple[str, ...]] = ("scalar_mix",)

    def stream_width(self, model: "ModelConfig") -> int:
        return 2 * model.d_model  # both directions side by side

    def default_classifier(self, num_labels: int, kind: "Kind") -> Classify:
        return Classify(num_labels, kind, pooling="mean", hidden="none")  # each direction ends at another end of a text

    def scaled(self, numerator: int, denominator: int) -> "Recurrent":
        return dataclasses.replace(self, filters=tuple(n * numerator // denominator for n in self.filters))

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.parts: Recurrent", experiment.model
        if self.character_dim < 1 or self.highways < 0:
            yield f"{path}.character_dim is {self.character_dim}, at least 1, and highways {self.highways}, at least 0"
        if not 0 < len(self.filters) <= WORD_LENGTH or min(self.filters) < 1:
            yield f"{path}.filters is {self.filters}: from 1 to {WORD_LENGTH} numbers, each at least 1"
        if self.clip is not None and self.clip <= 0:
            yield f"{path}.clip is {self.clip}, it must be greater than 0; None: nothing is clipped"
        if not isinstance(model.position, NoPositions):
            yield (
                f"config.model.position is {type(model.position).__name__}, and a recurrent model reads words in their "
                "order: set it to NoPositions()"
            )
        for name, value in _WITHOUT.items():
            if getattr(model, name) != value:
                yield f"config.model.{name} is {getattr(model, name)!r}, of a recurrent model it must be {value}"
