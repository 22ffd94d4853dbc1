"""Determines the special tokens that a trained decoder reads around a text, from its training data."""

from pretrainax.config import Experiment
from pretrainax.data.framing import special_token_frame
from pretrainax.data.objectives import CausalLM
from pretrainax.data.row_stream import default_packing
from pretrainax.data.sources import NoSource
from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame


def decoder_frame(experiment: Experiment, vocabulary: Vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens around the texts of a decoder, with which its tokenizer is exported."""
    if experiment.model.head is not None:
        return special_token_frame("decoder", vocabulary)
    objective = experiment.objective.components()[0][1]
    is_causal = isinstance(objective, CausalLM)
    start = leading_token_ids(experiment, vocabulary, is_needed=False) if is_causal else []
    row = RowFrame(tuple(start) or objective.prompt_start(vocabulary))
    return SpecialTokenFrame(row, row)


def is_imported(experiment: Experiment) -> bool:
    """Returns True if the model was imported, so that its tokenizer and not its training data determines the format."""
    return isinstance(experiment.data.source, NoSource)


def leading_token_ids(experiment: Experiment, vocabulary: Vocabulary, is_needed: bool) -> list[int]:
    """Returns the special token ids that a causal decoder reads before a text.

    A decoder that was trained with PretrainAX usually read each document after the separator of the previous document,
    so the result is this separator. The result is [] if training rows contained pieces of documents (`Packing.cuts`),
    or if attention was masked between documents. A task that writes texts defines its own start. For an imported
    decoder, the result is the tokens that its tokenizer adds before a text. A workdir of an older version does not
    record them. Then the result is the BOS token, or [] if BOS and EOS are the same token.

    Args:
      is_needed: whether a token must precede the first token of the text, as for scoring or for an empty prompt. If
        True, an imported model whose tokenizer adds none reads its BOS token or, without one, its separator, such as
        <|endoftext|>, which ends each document in its training data. transformers does not add it before prompts.
    """
    if not is_imported(experiment):
        if vocabulary.separator is not None and _reads_across_documents(experiment):
            return [vocabulary.separator]
        return list(experiment.objective.components()[0][1].prompt_start(vocabulary))
    if vocabulary.frame is not None:
        before = list(vocabulary.frame.single.before)
    else:
        before = [] if vocabulary.bos is None or vocabulary.bos == vocabulary.eos else [vocabulary.bos]
    start = vocabulary.separator if vocabulary.bos is None else vocabulary.bos
    return before or ([start] if is_needed and start is not None else [])


def _reads_across_documents(experiment: Experiment) -> bool:
    """Returns True if training rows could contain several documents that attend to each other.

    In these rows, a document follows the separator of the previous document.
    """
    return any(
        isinstance(objective, CausalLM)
        and not objective.mask_documents
        and not (experiment.data.packing or default_packing(objective)).cuts
        for _, objective in experiment.objective.components()
    )
