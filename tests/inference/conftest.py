from tests.support.made_run import made_run, run  # noqa: F401
