"""Translates the names that clouds give to accelerators, such as `v5e-16`, `h100x8` or `p5.48xlarge`.

A TPU type counts TensorCores: v4, v5p and TPU7x have two per chip, v5e and v6e have one. The shapes of the slices are
Google's defaults (the pages about the TPU versions on docs.cloud.google.com/tpu/docs). The GPUs of the instances are
those that Amazon, Google and Microsoft list.
"""

import math
import re
from typing import Optional

from pretrainax.config import UserError
from pretrainax.runtime.chips import CHIPS, Chip

_TENSOR_CORES = {"v4": 2, "v5p": 2, "tpu7x": 2}  # per chip; 1 for other TPUs
_MAX_CHIPS_2D = 256  # chips in a pod of v5e or v6e
_CUBE = 64  # larger slices with three dimensions consist of cubes of 4x4x4 chips
_NAMES = {"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "v7x": "tpu7x", "ironwood": "tpu7x"}
_MACHINES = {"ct4p": "v4", "ct5lp": "v5e", "ct5p": "v5p", "ct6e": "v6e", "tpu7x": "tpu7x"}  # ct5lp-hightpu-4t
_INSTANCES = {
    "gb200-nvl72": "gb200:72",
    "p4de.24xlarge": "a100:8",
    "p5.4xlarge": "h100:1",
    "p5.48xlarge": "h100:8",
    "p5e.48xlarge": "h200:8",
    "p5en.48xlarge": "h200:8",
    "p6-b200.48xlarge": "b200:8",
    **{f"a2-ultragpu-{n}g": f"a100:{n}" for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": f"h100:{n}" for n in (1, 2, 4, 8)},
    "a3-edgegpu-8g": "h100:8",
    "a3-megagpu-8g": "h100:8",
    "a3-ultragpu-8g": "h200:8",
    "a4-highgpu-8g": "b200:8",
    "standard-nd96amsr-a100-v4": "a100:8",
    "standard-nd96isr-h100-v5": "h100:8",
    "standard-nd96isr-h200-v5": "h200:8",
}
# What clouds add to the name of a GPU: the memory of the chip in CHIPS, and its form
_GPU = re.compile(r"(a100(?=-80gb|-sxm|$)|h100|h200|b200|gb200)(?:-(?:80gb|141gb|180gb|192gb|sxm\d?|mega|hgx|dgx))*")


def chip_named(name: str) -> Optional[Chip]:
    """Looks up a chip by its name in CHIPS or by a name that a cloud gives it; returns None if it is unknown."""
    name = re.sub(r"^(nvidia-|google-|tpu-)+", "", name.lower().replace("_", "-"))
    match = _GPU.fullmatch(name)
    return CHIPS.get(match[1] if match else _NAMES.get(name, name))


def expand(name: str) -> Optional[str]:
    """Translates a cloud's name of a number of devices to the format CHIP:SHAPE of `Topology.parse`.

    Returns None if the name is none of `v5p-8`, `h100x8`, `8xh100`, `h100` (one GPU), and the names of instances. The
    chip in the result may be unknown.

    Raises:
      UserError: no slice of the chip has this number of TensorCores.
    """
    name = name.lower().replace("_", "-")
    if name in _INSTANCES:
        return _INSTANCES[name]
    if (match := re.fullmatch(r"(\w+)-[a-z]+-(\d+)t", name)) and match[1] in _MACHINES:
        return _slice(CHIPS[_MACHINES[match[1]]], int(match[2]))
    if match := re.fullmatch(r"(?P<n>\d+)x(?P<chip>[a-z].*)|(?P<chip2>[a-z].*?\d.*)x(?P<n2>\d+)", name):
        count, chip_name = int(match["n"] or match["n2"]), match["chip"] or match["chip2"]
        chip = chip_named(chip_name)
        if chip is None or chip.is_tpu:
            return _slice(chip, count) if chip else f"{chip_name}:{count}"
        hosts, rest = divmod(count, chip.devices_per_host)
        return f"{chip.name}:{hosts}x{chip.devices_per_host}" if hosts > 1 and not rest else f"{chip.name}:{count}"
    if (chip := chip_named(name)) and not chip.is_tpu:
        return f"{chip.name}:1"
    if match := re.fullmatch(r"(.*\D.*)-(\d+)", name):
        chip = chip_named(match[1])
        if chip is None or not chip.is_tpu:
            return f"{match[1]}:{match[2]}"
        cores = _TENSOR_CORES.get(chip.name, 1)
        if int(match[2]) % cores:
            raise UserError(
                f"the name counts TensorCores, and {chip.name} has {cores} per chip: give a multiple of {cores}"
            )
        return _slice(chip, int(match[2]) // cores)
    return None


def _slice(chip: Chip, chips: int) -> str:
    """Returns Google's default slice of a number of chips, as CHIP:SHAPE; raises UserError if there is none."""
    shape = _shape_2d(chips) if chip.torus == 2 else _shape_3d(chips)
    if shape is None:
        example = "x".join(["4"] * chip.torus)
        raise UserError(f"no slice of {chip.name} has {chips:,} chips; give its shape, such as {chip.name}:{example}")
    return f"{chip.name}:{'x'.join(map(str, shape))}"


def _shape_2d(chips: int) -> Optional[tuple[int, ...]]:
    if chips == 2 or chips > _MAX_CHIPS_2D or chips.bit_count() != 1:
        return None
    short = 2 ** ((chips.bit_length() - 1) // 2)
    return short, chips // short


def _shape_3d(chips: int) -> Optional[tuple[int, ...]]:
    small = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips < _CUBE or chips % _CUBE:
        return small.get(chips)
    cubes = chips // _CUBE
    sides = ((a, b, cubes // (a * b)) for a in range(1, math.isqrt(cubes) + 1) for b in range(a, cubes // a + 1))
    a, b, c = min((s for s in sides if math.prod(s) == cubes and s[1] <= s[2]), key=lambda s: s[2] - s[0])
    return 4 * a, 4 * b, 4 * c
