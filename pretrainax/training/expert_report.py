"""Defines the callback that reports the load balance of a run's experts."""

import os

from pretrainax.storage.places import with_urls
from pretrainax.training.callbacks import Callback
from pretrainax.training.expert_balance import expert_loads, layer_balance_metrics
from pretrainax.training.metrics import read_metrics


class ExpertBalance(Callback):
    """Logs the load-balance metrics of each layer, warns about experts without tokens, and draws experts.png."""

    part = ""  # its methods are fast, so they need no row in the goodput table

    def __init__(self):
        self._num_dead = 0.0  # number of experts without tokens at the last log

    def log_metrics(self, loop, state):
        loads = expert_loads(loop.sums)
        return {**layer_balance_metrics(loop.sums), **({"experts": loads} if loads else {})}

    def on_log(self, loop, state, metrics):
        num_dead = metrics.get("dead_experts", 0.0)
        if num_dead > self._num_dead:
            loop.note(
                f"{num_dead:.0f} experts got no token in the steps up to {loop.step}, so they learn nothing. "
                "`experts` in metrics.jsonl lists them. Raise config.model.experts.balance_weight"
            )
        self._num_dead = num_dead

    def on_end(self, loop, state, metrics):
        lines = read_metrics(loop.writer.path) if loop.run.is_primary else []
        if any("experts" in line for line in lines):
            from pretrainax.reporting import expert_plot  # imported lazily: matplotlib takes long to import

            path = os.path.join(loop.workdir, "experts.png")
            expert_plot.draw(path, lines, os.path.basename(os.path.abspath(loop.workdir)))
            loop.note(f"balance of the experts: {with_urls(path)}")
