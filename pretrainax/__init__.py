"""PretrainAX: pretrain encoders, encoder-decoders and decoders in JAX."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.api import OpenRun, open, train
    from pretrainax.inference.load import load
    from pretrainax.inference.verification import verify
    from pretrainax.training.callbacks import Callback

    __version__: str

_MODULES = {  # public name -> module that defines it
    "Callback": "pretrainax.training.callbacks",
    "OpenRun": "pretrainax.api",
    "load": "pretrainax.inference.load",
    "open": "pretrainax.api",
    "train": "pretrainax.api",
    "verify": "pretrainax.inference.verification",
}
__all__ = ["Callback", "OpenRun", "load", "open", "train", "verify"]


def __getattr__(name: str) -> object:
    """Imports a public name on first use, to keep `import pretrainax` fast; `__version__` is read on first use too."""
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """Returns the version of the installed package, derived from the tag, or "0.0+unknown" if it is not installed."""
    try:
        return importlib.metadata.version("pretrainax")
    except importlib.metadata.PackageNotFoundError:
        return "0.0+unknown"


def __dir__() -> list[str]:
    """Lists the package's attributes, including public names not yet imported, so that tab completion finds them."""
    return sorted({*globals(), *__all__, "__version__"})
