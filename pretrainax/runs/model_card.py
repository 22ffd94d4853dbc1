"""Writes the model card (README.md) of an export, from the files in the run's folder.

The card describes usage, architecture, training, metrics, the source of each config value, and limitations. It contains
only metrics that were measured with exactly the exported parameters. Local paths are shortened to their last component,
and probable secrets are masked (`trackers/secrets.py`).
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import pretrainax
from pretrainax.checkpoints.params import EMA, TRAINED
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import step_of
from pretrainax.config import Experiment, UserError
from pretrainax.config.ledger import Comparison
from pretrainax.config.metric import metric_text
from pretrainax.config.reference import first_sentence
from pretrainax.config.values import PATH_FIELDS, leaf_fields
from pretrainax.data.sources import HuggingFace
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.files.paths import HubName, hub_name
from pretrainax.interop import adapters
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.origin import Origin
from pretrainax.interop.safetensors_files import Reader
from pretrainax.interop.sentence_transformers import MODULES
from pretrainax.interop.start import START, experiment_of
from pretrainax.reporting.tables import markdown
from pretrainax.reporting.units import large_number, three_digits
from pretrainax.tasks import Task
from pretrainax.tokenization.huggingface_export import loader
from pretrainax.trackers.secrets import masked
from pretrainax.training.metrics import meaning, read_metrics

FILE, CURVES = "README.md", "curves.png"
_TAGS = (  # (suffixes of transformers class names, pipeline tag on the hub)
    (("CausalLM", "LMHeadModel"), "text-generation"),
    (("MaskedLM",), "fill-mask"),
    (("ConditionalGeneration",), "text2text-generation"),
    (("SequenceClassification",), "text-classification"),
    (("TokenClassification",), "token-classification"),
    (("QuestionAnswering",), "question-answering"),
)
_PRIVATE = ("data.source.", "trackers", "tokenizer.path", "checkpoint.")  # fields that the config tables omit
_OPTIMAL_TOKENS = 20  # approximate compute-optimal tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556)


class Recipe(NamedTuple):
    """A run's config, compared with the ledger (the file that lists the source of each config value)."""

    name: str  # name of the config, "t5_base:small"
    compared: Comparison


class _Card(NamedTuple):
    """The data that all sections of a card use."""

    experiment: Experiment
    origin: Origin
    folder: str  # folder of the export
    name: str  # "org/name", or the name of the export folder
    model_config: JsonObject  # config.json of the model, or of the base model of an adapter
    architecture: str  # name of the transformers class, for example "GPT2LMHeadModel"
    base_model: Optional[HubName]  # base model on the hub of an adapter; None: the export is a model
    parameters: int
    license: Optional[str]
    recipe: Optional[Recipe]
    train_line: dict  # last training line of metrics.jsonl up to the exported checkpoint; {}: none

    @property
    def steps(self) -> list[int]:
        return list(map(step_of, self.origin.steps))


def write_card(
    folder: str,
    origin: Origin,
    name: str,
    license: Optional[str],
    recipe: Optional[Recipe],
    base: Optional[Origin] = None,
) -> None:
    """Writes README.md and curves.png into the folder of an export.

    Args:
      folder: folder of the export.
      origin: describes the exported checkpoints.
      name: name of the model, "org/name".
      license: license identifier as on the hub, for example "apache-2.0", or None if unknown.
      recipe: the run's config with the source of each value, or None if unknown.
      base: if the export is a PEFT adapter, its base model on the hub, otherwise None.
    """
    experiment = experiment_of(origin)
    model_config = read_config_json(base.directory if base else folder)
    family = described_model(model_config)[0]
    architecture = family.class_of(experiment.model) if base else model_config["architectures"][0]
    tensors = Reader(folder, adapters.WEIGHTS) if base else Reader(folder)
    parameters = sum(math.prod(shape) for shape in tensors.shapes.values())
    lines = _read_lines(origin.directory)
    up_to_checkpoint = [
        line for line in lines if line["split"] == "train" and line["step"] <= max(map(step_of, origin.steps))
    ]
    train_line = up_to_checkpoint[-1] if up_to_checkpoint else {}
    base_model = hub_name(base.hub) if base and base.hub else None
    model = (model_config, architecture, base_model, parameters)
    card = _Card(experiment, origin, folder, name, *model, license, recipe, train_line)
    has_curves = bool(lines) and os.path.exists(os.path.join(origin.directory, CURVES))
    if has_curves:
        shutil.copyfile(os.path.join(origin.directory, CURVES), os.path.join(folder, CURVES))
    metrics = list(_metrics(card))
    parts = (
        _metadata(card),
        _introduction(card),
        _usage(card),
        _architecture(card),
        _training(card),
        _results(metrics),
        _curves() if has_curves else "",
        _sources(card),
        _limits(card, bool(metrics)),
    )
    write_atomically(os.path.join(folder, FILE), masked("\n".join(filter(None, parts))))


