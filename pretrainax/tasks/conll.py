"""Defines named tasks for the word-level datasets of CoNLL: named entities (CoNLL-2003) and chunks (CoNLL-2000)."""

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.glue import NamedTask
from pretrainax.tasks.token_classification import TokenClassification


def _conll(name: str, field: str, kinds: str, examples: int, valid: str | None) -> NamedTask:
    """Builds the task of a CoNLL dataset.

    Args:
      name: name of the dataset on the Hugging Face Hub, below eriktks/.
      field: the field with the tags. The tag numbers follow the order O, then B-X and I-X for each kind X of span.
      kinds: the kinds of spans, separated by spaces.
      examples: number of training examples.
      valid: name of the validation split. If None, a tenth of the training split is held out.
    """
    labels = ("O", *(f"{position}-{kind}" for kind in kinds.split() for position in "BI"))
    # The hub's main branch has loading scripts, which are not executed. Its convert branch has the records as Parquet.
    source = HuggingFace(path=f"eriktks/{name}", revision="refs/convert/parquet", valid_split=valid, valid_fraction=0.1)
    return NamedTask(TokenClassification(tags_field=field, labels=labels), source, examples, "f1")


TASKS = {
    # Tjong Kim Sang and Buchholz 2000; the dataset has no validation split.
    "conll2000": _conll("conll2000", "chunk_tags", "ADJP ADVP CONJP INTJ LST NP PP PRT SBAR UCP VP", 8_042, None),
    # Tjong Kim Sang and De Meulder 2003, English.
    "conll2003": _conll("conll2003", "ner_tags", "PER ORG LOC MISC", 14_041, "validation"),
}
