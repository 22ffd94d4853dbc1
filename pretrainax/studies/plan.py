"""Stores the plan of a study in its workdir: the contents of the study file and the length of each arm's runs.

The plan exists from the start of the study. All processes that share the workdir follow the plan, so a budget in
seconds gives the same steps on all machines. The plan also has the config of each arm and a fingerprint of each text,
because the study file has only their names.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pretrainax.config import Experiment, UserError, differences, from_json, to_json
from pretrainax.data.sources import Source
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.studies.arms import configured, tunable
from pretrainax.studies.budgets import Length
from pretrainax.studies.study import Arm, Study
from pretrainax.studies.study_file import study_from

PLAN = "plan.json"
# The fields that may grow after the start: new entries at the end, or more seeds.
_GROWING = ("arms", "measures", "declared")
MORE_SEEDS = "final.seeds increased after the start"  # the start of the line about this change


class Plan(NamedTuple):
    """A started study."""

    study: Study
    lengths: dict[str, Length]  # name of the arm -> length of its runs
    changes: tuple[str, ...] = ()  # what changed after the start
    configs: Mapping[str, JsonObject] = {}  # name of the arm -> its config at the start of the study
    texts: Mapping[str, str] = {}  # fingerprint of each data source at the start, by its config

    def arm(self, name: str) -> Arm:
        """Returns the arm with a name."""
        return next(arm for arm in self.study.arms if arm.name == name)

    def defaults(self) -> dict[str, dict[str, float]]:
        """Returns {trained arm: {tuned field: value in the arm's config}}; a field that is 0 has no multiples."""
        grid = self.study.tuning.grid if self.study.tuning else {}
        values = {arm.name: tunable(configured(arm)) for arm in self.study.trained}
        return {name: {field: own[field] for field in grid if own.get(field)} for name, own in values.items()}


def read_plan(workdir: str) -> Plan:
    """Reads the plan of a study; raises UserError if it is damaged."""
    content = read_object(path := os.path.join(workdir, PLAN))
    lengths = {name: Length(**fields) for name, fields in content["lengths"].items()}
    configs, texts = content.get("configs", {}), content.get("texts", {})
    return Plan(study_from(content["study"], path), lengths, tuple(content["changes"]), configs, texts)


def write_plan(workdir: str, plan: Plan) -> None:
    """Writes the plan of a study."""
    lengths = {name: length._asdict() for name, length in plan.lengths.items()}
    configs = {arm.name: to_json(configured(arm)) for arm in plan.study.arms} | {**plan.configs}
    content = {"study": to_json(plan.study), "lengths": lengths, "changes": plan.changes, "configs": configs}
    content["texts"] = plan.texts
    write_atomically(os.path.join(workdir, PLAN), json.dumps(content, indent=1) + "\n")


def has_plan(workdir: str) -> bool:
    """Returns True if the study in a workdir has started."""
    return os.path.exists(os.path.join(workdir, PLAN))


def extended(plan: Plan, study: Study) -> Plan:
    """Returns the plan for a study file that may have grown after the start; its new arms have no length yet.

    Raises:
      UserError: the study file differs in anything but additional arms, measures, declared contrasts or seeds, or the
        config of an arm has changed.
    """
    old, new = ({name: _plain(value) for name, value in to_json(s).items()} for s in (plan.study, study))
    forbidden, additions = [], []
    for name in new:
        found = list(_additions(name, old[name], new[name]))
        forbidden += [name] if None in found else []
        additions += [line for line in found if line is not None]
    if study.stop.rule == "group_sequential" and study.final != plan.study.final:
        forbidden.append("final (the levels of a group-sequential study belong to its number of seeds)")
    if forbidden:
        raise UserError(
            f"the study file changed after the start in {', '.join(forbidden)}: only new arms, measures, declared "
            "contrasts and seeds may be added at the end; restore the file, or set another --workdir"
        )
    for name, before in plan.configs.items():
        check_unchanged(f"the config of the arm {name}", before, configured(plan.arm(name)))
    return plan._replace(study=study, changes=(*plan.changes, *additions))


def check_unchanged(what: str, before: JsonObject, after: Experiment) -> None:
    """Raises UserError if a config, whose runs may be finished already, has changed since the start."""
    if changed := differences(from_json(Experiment, before), after):
        raise UserError(f"{what} changed after the start: {', '.join(changed)}; restore it, or set another --workdir")


def with_texts(plan: Plan) -> Plan:
    """Returns the plan with the fingerprints of the data sources of its arms and measures; reads their files.

    Raises:
      UserError: a text has changed since the start.
    """
    sources = [source for arm in plan.study.arms for source in sources_of(configured(arm))]
    sources += [x for measure in plan.study.measures for x in vars(measure).values() if isinstance(x, Source)]
    texts = texts_of(sources)
    check_texts(plan.texts, texts)
    return plan._replace(texts=texts)


def sources_of(experiment: Experiment) -> list[Source]:
    """Returns the data sources of a run and of its phases."""
    return [experiment.data.source, *(phase.source for phase in experiment.phases if phase.source is not None)]


def texts_of(sources: Iterable[Source]) -> dict[str, str]:
    """Computes the fingerprint of each data source, {"TextFiles(path='text')": fingerprint}."""
    parts = {str(part): part for source in sources for part in source.components()}
    return {name: part.fingerprint() for name, part in parts.items()}


def check_texts(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raises UserError if the text of a data source, on which runs may be trained already, has changed."""
    if changed := [name for name in after if before.get(name, after[name]) != after[name]]:
        raise UserError(
            f"the text of {' and of '.join(changed)} changed after the start: restore it, or set another --workdir"
        )


def _additions(name: str, before: object, after: object) -> Iterator[str | None]:
    """Yields a line for each addition to a field of a study file, and None for any other change."""
    if before == after:
        return
    if name in _GROWING and isinstance(before, list) and isinstance(after, list) and after[: len(before)] == before:
        for item in after[len(before) :]:
            label = item.get("name") or f"{item['one']} against {item['other']} by {item['measure']}"
            yield f"added to {name} after the start: {label}"
        return
    if name == "final" and isinstance(before, dict) and isinstance(after, dict):
        if before | {"seeds": after["seeds"]} == after and after["seeds"] > before["seeds"]:
            yield f"{MORE_SEEDS} from {before['seeds']} to {after['seeds']}"
            return
    yield None


def _plain(value: object) -> JsonObject | list | str | float | None:
    """Converts tuples to lists, as JSON does."""
    return json.loads(json.dumps(value))
