"""The model card of an export: README.md, made of what the folder of its run says, and of nothing that is not known.

It says how the model is used, what it is, what it was trained on and for, where each number of its config comes from,
what was measured of exactly these parameters, and how, and what is not known. Of paths of the machine that trained it
stands the last name alone, and what looks like a secret is masked (`trackers/secrets.py`).
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional, cast

import pretrainax
from pretrainax.checkpoints.params import EMA, TRAINED
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import step_of
from pretrainax.config import Experiment, UserError
from pretrainax.config.ledger import Comparison
from pretrainax.config.reference import first_sentence
from pretrainax.config.values import PATHS, stated
from pretrainax.data.sources import HuggingFace
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.files.paths import HubName, hub_name
from pretrainax.interop import adapters
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.origin import Origin
from pretrainax.interop.safetensors_files import Reader
from pretrainax.interop.start import START, experiment_of
from pretrainax.reporting.tables import markdown
from pretrainax.reporting.units import large_number, three_digits
from pretrainax.tasks import Task
from pretrainax.trackers.secrets import masked
from pretrainax.training.metrics import meaning, read_metrics

FILE, CURVES = "README.md", "curves.png"
_TAGS = (  # ends of the names of transformers' classes, and what the hub calls their use
    (("CausalLM", "LMHeadModel"), "text-generation"),
    (("MaskedLM",), "fill-mask"),
    (("ConditionalGeneration",), "text2text-generation"),
    (("SequenceClassification",), "text-classification"),
    (("TokenClassification",), "token-classification"),
    (("QuestionAnswering",), "question-answering"),
)
_PRIVATE = ("data.source.", "trackers", "tokenizer.path", "checkpoint.")  # fields with a place of their own, or none
_ENOUGH = 20  # tokens a parameter, about, where compute is best spent (Hoffmann et al. 2022, arXiv 2203.15556)


class Recipe(NamedTuple):
    """The config that a run was made by, beside its ledger."""

    name: str  # "t5_base:small"
    compared: Comparison


class _Card(NamedTuple):
    """Holds what the parts of a card are made of."""

    experiment: Experiment
    origin: Origin
    folder: str  # of the export
    name: str  # "org/name", or that of the folder
    described: JsonObject  # config.json of the model
    adapted: Optional[HubName]  # the model that an adapter is for; None: it is a model
    parameters: int
    license: Optional[str]
    recipe: Optional[Recipe]
    trained: dict  # the last line of metrics.jsonl about training up to the checkpoint; {}: there is none

    @property
    def steps(self) -> list[int]:
        return list(map(step_of, self.origin.steps))

    @property
    def architecture(self) -> str:
        """Returns the class of transformers: "GPT2LMHeadModel"."""
        (found,) = cast(list[str], self.described["architectures"])
        return found


def write_card(
    folder: str,
    origin: Origin,
    name: str,
    license: Optional[str],
    recipe: Optional[Recipe],
    base: Optional[Origin] = None,
) -> None:
    """Writes README.md into an export, and beside it the curves of the run.

    Args:
      folder: of the export.
      origin: the checkpoints that it is of.
      name: of the model: "org/name".
      license: as the hub names it, "apache-2.0"; None: nobody has said it.
      base: the model of the hub that it is an adapter for, in the format of peft; None: it is a model.
    """
    experiment = experiment_of(origin)
    described = read_config_json(base.directory if base else folder)
    tensors = Reader(folder, adapters.WEIGHTS) if base else Reader(folder)
    parameters = sum(math.prod(shape) for shape in tensors.shapes.values())
    lines = _lines(origin.directory)
    until = [line for line in lines if line["split"] == "train" and line["step"] <= max(map(step_of, origin.steps))]
    trained = until[-1] if until else {}
    adapted = hub_name(base.hub) if base and base.hub else None
    card = _Card(experiment, origin, folder, name, described, adapted, parameters, license, recipe, trained)
    has_curves = bool(lines) and os.path.exists(os.path.join(origin.directory, CURVES))
    if has_curves:
        shutil.copyfile(os.path.join(origin.directory, CURVES), os.path.join(folder, CURVES))
    figures = list(_figures(card))
    parts = (
        _metadata(card),
        _introduction(card),
        _use(card),
        _architecture(card),
        _training(card),
        _results(figures),
        _curves() if has_curves else "",
        _sources(card),
        _limits(card, bool(figures)),
    )
    write_atomically(os.path.join(folder, FILE), masked("\n".join(filter(None, parts))))


def _lines(workdir: str) -> list[dict]:
    path = os.path.join(workdir, "metrics.jsonl")
    return read_metrics(path) if os.path.exists(path) else []


# --- what it is ------------------------------------------------------------------------------------------------------


def _metadata(card: _Card) -> str:
    """Returns the block that the hub reads: YAML, whose values are written as JSON, a part of it."""
    sources = card.experiment.data.source.components()
    data = [source.path for source in sources if isinstance(source, HuggingFace) and _is_of_hub(source)]
    base = _start(card)
    fields = {
        "license": card.license,
        "library_name": "peft" if card.adapted else "transformers",
        "pipeline_tag": _tag(card),
        "tags": ["pretrainax", "jax", *([] if base else ["pretraining"]), *_tags_of_adapter(card)],
        "datasets": data,
        "base_model": base.repository if (base := hub_name(base)) else None,
    }
    lines = (f"{name}: {json.dumps(value)}\n" for name, value in fields.items() if value)
    return f"---\n{''.join(lines)}---\n"


def _tags_of_adapter(card: _Card) -> list[str]:
    """Returns by what the hub finds adapters, as peft itself writes it; [] of a model."""
    if card.adapted is None:
        return []
    kind = str(read_object(os.path.join(card.folder, adapters.CONFIG))["peft_type"]).lower()
    return [kind, "transformers", f"base_model:adapter:{card.adapted.repository}"]


def _tag(card: _Card) -> Optional[str]:
    """Returns what the hub calls the use of a model; None where it has no name for it."""
    return next((use for ends, use in _TAGS if card.architecture.endswith(ends)), None)


def _is_of_hub(source: HuggingFace) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source.path)) and not os.path.exists(source.path)


def _start(card: _Card) -> str:
    """Returns what the run has started from: of a model of the hub with its commit; "" where it was nothing."""
    path = os.path.join(card.origin.directory, START)
    known = str(read_object(path).get("directory", "")) if os.path.exists(path) else ""
    return known or card.experiment.checkpoint.init_from or ""


def _introduction(card: _Card) -> str:
    steps, start, planned = card.steps, _start(card), card.experiment.train.steps
    family = card.experiment.model.family.replace("_", "-")
    what = f"`{card.architecture}` ({family}) of {card.parameters:,} parameters"
    if card.adapted:
        what = f"An adapter for a `{card.architecture}` ({family}): {card.parameters:,} parameters beside those of it"
    made = "It was not trained here." if not card.trained else "It started from random parameters."
    made = f"It started from `{_last(start)}`." if start else made
    if card.trained:
        of = "the mean of the checkpoints of steps" if len(steps) > 1 else "the checkpoint of step"
        average = ", the moving average of the parameters" if card.origin.folder == EMA else ""
        made += f" This is {of} {' and '.join(f'{step:,}' for step in steps)} of {planned:,}{average}."
    return f"# {card.name.rpartition('/')[2]}\n\n{what}, made with PretrainAX {pretrainax.__version__}. {made}\n"


def _last(path: str) -> str:
    """Returns a path as it may be shown: of one of the machine that trained the last name."""
    return path if hub_name(path) else os.path.basename(path.rstrip("/"))


def _shown(value: object) -> str:
    """Returns a value of a config for a cell, with the last names of paths."""
    text = re.sub(r"'[/~.][^']*/([^'/]+)/?'", r"'…/\1'", str(value))
    text = re.sub(rf"(?<!HuggingFace\()\b({'|'.join(PATHS)})='(?!hf:)[^']*/([^'/]+)/?'", r"\1='…/\2'", text)
    return text.replace("|", r"\|").replace("\n", " ")


def _code(value: object) -> str:
    return f"`{_shown(value)}`"


def _use(card: _Card) -> str:
    if card.adapted:
        return _use_of_adapter(card, card.adapted)
    name = card.name if "/" in card.name else "DIR"
    ours = f"hf:{name}" if "/" in card.name else name
    return (
        "## Use\n\n```python\n"
        f"from transformers import AutoTokenizer, {card.architecture}\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f'model = {card.architecture}.from_pretrained("{name}")\n{_written(card)}```\n\n'
        f'With PretrainAX: `pretrainax.load("{ours}")`, or `--config.checkpoint.init_from={ours}` to train on.\n'
    )


def _use_of_adapter(card: _Card, base: HubName) -> str:
    theirs = f'"{base.repository}", revision="{base.revision}"'
    ours = f"--from=hf:{card.name} --base=hf:{base.repository}@{base.revision} --workdir=DIR"
    return (
        "## Use\n\n```python\n"
        f"from peft import PeftModel\nfrom transformers import AutoTokenizer, {card.architecture}\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({theirs})\n"
        f"model = {card.architecture}.from_pretrained({theirs})\n"
        f'model = PeftModel.from_pretrained(model, "{card.name}")\n{_written(card)}```\n\n'
        f"With PretrainAX: `pretrainax huggingface import {ours}`.\n"
    )


def _written(card: _Card) -> str:
    """Returns the lines by which a decoder writes; "" of others."""
    if _tag(card) != "text-generation":
        return ""
    ids = 'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids'
    return f"{ids}\nprint(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))\n"


def _architecture(card: _Card) -> str:
    _, model = described_model(card.described)
    sized = model.sized.values()
    keys = [f", {stack.kv_heads} of keys and values" * (stack.kv_heads != stack.num_heads) for stack in sized]
    length = model.position.max_length
    rows = [
        ("layers", model.shown("num_layers")),
        ("width", model.shown("d_model")),
        ("feed-forward", model.shown("d_ff")),
        ("heads", " + ".join(f"{stack.num_heads}{own}" for stack, own in zip(sized, keys, strict=True))),
        ("positions", _code(model.position)),
        ("vocabulary", f"{model.vocab_size:,} ids, `{type(card.experiment.tokenizer).__name__}`"),
        ("most tokens", f"{length:,}" if length else "no limit in its positions"),
        ("numbers of the files", str(card.described.get("dtype"))),
    ]
    return "## Architecture\n\n" + markdown(("", _code(card.architecture)), rows, padded=False)


# --- how it was made -------------------------------------------------------------------------------------------------


def _training(card: _Card) -> str:
    if not card.trained:
        return ""
    e = card.experiment
    seen = [
        f"{large_number(card.trained[name])} {what}"
        for name, what in (("text_tokens", "tokens of text"), ("text_bytes", "bytes of text"), ("flops", "FLOPs"))
        if card.trained.get(name)
    ]
    phases = [("phases", "; ".join(_code(phase) for phase in e.phases))] if e.phases else []
    validated = e.evaluate.objective
    rows = [
        *(("training data", f"{_code(s)}: {first_sentence(type(s).__doc__)}") for s in e.data.source.components()),
        ("objective", f"{_code(e.objective)}: {first_sentence(type(e.objective).__doc__)}"),
        *([("asked in validation", _code(validated))] if validated is not None else []),
        ("steps", f"{max(card.steps):,} of {e.train.steps:,}, {', '.join(seen)}"),
        ("rows", f"{e.train.global_batch_size:,} a batch, of {e.data.sequence_length:,} tokens"),
        ("optimizer", _code(e.optimizer)),
        ("schedule", _code(e.schedule)),
        *phases,
        *([("tuning", _code(e.tuning))] if e.tuning is not None else []),
        *([("teacher", _code(e.distill))] if e.distill is not None else []),
        ("seed", f"{e.train.seed}"),
    ]
    return "## Training\n\n" + markdown(("", f"PretrainAX {pretrainax.__version__}"), rows, padded=False)


def _sources(card: _Card) -> str:
    """Returns the part on where the numbers of the config come from, as far as anybody says."""
    if not card.trained:
        return ""
    if card.recipe is None:
        fields = (field for field in stated(card.experiment) if field.value != field.default and not field.is_free)
        rows = [(f"`{field.path}`", _code(field.value)) for field in fields if _is_public(field.path)]
        table = markdown(("field", "value"), rows, padded=False)
        said = "What is not as by default. Where these numbers come from was not said when the model was exported.\n"
        return f"## Config\n\n{said}\n<details><summary>{len(rows)} fields</summary>\n\n{table}\n</details>\n"
    name, compared = card.recipe
    rows = []
    for row in compared.rows:
        if _is_public(row.path):
            fact = row.fact
            source = f"{fact.status}: {_shown(fact.source)}" if fact else "the ledger does not say"
            if fact and not row.agrees:
                source = f"set for this run, in the place of {_code(fact.value)} ({source})"
            rows.append((f"`{row.path}`", _code(row.value), source))
    table = markdown(("field", "value", "where it comes from"), rows, padded=False)
    others = "".join(f"- The source has {each.theirs}; here: {each.ours}.\n" for each in compared.deviations)
    return (
        f"## Recipe\n\nThe config is `{name}` of PretrainAX, whose ledger says where each number comes from.\n\n"
        f"{others}\n<details><summary>{len(rows)} fields, and their sources</summary>\n\n{table}\n</details>\n"
    )


def _is_public(path: str) -> bool:
    return not path.startswith(_PRIVATE) and path.rpartition(".")[2] not in PATHS


# --- what was measured -----------------------------------------------------------------------------------------------


class _Figure(NamedTuple):
    of: str
    name: str
    value: float
    error: Optional[float]
    meaning: str
    how: str


def _figures(card: _Card) -> Iterator[_Figure]:
    """Yields what was measured of exactly these parameters: the run's validation, and what `evaluate` has written."""
    e, origin = card.experiment, card.origin
    if len(origin.steps) != 1:
        return
    figures = read_run_json(origin.steps[0])["metrics"]
    if origin.folder == (EMA if e.evaluate.parameters == "ema" else TRAINED):
        count = "all" if not e.evaluate.batches else f"at most {e.evaluate.batches:,}"
        counted = f", {figures['loss_tokens']:,.0f} target tokens" if figures.get("loss_tokens") else ""
        how = f"the validation split of its data, {count} batches of {e.train.global_batch_size:,} rows{counted}"
        for name, value in figures.items():
            if value is not None and (said := meaning(name, figures)) and name not in ("loss_tokens", "labels"):
                yield _Figure("Its validation", name, value, None, said, how)
    folder = os.path.join(origin.directory, "evaluations")
    for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if file.endswith(".json"):
            yield from _evaluated(os.path.join(folder, file), card)


