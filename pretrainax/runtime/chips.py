"""Lists the peak rates, memory, network and price of each accelerator that PretrainAX knows.

Rates are the vendors' specifications; the comments name the sources. "Recalled" marks values that were written from
memory and not checked against a source: check them before spending money based on them. Programs do not reach the peak
rates; `planning.roofline` defines the fractions of the peak rates that the planner assumes.
"""

import dataclasses
import math
from typing import Optional

from pretrainax.files.errors import UserError

GB, GIB = 10**9, 2**30
# Multiple of which the sizes of a product should be: lanes of a TPU's matrix unit, tiles of a GPU's tensor cores.
ALIGNMENT = {"tpu": 128, "gpu": 64}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device: a TPU chip (for v4 and v5p, both cores; for TPU7x, one of two chiplets) or a GPU."""

    name: str
    device_kinds: tuple[str, ...]  # lower-case substrings of jax.Device.device_kind
    peak_flops: float  # dense bfloat16 FLOP/s
    memory_bytes: int  # bytes of device memory that a program can use
    memory_rate: float  # B/s between the device memory and the cores
    link_rate: float  # B/s per device in one direction of the fast network (ICI, NVLink), sum of all links
    torus: int  # dimensions of the fast network; 0: every device of a host is linked to all others
    network_rate: float  # B/s per device between hosts (GPU) or slices (TPU), one direction
    devices_per_host: int  # for GPUs the number of devices that NVLink connects
    price: Optional[float] = None  # USD per device and hour, on demand; None: unknown
    devices_per_chip: int = 1

    def product_flops(self, products: str) -> float:
        """Returns the peak FLOP/s of matrix multiplications with these operands, a value of `config.train.products`.

        Raises:
          UserError: the chip has no units for them.
        """
        peaks = {"": self.peak_flops} | _EIGHT_BIT[self.name]
        if products not in peaks:
            raise UserError(
                f"config.train.products is {products!r}, and {self.name} has no units for it. "
                f"Set --config.train.products={max(peaks)}"
            )
        return peaks[products]

    def speedup(self, dtype: str) -> float:
        """Returns the peak rate of matrix multiplications of an HLO dtype ("s8"), divided by that of bfloat16.

        It is 1 for all dtypes but 8-bit formats for which the chip has units.
        """
        products = "int8" if dtype == "s8" else "fp8" if dtype.startswith("f8") else ""
        return _EIGHT_BIT[self.name].get(products, self.peak_flops) / self.peak_flops

    @property
    def is_tpu(self) -> bool:
        return self.torus > 0

    @property
    def platform(self) -> str:
        """Returns JAX's name for the device's platform, "tpu" or "gpu"."""
        return "tpu" if self.is_tpu else "gpu"


# TPU. FLOP/s, memory rate and links: the pages "TPU v5e", "v5p" and "v6e" of docs.cloud.google.com/tpu/docs. Their
# "bidirectional inter-chip interconnect bandwidth per chip" (400, 1,200 and 800 GB/s) is twice link_rate; v4 recalled.
# Memory: the limit in the out-of-memory error of libtpu 0.0.42, slightly less than the 32, 16, 95 and 32 GB of the
# pages. Network, from the same pages: v5p 50 Gb/s per chip; v5e and v6e 2 × 100 and 4 × 200 Gb/s per 8 chips; v4
# recalled. Devices per host: for slices of several hosts. Prices: Google's list, lowest US region, 2025, recalled.
# TPU7x (Ironwood): the page "TPU7x" of that site. A chip has 2,307 TFLOP/s, 7,380 GB/s, 192 GiB, 1,200 GB/s of links in
# both directions and a network of 100 Gb/s. It is two devices in JAX, each with half of these values. Memory: also the
# limit of libtpu. No price was found.
# GPU. NVIDIA's data sheets of A100 80 GB, H100 SXM and H200 SXM; recalled except for the peak and memory rates. The
# sheets also list FLOP/s with sparsity, twice the values below. Memory: the value in GiB that CUDA reports for the 80
# and 141 GB of the sheets, recalled. Links: NVLink, half of the value of the sheets, which counts both directions.
# Network: one InfiniBand port per device, 400 Gb/s in DGX H100 and H200, 200 Gb/s in DGX A100, recalled. Prices: an
# eighth of Amazon's p4de, p5 and p5en instances, 2025, recalled.
# B200 and GB200: FLOP/s from NVIDIA's "Blackwell Architecture Technical Brief" for HGX B200 (1,000 W) and GB200 NVL72
# (1,200 W), as tabulated at glennklockwood.com/garden/processors/B200. Memory of B200: 178.35 GiB and 7.67 TB/s, as the
# driver reports (github.com/pytorch/ao, pull request 4002). Memory of GB200: 186 GB (system descriptions of MLPerf
# Inference 6.1; value in GiB recalled), 8 TB/s. NVLink: 1.8 TB/s in both directions. Network: 400 Gb/s per device,
# recalled. In a GB200 NVL72, NVLink connects the 72 devices of a rack, so a rack counts as one host here, although it
# has 18 hosts of four devices. Price of B200: Amazon's p6-b200, 2025, recalled. GB200 has no price on demand.
_TABLE = (
    # name, device_kinds, peak_flops, memory_bytes, memory_rate, link_rate, torus, network_rate, devices_per_host, price
    Chip("v4", ("tpu v4",), 275e12, int(30.75 * GIB), 1228 * GB, 300 * GB, 3, 6.25 * GB, 4, 3.22),
    Chip("v5e", ("tpu v5 lite", "tpu v5e"), 197e12, int(15.75 * GIB), 819 * GB, 200 * GB, 2, 3.125 * GB, 4, 1.20),
    Chip("v5p", ("tpu v5p", "tpu v5"), 459e12, int(95.74 * GIB), 2765 * GB, 600 * GB, 3, 6.25 * GB, 4, 4.20),
    Chip("v6e", ("tpu v6 lite", "tpu v6e"), 918e12, int(31.25 * GIB), 1640 * GB, 400 * GB, 2, 12.5 * GB, 4, 2.70),
    Chip("tpu7x", ("tpu7x",), 1153.5e12, int(94.75 * GIB), 3690 * GB, 300 * GB, 3, 6.25 * GB, 8, None, 2),
    Chip("a100", ("a100",), 312e12, 79 * GIB, 2039 * GB, 300 * GB, 0, 25 * GB, 8, 3.43),
    Chip("h100", ("h100",), 990e12, 79 * GIB, 3350 * GB, 450 * GB, 0, 50 * GB, 8, 6.88),
    Chip("h200", ("h200",), 990e12, 139 * GIB, 4800 * GB, 450 * GB, 0, 50 * GB, 8, 7.91),
    Chip("gb200", ("gb200",), 2500e12, 184 * GIB, 8000 * GB, 900 * GB, 0, 50 * GB, 72),
    Chip("b200", ("nvidia b200",), 2250e12, 178 * GIB, 7670 * GB, 900 * GB, 0, 50 * GB, 8, 14.24),
)
# Dense operations per second with 8-bit operands, {value of config.train.products: peak}. TPUs: Google's pages,
# recalled; the page of TPU7x has 4,614 TFLOP/s per chip, and no int8. A100 and H100: the data sheets, recalled; H200
# equals H100. B200 and GB200: the table cited above.
_EIGHT_BIT = {
    "v4": {"int8": 275e12},
    "v5e": {"int8": 394e12},
    "v5p": {"int8": 918e12},
    "v6e": {"int8": 1836e12},
    "tpu7x": {"fp8": 2307e12},
    "a100": {"int8": 624e12},
    "h100": {"fp8": 1979e12, "int8": 1979e12},
    "h200": {"fp8": 1979e12, "int8": 1979e12},
    "gb200": {"fp8": 5000e12, "int8": 5000e12},
    "b200": {"fp8": 4500e12, "int8": 4500e12},
}
CHIPS = {chip.name: chip for chip in _TABLE}


def chip_of(device_kind: str) -> Optional[Chip]:
    """Looks up the chip for a `jax.Device.device_kind`; returns None if the kind is unknown, as for a CPU."""
    return next((chip for chip in _TABLE if any(kind in device_kind.lower() for kind in chip.device_kinds)), None)


def peak_flops(device_kind: str) -> Optional[float]:
    """Returns the peak dense bfloat16 FLOP/s for a `jax.Device.device_kind`, or None if the kind is unknown."""
    chip = chip_of(device_kind)
    return chip and chip.peak_flops


def tile_padding(columns: float, platform: str) -> float:
    """Returns the columns that a product computes, in whole tiles, divided by its columns; 1 for no columns."""
    multiple = ALIGNMENT[platform]
    return math.ceil(columns / multiple) * multiple / columns if columns else 1.0
