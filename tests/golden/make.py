"""Writes the results of transformers for tiny models of every family: logits, hidden states, gradients.

`python -m tests.golden.make [NAME …]` (extra `parity`) writes two results. The .npz files are references for tests
without torch. The largest differences are the numbers that `python -m pretrainax.zoo` prints. tests/support/written.py
computes the models that transformers lacks. updates/ contains the parameters after three updates by torch, for one
model of each kind.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pretrainax.inference.verification.reference import model_inputs
from pretrainax.optim.decay import decay_mask
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.zoo.convert import from_huggingface, to_huggingface
from tests.golden import CASES
from tests.golden.case import Case, batch, weights
from tests.support import updates, written

FOLDER = Path(__file__).parent
# One model for each kind of update. The golden files of all models cover the gradients of all other components.
UPDATED = ("bert", "electra_small", "llama3", "deepseek_v3", "t5_1_1")


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as f:
        return dict(f.items())


def oracle(case: Case) -> Any:
    """Returns the torch model with the weights of the case, in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(0)
    huggingface, config = case.family.huggingface, case.config
    if case.oracle is not None:
        model = case.oracle()
    else:
        json = huggingface.write_config(config)
        theirs = transformers.AutoConfig.for_model(**json)
        theirs._attn_implementation = "eager"
        model = getattr(transformers, json["architectures"][0])(theirs)
    state = to_huggingface(huggingface.names(config), weights(config))
    # The class stores all experts in one tensor, and the files have a tensor for each expert.
    if config.experts is not None:
        return read_from_file(model, state).eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    assert not unexpected, unexpected
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    loaded = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in missing}
    # A tied parameter has several names. Marian's sinusoidal table is a parameter without training.
    fresh = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in loaded]
    assert not fresh, fresh
    return model.eval()


def read_from_file(model: Any, state: dict[str, np.ndarray]) -> Any:
    """Returns a torch model with the weights of a file, and asserts that it has read all tensors."""
    import safetensors.numpy

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        arrays = {name: np.ascontiguousarray(x) for name, x in state.items()}
        safetensors.numpy.save_file(arrays, f"{folder}/model.safetensors", {"format": "pt"})
        settings = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
        model, info = type(model).from_pretrained(folder, dtype="float32", **settings)
    assert not any(info.values()), info
    return model


def as_in_files(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Converts tensors of a torch model, weights or gradients, to the names of released files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def forward(case: Case, model: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the outputs "logits", "pair_logits", "replaced_logits", "hidden …" and "loss", if any, with gradients."""
    import torch

    t = {key: torch.from_numpy(value.astype(np.int64)) for key, value in arrays.items()}
    arguments = model_inputs(case.config, model, arrays)
    out = model(**arguments, output_hidden_states=True, return_dict=True)
    found = {}
    if case.config.replaced_token_head:
        found["replaced_logits"] = out.logits
    else:
        found["logits"] = out.prediction_logits if "prediction_logits" in out else out.logits
    if case.config.pair_head:
        found["pair_logits"] = out.seq_relationship_logits if "seq_relationship_logits" in out else out.sop_logits
    for side in ("encoder", "decoder"):
        states = out.get(f"{side}_hidden_states", out.get("hidden_states") if case.config.family == side else None)
        if states is not None:
            found[f"hidden {side}"] = torch.stack(states[1:])  # [L, B, T, D]; the first state is the embeddings

    functional, loss = torch.nn.functional, 0.0
    if "logits" in found:
        counted = t["loss_weights"] > 0
        loss = loss + functional.cross_entropy(found["logits"][counted], t["targets"][counted])
    if "pair_logits" in found:
        loss = loss + functional.cross_entropy(found["pair_logits"], t["pair_labels"])
    if "replaced_logits" in found:
        real = t["segment_ids"] > 0
        logits, labels = found["replaced_logits"][real], t["replaced"][real].float()
        loss = loss + functional.binary_cross_entropy_with_logits(logits, labels)
    return found | {"loss": loss}


def state_of(case: Case, model: Any, gradients: bool = False) -> Any:
    """Returns the weights of a torch model, or their gradients, as our tree."""
    named = model.named_parameters(remove_duplicate=False)  # the table has one of the names of a tied parameter
    tensors = {name: p.grad if gradients else p.detach() for name, p in named}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # we treat it as a parameter, but no gradient changes it
            tensors[name] = buffer * 0 if gradients else buffer
    if case.config.experts is not None:
        tensors = as_in_files(model, tensors)
    table = case.family.huggingface.names(case.config)
    return from_huggingface(table, {k: v.numpy() for k, v in tensors.items()}, case.config)


def reference(name: str) -> dict[str, np.ndarray]:
    """Runs transformers: "logits", …, "hidden …", "loss", and "gradient <path>" of each of our parameters."""
    if name in written.CASES:
        return written.reference(name)
    case = CASES[name]
    model = oracle(case)
    found = forward(case, model, batch(case))
    found["loss"].backward()
    gradients = state_of(case, model, gradients=True)
    arrays = {key: value.detach().numpy() for key, value in found.items()}
    names = [f"gradient {path}" for path in parameter_names(gradients)]
    return arrays | dict(zip(names, jax.tree.leaves(gradients), strict=True))


def updated(name: str) -> dict[str, np.ndarray]:
    """Returns our parameters, by path, after three updates by torch, with its model, AdamW and gradient clipping."""
    case = CASES[name]
    model, table = oracle(case), case.family.huggingface.names(case.config)
    params = weights(case.config)
    decays = jax.tree.map(lambda decay, x: np.full(x.shape, decay), decay_mask(params), params)
    named = dict(model.named_parameters(remove_duplicate=False))
    decayed = {n: bool(x.any()) for n, x in to_huggingface(table, decays).items()}
    # Some parameters have other names in the class than in files.
    if case.config.experts is not None:
        known = {id(named[n]) for n in decayed if n in named}  # by one of the names of a tied parameter
        decayed |= {n: p.ndim > 1 for n, p in model.named_parameters() if id(p) not in known}
    updates.update_torch(named, decayed, lambda: forward(case, model, batch(case))["loss"])
    theirs = state_of(case, model)
    return dict(zip(parameter_names(theirs), jax.tree.leaves(theirs), strict=True))


if __name__ == "__main__":
    from tests.support.parity import ALL, write_differences

    for name in sys.argv[1:] or ALL:
        np.savez_compressed(FOLDER / f"{name}.npz", allow_pickle=False, **reference(name))
        if name in UPDATED:
            np.savez_compressed(FOLDER / "updates" / f"{name}.npz", allow_pickle=False, **updated(name))
        print(name, (FOLDER / f"{name}.npz").stat().st_size, "bytes", flush=True)
    write_differences(sys.argv[1:] or ALL)
