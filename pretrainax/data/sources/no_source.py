"""A placeholder for configs without a data source."""

import dataclasses

from pretrainax.data.sources.base import Source


@dataclasses.dataclass
class NoSource(Source):
    """A placeholder until the user sets a source: an imported model comes without its training data."""

    def problems(self, experiment):
        yield (
            "config.data.source is not chosen: an imported model comes without training data; set it, for example "
            "--config.data.source=\"TextFiles(path='my/folder')\""
        )
