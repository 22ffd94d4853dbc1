"""The fixture of small tokenizers of every kind, and the text on which they train."""

import pytest

from pretrainax.tokenization import ByteBPE, Characters, Unigram, WordPiece
from pretrainax.tokenization.base import Tokenizer
from tests.support.text_in_store import another_machine, lines  # noqa: F401

ENGLISH = """The chef cooked the meal. My dog is hairy, and it barks at the neighbours' cat whenever she comes near.
Thank you for inviting me to your party last week! I was happy to meet your friends again.
An American football game was played on the seventh of February at a stadium in the San Francisco Bay Area.
The man went to the store. He bought a gallon of milk. Penguins are flightless birds; they swim very well.
She said: "The phenomenal acceleration of everything is probably unbelievable, unless you measure it twice."
In 1665, Newton watched an apple fall; some 340 years later, 3.14159 still begins with a 3.
"""

# By Li Bai, Wang Zhihuan, Meng Haoran, Wang Wei (8th century).
CHINESE = """床前明月光，疑是地上霜。举头望明月，低头思故乡。
白日依山尽，黄河入海流。欲穷千里目，更上一层楼。
春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。
空山不见人，但闻人语响。返景入深林，复照青苔上。
"""

TEXTS = [line for line in (ENGLISH + CHINESE).splitlines() if line]


@pytest.fixture(scope="session")
def tokenizers_of_all_kinds() -> dict[str, Tokenizer]:
    """Trains on TEXTS: "WordPiece", "ByteBPE" (RoBERTa's special pieces), "Unigram" (100 sentinels), "Characters"."""
    texts = [ENGLISH, CHINESE] * 4
    return {
        "WordPiece": WordPiece(vocab_size=360).build(iter(texts)),
        "ByteBPE": ByteBPE(vocab_size=440, special_pieces="roberta").build(iter(texts)),
        "Unigram": Unigram(vocab_size=455).build(iter(texts)),
        "Characters": Characters().build(iter(texts)),
    }
