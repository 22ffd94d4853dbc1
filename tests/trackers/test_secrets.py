"""Tests that trackers mask possible secrets before they leave the machine."""

import random
import string

import pytest

from pretrainax.data.sources import TextFiles
from pretrainax.trackers import config_values
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
        ("Authorization: Basic bWU6aHVudGVyMg==", "Authorization: Basic ***"),
        (
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=aHVudGVyMg==;EndpointSuffix=core.windows.net",
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=***;EndpointSuffix=core.windows.net",
        ),
        (
            "BlobEndpoint=https://me.x;SharedAccessSignature=sv=2024&sig=aaa",
            "BlobEndpoint=https://me.x;SharedAccessSignature=***",
        ),
        ("AWS_SECRET_ACCESS_KEY=hunter2 python", "AWS_SECRET_ACCESS_KEY=*** python"),
        ('{"aws_secret_access_key": "hunter2"}', '{"aws_secret_access_key": "***"}'),
        ("--wandb_api_key=hunter2", "--wandb_api_key=***"),
        ("key wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY is wrong", "key *** is wrong"),
        ("token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U", "token ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\n", "***\n"),
        ("s3://KEY:SECRET@bucket/x: no", "s3://***@bucket/x: no"),
    ],
)
def test_secrets_in_a_text_are_masked(text, shown):
    assert masked(text) == shown


HARMLESS = [
    "AdamW(learning_rate=0.003)",
    "a@b.org",
    "books/sk-1.txt",
    "loss/source=wiki",
    "",
    "commit 13f16e8a2b3c4d5e6f708192a3b4c5d6e7f80912",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "/home/me/models/checkpoints/gpt2/step10000",
    "pretrainax/training/checkpoints/restoring0",
    "Basic English 850 words, Basic training1",
    "pad_token='<pad>', max_tokens=128, key_dim=64, tokens: 5000",
    "ThisIsALongCamelCaseNameOfFortyLetters12",
]


def test_random_keys_of_aws_are_masked():
    rng, letters = random.Random(0), string.ascii_letters + string.digits + "+/"
    keys = ["".join(rng.choices(letters, k=40)) for _ in range(1000)]
    assert sum(masked(f"key {key}") == "key ***" for key in keys) > 990  # A few have as little entropy as text.


@pytest.mark.parametrize("text", HARMLESS)
def test_all_else_stays(text):
    assert masked(text) == text


@pytest.mark.parametrize("name", ["api_key", "token", "password", "auth", "client_secret"])
def test_a_field_that_is_named_after_a_secret_is_masked(name):
    assert masked_field(f"data.source.{name}", "hunter2") == "***"


def test_a_config_is_shown_by_its_fields():
    experiment = tiny.get_config("gpt")
    experiment.data.source = TextFiles(path="/mnt/books?token=hunter2")
    shown = config_values(experiment)
    assert shown["train.steps"] == 40 and shown["optimizer.type"] == "AdamW" and shown["model.dropout_rate"] == 0.0
    assert shown["data.source.path"] == "/mnt/books?***" and not any(path.startswith("trackers") for path in shown)
    assert all(type(value) in (int, float, bool, str) for value in shown.values())
