"""Defines named tasks for text datasets: summarization, instruction tuning, and retrieval."""

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.glue import NamedTask
from pretrainax.tasks.instructions import Instructions
from pretrainax.tasks.retrieval import Retrieval
from pretrainax.tasks.text_generation import TextGeneration


def _summaries(path: str, fields: str, examples: int, name: str = "") -> NamedTask:
    """Builds a summarization task with its dataset on the Hugging Face Hub.

    Args:
      path: name of the dataset.
      fields: the fields of the text and of its summary, separated by a space.
      examples: number of training examples.
      name: configuration of the dataset, or "" if it has none.
    """
    text, summary = fields.split()
    task = TextGeneration(input=f"summarize: {{{text}}}", target_field=summary, target_length=128, scores=("rouge",))
    return NamedTask(
        task, HuggingFace(path=path, name=name or None, valid_split="validation"), examples, "", length=512
    )


def _instructions(path: str, fields: str, examples: int) -> NamedTask:
    """Builds an instruction-tuning task with its dataset on the Hugging Face Hub.

    Args:
      path: name of the dataset.
      fields: the fields of the instruction, its input and the answer, separated by spaces.
      examples: number of training examples.
    """
    names = dict(zip(("instruction_field", "input_field", "output_field"), fields.split(), strict=True))
    return NamedTask(Instructions(messages_field=None, **names), HuggingFace(path=path), examples, "", length=512)


TASKS = {
    "xsum": _summaries("EdinburghNLP/xsum", "document summary", 204_045),  # Narayan et al. 2018, arXiv 1808.08745
    "cnn_dailymail": _summaries("abisee/cnn_dailymail", "article highlights", 287_113, "3.0.0"),  # See et al. 2017
    # Taori et al. 2023, and Conover et al. 2023; neither dataset has a validation split.
    "alpaca": _instructions("tatsu-lab/alpaca", "instruction input output", 52_002),
    "dolly": _instructions("databricks/databricks-dolly-15k", "instruction context response", 15_011),
    "samsum": _summaries("knkarthick/samsum", "dialogue summary", 14_732),  # Gliwa et al. 2019, arXiv 1911.12237
    # Kwiatkowski et al. 2019, and Nguyen et al. 2016 (arXiv 1611.09268). The latter has one negative passage per query,
    # found by BM25.
    "natural_questions": NamedTask(
        Retrieval(passage_field="answer"), HuggingFace(path="sentence-transformers/natural-questions"), 100_231, ""
    ),
    "msmarco": NamedTask(
        Retrieval(passage_field="positive", negatives_field="negative", negatives=1),
        HuggingFace(path="sentence-transformers/msmarco-bm25", name="triplet"),
        502_939,
        "",
    ),
}
