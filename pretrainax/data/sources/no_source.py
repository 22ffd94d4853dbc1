"""The source of a config that has none yet."""

import dataclasses

from pretrainax.data.sources.base import Source


@dataclasses.dataclass
class NoSource(Source):
    """Stands where a source has still to be chosen: an imported model comes without the text it was trained on."""

    def problems(self, experiment):
        yield (
            "config.data.source is not chosen: an imported model comes without text; give one, as "
            "--config.data.source=\"TextFiles(path='my/folder')\""
        )
