"""Tests retrieval: the row of a query and its passages, the ranks of passages, invalid records, and errors."""

import numpy as np
import pytest

from pretrainax.config import Embed, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.sources import JsonLines
from pretrainax.tasks import Retrieval
from pretrainax.tasks.retrieval import ranks_of
from pretrainax.tokenization import WordPiece
from tests.support import tiny

TOKENIZER = WordPiece(vocab_size=40).build(iter(["a fine film and a dull one", "no film at all is fine"] * 20))
VOCABULARY = TOKENIZER.vocabulary
RECORD = {"query": "a film", "passage": "no film at all", "worse": ["a dull one", "is fine", "and"]}


def adapted(length=12, **fields):
    experiment = tiny.get_config("bert")
    experiment.data.sequence_length = length
    return Retrieval(**fields).adapted(experiment).bind(TOKENIZER)


def example_of(task, record):
    (encoded,) = task.encode(task.read(record), TOKENIZER)
    ends, tokens = np.cumsum([len(ids) for ids in encoded.parts]), np.concatenate(encoded.parts)
    return task.example(ObjectiveInput(tokens, np.ones_like(tokens), ends, note=encoded.note), None, VOCABULARY)


def framed(text):
    return [VOCABULARY.cls, *TOKENIZER.encode(text).tolist(), VOCABULARY.sep]


def test_a_row_is_a_query_and_its_passages_each_by_itself():
    found = example_of(adapted(negatives_field="worse", negatives=2), RECORD)
    texts = [framed(text) for text in ("a film", "no film at all", "a dull one", "is fine")]
    assert found["tokens"].tolist() == sum(texts, []) and found["texts"] == 4
    assert found["segment_ids"].tolist() == [i for i, text in enumerate(texts, 1) for _ in text]
    assert found["positions"].tolist() == [place for text in texts for place in range(len(text))]
    assert not found["token_types"].any()


def test_a_query_and_a_passage_have_rooms_of_their_own():
    task = adapted(10, query_length=6)
    found = example_of(task, {"query": "a fine film " * 9, "passage": "no film at all " * 9})
    assert np.bincount(found["segment_ids"]).tolist() == [0, 6, 10] and found["tokens"][5] == VOCABULARY.sep
    longer = example_of(adapted(10, query_length=14), {"query": "a fine film " * 9, "passage": "no film at all " * 9})
    assert np.bincount(longer["segment_ids"]).tolist() == [0, 14, 10]
    assert task.lengths(10).inputs == 16 and task.max_positions(10) == 10
    short, long = "a film", "no film at all is fine"  # 4 and 10 tokens, including special tokens
    cut = [task.is_cut(*task.encode(task.read({"query": q, "passage": p}), TOKENIZER)) for q, p in
           ((short, long), (long, short), (short, f"{long} {long}"))]  # fmt: skip
    assert cut == [False, True, True]
    experiment = config(task)
    experiment.data.sequence_length = 64
    validate(experiment)  # The model has 64 positions, and the row has more tokens.
    experiment.data.sequence_length = 65
    with pytest.raises(UserError, match="config.model.position.max_length is 64"):
        validate(experiment)


def test_the_rank_of_a_passage_is_among_all_but_those_that_answer_too():
    vectors = np.zeros((4, 3, 2), np.float32)
    vectors[:, 0] = [[1, 0], [1, 0], [0, 1], [0, 1]]
    vectors[:, 1] = [[0.9, 0], [0.5, 0], [0, 0.5], [0, 0.5]]
    vectors[:, 2] = [[0.7, 0], [0, 0.6], [0, 0.6], [0, 0.4]]
    queries, passages = ["a", "a", "b", "c"], [("p", "n"), ("q", "m"), ("r", "m"), ("r", "o")]
    # The passage above "q" is "n", not "p", which also answers "a". The passage above "r", which answers two queries,
    # is "m".
    assert ranks_of(vectors, queries, passages).tolist() == [1, 2, 2, 2]
    found = Retrieval().metrics(vectors, [{"query": q, "passages": p} for q, p in zip(queries, passages, strict=True)])
    assert found == {"recall@1": 0.25, "recall@10": 1.0, "recall@100": 1.0, "mrr": (1 + 3 * 0.5) / 4}
    assert tuple(found) == Retrieval().metric_names
    same = np.ones((4, 3, 2), np.float32)  # no information
    assert ranks_of(same, list("abcd"), passages).min() == 6


@pytest.mark.parametrize(
    "record, said",
    [
        ({**RECORD, "query": " "}, "field 'query' is empty"),
        ({**RECORD, "passage": None}, "field 'passage' holds NoneType"),
        ({**RECORD, "worse": ["one"]}, "field 'worse' has 1 passages, but config.objective.negatives is 2"),
        ({**RECORD, "worse": ["one", ""]}, "must be a list of texts, none of them empty"),
        ({**RECORD, "worse": 3}, "must be a list of texts"),
        ({"query": "a", "passage": "b"}, "no field 'worse'.*config.objective.negatives_field"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(record, said):
    with pytest.raises(ValueError, match=said):
        adapted(negatives_field="worse", negatives=2).read(record)


@pytest.mark.parametrize("values", [["1984", "dry"], np.array([b"1984", b"dry"], object), [1984, "dry"]])
def test_negatives_have_the_types_of_other_texts(values):
    texts = adapted(negatives_field="worse", negatives=2).read({**RECORD, "worse": values}).texts
    assert texts == (RECORD["query"], RECORD["passage"], "1984", "dry")


@pytest.mark.parametrize("value", ["dry", b"dry"])
def test_a_single_negative_needs_no_list(value):
    assert adapted(negatives_field="worse", negatives=1).read({**RECORD, "worse": value}).texts[2] == "dry"


def config(task=None, **head):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head = False
    experiment.model.head = Embed(**head)
    experiment.objective, experiment.data.source = task or Retrieval(), JsonLines(path=__file__)
    experiment.objective.complete(experiment)
    return experiment


@pytest.mark.parametrize(
    "fields, head, said",
    [
        ({"negatives": 2}, {}, "negatives is 2 and negatives_field is None"),
        ({"negatives_field": "worse"}, {}, "set both, for example"),
        ({"query_length": 2}, {}, "config.objective.query_length is 2"),
        ({}, {"num_texts": 3}, "Retrieval needs Embed\\(num_texts=2\\)"),
        ({}, {"temperature": 0.0}, "config.model.head.temperature is 0.0"),
        ({}, {"dimensions": (8, 32)}, "they must be distinct numbers below config.model.d_model 32"),
    ],
)
def test_what_does_not_fit_together_is_one_line(fields, head, said):
    with pytest.raises(UserError, match=said):
        validate(config(Retrieval(**fields), **head))


def test_micro_batches_are_refused():
    experiment = config(dimensions=(8, 16))
    validate(experiment)
    experiment.train.accumulate = 2
    with pytest.raises(UserError, match="config.train.accumulate is 2, and the negatives of a query"):
        validate(experiment)
