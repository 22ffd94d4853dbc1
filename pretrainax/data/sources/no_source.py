"""Defines a placeholder for configs without a data source."""

import dataclasses

from pretrainax.data.sources.base import Source


@dataclasses.dataclass
class NoSource(Source):
    """Placeholder for a data source that the user must set, because an imported model has no training data."""

    def problems(self, experiment):
        yield (
            "config.data.source is not chosen: an imported model comes without training data; set it, for example "
            "--config.data.source=\"TextFiles(path='my/folder')\""
        )