def _evaluated(path: str, card: _Card) -> Iterator[_Figure]:
    """Yields the results of one `evaluate` that are of these parameters."""
    try:
        with open(path, encoding="utf-8") as f:
            results = json.load(f)
        for r in results:
            is_ema = "moving average" in r["origin"]
            if r["step"] == card.steps[0] and is_ema == (card.origin.folder == EMA) and r["value"] is not None:
                counts = ", ".join(f"{n:,} {what}" for what, n in r["counts"].items())
                of = ": ".join(filter(None, (r["source"], r["part"])))
                how = f"{r['how']}; {counts}"
                yield _Figure(of, r["measure"], r["value"], r["standard_error"], meaning(r["measure"]), how)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} holds no results of pretrainax.evaluate ({e}): move it away") from e


def _results(figures: Sequence[_Figure]) -> str:
    if not figures:
        return "## Results\n\nNothing was measured of exactly these parameters.\n"
    tables = []
    for of, how in dict.fromkeys((f.of, f.how) for f in figures):
        own = [f for f in figures if (f.of, f.how) == (of, how)]
        values = (f"{f.value:,.4f}" + ("" if f.error is None else f" ± {f.error:,.4f}") for f in own)
        rows = [(f.name, value, _shown(f.meaning)) for f, value in zip(own, values, strict=True)]
        columns = 3 if any(f.meaning for f in own) else 2
        table = markdown(("figure", "value", "what it is")[:columns], [row[:columns] for row in rows], padded=False)
        tables.append(f"{_shown(of)}: {_shown(how)}.\n\n{table}\n")
    errors = "± is the standard error. " if any(f.error is not None for f in figures) else ""
    return f"## Results\n\n{''.join(tables)}{errors}All is of one run with one seed, and no mean over several.\n"


