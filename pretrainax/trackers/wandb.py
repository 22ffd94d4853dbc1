"""The Weights & Biases tracker, which writes to the server or to local files for `wandb sync`."""

import dataclasses
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.trackers.base import TrackedRun, Tracker, Writer, describe_error
from pretrainax.trackers.progress import Progress

if TYPE_CHECKING:
    from wandb import Run

_MODES = ("online", "offline")
_FINISH_SECONDS = 25.0  # less than the 30 s for which a run waits for its trackers


@dataclasses.dataclass
class WandB(Tracker):
    """Tracks the run on Weights & Biases (extra `wandb`); the API key comes from `wandb login` or WANDB_API_KEY.

    A resumed run continues the same W&B run. A rollback rewinds the W&B run if the server supports rewinding.
    Otherwise, and when offline, the entries go to a new W&B run in the same group, and the previous one is marked.
    """

    project: str = "pretrainax"  # name of the W&B project
    entity: Optional[str] = None  # user or team; None: the owner of the API key
    name: Optional[str] = None  # name of the W&B run; None: the name of the workdir
    group: Optional[str] = None  # group of W&B runs; None: the name of the W&B run
    tags: tuple[str, ...] = ()  # tags of the W&B run
    # offline: writes wandb/ in the workdir for `wandb sync`; None: the variable WANDB_MODE or, without it, online
    mode: Optional[Literal["online", "offline"]] = None

    extra = "wandb"
    packages = ("wandb",)

    @property
    def mode_now(self) -> str:
        """Returns the W&B mode: the config's `mode` or, if not set, the environment variable WANDB_MODE or "online"."""
        return self.mode or os.environ.get("WANDB_MODE") or "online"

    def open(self, run: TrackedRun) -> "WandBWriter":
        return WandBWriter(self, run)

    def describe(self, workdir: str) -> str:
        where = f", {os.path.join(workdir, 'wandb')}; upload with wandb sync" if self.mode_now == "offline" else ""
        return f"W&B project {self.project}, {self.mode_now}{where}"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.mode is None and self.mode_now not in _MODES:
            yield f"WANDB_MODE is {self.mode_now!r}, it must be {' or '.join(_MODES)}; or leave WandB() out"
        if not self.project:
            yield "WandB.project of config.trackers is empty, it must name a project"


class WandBWriter(Writer):
    """Writes the entries of one run with the W&B client."""

    def __init__(self, tracker: WandB, run: TrackedRun):
        import wandb

        self._wandb, self._tracker, self._run = wandb, tracker, run
        self._progress = Progress.load(run.workdir, "WandB")
        wandb.setup(wandb.Settings(silent=True))  # this package prints its own messages
        if tracker.mode_now == "online" and not wandb.login(prompt=False):
            raise UserError("no W&B key found: run `wandb login`, set WANDB_API_KEY, or use WandB(mode='offline')")
        self._open(self._progress.run or uuid.uuid4().hex[:8], resume="allow")

    def _open(self, name: str, **resume_options: str) -> None:
        """Begins or continues the W&B run with the id `name`, and disables everything that W&B would record on its own.

        Args:
          resume_options: the argument `resume` or `resume_from` for `wandb.init`.
        """
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,  # the URL of a git remote may contain a password
            disable_code=True,
            finish_timeout=_FINISH_SECONDS,
            x_disable_meta=True,  # the command line may contain a password
            x_disable_stats=True,
            x_save_requirements=False,
        )
        tracker, progress, base_name = self._tracker, self._progress, self._tracker.name or self._run.name
        is_first = name == (progress.first or name)
        self._wandb_run: Run = self._wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            id=name,
            name=base_name if is_first else f"{base_name}, rollback {progress.rollbacks}",
            group=tracker.group or base_name,
            tags=tracker.tags or None,
            dir=self._run.workdir,
            mode=tracker.mode_now,
            config=dict(self._run.config),
            reinit="finish_previous",
            settings=settings,
            **resume_options,
        )
        self.link = self._wandb_run.url or ""
        progress.begin(name)

    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        if self._progress.is_new(step, split):
            self._wandb_run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)
            self._progress.record(step, split)

    def write_text(self, step: int, name: str, text: str) -> None:
        if self._progress.is_new(step, name):
            page = "\n".join(f"<p>{_escape_html(line)}</p>" for line in text.splitlines())
            self._wandb_run.log({name: self._wandb.Html(page, inject=False)}, step=step)
            self._progress.record(step, name)

    def rewind(self, step: int) -> None:
        name = self._wandb_run.id
        self._wandb_run.summary["rolled_back_to"] = step
        self._wandb_run.finish()
        self._progress.rewind(step)
        reason = "offline"
        if self._tracker.mode_now == "online":
            try:
                return self._open(name, resume_from=f"{name}?_step={step}")
            except Exception as error:  # the server or the price plan does not support rewinding
                reason = describe_error(error)
        self._open(f"{self._progress.first}-{self._progress.rollbacks}", resume="allow")
        self._wandb_run.config.update({"rollback": {"from_run": name, "to_step": step, "not_rewound_as": reason}})

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        self._wandb_run.summary.update({f"final/{name}": value for name, value in metrics.items()})

    def close(self, done: bool) -> None:
        self._wandb_run.finish(exit_code=0 if done else 1)


def _escape_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
