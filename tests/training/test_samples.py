"""What a model says at the end of a run: spans and masks filled in, texts continued."""

from types import SimpleNamespace
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.outputs import Outputs
from pretrainax.training.samples import samples

WORDS = ["</s>", "<X>", "<Y>", "thank", "you", "for", "inviting", "me", "last"]
ID = {word: i for i, word in enumerate(WORDS)}
TOKENIZER = SimpleNamespace(
    vocabulary=SimpleNamespace(eos=0, pad=0, sentinels=(1, 2)), decode=lambda ids: " ".join(WORDS[i] for i in ids)
)


class Recites(nn.Module):
    """After each token of `line` it is sure of the next one."""

    line: tuple[int, ...]
    config: ClassVar[SimpleNamespace] = SimpleNamespace(vocab_size=len(WORDS))

    def __call__(self, batch, *, deterministic):
        follows = np.zeros((len(WORDS), len(WORDS)), np.float32)
        for token, after in zip(self.line, self.line[1:], strict=False):
            follows[token, after] = 100.0
        tokens = batch["tokens"]
        if "masked_positions" in batch:  # guesses from the token before the mask
            tokens = jnp.take_along_axis(tokens, batch["masked_positions"] - 1, axis=1)
        return Outputs({"lm": LanguageModelOutput(jax.nn.one_hot(tokens, len(WORDS)), jnp.asarray(follows))})


def ids(text: str) -> np.ndarray:
    return np.array([[ID[word] for word in text.split()]], np.int32)


def say(line: str, **batch) -> str:
    batch.setdefault("loss_weights", np.ones(batch["targets"].shape, np.float32))
    (text,) = samples(Recites(tuple(ids(line)[0].tolist())), {}, batch, TOKENIZER)
    return text


def test_spans_are_filled_in_and_a_wrong_one_shows_the_truth():
    text = say(
        "</s> <X> for you <Y> last inviting",
        encoder_tokens=ids("thank you <X> me <Y> </s>"),
        tokens=ids("</s> <X> for inviting <Y> last"),
        targets=ids("<X> for inviting <Y> last </s>"),
    )
    assert text == "thank you [for you ≠ for inviting] me [last] </s>"


def test_masks_are_filled_in_and_a_wrong_one_shows_the_truth():
    text = say(
        "thank you me inviting",
        tokens=ids("thank </s> me </s> last"),
        masked_positions=np.array([[1, 3, 1]], np.int32),
        targets=ids("you last </s>"),
        loss_weights=np.array([[1, 1, 0]], np.float32),  # the third slot is empty
    )
    assert text == "thank [you] me [inviting ≠ last] last"


def test_a_text_is_continued_from_its_first_half():
    text = say("thank you for inviting me last", tokens=ids("thank you </s> </s>"), targets=ids("you for for for"))
    assert text == "thank you ⟶ for inviting"


def test_a_text_is_continued_from_its_prefix_and_no_farther_than_its_end():
    text = say(
        "thank you for inviting me last",
        tokens=ids("thank you for </s> </s> thank last"),
        targets=ids("you for inviting me last last last"),
        segment_ids=np.array([[1, 1, 1, 1, 1, 2, 2]], np.int32),
        prefix_mask=np.array([[1, 1, 1, 0, 0, 1, 0]], np.int32),
    )
    assert text == "thank you for ⟶ inviting me"


def test_a_row_without_sentinels_is_answered_as_a_whole():
    text = say(
        "</s> thank you for me",
        encoder_tokens=ids("inviting me </s> </s>"),
        encoder_segment_ids=np.array([[1, 1, 1, 0]], np.int32),
        tokens=ids("</s> thank you inviting </s>"),
        targets=ids("thank you inviting </s> </s>"),
        segment_ids=np.array([[1, 1, 1, 1, 0]], np.int32),
    )
    assert text == "inviting me </s> ⟶ [thank you for ≠ thank you inviting]"


def test_of_a_packed_row_the_first_example_is_shown():
    text = say(
        "thank you me inviting",
        tokens=ids("thank </s> me </s> last"),
        segment_ids=np.array([[1, 1, 2, 2, 2]], np.int32),
        masked_positions=np.array([[1, 3]], np.int32),
        targets=ids("you last"),
    )
    assert text == "thank [you]"
