"""Makes the package `datasets` work without a network."""

import pathlib

import datasets
import huggingface_hub
import pytest


def without_network(patch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    """Gives `datasets` a separate cache, and forbids requests to the hub."""
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
