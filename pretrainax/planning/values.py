"""Collects the numbers that `plan --json` prints: one run on one mesh, and the best meshes. Bytes are per device."""

from typing import Optional

from pretrainax.config import Experiment
from pretrainax.files.json_files import JsonObject
from pretrainax.planning import search
from pretrainax.planning.compiled import Compiled
from pretrainax.planning.memory import MARGIN
from pretrainax.planning.search import Candidate
from pretrainax.planning.topologies import Topology


def run_values(
    name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str
) -> JsonObject:
    """Returns the numbers of `report.run_report`; arguments as there. "compiled" is None without a compiled step."""
    chip = topology.chip
    return {
        "config": name,
        "topology": str(topology),
        "devices": topology.num_devices,
        "hosts": topology.hosts,
        "limit_bytes": round(MARGIN * chip.memory_bytes),
        **_candidate_values(candidate),
        "phases": [{"name": phase.name, **_candidate_values(plan)} for phase, plan in candidate.phases],
        "collectives": [
            {"axis": c.axis, "kind": c.kind, "where": c.where, "bytes_per_step": c.total} for c in candidate.collectives
        ],
        "compiled": compiled
        and {
            "fits": compiled.fits,
            "peak_bytes": compiled.needed,
            "available_bytes": compiled.available,
            "seconds": compiled.seconds,
        },
        "compilation": note,
        "proposals": [] if (compiled or candidate).fits else _proposals(candidate.experiment, topology),
    }


def mesh_values(experiment: Experiment, candidates: list[Candidate]) -> list[JsonObject]:
    """Returns the numbers of each candidate and the flags that turn `experiment` into its config."""
    return [{**_candidate_values(candidate), "flags": candidate.flags(experiment)} for candidate in candidates]


def _proposals(experiment: Experiment, topology: Topology) -> list[JsonObject]:
    """Returns changes that make a run fit, each with the topology for which it is estimated."""
    larger, candidates = search.remedies_on_larger_topology(experiment, topology)
    return [{"topology": str(larger), **values} for values in mesh_values(experiment, candidates)]


def _candidate_values(candidate: Candidate) -> JsonObject:
    time = candidate.roofline
    return {
        "mesh": candidate.sizes,
        "fits": candidate.fits,
        "peak_bytes": candidate.memory.total,
        "memory_bytes": dict(candidate.memory.parts()),
        "step_seconds": time.seconds,
        "step_seconds_range": time.range,
        "flops": time.flops,
        "executed_flops": time.executed_flops,
        "mfu": time.mfu,
        "hours": time.hours,
        "price_usd": time.price,
    }
