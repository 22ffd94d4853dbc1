"""Estimates the FLOPs, memory traffic and collectives of optimizers that multiply whole matrices, such as Muon."""

from collections.abc import Iterable
from typing import cast

from pretrainax.config import Experiment
from pretrainax.optim.optimizers import Optimizer
from pretrainax.optim.sharded_stacks import MatrixWork
from pretrainax.planning.activations import abstract_state

# Time of a float32 matrix multiplication of the default precision relative to bfloat16. A GPU computes it in TF32, at
# half of the bfloat16 rate (data sheets of A100, H100 and B200). A TPU rounds the operands to bfloat16.
_FLOAT32_TIME = {"gpu": 2.0, "tpu": 1.0}


def optimizer_flops(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Computes the optimizer's FLOPs per device and update, as FLOPs that take the same time in bfloat16.

    Args:
      platform: "tpu" or "gpu".
    """
    works = matrix_work(experiment, mesh_sizes)
    return sum(one.flops * (_FLOAT32_TIME[platform] if one.itemsize == 4 else 1.0) for one in works)


def optimizer_operands(experiment: Experiment, mesh_sizes: dict[str, int]) -> float:
    """Computes the bytes per device that the optimizer's matrix multiplications read and write in one update."""
    return sum(one.itemsize * one.operands for one in matrix_work(experiment, mesh_sizes))


def matrix_work(experiment: Experiment, mesh_sizes: dict[str, int]) -> Iterable[MatrixWork]:
    """Returns the work of one device on the matrices that the optimizer shares between devices."""
    return cast(Optimizer, experiment.optimizer).matrix_work(abstract_state(experiment, mesh_sizes).params, mesh_sizes)
