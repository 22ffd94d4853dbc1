"""Searches the hyperparameters of all arms with equal numbers of trials.

The search is a coordinate search: round by round, in the order of `tuning.grid`, one field takes all its values while
the other fields keep their best values so far. It has sum(k) trials instead of the product(k) of a full grid, and
misses interactions between two fields.

- An arm may have fewer new values in a round than other arms, for example because it lacks the field. It then runs the
  same number of trials, at finer steps around its best values.
- If `tuning.stop_share` is set, all trials of a round run until this share of the budget. The better half of each arm
  continues to the end. The rule compares all trials of the round at once, so it does not depend on their order.
- If the best value of an arm is at an edge of a field's grid, the grid of all arms gets the next value on that side,
  at most `MAX_WIDENINGS` times. An arm that is still at an edge is unfinished.

All functions are pure: the next trials follow from the results so far, in any order and on any number of processes.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.studies.study import Tuning

MAX_WIDENINGS = 4  # maximum number of times that the grid of a field is widened
Setting = tuple[tuple[str, float], ...]  # the values of an arm's tuned fields, in the order of the grid


class Request(NamedTuple):
    """A trial, or the first part of a trial."""

    arm: str
    setting: Setting
    seed: int
    is_part: bool = False  # True: run only until `tuning.stop_share`


Costs = Mapping[Request, Optional[float]]  # value of the tuning measure, smaller is better; None: the trial failed


class Search(NamedTuple):
    """The state of the search, which the costs so far determine."""

    pending: list[Request]  # trials to run next, with arms interleaved; []: the search is done
    requested: dict[Request, bool]  # all trials so far, without parts -> whether they stopped early
    chosen: dict[str, dict[str, float]]  # {arm: {field: best value so far}}
    unfinished: dict[str, str]  # {arm: why its tuning is not finished}


def search(tuning: Tuning, defaults: Mapping[str, Mapping[str, float]], costs: Costs) -> Search:
    """Determines the next trials and the best values from the costs so far.

    Args:
      defaults: {arm: {tuned field: value in the arm's config}}; an arm has only the fields of its config.
      costs: costs of trials and of their first parts.
    """
    rounds = _Rounds(tuning, defaults, costs)
    for field in tuning.grid:
        if pending := rounds.run(field):
            return rounds.result(pending)
    return rounds.result([])


class _Rounds:
    """Replays the rounds of the search."""

    def __init__(self, tuning: Tuning, defaults: Mapping[str, Mapping[str, float]], costs: Costs):
        self._tuning, self._defaults, self._costs = tuning, defaults, costs
        self._best: dict[str, Setting] = {arm: tuple(values.items()) for arm, values in defaults.items()}
        # {arm: {setting: whether it stopped early}}, in the order of the requests
        self._settings: dict[str, dict[Setting, bool]] = {arm: {} for arm in defaults}
        self._unfinished: dict[str, str] = {}

    def run(self, field: str) -> list[Request]:
        """Replays a round; returns its trials without a cost, or [] after choosing the best values."""
        multiples, start = list(self._tuning.grid[field]), dict(self._best)
        for widening in range(MAX_WIDENINGS + 1):
            batch = self._new_settings(field, multiples, start)
            pending = [r for arm, settings in batch.items() for r in self._pending(arm, settings, widening == 0)]
            if pending:  # arms interleaved
                return sorted(pending, key=lambda request: (request.seed, batch[request.arm].index(request.setting)))
            self._best = {arm: self._best_setting(arm) for arm in self._defaults}
            edges = {arm: edge for arm in self._defaults if (edge := self._edge(arm, field, multiples))}
            if not edges:
                return []
            if not self._tuning.widen or widening == MAX_WIDENINGS:
                break
            if "smallest" in edges.values():
                multiples.insert(0, multiples[0] ** 2 / multiples[1])
            if "largest" in edges.values():
                multiples.append(multiples[-1] ** 2 / multiples[-2])
        for arm, edge in edges.items():
            reason = f"the best {field}, {dict(self._best[arm])[field]:g}, is the {edge} value of its grid"
            self._unfinished.setdefault(arm, reason)
        return []

    def result(self, pending: list[Request]) -> Search:
        """Returns the state after the last replayed round."""
        requested = {
            request: is_stopped
            for arm, settings in self._settings.items()
            for setting, is_stopped in settings.items()
            for request in self._requests(arm, setting)
        }
        unfinished = {arm: self._unfinished[arm] for arm in self._defaults if arm in self._unfinished}
        return Search(pending, requested, {arm: dict(best) for arm, best in self._best.items()}, unfinished)

    def _new_settings(self, field: str, multiples: Sequence[float], start: dict[str, Setting]) -> dict[str, list]:
        """Returns the settings of each arm that this round adds, equally many for all arms."""
        batch = {}
        for arm in (arm for arm, values in self._defaults.items() if field in values):
            values = (without_noise(self._defaults[arm][field] * multiple) for multiple in multiples)
            settings = (_replaced(start[arm], field, value) for value in values)
            batch[arm] = [setting for setting in settings if setting not in self._settings[arm]]
        count = max(map(len, batch.values()), default=0)
        for arm in self._defaults:  # also arms with the field: an earlier refinement can be a value of this grid
            own, tried = batch.setdefault(arm, []), self._settings[arm]
            settings = (s for s in self._refinements(start[arm]) if s not in tried and s not in own)
            batch[arm] = own + list(itertools.islice(settings, count - len(own)))
        return {arm: batch[arm] for arm in self._defaults}

    def _refinements(self, setting: Setting) -> Iterator[Setting]:
        """Yields a setting, then its neighbors at half a step of each field's grid, at a quarter, and so on."""
        yield setting
        for level in itertools.count(1):
            for field, value in setting:
                smallest, second, *_ = self._tuning.grid[field]
                step = (second / smallest) ** 0.5**level
                yield _replaced(setting, field, without_noise(value * step))
                yield _replaced(setting, field, without_noise(value / step))

    def _pending(self, arm: str, settings: list[Setting], may_stop: bool) -> list[Request]:
        """Adds settings to the requested settings; returns their trials, or parts of trials, without a cost."""
        kept = settings
        if may_stop and self._tuning.stop_share > 0:
            parts = [part for setting in settings for part in self._requests(arm, setting, is_part=True)]
            if missing := [part for part in parts if part not in self._costs]:
                self._settings[arm] |= dict.fromkeys(settings, False)
                return missing
            by_cost = sorted(settings, key=lambda setting: self._cost(arm, setting, is_part=True))
            kept = by_cost[: -(-len(settings) // 2)]
        self._settings[arm] |= {setting: setting not in kept for setting in settings}
        requests = (request for setting in settings if setting in kept for request in self._requests(arm, setting))
        return [request for request in requests if request not in self._costs]

    def _best_setting(self, arm: str) -> Setting:
        """Returns the first setting with the smallest cost, or the current setting if all trials failed."""
        finished = [setting for setting, is_stopped in self._settings[arm].items() if not is_stopped]
        best = min(finished, key=lambda setting: self._cost(arm, setting))
        if self._cost(arm, best) == math.inf:
            self._unfinished.setdefault(arm, "all its trials failed")
            return self._best[arm]
        return best

    def _edge(self, arm: str, field: str, multiples: Sequence[float]) -> str:
        """Returns "smallest" or "largest" if an arm's best value is at an edge of the grid or outside of it, else "".

        A refinement can be outside, because `_refinements` yields values on both sides of the arm's own value.
        """
        if field not in self._defaults[arm]:
            return ""
        value, default = dict(self._best[arm])[field], self._defaults[arm][field]
        if value <= without_noise(default * multiples[0]):
            return "smallest"
        return "largest" if value >= without_noise(default * multiples[-1]) else ""

    def _cost(self, arm: str, setting: Setting, is_part: bool = False) -> float:
        """Returns the mean cost of a setting over the seeds; infinity if a trial failed."""
        costs = [self._costs[request] for request in self._requests(arm, setting, is_part)]
        known = [cost for cost in costs if cost is not None]
        return sum(known) / len(known) if len(known) == len(costs) else math.inf

    def _requests(self, arm: str, setting: Setting, is_part: bool = False) -> list[Request]:
        """Returns the trials of a setting, one per seed."""
        seeds = range(self._tuning.seed, self._tuning.seed + self._tuning.seeds)
        return [Request(arm, setting, seed, is_part) for seed in seeds]


def _replaced(setting: Setting, field: str, value: float) -> Setting:
    """Returns a setting with the value of one field replaced."""
    return tuple((name, value if name == field else old) for name, old in setting)


def without_noise(value: float) -> float:
    """Returns the decimal of 12 digits that a value equals up to rounding errors, or the value: 0.009 for 3 · 0.003."""
    short = float(f"{value:.12g}")
    return short if math.isclose(short, value, rel_tol=1e-14) else value
