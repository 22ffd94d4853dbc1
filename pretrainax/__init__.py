"""PretrainAX: pretrain encoders, encoder-decoders and decoders in JAX."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.api import OpenRun, open, train
    from pretrainax.inference.load import load
    from pretrainax.inference.verification import verify
    from pretrainax.training.callbacks import Callback

_MODULES = {  # public name -> module that defines it
    "Callback": "pretrainax.training.callbacks",
    "OpenRun": "pretrainax.api",
    "load": "pretrainax.inference.load",
    "open": "pretrainax.api",
    "train": "pretrainax.api",
    "verify": "pretrainax.inference.verification",
}
__all__ = ["Callback", "OpenRun", "load", "open", "train", "verify"]
__version__ = "0.6.0"


def __getattr__(name: str) -> object:
    """Imports a public name on first use, to keep `import pretrainax` fast."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the package's attributes, including public names not yet imported, so that tab completion finds them."""
    return sorted({*globals(), *__all__})