def _curves() -> str:
    return f"## Curves\n\n![Losses and rates of the run, step by step]({CURVES})\n"


def _limits(card: _Card, is_measured: bool) -> str:
    e = card.experiment
    lines = []
    if not isinstance(e.objective, Task):
        lines.append(
            "It is pretrained alone: it was tuned neither to follow instructions nor to be safe to answer the public."
        )
    if card.trained:
        lines.append(f"It was trained on rows of {e.data.sequence_length:,} tokens; of longer ones nothing is known.")
        tokens = card.trained.get("text_tokens", 0) / card.parameters
        if tokens < _ENOUGH and not _start(card):
            lines.append(
                f"It has read {three_digits(tokens)} tokens of text a parameter; where compute is spent best it is "
                f"about {_ENOUGH} (Hoffmann et al. 2022, arXiv 2203.15556): it is undertrained."
            )
        if max(card.steps) < e.train.steps:
            lines.append("The run went on after it, so that its learning rate had not come to its end.")
    else:
        lines.append("What it was trained on is said by whom it came from, and not known here.")
    beyond = "beyond the table of results " if is_measured else ""
    lines.append(
        f"Nothing {beyond}was measured: no bias, no toxicity, nothing of what it repeats of its training text."
    )
    if card.license is None:
        lines.append("No license is stated: ask its authors before you use it.")
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in lines)
