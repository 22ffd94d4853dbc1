"""Tests reading question datasets and SuperGLUE by their names on the hub and in TFDS, with their own fields."""

import collections

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Value

from pretrainax.data.sources import TFDS
from pretrainax.tasks import qa_datasets, superglue
from tests.support.huggingface_datasets import without_network

TASKS = qa_datasets.TASKS | superglue.TASKS
TEXT, NUMBER, LABEL = Value("string"), Value("int32"), ClassLabel(names=["False", "True"])
_IDX = {name: NUMBER for name in ("paragraph", "question", "answer")}
_ANSWERS = {"text": datasets.Sequence(TEXT), "answer_start": datasets.Sequence(NUMBER)}
_SQUAD = {"id": TEXT, "title": TEXT, "context": TEXT, "question": TEXT, "answers": _ANSWERS}
_RACE = {"example_id": TEXT, "article": TEXT, "answer": TEXT, "question": TEXT, "options": datasets.Sequence(TEXT)}
_ENDINGS = [f"ending{i}" for i in range(4)]
_NLI = {"premise": TEXT, "hypothesis": TEXT, "idx": NUMBER}
_WIC = {**dict.fromkeys(("word", "sentence1", "sentence2"), TEXT), "idx": NUMBER, "label": LABEL}
_WIC |= dict.fromkeys(("start1", "start2", "end1", "end2"), NUMBER)
FEATURES = {  # the features of each dataset on the hub
    **dict.fromkeys(("squad", "squad_v2"), _SQUAD),
    **dict.fromkeys(("race", "race_middle", "race_high"), _RACE),
    "swag": {
        **dict.fromkeys(("startphrase", "sent1", "sent2", *_ENDINGS), TEXT),
        "label": ClassLabel(names=list("0123")),
    },
    "boolq": {"question": TEXT, "passage": TEXT, "idx": NUMBER, "label": LABEL},
    "cb": {**_NLI, "label": ClassLabel(names=["entailment", "contradiction", "neutral"])},
    "superglue_rte": {**_NLI, "label": ClassLabel(names=["entailment", "not_entailment"])},
    "copa": {
        **dict.fromkeys(("premise", "choice1", "choice2", "question"), TEXT),
        **{"idx": NUMBER, "label": ClassLabel(names=["choice1", "choice2"])},
    },
    "multirc": {**dict.fromkeys(("paragraph", "question", "answer"), TEXT), "idx": _IDX, "label": LABEL},
    "record": {
        **dict.fromkeys(("passage", "query"), TEXT),
        **dict.fromkeys(("entities", "answers"), datasets.Sequence(TEXT)),
        "idx": {"passage": NUMBER, "query": NUMBER},
    },
    "wic": _WIC,
    "wsc": {
        **dict.fromkeys(("text", "span1_text", "span2_text"), TEXT),
        **{"span1_index": NUMBER, "span2_index": NUMBER, "idx": NUMBER, "label": LABEL},
    },
}
_NONE = {
    "id": "2",
    "title": "t",
    "context": "It was cold.",
    "question": "Why?",
    "answers": {"text": [], "answer_start": []},
}
_ONE = {**_NONE, "answers": {"text": ["cold", "was cold"], "answer_start": [7, 3]}}
_OPTIONS = {"example_id": "h1", "article": "It rained.", "question": "So _ .", "options": list("wxyz"), "answer": "C"}
RECORDS = {  # for each dataset: a record, its text parts, its note
    "squad": (_ONE, ("Why?", "It was cold."), {"answers": ["cold", "was cold"], "spans": [[7, 11], [3, 11]]}),
    "squad_v2": (_NONE, ("Why?", "It was cold."), {"answers": [], "spans": []}),
    **{
        name: (_OPTIONS, ("It rained.", *(f"So _ . {x}" for x in "wxyz")), {"label": 2})
        for name in ("race", "race_middle", "race_high")
    },
    "swag": (
        {
            "startphrase": "A B",
            "sent1": "A",
            "sent2": "B",
            **{name: f"e{i}" for i, name in enumerate(_ENDINGS)},
            "label": 3,
        },
        ("A", "B e0", "B e1", "B e2", "B e3"),
        {"label": 3},
    ),
    "boolq": ({"question": "is it", "passage": "It is.", "idx": 0, "label": 1}, ("It is.", "is it"), {"label": 1}),
    "cb": ({"premise": "p", "hypothesis": "h", "idx": 0, "label": 2}, ("p", "h"), {"label": 2}),
    "superglue_rte": ({"premise": "p", "hypothesis": "h", "idx": 0, "label": 1}, ("p", "h"), {"label": 1}),
    "copa": (
        {"premise": "It fell.", "choice1": "wet", "choice2": "dry", "question": "effect", "idx": 0, "label": 1},
        ("It fell.", "effect wet", "effect dry"),
        {"label": 1},
    ),
    "multirc": (
        {
            **{"paragraph": "It fell.", "question": "Why?", "answer": "cold", "label": 1},
            "idx": {"paragraph": 3, "question": 5, "answer": 0},
        },
        ("It fell.", "Why? cold"),
        {"label": 1, "group": ["3", "5"]},
    ),
    "record": (
        {
            **{"passage": "Ann met Bo\n@highlight\nIt rained.", "query": "Later @placeholder left."},
            **{"entities": ["Ann", "Bo"], "answers": ["Bo"], "idx": {"passage": 0, "query": 1}},
        },
        ("Ann met Bo. It rained.", "Later Ann left.", "Later Bo left."),
        {"entities": ["Ann", "Bo"], "answers": ["Bo"]},
    ),
    "wic": (
        {
            **{"word": "bank", "sentence1": "The bank rose", "start1": 4, "end1": 8, "idx": 0, "label": 0},
            **{"sentence2": "banks lend", "start2": 0, "end2": 5},
        },
        ("The * bank * rose", "# banks # lend"),
        {"label": 0},
    ),
    "wsc": (
        {
            **{"text": "Old Ann saw Eve, as she left", "span1_index": 0, "span1_text": "Old Ann", "span2_index": 5},
            **{"span2_text": "she", "idx": 0, "label": 1},
        },
        ("* Old Ann * saw Eve, as # she # left",),
        {"label": 1},
    ),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Writes a record of each dataset to a folder, with a README that lists its files, as on the hub."""
    root = tmp_path_factory.mktemp("hub")
    found = collections.defaultdict(list)
    for name, named in TASKS.items():
        path, config = named.source.path, named.source.name or "default"
        lines = [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "validation"):
            file = root / path / config / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            features = datasets.Features(FEATURES[name])
            datasets.Dataset.from_list([RECORDS[name][0]], features=features).to_parquet(str(file))
            lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
        found[path] += lines
    for path, lines in found.items():
        (root / path / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
    with pytest.MonkeyPatch.context() as patch:
        without_network(patch, tmp_path_factory.mktemp("cache"))
        patch.chdir(root)
        yield root


def assert_read(name, source):
    source = source.reading(TASKS[name].task)
    _, texts, note = RECORDS[name]
    for split in ("train", "valid"):
        found = [r for shard in source.shards(split) for r in source.read(shard, collections.Counter())]
        assert [(record.texts, record.note) for record in found] == [(texts, note)]


@pytest.mark.parametrize("name", TASKS)
def test_a_set_is_read_by_its_name_on_the_hub(name, hub):
    assert_read(name, TASKS[name].source)


@pytest.mark.parametrize("name", TASKS)
def test_a_named_task_is_ranked_by_a_figure_of_its_own(name):
    named = TASKS[name]
    assert named.select_by in named.task.metric_names and not list(named.task.field_problems())


BUILDERS = {  # for each kind of dataset: the name of its builder, its config, its version
    "squad": ("squad", "v1.1", "3.0.0"),
    "multirc": ("super_glue", "multirc", "1.0.2"),
    "record": ("super_glue", "record", "1.0.2"),
    "wic": ("super_glue", "wic", "1.0.2"),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("name", BUILDERS)
def test_a_set_is_read_by_its_name_in_tfds(name, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    given, _, _ = RECORDS[name]
    called, config, version = BUILDERS[name]
    assert TASKS[name].tfds == f"{called}/{config}"

    def feature(value):
        if isinstance(value, dict) and called == "squad":
            return tfds.features.Sequence({key: feature(several[0]) for key, several in value.items()})
        if isinstance(value, list):
            return tfds.features.Sequence(feature(value[0]))
        if isinstance(value, dict):
            return tfds.features.FeaturesDict({key: feature(x) for key, x in value.items()})
        return tfds.features.Text() if isinstance(value, str) else np.int32

    features = {key: feature(value) for key, value in given.items()}
    if "label" in features:
        features["label"] = tfds.features.ClassLabel(names=["False", "True"])
    info = lambda self: self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))  # noqa: E731
    members = {
        "__module__": __name__,
        "name": called,
        "VERSION": tfds.core.Version(version),
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)],
        "_info": info,
        "_split_generators": lambda self, manager: {"train": [(0, given)], "validation": [(0, given)]},
        "_generate_examples": lambda self: None,
    }
    with tfds.core.registered.skip_registration():
        builder = type("Made", (tfds.core.GeneratorBasedBuilder,), members)(data_dir=str(tmp_path), config=config)
    builder.download_and_prepare(file_format="array_record")
    assert_read(name, TFDS(name=TASKS[name].tfds, data_dir=str(tmp_path)))
