"""What may be secret does not leave the machine by a tracker."""

import pytest

from pretrainax.data.sources import TextFiles
from pretrainax.trackers import shown_config
from pretrainax.trackers.secrets import masked, masked_field
from tests.support import tiny


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://me:hunter2@host/x", "https://***@host/x"),
        ("postgresql://hunter2@db", "postgresql://***@db"),
        ("https://host/data?user=1&access_token=hunter2", "https://host/data?user=1&***"),
        ("https://host/b?X-Amz-Signature=abc&y=2", "https://host/b?***&y=2"),
        ("401 for hf_abcdefghijklmnopqrst", "401 for ***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
    ],
)
def test_secrets_in_a_text_are_masked(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize("text", ["AdamW(learning_rate=0.003)", "a@b.org", "books/sk-1.txt", "loss/source=wiki", ""])
def test_all_else_stays(text):
    assert masked(text) == text


@pytest.mark.parametrize("name", ["api_key", "token", "password", "auth", "client_secret"])
def test_a_field_that_is_named_after_a_secret_is_masked(name):
    assert masked_field(f"data.source.{name}", "hunter2") == "***"


def test_a_config_is_shown_by_its_fields():
    experiment = tiny.get_config("gpt")
    experiment.data.source = TextFiles(path="/mnt/books?token=hunter2")
    shown = shown_config(experiment)
    assert shown["train.steps"] == 40 and shown["optimizer.type"] == "AdamW" and shown["model.dropout_rate"] == 0.0
    assert shown["data.source.path"] == "/mnt/books?***" and not any(path.startswith("trackers") for path in shown)
    assert all(type(value) in (int, float, bool, str) for value in shown.values())