def _read_lines(workdir: str) -> list[dict]:
    path = os.path.join(workdir, "metrics.jsonl")
    return read_metrics(path) if os.path.exists(path) else []


# --- description -----------------------------------------------------------------------------------------------------


def _metadata(card: _Card) -> str:
    """Formats the YAML metadata block for the hub; the values are JSON, a subset of YAML."""
    sources = card.experiment.data.source.components()
    data = [source.path for source in sources if isinstance(source, HuggingFace) and _is_on_hub(source)]
    base = _start(card)
    fields = {
        "license": card.license,
        "library_name": "peft" if card.base_model else _library(card),
        "pipeline_tag": _tag(card),
        "tags": ["pretrainax", "jax", *([] if base else ["pretraining"]), *_tags_of_adapter(card)],
        "datasets": data,
        "base_model": base.repository if (base := hub_name(base)) else None,
    }
    lines = (f"{name}: {json.dumps(value)}\n" for name, value in fields.items() if value)
    return f"---\n{''.join(lines)}---\n"


def _tags_of_adapter(card: _Card) -> list[str]:
    """Returns the hub tags for a PEFT adapter, or [] for a full model."""
    if card.base_model is None:
        return []
    kind = str(read_object(os.path.join(card.folder, adapters.CONFIG))["peft_type"]).lower()
    return [kind, "transformers", f"base_model:adapter:{card.base_model.repository}"]


def _library(card: _Card) -> str:
    """Returns the library that loads the whole model; for an embedding model, including its pooling."""
    is_embedding_model = os.path.exists(os.path.join(card.folder, MODULES))
    return "sentence-transformers" if is_embedding_model else "transformers"


def _tag(card: _Card) -> Optional[str]:
    """Returns the model's pipeline tag (its task on the hub), or None if no tag fits the architecture."""
    if _library(card) == "sentence-transformers":
        return "sentence-similarity"
    return next((use for ends, use in _TAGS if card.architecture.endswith(ends)), None)


def _is_on_hub(source: HuggingFace) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source.path)) and not os.path.exists(source.path)


def _start(card: _Card) -> str:
    """Returns the name of the model or run that initialized this run, or "" if the parameters were random.

    A hub model's name includes its commit.
    """
    path = os.path.join(card.origin.directory, START)
    source = str(read_object(path).get("directory", "")) if os.path.exists(path) else ""
    return source or card.experiment.checkpoint.init_from or ""


def _introduction(card: _Card) -> str:
    """Formats the title, and a paragraph about the model, its initialization and the exported checkpoints."""
    steps, start, planned = card.steps, _start(card), card.experiment.train.steps
    family = card.experiment.model.family.replace("_", "-")
    subject = f"`{card.architecture}` ({family}) with {card.parameters:,} parameters"
    if card.base_model:
        subject = f"An adapter for a `{card.architecture}` ({family}) with {card.parameters:,} additional parameters"
    training = "It was not trained with PretrainAX." if not card.train_line else "It started from random parameters."
    training = f"It started from `{_shorten(start)}`." if start else training
    if card.train_line:
        source = "the average of the checkpoints of steps" if len(steps) > 1 else "the checkpoint of step"
        average = ", the moving average of the parameters" if card.origin.folder == EMA else ""
        training += f" This is {source} {' and '.join(f'{step:,}' for step in steps)} of {planned:,}{average}."
    return (
        f"# {card.name.rpartition('/')[2]}\n\n{subject}, exported by PretrainAX {pretrainax.__version__}. {training}\n"
    )


