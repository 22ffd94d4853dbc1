"""Shows a run elsewhere too, beside its metrics.jsonl: TensorBoard, Weights & Biases, MLflow, behind one face."""

from pretrainax.trackers.base import TrackedRun, Tracker, Writer, check_trackers, shown_config
from pretrainax.trackers.lanes import Trackers
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
    "shown_config",
]
