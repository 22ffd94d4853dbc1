"""Converts field and metric names that earlier versions wrote to config.json and metrics.jsonl to current names."""

from pretrainax.files.json_files import JsonObject

# Class -> former name of a field -> current name of the field.
_FIELDS: dict[str, dict[str, str]] = {
    "TrainConfig": {"pipeline_parts": "pipeline_microbatches"},
    "RotaryPositions": {"neighbours": "interleaved"},
    "YarnScaling": {"turned_weight": "mscale", "logit_weight": "mscale_all_dim"},
    "Layers": {"taken": "layers", "silent": "zero_init"},
    "Chunks": {"most": "max_windows"},
    "Adafactor": {"least_factored": "min_factored_size"},
    "AdEMAMix": {"rise_steps": "alpha_warmup_steps"},
    "SOAP": {"longest": "max_side"},
    "MarkedWords": {"unit": "position_unit"},
    **dict.fromkeys(("Distillation", "DistilBERT", "TinyBERT", "MiniLM"), {"own": "hard"}),
}
# (class, current name of a field) -> former value -> current value.
_VALUES: dict[tuple[str, str], dict[object, object]] = {
    ("DecoderToEncoderDecoder", "cross_attention"): {"silent": "zero"},
}
_METRICS = {"mfu_done": "mfu_executed"}


def upgrade_fields(class_name: str, fields: JsonObject) -> JsonObject:
    """Converts a config class's fields, as read from config.json, to their current names and values."""
    names = _FIELDS.get(class_name, {})
    upgraded = {names.get(name, name): value for name, value in fields.items()}
    for name, value in upgraded.items():
        if isinstance(value, str):
            upgraded[name] = _VALUES.get((class_name, name), {}).get(value, value)
    if class_name == "ModelConfig" and (recurrent := upgraded.pop("recurrent", None)) is not None:  # configs of 0.6
        upgraded["parts"] = [*upgraded.get("parts", ()), recurrent]
    if class_name == "TrainConfig" and (epochs := upgraded.pop("epochs", None)) is not None:
        upgraded["budget"] = f"{epochs} epochs"
    return upgraded


def upgrade_metrics(line: JsonObject) -> JsonObject:
    """Converts the metric names in a line of metrics.jsonl, given as a dict, to the current names."""
    return {_METRICS.get(name, name): value for name, value in line.items()}
