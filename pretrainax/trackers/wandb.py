"""The curves of a run on Weights & Biases, or in files that `wandb sync` sends there later."""

import dataclasses
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.trackers.base import TrackedRun, Tracker, Writer, one_line
from pretrainax.trackers.remembered import Remembered

if TYPE_CHECKING:
    from wandb import Run

_MODES = ("online", "offline")
_FINISH_SECONDS = 25.0  # within those that a run waits for its trackers


@dataclasses.dataclass
class WandB(Tracker):
    """Shows the run on Weights & Biases (extra `wandb`). The key is that of `wandb login` or WANDB_API_KEY.

    A start that resumes goes on in the same run. After a rollback the run is rewound where the server allows it; else,
    and offline, what follows is a run of its own in the same group, and the one before is marked.
    """

    project: str = "pretrainax"  # that the run is of there
    entity: Optional[str] = None  # a user or a team; None: that of the key
    name: Optional[str] = None  # of the run there; None: that of its folder
    group: Optional[str] = None  # of runs that are shown together; None: the name
    tags: tuple[str, ...] = ()  # of the run there
    # offline: files in wandb/ of the run's folder, for `wandb sync`; None: as WANDB_MODE says, online without it
    mode: Optional[Literal["online", "offline"]] = None

    extra = "wandb"
    packages = ("wandb",)

    @property
    def mode_now(self) -> str:
        """Returns the mode, also where the environment decides."""
        return self.mode or os.environ.get("WANDB_MODE") or "online"

    def open(self, run: TrackedRun) -> "WandBWriter":
        return WandBWriter(self, run)

    def describe(self, workdir: str) -> str:
        where = f", {os.path.join(workdir, 'wandb')}: wandb sync sends it" if self.mode_now == "offline" else ""
        return f"W&B project {self.project}, {self.mode_now}{where}"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.mode is None and self.mode_now not in _MODES:
            yield f"WANDB_MODE is {self.mode_now!r}, it must be {' or '.join(_MODES)}; or leave WandB() out"
        if not self.project:
            yield "WandB.project of config.trackers is empty, it must name a project"


class WandBWriter(Writer):
    """Writes one run by the client of Weights & Biases, whose own service sends it."""

    def __init__(self, tracker: WandB, run: TrackedRun):
        import wandb

        self._wandb, self._tracker, self._run = wandb, tracker, run
        self._remembered = Remembered.of(run.workdir, "WandB")
        wandb.setup(wandb.Settings(silent=True))  # what is to be said is said here
        if tracker.mode_now == "online" and not wandb.login(prompt=False):
            raise UserError("there is no key: `wandb login`, or set WANDB_API_KEY, or take WandB(mode='offline')")
        self._open(self._remembered.run or uuid.uuid4().hex[:8], resume="allow")

    def _open(self, name: str, **how: str) -> None:
        """Begins a run, or goes on in it; what is sent is what this package shows, and no more."""
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,  # a remote's URL may have a password
            disable_code=True,
            finish_timeout=_FINISH_SECONDS,
            x_disable_meta=True,  # the command line, which may have one too
            x_disable_stats=True,
            x_save_requirements=False,
        )
        tracker, remembered, title = self._tracker, self._remembered, self._tracker.name or self._run.name
        is_first = name == (remembered.first or name)
        self._here: Run = self._wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            id=name,
            name=title if is_first else f"{title}, rollback {remembered.rollbacks}",
            group=tracker.group or title,
            tags=tracker.tags or None,
            dir=self._run.workdir,
            mode=tracker.mode_now,
            config=dict(self._run.config),
            reinit="finish_previous",
            settings=settings,
            **how,
        )
        self.link = self._here.url or ""
        remembered.begin(name)

    def figures(self, step: int, split: str, values: Mapping[str, float]) -> None:
        if self._remembered.is_new(step, split):
            self._here.log({f"{split}/{name}": value for name, value in values.items()}, step=step)
            self._remembered.wrote(step, split)

    def text(self, step: int, name: str, text: str) -> None:
        if self._remembered.is_new(step, name):
            page = "\n".join(f"<p>{_escaped(line)}</p>" for line in text.splitlines())
            self._here.log({name: self._wandb.Html(page, inject=False)}, step=step)
            self._remembered.wrote(step, name)

    def rewind(self, step: int) -> None:
        name = self._here.id
        self._here.summary["rolled_back_to"] = step
        self._here.finish()
        self._remembered.rewind(step)
        why = "offline"
        if self._tracker.mode_now == "online":
            try:
                return self._open(name, resume_from=f"{name}?_step={step}")
            except Exception as error:  # of servers that cannot, or of plans that may not
                why = one_line(error)
        self._open(f"{self._remembered.first}-{self._remembered.rollbacks}", resume="allow")
        self._here.config.update({"rollback": {"from_run": name, "to_step": step, "not_rewound_as": why}})

    def finish(self, step: int, figures: Mapping[str, float]) -> None:
        self._here.summary.update({f"final/{name}": value for name, value in figures.items()})

    def close(self, done: bool) -> None:
        self._here.finish(exit_code=0 if done else 1)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