def _shorten(path: str) -> str:
    """Shortens a local path to its last component; returns a hub name unchanged."""
    return path if hub_name(path) else os.path.basename(path.rstrip("/"))


def _format_cell(value: object) -> str:
    """Formats a config value for a table cell, with local paths shortened to their last component."""
    text = re.sub(r"'[/~.][^']*/([^'/]+)/?'", r"'…/\1'", str(value))
    text = re.sub(rf"(?<!HuggingFace\()\b({'|'.join(PATH_FIELDS)})='(?!hf:)[^']*/([^'/]+)/?'", r"\1='…/\2'", text)
    return text.replace("|", r"\|").replace("\n", " ")


def _code(value: object) -> str:
    return f"`{_format_cell(value)}`"


def _usage(card: _Card) -> str:
    if card.base_model:
        return _usage_of_adapter(card, card.base_model)
    name = card.name if "/" in card.name else "DIR"
    ours = f"hf:{name}" if "/" in card.name else name
    tokenizer_class = loader(card.folder)
    example = (
        f"from transformers import {tokenizer_class}, {card.architecture}\n\n"
        f'tokenizer = {tokenizer_class}.from_pretrained("{name}")\n'
        f'model = {card.architecture}.from_pretrained("{name}")\n{_generation_example(card)}'
    )
    if _library(card) == "sentence-transformers":
        example = (
            "from sentence_transformers import SentenceTransformer\n\n"
            f'model = SentenceTransformer("{name}")\nvectors = model.encode(["a sentence", "another"])\n'
        )
    return (
        f"## Use\n\n```python\n{example}```\n\n"
        f'With PretrainAX: `pretrainax.load("{ours}")`, or `--config.checkpoint.init_from={ours}` to train further.\n'
    )


def _usage_of_adapter(card: _Card, base: HubName) -> str:
    theirs = f'"{base.repository}", revision="{base.revision}"'
    labels = ", ".join(filter(None, (theirs, adapters.label_arguments(card.experiment))))
    ours = f"--from=hf:{card.name} --base=hf:{base.repository}@{base.revision} --workdir=DIR"
    return (
        "## Use\n\n```python\n"
        f"from peft import PeftModel\nfrom transformers import AutoTokenizer, {card.architecture}\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({theirs})\n"
        f"model = {card.architecture}.from_pretrained({labels})\n"
        f'model = PeftModel.from_pretrained(model, "{card.name}")\n{_generation_example(card)}```\n\n'
        f"With PretrainAX: `pretrainax huggingface import {ours}`.\n"
    )


def _generation_example(card: _Card) -> str:
    """Returns Python code that generates text, as the usage example for a decoder, or "" for other models."""
    if _tag(card) != "text-generation":
        return ""
    ids = 'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids'
    return f"{ids}\nprint(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))\n"


def _architecture(card: _Card) -> str:
    """Formats the table of the model's sizes."""
    _, model = described_model(card.model_config)
    sized = model.sized.values()
    keys = [f", {stack.kv_heads} key-value heads" * (stack.kv_heads != stack.num_heads) for stack in sized]
    length = model.position.max_length
    rows = [
        ("layers", model.format_size("num_layers")),
        ("width", model.format_size("d_model")),
        ("feed-forward", model.format_size("d_ff")),
        ("heads", " + ".join(f"{stack.num_heads}{kv}" for stack, kv in zip(sized, keys, strict=True))),
        ("positions", _code(model.position)),
        ("vocabulary", f"{model.vocab_size:,} ids, `{type(card.experiment.tokenizer).__name__}`"),
        ("maximum length", f"{length:,} tokens" if length else "not limited by the positions"),
        ("dtype of the files", str(card.model_config.get("dtype"))),
    ]
    return "## Architecture\n\n" + markdown(("", _code(card.architecture)), rows, padded=False)


