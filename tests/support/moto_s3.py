"""A local server of the S3 protocol (moto), and the settings with which fsspec finds it."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Yields the URL of a server with the bucket `bucket`."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        fsspec.filesystem("s3", **settings(url)).call_s3("create_bucket", Bucket="bucket")
        yield url
    finally:
        server.stop()


def settings(url: str) -> dict[str, object]:
    """Returns the settings of fsspec for a server at s3://."""
    keys = {"key": "test", "secret": "test"}
    return {"endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}, **keys}


def client(url: str):
    """Returns a client of the server that uses keys unchanged, unlike the client of fsspec."""
    import botocore.session

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return botocore.session.get_session().create_client("s3", endpoint_url=url, region_name="us-east-1", **keys)


def environment(url: str) -> dict[str, str]:
    """Returns the environment variables with which fsspec finds the server in another process."""
    keys = {"FSSPEC_S3_KEY": "test", "FSSPEC_S3_SECRET": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    return {"FSSPEC_S3_ENDPOINT_URL": url, **keys}
