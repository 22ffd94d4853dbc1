"""Tasks whose records are texts, by the names of their data sets: summaries, instructions, questions with passages."""

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.glue import NamedTask
from pretrainax.tasks.text_generation import TextGeneration


def _summaries(path: str, fields: str, examples: int, name: str = "") -> NamedTask:
    """fields: of a text and its summary."""
    text, summary = fields.split()
    task = TextGeneration(input=f"summarize: {{{text}}}", target_field=summary, target_length=128, scores=("rouge",))
    return NamedTask(task, HuggingFace(path=path, name=name or None, valid_split="validation"), examples, "")


TEXTS = {
    "xsum": _summaries("EdinburghNLP/xsum", "document summary", 204_045),  # Narayan et al. 2018, arXiv 1808.08745
    "cnn_dailymail": _summaries("abisee/cnn_dailymail", "article highlights", 287_113, "3.0.0"),  # See et al. 2017
    "samsum": _summaries("knkarthick/samsum", "dialogue summary", 14_732),  # Gliwa et al. 2019, arXiv 1911.12237
}
