"""A config.json of an earlier version is read like the current format."""

import dataclasses
from collections.abc import Iterator

from pretrainax import zoo  # noqa: F401  registers the classes of choices
from pretrainax.config import Choice, Experiment, TrainConfig, former_fields, from_json, to_json
from pretrainax.config.former_fields import upgrade_fields
from pretrainax.config.serialization import differences
from pretrainax.interop import start  # noqa: F401  registers the adaptations
from pretrainax.tasks.chunks import Chunks
from pretrainax.training.metrics import read_metrics
from tests.support import tiny


def config_classes() -> Iterator[type]:
    """Yields the classes of a config that the table of former names can contain."""
    pending = [Choice]
    while pending:
        cls = pending.pop()
        yield cls
        pending += cls.__subclasses__()
    yield from (TrainConfig, Chunks)


def test_the_recurrent_field_of_a_model_is_a_part():
    experiment = tiny.get_config("elmo")
    former = to_json(experiment)
    (former["model"]["recurrent"],) = former["model"].pop("parts")
    assert differences(experiment, from_json(Experiment, former)) == []


def test_a_transformer_had_that_field_without_a_value():
    experiment = tiny.get_config("gpt")
    former = to_json(experiment)
    former["model"]["recurrent"] = None
    assert differences(experiment, from_json(Experiment, former)) == []


def test_former_names_and_values_are_the_current_ones():
    former = {
        ("TrainConfig", "pipeline_parts"): {"pipeline_microbatches": 4},
        ("SOAP", "longest"): {"max_side": 4},
        ("YarnScaling", "turned_weight"): {"mscale": 4},
        ("Chunks", "most"): {"max_windows": 4},
        ("Layers", "taken"): {"layers": 4},
        ("WarmupCosine", "warmup_steps"): {"warmup_steps": 4},
    }
    for (name, field), expected in former.items():
        assert upgrade_fields(name, {field: 4}) == expected
    assert upgrade_fields("DecoderToEncoderDecoder", {"cross_attention": "silent"}) == {"cross_attention": "zero"}


def test_every_current_name_in_the_table_is_a_field():
    registered = {cls.__name__: cls for cls in config_classes()}
    for name, fields in former_fields._FIELDS.items():
        current = {field.name for field in dataclasses.fields(registered[name])}
        assert set(fields.values()) <= current and not set(fields) & current, name


def test_metrics_of_0_6_have_their_current_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train", "loss": 2.0, "mfu_done": 0.5}\n')
    assert read_metrics(str(path)) == [{"step": 1, "split": "train", "loss": 2.0, "mfu_executed": 0.5}]
