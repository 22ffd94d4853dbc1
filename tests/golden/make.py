"""Writes what transformers computes with tiny models of every family: logits, hidden states, gradients.

`python -m tests.golden.make [NAME …]` (extra `parity`) writes the .npz files, which tests without torch compare with,
and the largest differences, which `python -m pretrainax.zoo` prints. What transformers has not is computed by
tests/support/written.py. The parameters after three updates by torch are in updates/, of one model of each kind.
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
# Every further brick has its gradient in the golden file of some model; a kind is how an update comes about.
UPDATED = ("bert", "electra_small", "llama3", "deepseek_v3", "t5_1_1")


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as f:
        return dict(f.items())


def oracle(case: Case) -> Any:
    """The torch model with the weights of the case, in evaluation mode."""
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
    if config.experts is not None:  # of which the class keeps all in one tensor, and the files have one each
        return read_from_file(model, state).eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    assert not unexpected, unexpected
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    loaded = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in missing}
    # A tied one has several names; Marian's table of sinusoids is a parameter that is not trained.
    fresh = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in loaded]
    assert not fresh, fresh
    return model.eval()


def read_from_file(model: Any, state: dict[str, np.ndarray]) -> Any:
    """A torch model with the weights of a file, which it has read all of."""
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
    """Tensors of a torch model, weights or gradients, by the names that released files have."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def forward(case: Case, model: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tensors "logits", "pair_logits", "replaced_logits" (those there are), "hidden …", and "loss", with gradients."""
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
            found[f"hidden {side}"] = torch.stack(states[1:])  # [L, B, T, D]; the first are the embeddings

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
    """The weights of a torch model, or their gradients, as our tree."""
    named = model.named_parameters(remove_duplicate=False)  # the table knows one name of a tied one
    tensors = {name: p.grad if gradients else p.detach() for name, p in named}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # a parameter of ours, which no gradient moves
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
    """Returns our parameters, by path, after three updates by torch: of its model, its AdamW and its clipping."""
    case = CASES[name]
    model, table = oracle(case), case.family.huggingface.names(case.config)
    params = weights(case.config)
    decays = jax.tree.map(lambda decay, x: np.full(x.shape, decay), decay_mask(params), params)
    named = dict(model.named_parameters(remove_duplicate=False))
    decayed = {n: bool(x.any()) for n, x in to_huggingface(table, decays).items()}
    if case.config.experts is not None:  # some have other names in the class than in files
        known = {id(named[n]) for n in decayed if n in named}  # by one name of a tied one
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
