"""Tests how a process detects that it is one of several: by the environment and the metadata of a TPU's machine."""

import http.server
import threading

import pytest

from pretrainax.config import RunFailed
from pretrainax.runtime import cluster

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.fixture
def set_environment(monkeypatch):
    """Returns a function that sets the whole environment, on a machine without a TPU."""
    monkeypatch.setattr(cluster, "_has_tpu", lambda: False)

    def only(variables):
        monkeypatch.setattr("os.environ", dict(variables))

    return only


@pytest.mark.parametrize(
    "variables, joins",
    [
        ({}, False),
        ({"JAX_COORDINATOR_ADDRESS": "host:1234"}, True),
        ({"JAX_NUM_PROCESSES": "2"}, True),
        ({"JAX_PROCESS_ID": "1"}, True),
        (SLURM | {"SLURM_NTASKS": "2"}, True),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, False),  # the script of a job, outside of srun
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, True),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, False),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"} | SLURM | {"SLURM_NTASKS": "2"}, False),  # mpirun within srun
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, False),  # The machine has no TPU.
    ],
)
def test_a_launcher_says_how_many_there_are(variables, joins, set_environment):
    set_environment(variables)
    assert cluster.is_multi_process() == joins


@pytest.mark.parametrize("installed, joins", [(True, True), (False, False)])
def test_a_pod_of_an_indexed_job_is_one_of_many_where_jax_can_ask(installed, joins, set_environment, monkeypatch):
    set_environment(POD)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert cluster.is_multi_process() == joins


@pytest.mark.parametrize(
    "variables, joins",
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_SKIP_MDS_QUERY": "true"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a", "TPU_PROCESS_ADDRESSES": "a:1,a:2"}, True),
        ({"TPU_SKIP_MDS_QUERY": "1"}, False),
    ],
)
def test_a_pod_with_a_tpu_knows_its_workers(variables, joins, set_environment, monkeypatch):
    set_environment(variables)
    monkeypatch.setattr(cluster, "_has_tpu", lambda: True)
    assert cluster.is_multi_process() == joins


@pytest.fixture
def metadata():
    """Serves attributes like a Compute Engine machine; yields (address, attributes)."""
    attributes = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
            self.send_response(404 if value is None or self.headers["Metadata-Flavor"] != "Google" else 200)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", attributes
        server.shutdown()


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "found, joins",
    [
        ({"worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2"}, True),
        ({"worker-network-endpoints": "a:0:10.0.0.1"}, False),
        ({"worker-network-endpoints": "a", "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n"}, True),
        ({}, False),
    ],
)
def test_a_machine_with_a_tpu_asks_for_its_workers(found, joins, metadata, set_environment, monkeypatch):
    address, attributes = metadata
    attributes.update(found)
    set_environment({"GCE_METADATA_IP": address})
    monkeypatch.setattr(cluster, "_has_tpu", lambda: True)
    assert cluster.is_multi_process() == joins


def test_a_machine_that_does_not_answer_ends_the_run(set_environment, monkeypatch):
    set_environment({"GCE_METADATA_IP": "127.0.0.1:1"})
    monkeypatch.setattr(cluster, "_has_tpu", lambda: True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(RunFailed, match="set TPU_SKIP_MDS_QUERY=1"):
        cluster.is_multi_process()
