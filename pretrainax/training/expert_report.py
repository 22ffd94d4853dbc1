"""Reports how evenly the experts of a run are used, as one of its callbacks."""

import os

from pretrainax.storage.places import named
from pretrainax.training.callbacks import Callback
from pretrainax.training.expert_balance import expert_loads, layer_figures
from pretrainax.training.metrics import read_metrics


class ExpertBalance(Callback):
    """Adds the figures of each layer to the lines of a run, warns of dead experts, and draws experts.png."""

    part = ""  # of all that it does nothing takes long

    def __init__(self):
        self._dead = 0.0  # experts, of the last line

    def figures(self, loop, state):
        loads = expert_loads(loop.sums)
        return {**layer_figures(loop.sums), **({"experts": loads} if loads else {})}

    def on_log(self, loop, state, metrics):
        dead = metrics.get("dead_experts", 0.0)
        if dead > self._dead:
            loop.note(
                f"{dead:.0f} experts got no token in the steps up to {loop.step}: they learn nothing. Which "
                "ones: `experts` in metrics.jsonl; raise config.model.experts.balance_weight"
            )
        self._dead = dead

    def on_end(self, loop, state, metrics):
        lines = read_metrics(loop.writer.path) if loop.run.is_primary else []
        if any("experts" in line for line in lines):
            from pretrainax.reporting import expert_picture  # here: matplotlib takes long to import

            path = os.path.join(loop.workdir, "experts.png")
            expert_picture.draw(path, lines, os.path.basename(os.path.abspath(loop.workdir)))
            loop.note(f"balance of the experts: {named(path)}")
