"""Topologies: what their names mean, and that their devices are those to compile for."""

import pytest

from pretrainax.config import UserError
from pretrainax.planning.topologies import Topology
from pretrainax.runtime.chips import CHIPS


@pytest.mark.parametrize(
    "text, chip, shape, slices, devices, hosts",
    [
        ("v5p:4x4x8", "v5p", (4, 4, 8), 1, 128, 32),
        ("v5e:16x16", "v5e", (16, 16), 1, 256, 64),
        ("v5e:1x1", "v5e", (1, 1), 1, 1, 1),
        ("4*v5e:4x4", "v5e", (4, 4), 4, 64, 16),
        ("h100:8", "h100", (1, 8), 1, 8, 1),
        ("h200:4x8", "h200", (4, 8), 1, 32, 4),
        ("2*H100:4x8", "h100", (4, 8), 2, 64, 8),
        ("b200:2x8", "b200", (2, 8), 1, 16, 2),
        ("gb200:72", "gb200", (1, 72), 1, 72, 1),  # a rack
        ("tpu7x:4x4x4", "tpu7x", (4, 4, 4), 1, 128, 16),  # two devices a chip
        ("2*tpu7x:2x2x1", "tpu7x", (2, 2, 1), 2, 16, 2),
    ],
)
def test_a_name_says_chip_shape_and_slices(text, chip, shape, slices, devices, hosts):
    found = Topology.parse(text)
    assert (found.chip, found.shape, found.slices) == (CHIPS[chip], shape, slices)
    assert (found.num_devices, found.hosts) == (devices, hosts)
    assert Topology.parse(str(found)) == found


@pytest.mark.parametrize(
    "text, words",
    [
        ("v9:4x4", "unknown chip 'v9', allowed: a100, b200, gb200, h100, h200, tpu7x, v4, v5e, v5p, v6e"),
        ("v5p:4x4", "a slice of v5p has 3 sizes, such as v5p:4x4x4"),
        ("v5e:4", "a slice of v5e has 2 sizes, such as v5e:4x4"),
        ("h100:16", "write h100:HOSTSxDEVICES, at most 8 devices per host"),
        ("h100:1x2x8", "write h100:HOSTSxDEVICES"),
        ("v5e:0x4", "every size must be at least 1"),
        ("0*v5e:4x4", "every size must be at least 1"),
        ("v5e", "write CHIP:SHAPE, such as v5p:4x4x8"),
        ("v5e:4x", "write CHIP:SHAPE"),
    ],
)
def test_a_name_that_is_none_is_one_clear_line(text, words):
    with pytest.raises(UserError, match=words) as e:
        Topology.parse(text)
    assert f"--topology={text}" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.aot
@pytest.mark.parametrize(
    "text",
    [
        "v5e:1x1",
        "v5e:2x4",
        "v4:2x2x1",
        "v5p:2x2x2",
        "v6e:4x4",
        "tpu7x:2x2x1",
        "2*v5e:4x4",
        "h100:2x8",
        "2*h200:2x8",
        "b200:8",
    ],
)
def test_the_devices_are_as_many_as_it_says(text):
    topology = Topology.parse(text)
    try:
        devices = topology.devices()
    except UserError as e:
        assert "pip install" in str(e)
        pytest.skip(str(e))
    assert len(devices) == topology.num_devices
    assert len({device.process_index for device in devices}) * topology.slices >= topology.hosts
    if topology.chip.is_tpu:
        assert any(kind in devices[0].device_kind.lower() for kind in topology.chip.device_kinds)


@pytest.mark.aot
def test_a_slice_that_the_maker_does_not_sell_is_one_clear_line():
    with pytest.raises(UserError, match="v5e:3x5"):
        Topology.parse("v5e:3x5").devices()


@pytest.mark.parametrize(
    "text, twice",
    [
        ("v5e:4x4", "v5e:4x8"),
        ("v5p:4x4x8", "v5p:4x8x8"),
        ("h100:4", "h100:8"),
        ("h100:8", "h100:2x8"),
        ("2*v5e:4x8", "2*v5e:8x8"),
        ("gb200:36", "gb200:72"),
        ("gb200:72", "gb200:2x72"),
    ],
)
def test_twice_the_devices_is_the_next_larger_slice(text, twice):
    assert str(Topology.parse(text).doubled()) == twice
