"""Trackers, which copy the metrics of a run to TensorBoard, Weights & Biases or MLflow."""

from pretrainax.trackers.background import Trackers
from pretrainax.trackers.base import TrackedRun, Tracker, Writer, check_trackers, config_values
from pretrainax.trackers.mlflow import MLflow
from pretrainax.trackers.tensorboard import TensorBoard
from pretrainax.trackers.wandb import WandB

__all__ = [
    "MLflow",
    "TensorBoard",
    "TrackedRun",
    "Tracker",
    "Trackers",
    "WandB",
    "Writer",
    "check_trackers",
    "config_values",
]
