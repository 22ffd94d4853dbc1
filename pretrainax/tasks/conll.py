"""The shared tasks of CoNLL whose tags are of words, by name: names of CoNLL-2003, chunks of CoNLL-2000."""

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.glue import NamedTask
from pretrainax.tasks.token_classification import TokenClassification


def _conll(name: str, field: str, kinds: str, examples: int, valid: str | None) -> NamedTask:
    """field: of the tags; kinds: of spans, in the order of the numbers of their tags, B-X and I-X of each after O."""
    labels = ("O", *(f"{position}-{kind}" for kind in kinds.split() for position in "BI"))
    # On the hub both come with a program, which is not run; their records lie on the branch of the hub's own Parquet.
    source = HuggingFace(path=f"eriktks/{name}", revision="refs/convert/parquet", valid_split=valid, valid_fraction=0.1)
    return NamedTask(TokenClassification(tags_field=field, labels=labels), source, examples, "f1")


TASKS = {
    # Tjong Kim Sang and Buchholz 2000: it has no split for validation, a tenth of the training's is held out
    "conll2000": _conll("conll2000", "chunk_tags", "ADJP ADVP CONJP INTJ LST NP PP PRT SBAR UCP VP", 8_042, None),
    # Tjong Kim Sang and De Meulder 2003, English
    "conll2003": _conll("conll2003", "ner_tags", "PER ORG LOC MISC", 14_041, "validation"),
}
