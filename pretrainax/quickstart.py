"""Trains a small T5 on installed documentation, without a download: `python -m pretrainax.quickstart`.

The command is `pretrainax train --config=quickstart`, and it takes the same flags, such as --workdir=DIR. The text is
the documentation of Python, NumPy, SciPy, JAX, Flax and Optax, which is on every machine where PretrainAX is installed.
A run takes about 3 minutes on 2 cores. With --config.train.steps=200 it takes one minute, too few to beat the baseline.
It ends with a table of results and with the commands to try next.
"""

import sys

from pretrainax import cli

CONFIG = "--config=quickstart"

if __name__ == "__main__":
    from pretrainax import main as training  # here, because it defines the flags of `train`

    if not any(word in (*cli.HELP, cli.COMPLETE) for word in sys.argv):  # --help with a config lists all its fields
        sys.argv.insert(1, CONFIG)
    cli.run(training.main, trains=True)
