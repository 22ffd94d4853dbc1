"""Tests the batches of examples of any length: they have few shapes, and contain each example once."""

import jax
import numpy as np
import pytest

from pretrainax.config import MeshConfig
from pretrainax.inference.rows import batches, bucket
from pretrainax.sharding.mesh import make_mesh


def example(length: int) -> dict[str, np.ndarray]:
    return {"tokens": np.full(length, length, np.int32), "segment_ids": np.ones(length, np.int32)}


@pytest.mark.parametrize("length, longest, padded", [(1, None, 16), (17, None, 32), (32, None, 32), (17, 20, 20)])
def test_a_length_is_padded_to_a_power_of_two_or_to_the_longest(length, longest, padded):
    assert bucket(length, longest) == padded


@pytest.mark.parametrize("devices", [1, 8])
def test_each_example_is_in_one_row_of_few_shapes_that_the_mesh_divides(devices):
    mesh = make_mesh(MeshConfig(data=devices), jax.devices()[:devices])
    lengths = [3, 700, 20, 5, 16, 300, *range(1, 600)]
    seen, shapes = [], set()
    for numbers, batch in batches([example(n) for n in lengths], mesh, pad=9):
        rows, size = batch["tokens"].shape
        assert rows % devices == 0 and rows >= len(numbers)
        for number, tokens, segments in zip(numbers, batch["tokens"], batch["segment_ids"], strict=False):
            n = lengths[number]
            assert (tokens[:n] == n).all() and (tokens[n:] == 9).all() and segments.sum() == n
        seen += numbers
        shapes.add((rows, size))
    assert sorted(seen) == list(range(len(lengths)))
    assert len(shapes) <= 2 * len({size for _, size in shapes})  # full batches, and the last batch of each length


def test_places_that_are_asked_for_are_padded_likewise():
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    asked = example(5) | {"masked_positions": np.array([1, 2, 4], np.int32)}
    ((_, batch),) = batches([asked], mesh)
    assert batch["tokens"].shape == (1, 16) and batch["masked_positions"].tolist() == [[1, 2, 4, 0]]


def test_examples_are_taken_as_they_are_needed_and_of_two_sides_each_has_its_length():
    mesh, taken = make_mesh(MeshConfig(data=1), jax.devices()[:1]), []

    def examples():
        for number in range(40):
            taken.append(number)
            yield {"encoder_tokens": np.ones(900, np.int32), "tokens": np.ones(3, np.int32)}

    numbers, batch = next(batches(examples(), mesh, longest=1000))
    assert numbers == taken and len(taken) < 40
    assert batch["encoder_tokens"].shape == (len(taken), 1000) and batch["tokens"].shape == (len(taken), 16)
