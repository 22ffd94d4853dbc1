"""Describes accelerators that this machine need not have, such as `v5p:4x4x8`, `h100:4x8` or `4*v5e:16x16`.

`plan` estimates and compiles steps for such a topology. Compilation requires the chip's compiler: libtpu (extra `tpu`)
or JAX's CUDA plugin (extra `cuda12` or `cuda13`). Estimates need no compiler.
"""

import dataclasses
import importlib.util
import math
import os
import re

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from pretrainax.config import UserError, nearest
from pretrainax.files.extras import needs
from pretrainax.planning import cloud_names
from pretrainax.runtime.chips import CHIPS, Chip
from pretrainax.runtime.libtpu import overlap_gathers

# Without these environment variables, libtpu queries a metadata server about a local TPU and waits for a response.
_NO_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # otherwise only one process may load libtpu, to protect a real TPU
}

_GPU_COMPILERS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# Template of XLA's GpuTargetConfigProto, which describes a GPU. The values are from NVIDIA's data sheets and from
# deviceQuery.
_GPU_TARGET = """
gpu_device_info {{
  name: "{name}"
  cuda_compute_capability {{ {capability} }}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} device_address_bits: 64
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared} shared_memory_per_core: {shared_core}
  l2_cache_size: {cache} device_memory_size: {memory} memory_bandwidth: {rate}
  driver_version: "13.0.0" runtime_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""
_HOPPER = {
    "capability": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
    "cores": 132,
    "units": 128,
    "clock": 1.98,
    "shared": 232448,
    "shared_core": 233472,
    "cache": 50 * 2**20,
}
_AMPERE = {
    "capability": "major: 8 minor: 0",
    "cores": 108,
    "units": 64,
    "clock": 1.41,
    "shared": 166912,
    "shared_core": 167936,
    "cache": 40 * 2**20,
}
_BLACKWELL = {
    "capability": "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES",
    "cores": 148,
    "units": 128,
    "clock": 1.965,
    "shared": 232448,
    "shared_core": 233472,
    "cache": 126 * 2**20,
}
_GPU_VALUES = {
    "a100": {"name": "NVIDIA A100-SXM4-80GB", **_AMPERE},
    "h100": {"name": "NVIDIA H100 80GB HBM3", **_HOPPER},
    "h200": {"name": "NVIDIA H200", **_HOPPER},
    "b200": {"name": "NVIDIA B200", **_BLACKWELL},
    "gb200": {"name": "NVIDIA GB200", **_BLACKWELL},
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of a run: the chip, the shape of one slice and the number of slices.

    A slice is a group of devices with fast links between them. All slices have the same shape and communicate only
    through the slow network.
    """

    chip: Chip
    shape: tuple[int, ...]  # shape of one slice: TPU chips per torus dimension, or (hosts, GPUs per host)
    slices: int = 1  # number of slices

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parses a topology in the format `[SLICES*]CHIP:SHAPE`, or with a cloud's name after `[SLICES*]`.

        Examples: `v5p:4x4x8`, `h100:8` (one host), `h100:4x8` (hosts × GPUs per host), `4*v5e:16x16` (four slices),
        `v5e-16`, `8xh100`; `cloud_names` lists the others.

        Raises:
          UserError: the text has a different format, the chip is unknown, or the shape is invalid for the chip.
        """
        slices_text, devices = re.fullmatch(r"(?:(\d+)\*)?(.*)", text.strip().lower(), re.DOTALL).groups()
        try:
            expanded = devices if ":" in devices else cloud_names.expand(devices)
        except UserError as e:
            raise UserError(f"--topology={text}: {e}") from e
        match = re.fullmatch(r"([\w-]+):(\d+(?:x\d+)*)", expanded or "")
        if match is None:
            raise UserError(
                f"--topology={text}: write CHIP:SHAPE, such as v5p:4x4x8, h100:4x8 or 4*v5e:16x16, or a cloud's name, "
                f"such as v5e-16 or h100x8; chips: {', '.join(sorted(CHIPS))}"
            )
        shape, chip, slices = (
            tuple(map(int, match[2].split("x"))),
            cloud_names.chip_named(match[1]),
            int(slices_text or 1),
        )
        if chip is None:
            raise UserError(f"--topology={text}: unknown chip {match[1]!r}, {nearest(match[1], CHIPS)}")
        name = chip.name
        if not slices or not all(shape):
            raise UserError(f"--topology={text}: every size must be at least 1")
        if chip.is_tpu and len(shape) != chip.torus:
            example = "x".join(["4"] * chip.torus)
            raise UserError(f"--topology={text}: a slice of {name} has {chip.torus} sizes, such as {name}:{example}")
        if not chip.is_tpu:
            shape = shape if len(shape) > 1 else (1, *shape)
            if len(shape) > 2 or shape[1] > chip.devices_per_host:
                raise UserError(
                    f"--topology={text}: write {name}:HOSTSxDEVICES, at most {chip.devices_per_host} devices per host"
                )
        return cls(chip, shape, slices)

    def __str__(self) -> str:
        shape = self.shape if self.chip.is_tpu or self.shape[0] > 1 else self.shape[1:]
        return f"{f'{self.slices}*' if self.slices > 1 else ''}{self.chip.name}:{'x'.join(map(str, shape))}"

    @property
    def num_devices(self) -> int:
        """Returns the number of JAX devices in all slices."""
        return self.slices * math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def is_torus(self) -> bool:
        """Checks whether the links of a TPU slice wrap around in all dimensions, so that they form a torus.

        A 3D torus needs at least 4 chips per dimension. A 2D torus needs 16 chips per dimension, which is a whole pod.
        """
        return self.chip.is_tpu and min(self.shape) >= {2: 16, 3: 4}[self.chip.torus]

    def flops_at(self, mfu: float) -> float:
        """Computes the total FLOP/s of all devices at an MFU of `mfu` (0 to 1)."""
        return mfu * self.num_devices * self.chip.peak_flops

    @property
    def hosts(self) -> int:
        """Returns the number of hosts in all slices."""
        if not self.chip.is_tpu:
            return self.slices * self.shape[0]
        return self.slices * max(1, self.num_devices // self.slices // self.chip.devices_per_host)

    def doubled(self) -> "Topology":
        """Returns a topology with twice as many devices.

        For TPUs, the slice's shortest dimension is doubled. For GPUs, the number per host is doubled or, if the hosts
        are full, the number of hosts.
        """
        shape = list(self.shape)
        is_host_growing = not self.chip.is_tpu and 2 * shape[1] <= self.chip.devices_per_host
        dimension = len(shape) - 1 - shape[::-1].index(min(shape)) if self.chip.is_tpu else int(is_host_growing)
        shape[dimension] *= 2
        return dataclasses.replace(self, shape=tuple(shape))

    def devices(self) -> list[jax.Device]:
        """Returns device descriptions for the compiler, in JAX's device order; they cannot hold arrays.

        Raises:
          UserError: the chip's compiler is not installed, or does not support a slice of this shape.
        """
        extra, modules = ("tpu", ("libtpu",)) if self.chip.is_tpu else ("cuda13", _GPU_COMPILERS)
        module = next(filter(_is_installed, modules), None)
        if module is None:
            raise UserError(needs(f"compiling for {self}", modules[:1], extra))
        try:
            description = self._tpu() if self.chip.is_tpu else self._gpu()
        except Exception as e:  # the plugins raise exceptions of many types
            first_line = (str(e).splitlines() or [type(e).__name__])[0]
            raise UserError(f"--topology={self}: {module} does not support these devices: {first_line}") from e
        return list(description.devices)

    def _tpu(self):
        for name, value in _NO_TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        overlap_gathers()
        shape = "x".join(map(str, self.shape))
        options = {"num_slices": self.slices} if self.slices > 1 else {}
        if math.prod(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.chip.name == "v4":
            options["chip_config_name"] = "megacore"  # both cores of a chip are one device
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{self.chip.name}:{shape}", **options)

    def _gpu(self):
        memory, rate = self.chip.memory_bytes, int(self.chip.memory_rate)
        values = _GPU_VALUES[self.chip.name]
        target = _GPU_TARGET.format(memory=memory, rate=rate, **values)
        _register_capability(*re.findall(r"\d+", values["capability"]))
        topology_text = "x".join(map(str, (self.slices, *self.shape)))
        if jax.default_backend() != "gpu":
            # Without a GPU, JAX would reject the head sizes that cuDNN computes on Hopper only. The layer checks them.
            fused_attention_stablehlo.check_compute_capability = lambda capability: True
        return topologies.get_topology_desc("", "cuda", target_config=target, topology=topology_text)


def _register_capability(major: str, minor: str) -> None:
    """Registers the compute capability of the GPUs of a topology, which jax 0.11 requires to compile Pallas kernels.

    JAX looks it up by the device kind, which is "" for these GPUs.
    """
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:  # jax 0.10
        return
    info = gpu_info.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=int(major + minor))
    gpu_info.registry[""] = lambda: info


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
