"""onnxruntime computes our logits from exports that torch.onnx converted, for any batch size and length."""

import importlib.util
import json

import numpy as np
import pytest

from pretrainax.interop import directories
from tests.golden import CASES
from tests.golden.case import batch, needs_transformers, weights
from tests.support.exports import our_logits, write_workdir

pytestmark = [
    pytest.mark.slow,
    needs_transformers,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("onnxruntime", "onnxscript"))),
        reason="onnxruntime or onnxscript is not installed (extra servers)",
    ),
]


def inputs(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arguments [B, T] of the model in transformers, in the order of the ONNX inputs."""
    if "encoder_tokens" in arrays:
        return {
            "input_ids": arrays["encoder_tokens"].astype(np.int64),
            "attention_mask": (arrays["encoder_segment_ids"] > 0).astype(np.int64),
            "decoder_input_ids": arrays["tokens"].astype(np.int64),
        }
    theirs = {"input_ids": arrays["tokens"], "attention_mask": arrays["segment_ids"] > 0}
    if "token_types" in arrays:
        theirs["token_type_ids"] = arrays["token_types"]
    return {name: array.astype(np.int64) for name, array in theirs.items()}


def write_onnx(directory, path, example: dict[str, np.ndarray]) -> None:
    """Converts an export to an ONNX file whose only output is the logits."""
    import torch
    import transformers

    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(directory, attn_implementation="eager").eval()
    model.config.use_cache = False

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *arguments):
            outputs = self.model(**dict(zip(example, arguments, strict=True)))
            return outputs.logits if "logits" in outputs else outputs.prediction_logits

    torch.onnx.export(
        Logits(),
        tuple(map(torch.tensor, example.values())),
        path,
        input_names=list(example),
        dynamic_shapes=(tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in example),),
        verbose=False,
    )


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5_1_1"])
def test_onnxruntime_computes_the_same_logits(name, tmp_path):
    import onnxruntime

    case = CASES[name]
    params, arrays = weights(case.config), batch(case)
    write_workdir(tmp_path / "run", case.config, params, case.pad_id)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "exported"))
    theirs = inputs(arrays)
    write_onnx(tmp_path / "exported", tmp_path / "model.onnx", {key: x[:2, :9] for key, x in theirs.items()})
    (logits,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, theirs)
    real = arrays["segment_ids"] > 0
    # The tolerance of all parity tests: the float32 sums have another order.
    np.testing.assert_allclose(logits[real], our_logits(case.config, params, arrays)[real], atol=2e-4, rtol=0)