# --- training --------------------------------------------------------------------------------------------------------


def _training(card: _Card) -> str:
    """Formats the table of data, objective, batch and optimizer, or "" if PretrainAX did not train the model."""
    if not card.train_line:
        return ""
    e = card.experiment
    amounts = [
        f"{large_number(card.train_line[name])} {what}"
        for name, what in (("text_tokens", "tokens of text"), ("text_bytes", "bytes of text"), ("flops", "FLOPs"))
        if card.train_line.get(name)
    ]
    phases = [("phases", "; ".join(_code(phase) for phase in e.phases))] if e.phases else []
    validated = e.evaluate.objective
    rows = [
        *(("training data", f"{_code(s)}: {first_sentence(type(s).__doc__)}") for s in e.data.source.components()),
        ("objective", f"{_code(e.objective)}: {first_sentence(type(e.objective).__doc__)}"),
        *([("validation objective", _code(validated))] if validated is not None else []),
        ("steps", f"{max(card.steps):,} of {e.train.steps:,}, {', '.join(amounts)}"),
        ("batch", f"{counted(e.train.global_batch_size, 'row')} of {e.data.sequence_length:,} tokens"),
        ("optimizer", _code(e.optimizer)),
        ("schedule", _code(e.schedule)),
        *phases,
        *([("tuning", _code(e.tuning))] if e.tuning is not None else []),
        *([("teacher", _code(e.distill))] if e.distill is not None else []),
        ("seed", f"{e.train.seed}"),
    ]
    return "## Training\n\n" + markdown(("", f"PretrainAX {pretrainax.__version__}"), rows, padded=False)


def _sources(card: _Card) -> str:
    """Formats the section about the config: its values and, with a recipe, the source of each value."""
    if not card.train_line:
        return ""
    if card.recipe is None:
        fields = (field for field in leaf_fields(card.experiment) if field.value != field.default and not field.is_free)
        rows = [(f"`{field.path}`", _code(field.value)) for field in fields if _is_public(field.path)]
        table = markdown(("field", "value"), rows, padded=False)
        text = "Fields that differ from the defaults. The export did not state the sources of these values.\n"
        return f"## Config\n\n{text}\n<details><summary>{len(rows)} fields</summary>\n\n{table}\n</details>\n"
    name, compared = card.recipe
    rows = []
    for row in compared.rows:
        if _is_public(row.path):
            fact = row.fact
            source = f"{fact.status}: {_format_cell(fact.source)}" if fact else "not in the ledger"
            if fact and not row.agrees:
                source = f"set for this run, instead of {_code(fact.value)} ({source})"
            rows.append((f"`{row.path}`", _code(row.value), source))
    table = markdown(("field", "value", "source"), rows, padded=False)
    others = "".join(f"- The source has {d.theirs}; this model: {d.ours}.\n" for d in compared.deviations)
    return (
        f"## Recipe\n\nThe config is `{name}` of PretrainAX. Its ledger states the source of each value.\n\n"
        f"{others}\n<details><summary>{len(rows)} fields and their sources</summary>\n\n{table}\n</details>\n"
    )


def _is_public(path: str) -> bool:
    return not path.startswith(_PRIVATE) and path.rpartition(".")[2] not in PATH_FIELDS


# --- results ---------------------------------------------------------------------------------------------------------


class _Metric(NamedTuple):
    """A measured metric and how it was measured."""

    source: str
    name: str
    value: float
    interval: Optional[Sequence[float]]  # 95 % confidence interval; None if unknown
    meaning: str
    method: str


