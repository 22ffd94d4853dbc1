from tests.support.fake_hub import hub_server  # noqa: F401
from tests.support.made_run import made_run, run  # noqa: F401
