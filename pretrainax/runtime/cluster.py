"""Detects whether a run has several processes, and provides access to the key-value store that they share."""

import glob
import importlib.util
import os
import time
import urllib.error
import urllib.request
from typing import Any, Optional

from pretrainax.config import RunFailed

PROCESS_VARIABLES = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # srun sets all


def is_multi_process() -> bool:
    """Returns True if the environment or the TPU shows that the run has several processes.

    Launchers are checked in the same order as in `jax.distributed.initialize`, and the first one found decides.

    Raises:
      RunFailed: a Google Cloud TPU's metadata server does not return the TPU's machines.
    """
    environment = os.environ
    if any(name in environment for name in ("JAX_COORDINATOR_ADDRESS", *PROCESS_VARIABLES)):
        return True
    if "OMPI_MCA_orte_hnp_uri" in environment:  # Open MPI
        return int(environment["OMPI_COMM_WORLD_SIZE"]) > 1
    if all(name in environment for name in _SLURM):
        return int(environment["SLURM_NTASKS"]) > 1
    if _has_tpu():
        workers = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES"))
        if workers is not None:  # Google Kubernetes Engine
            return "," in workers or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
        if "TPU_SKIP_MDS_QUERY" not in environment:
            workers = _metadata("worker-network-endpoints")
            if workers is not None:
                return "," in workers or _slices_of_metadata() > 1
    # A pod of an indexed Kubernetes Job. JAX reads the other settings from the cluster, with the package `kubernetes`.
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    return indexed and importlib.util.find_spec("kubernetes") is not None


def _has_tpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None and bool(
        glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    )


def _slices_of_metadata() -> int:
    """Returns the number of slices of a Compute Engine TPU.

    The number is the value of MEGASCALE_NUM_SLICES, either in the environment or in the machine attribute tpu-env,
    which has lines of the form "NAME: 'value'". If the variable is in neither, the TPU has one slice.
    """
    lines = (line.partition(":") for line in (_metadata("tpu-env") or "").splitlines())
    pairs = {name.strip(): value.strip().strip("'") for name, _, value in lines}
    return int(os.environ.get("MEGASCALE_NUM_SLICES") or pairs.get("MEGASCALE_NUM_SLICES") or 1)


def _metadata(key: str, tries: int = 6) -> Optional[str]:
    """Fetches this Compute Engine machine's attribute `key`; returns None if the attribute does not exist.

    Raises:
      RunFailed: the metadata server did not respond in `tries` attempts.
    """
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for attempt in range(tries):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.read().decode()
        except urllib.error.HTTPError as e:
            if e.code == 404:
                return None
            failure = e
        except OSError as e:
            failure = e
        time.sleep(0.5 if attempt + 1 < tries else 0)
    raise RunFailed(
        f"{url} did not return the machines of this TPU: {failure}. If this TPU is outside Google Cloud, set "
        "TPU_SKIP_MDS_QUERY=1"
    ) from failure


def distributed_state() -> Any:
    """Returns JAX's distributed state, which `jax.distributed.initialize` creates.

    The fields are `client` (of the key-value store that all processes share), `process_id`, `num_processes` and
    `coordinator_address`.

    NOTE This is the only private JAX name that the package uses. The store has no public name (jax 0.10.2). The public
    `jax.process_index()` would start the backend, which waits for the other processes before the watchdog runs.
    """
    from jax._src import distributed

    return distributed.global_state
