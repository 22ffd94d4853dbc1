"""Accelerators: what each can do at most, what it holds, and what it costs.

Rates are the makers'. Each line names its page; "recalled" marks what was written from memory and not read again, so
check it before money depends on it. A program reaches less: `planning.roofline` says which share it counts on.
"""

import dataclasses
from typing import Optional

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts them: a TPU chip (v4 and v5p: both cores; TPU7x: one of two chiplets) or a GPU."""

    name: str
    device_kinds: tuple[str, ...]  # lower-case parts of jax.Device.device_kind
    peak_flops: float  # dense bfloat16 FLOP/s
    memory_bytes: int  # that a program may use
    memory_rate: float  # B/s
    link_rate: float  # B/s of a device into its fast network, one direction, all links together
    torus: int  # dimensions of that network; 0: every device of a host is next to every other
    network_rate: float  # B/s of a device between hosts (GPU) or slices (TPU), one direction
    devices_per_host: int  # of GPUs: those that NVLink joins
    price: Optional[float] = None  # USD for a device and hour, on demand
    devices_per_chip: int = 1

    @property
    def is_tpu(self) -> bool:
        return self.torus > 0

    @property
    def platform(self) -> str:
        """Returns what JAX calls it."""
        return "tpu" if self.is_tpu else "gpu"


# TPU. FLOP/s, memory rate and links: the pages "TPU v5e", "v5p" and "v6e" of docs.cloud.google.com/tpu/docs, whose
# "bidirectional inter-chip interconnect bandwidth per chip" (400, 1,200 and 800 GB/s) is twice link_rate; v4 recalled.
# Memory: the limit that libtpu 0.0.42 names in its error line for a program that is too large, a little less than the
# 32, 16, 95 and 32 GB of the pages. Network: v5p 50 Gb/s a chip; v5e and v6e 2 × 100 and 4 × 200 Gb/s for 8 chips, of
# the same pages; v4 recalled. Hosts: of slices of several hosts. Prices: Google's list, lowest US region, recalled of
# 2025.
# TPU7x (Ironwood): the page "TPU7x" there. A chip of 2,307 TFLOP/s, 7,380 GB/s, 192 GiB, 1,200 GB/s of links in both
# directions and a network of 100 Gb/s is two devices to JAX: half of each here. Memory: libtpu's limit, likewise. Its
# price has not been found.
# GPU. NVIDIA's data sheets of A100 80 GB, H100 SXM and H200 SXM, recalled but for the peak and memory rates; what they
# give with sparsity is twice the FLOP/s. Memory: what CUDA reports of the sheets' 80 and 141 GB, in GiB, recalled.
# Links: NVLink, half of the sheet's figure, which counts both directions. Network: one InfiniBand port a device,
# 400 Gb/s in DGX H100 and H200, 200 Gb/s in DGX A100, recalled. Prices: Amazon's p4de, p5 and p5en instances by eight,
# recalled of 2025.
# B200 and GB200: FLOP/s of NVIDIA's "Blackwell Architecture Technical Brief", of HGX B200 (1,000 W) and of GB200 NVL72
# (1,200 W), as tabulated at glennklockwood.com/garden/processors/B200. Memory of B200: 178.35 GiB and 7.67 TB/s are
# what its driver tells (github.com/pytorch/ao, pull request 4002); of GB200: 186 GB (system descriptions of MLPerf
# Inference 6.1), in GiB recalled, 8 TB/s. NVLink: 1.8 TB/s both directions. Network: 400 Gb/s a device, recalled. In a
# GB200 NVL72 NVLink joins the 72 devices of a rack, so a rack stands for a host here, though it has 18 of four devices.
# Price of B200: Amazon's p6-b200, recalled of 2025; of GB200 there is no price on demand.
_TABLE = (
    # name, device_kinds, FLOP/s, memory, B/s, links, torus, network, a host, price
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
CHIPS = {chip.name: chip for chip in _TABLE}


def chip_of(device_kind: str) -> Optional[Chip]:
    """Returns the chip of a `jax.Device.device_kind`; None where it is unknown, as for any CPU."""
    return next((chip for chip in _TABLE if any(kind in device_kind.lower() for kind in chip.device_kinds)), None)


def peak_flops(device_kind: str) -> Optional[float]:
    """Returns the dense bfloat16 FLOP/s of a `jax.Device.device_kind`; None where unknown, as for any CPU."""
    chip = chip_of(device_kind)
    return chip and chip.peak_flops