def _metrics(card: _Card) -> Iterator[_Metric]:
    """Yields the metrics that were measured with exactly the exported parameters.

    The metrics come from the run's validation and from result files that `evaluate` wrote.
    """
    e, origin = card.experiment, card.origin
    if len(origin.steps) != 1:
        return
    metrics = read_run_json(origin.steps[0])["metrics"]
    if origin.folder == (EMA if e.evaluate.parameters == "ema" else TRAINED):
        count = "all batches" if not e.evaluate.batches else f"at most {counted(e.evaluate.batches, 'batch')}"
        targets = f", {metrics['loss_tokens']:,.0f} target tokens" if metrics.get("loss_tokens") else ""
        method = f"the validation split of its data, {count} of {counted(e.train.global_batch_size, 'row')}{targets}"
        for name, value in metrics.items():
            if value is not None and (explanation := meaning(name, metrics)) and name not in ("loss_tokens", "labels"):
                yield _Metric("Validation of the run", name, value, None, explanation, method)
    folder = os.path.join(origin.directory, "evaluations")
    for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if file.endswith(".json"):
            yield from _evaluation_metrics(os.path.join(folder, file), card)


def _evaluation_metrics(path: str, card: _Card) -> Iterator[_Metric]:
    """Yields the metrics in one `evaluate` result file that were measured with the exported parameters."""
    try:
        with open(path, encoding="utf-8") as f:
            results = json.load(f)
        for r in results:
            is_ema = "moving average" in r["origin"]
            if r["step"] == card.steps[0] and is_ema == (card.origin.folder == EMA) and r["value"] is not None:
                counts = ", ".join(f"{n:,} {what}" for what, n in r["counts"].items())
                source = ": ".join(filter(None, (r["source"], r["part"])))
                method = f"{r['how']}; {counts}"
                name, interval = r["measure"], r.get("interval")  # files before version 0.7 have no interval
                yield _Metric(source, name, r["value"], interval, meaning(name), method)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is not a valid result file of pretrainax.evaluate ({e}): move it away") from e


def _results(metrics: Sequence[_Metric]) -> str:
    """Formats the metrics as tables, one for each source and measurement method."""
    if not metrics:
        return "## Results\n\nNo results exist for exactly these parameters.\n"
    tables = []
    for source, method in dict.fromkeys((f.source, f.method) for f in metrics):
        group = [f for f in metrics if (f.source, f.method) == (source, method)]
        values = (
            metric_text(f.name, f.value)
            + (f" ({' to '.join(metric_text(f.name, bound) for bound in f.interval)})" if f.interval else "")
            for f in group
        )
        rows = [(f.name, value, _format_cell(f.meaning)) for f, value in zip(group, values, strict=True)]
        columns = 3 if any(f.meaning for f in group) else 2
        table = markdown(("metric", "value", "meaning")[:columns], [row[:columns] for row in rows], padded=False)
        tables.append(f"{_format_cell(source)}: {_format_cell(method)}.\n\n{table}\n")
    errors = "Intervals are 95 % confidence intervals. " if any(f.interval for f in metrics) else ""
    return f"## Results\n\n{''.join(tables)}{errors}All results are from one run with one seed.\n"


def _curves() -> str:
    return f"## Curves\n\n![Losses and learning rate of the run by step]({CURVES})\n"


def _limits(card: _Card, is_measured: bool) -> str:
    """Formats the list of limitations; `is_measured` is True if the card has results."""
    e = card.experiment
    lines = []
    if not isinstance(e.objective, Task):
        lines.append("It is only pretrained: it was not tuned to follow instructions or to give safe answers.")
    if card.train_line:
        lines.append(f"It was trained on rows of {e.data.sequence_length:,} tokens. Longer inputs are untested.")
        tokens = card.train_line.get("text_tokens", 0) / card.parameters
        if tokens < _OPTIMAL_TOKENS and not _start(card):
            lines.append(
                f"It is undertrained: it has seen {three_digits(tokens)} tokens of text per parameter; about "
                f"{_OPTIMAL_TOKENS} are compute-optimal (Hoffmann et al. 2022, arXiv 2203.15556)."
            )
        if max(card.steps) < e.train.steps:
            lines.append("It is an intermediate checkpoint: the learning-rate schedule was not finished.")
    else:
        lines.append("Its training data is unknown to PretrainAX; see the original model.")
    exception = "except the results above " if is_measured else ""
    lines.append(f"Nothing {exception}was measured: no bias, no toxicity, no memorization of training data.")
    if card.license is None:
        lines.append("No license is stated: ask the authors before you use the model.")
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in lines)
