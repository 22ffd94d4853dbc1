"""PretrainAX: pretrain encoders, encoder-decoders and decoders in JAX."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.api import OpenRun, open, train
    from pretrainax.inference.load import load
    from pretrainax.training.callbacks import Callback

_MODULES = {  # of what can be used
    "Callback": "pretrainax.training.callbacks",
    "OpenRun": "pretrainax.api",
    "load": "pretrainax.inference.load",
    "open": "pretrainax.api",
    "train": "pretrainax.api",
}
__all__ = ["Callback", "OpenRun", "load", "open", "train"]
__version__ = "0.6.0"


def __getattr__(name: str) -> object:
    """Imports what is used when it is used: `import pretrainax` alone takes no time."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names what can be used, for an editor that completes words."""
    return sorted({*globals(), *__all__})
