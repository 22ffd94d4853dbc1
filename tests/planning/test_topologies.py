"""Tests the meaning of topologies' names, and that their devices are those to compile for."""

import math

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
        ("tpu7x:4x4x4", "tpu7x", (4, 4, 4), 1, 128, 16),  # two devices per chip
        ("2*tpu7x:2x2x1", "tpu7x", (2, 2, 1), 2, 16, 2),
    ],
)
def test_a_name_says_chip_shape_and_slices(text, chip, shape, slices, devices, hosts):
    found = Topology.parse(text)
    assert (found.chip, found.shape, found.slices) == (CHIPS[chip], shape, slices)
    assert (found.num_devices, found.hosts) == (devices, hosts)
    assert Topology.parse(str(found)) == found


@pytest.mark.parametrize(
    "name, topology",
    [
        *(("v5e-16", "v5e:4x4"), ("v5litepod-8", "v5e:2x4"), ("tpu-v5litepod-256", "v5e:16x16"), ("v6e-1", "v6e:1x1")),
        *(("v6e-8", "v6e:2x4"), ("2*v6e-128", "2*v6e:8x16"), ("trillium-4", "v6e:2x2"), ("8xv5e", "v5e:2x4")),
        *(("tpu-v4-8", "v4:2x2x1"), ("v4-32", "v4:2x2x4"), ("v5p-8", "v5p:2x2x1"), ("V5P-128", "v5p:4x4x4")),
        *(("v5p-256", "v5p:4x4x8"), ("v5p-12288", "v5p:16x16x24"), ("tpu7x-128", "tpu7x:4x4x4")),
        *(("tpu7x-2", "tpu7x:1x1x1"), ("ironwood-8", "tpu7x:2x2x1"), ("ct5lp-hightpu-4t", "v5e:2x2")),
        *(("h100x8", "h100:8"), ("8xh100", "h100:8"), ("8xH100", "h100:8"), ("h100-8", "h100:8"), ("h100", "h100:1")),
        *(("16xh100", "h100:2x8"), ("h100x16", "h100:2x8"), ("h100x4", "h100:4"), ("4*8xh100", "4*h100:8")),
        *(("a100-80gb", "a100:1"), ("a100-80gb:8", "a100:8"), ("4xa100-80gb", "a100:4"), ("a100-sxm4-80gb", "a100:1")),
        *(("nvidia-h100-80gb:4x8", "h100:4x8"), ("nvidia-h100-mega-80gb", "h100:1"), ("nvidia-h200-141gb", "h200:1")),
        *(("p5.48xlarge", "h100:8"), ("4*p5en.48xlarge", "4*h200:8"), ("p4de.24xlarge", "a100:8")),
        *(("a3-highgpu-8g", "h100:8"), ("a4-highgpu-8g", "b200:8"), ("Standard_ND96isr_H100_v5", "h100:8")),
        *(("gb200-nvl72", "gb200:72"), ("b200x8", "b200:8"), ("v5e_16", "v5e:4x4")),
    ],
)
def test_the_name_that_a_cloud_uses_says_the_same(name, topology):
    assert str(Topology.parse(name)) == str(Topology.parse(topology)) == topology


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.is_tpu])
def test_a_cloud_name_has_as_many_chips_as_it_says(chip):
    cores, largest = (2, 12288) if chip.torus == 3 else (1, 256)
    found = 0
    for count in range(1, largest + 1):
        try:
            topology = Topology.parse(f"{chip.name}-{count}")
        except UserError as e:
            assert f"--topology={chip.name}-{count}: " in str(e) and "\n" not in str(e)
            continue
        assert (
            math.prod(topology.shape) * cores == count and list(topology.shape) == sorted(topology.shape) or count == 8
        )
        found += 1
    assert found == (5 + largest // 128 if chip.torus == 3 else 8)


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
        ("tpu", "chips: a100, b200, gb200, h100, h200, tpu7x, v4, v5e, v5p, v6e"),
        ("a100-40gb", "write CHIP:SHAPE"),  # This GPU has less memory than the A100 of the table.
        ("mi300x8", "unknown chip 'mi300', allowed: a100, b200"),
        ("v3-8", "unknown chip 'v3', allowed: a100, b200"),
        ("v5e-6", "no slice of v5e has 6 chips; give its shape, such as v5e:4x4"),
        ("v5e-512", "no slice of v5e has 512 chips"),
        ("v4-4", "no slice of v4 has 2 chips; give its shape, such as v4:4x4x4"),
        ("v5p-7", "the name counts TensorCores, and v5p has 2 per chip: give a multiple of 2"),
        ("12xh100", "at most 8 devices per host"),
        ("0xh100", "every size must be at least 1"),
        ("v5e-0", "no slice of v5e has 0 chips"),
        ("v5p-0", "no slice of v5p has 0 chips"),
        ("", "write CHIP:SHAPE"),
        ("xh100", "write CHIP:SHAPE"),
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
