"""Tests reading the shared tasks of CoNLL by the names of their datasets, on the hub and in TFDS."""

import collections
import dataclasses
import importlib

import datasets
import pytest

from pretrainax.data.sources import TFDS
from pretrainax.tasks.conll import TASKS
from tests.support.huggingface_datasets import without_network

SENTENCES = [(["EU", "rejects"], [1, 0]), (["Peter", "Blackburn"], [1, 2])]  # words and tag ids


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Writes small datasets in the layout of the hub's Parquet branch: NAME/SPLIT/0000.parquet."""
    root = tmp_path_factory.mktemp("hub")
    for name, named in TASKS.items():
        tags = datasets.Sequence(datasets.ClassLabel(names=list(named.task.labels)))
        words = datasets.Sequence(datasets.Value("string"))
        features = datasets.Features({"id": datasets.Value("string"), "tokens": words, named.task.tags_field: tags})
        for split in ("train", "validation", "test") if name == "conll2003" else ("train", "test"):
            folder = root / "eriktks" / name / name / split
            folder.mkdir(parents=True)
            rows = [
                {"id": f"{split}{i}", "tokens": [f"{split}{i}", *w], named.task.tags_field: [0, *t]}
                for i, (w, t) in enumerate(SENTENCES * 20)
            ]
            datasets.Dataset.from_list(rows, features=features).to_parquet(str(folder / "0000.parquet"))
    with pytest.MonkeyPatch.context() as patch:
        without_network(patch, tmp_path_factory.mktemp("cache"))
        patch.chdir(root)  # `datasets` looks for a name here before it contacts the hub
        yield root


def records(source, split):
    return [record for shard in source.shards(split) for record in source.read(shard, collections.Counter())]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_by_the_name_of_its_set(name, hub):
    named = TASKS[name]
    source = named.source.reading(named.task)
    train, valid = records(source, "train"), records(source, "valid")
    assert train[0].note == {"words": ["train0", "EU", "rejects"], "tags": [0, 1, 0]}
    if name == "conll2003":
        assert len(train) == len(valid) == 40 and valid[0].note["words"][0] == "validation0"
    else:  # No validation split: a tenth is held out; 4 expected, standard deviation 1.9.
        assert len(train) + len(valid) == 40 and 0 < len(valid) < 13
    assert named.select_by in named.task.metric_names


BUILDER = """
import tensorflow_datasets as tfds

TAGS = ["O", *(f"{position}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for position in "BI")]

class Conll2003(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        several = tfds.features.Sequence
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(
            {"tokens": several(tfds.features.Text()), "ner": several(tfds.features.ClassLabel(names=TAGS))}
        ))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in ("train", "dev", "test")}

    def _generate_examples(self, split):
        yield 0, {"tokens": [split, "Peter", "Blackburn"], "ner": ["O", "B-PER", "I-PER"]}
"""


@pytest.mark.slow
def test_the_names_of_2003_are_read_from_tfds(tmp_path, monkeypatch):
    """Reads a prepared dataset with TFDS' name, splits and fields, because TFDS' own builder needs TensorFlow."""
    package = tmp_path / "conll_of_tfds"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "conll2003.py").write_text(BUILDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    tfds = pytest.importorskip("tensorflow_datasets")  # Another test may have registered this name.
    monkeypatch.delitem(tfds.core.registered._DATASET_REGISTRY, "conll2003", raising=False)
    builder = importlib.import_module("conll_of_tfds.conll2003").Conll2003(data_dir=str(tmp_path / "data"))
    builder.download_and_prepare(file_format="array_record")
    task = dataclasses.replace(TASKS["conll2003"].task, tags_field="ner")
    source = TFDS("conll2003", data_dir=str(tmp_path / "data"), valid_split="dev").reading(task)
    for split, there in (("train", "train"), ("valid", "dev")):
        (record,) = records(source, split)
        assert record.note == {"words": [there, "Peter", "Blackburn"], "tags": [0, 1, 2]}
