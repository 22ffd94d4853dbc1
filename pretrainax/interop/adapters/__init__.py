"""Imports and exports PEFT adapters: the trained parameters of parameter-efficient tuning, without the base model.

A PEFT directory contains adapter_config.json and adapter_model.safetensors. LoRA, DoRA and IA3 are supported for all
model families in the zoo, also with task heads. Prompt tuning and prefix tuning are supported for language models that
PEFT and PretrainAX compute in equivalent ways.
"""

from pretrainax.interop.adapters.directories import export_adapter, import_adapter, is_adapter, label_arguments
from pretrainax.interop.adapters.fields import CONFIG, WEIGHTS

__all__ = ["CONFIG", "WEIGHTS", "export_adapter", "import_adapter", "is_adapter", "label_arguments"]
