"""Our config of a config.json equals the config that transformers' own class reads from it.

Only the test of logits builds models.
"""

import collections
import copy
import dataclasses
import json
import random

import numpy as np
import pytest
import safetensors.numpy

from pretrainax.config import LinearScaling, LongContextScaling, LongRopeScaling, UserError, YarnScaling
from pretrainax.inference.verification.settings import comparable, their_config
from pretrainax.interop.architectures import DAMAGED, described_model
from pretrainax.interop.directories import evaluation_of
from pretrainax.interop.weights import DirectoryWeights, label_names
from pretrainax.zoo.convert import to_huggingface
from tests.golden.case import VOCABULARY, needs_transformers, weights
from tests.support.exports import assert_transformers_computes_the_same
from tests.support.loaded import letters
from tests.support.mutated_configs import bases, mutated, other_value, outcome
from tests.support.released import RELEASED, write_release
from tests.support.tiers import few

pytestmark = needs_transformers
NAMES = [name for name in RELEASED if name != "deepseek-moe"]  # transformers has no class for it


def read(name, **changes):
    return described_model(bases(name)["released"] | changes)[1]


@pytest.fixture(autouse=True)
def quiet():
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(before)


# --- any file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, seed", [(205, 0), pytest.param(2000, 1, marks=pytest.mark.slow)])
def test_a_mutated_file_means_what_their_class_says(count, seed):
    found, counts = [], collections.Counter()
    for case in mutated(count, seed):
        kind, detail = outcome(case)
        counts[kind] += 1
        if kind in ("differ", "raises", "theirs refuses"):
            found.append(f"{case.name} {case.changes}: {kind}, {detail}")
    assert not found, "\n".join(found)
    assert counts["equal"] > 0.4 * count, counts  # the mutations leave enough files that both read


# Keys without effect in inference, or without effect in their class.
IDLE = """
_num_labels _sliding_window_pattern activation_dropout add_router_probs batch_prioritized_routing bos_token_id
chunk_size_feed_forward classif_dropout classifier_dropout classifier_dropout_prob cls_token_id decoder_layerdrop
decoder_start_token_id deterministic_flash_attn down_scale_factor dtype embd_pdrop embed_dropout embedding_dropout
encoder_layerdrop eos_token_id ep_size experts_per_token forced_eos_token_id gap_size gradient_checkpointing
hidden_dropout ignore_attention_mask initial_context_length initializer_cutoff_factor initializer_factor
is_encoder_decoder mask_token_id n_ctx n_special net_structure_type num_memory_blocks num_nextn_predict_layers
num_selected_experts onnx_export output_attentions output_hidden_states output_past output_router_logits pad_token_id
pooler_dropout pooler_hidden_size predict_special_tokens pretraining_tp problem_type qa_dropout qk_head_dim
reorder_and_upcast_attn return_dict router_dtype router_jitter_noise sep_token_id seq_aux seq_classif_dropout
sparse_pred_ignore_index sparse_prediction summary_first_dropout summary_last_dropout summary_proj_to_labels
tie_weights_ use_cache use_mrope
""".split()
# Keys without effect in one class, or because of the value of another key. Name of the release -> keys.
IDLE_IN = {
    "switch": "add_cross_attention expert_capacity",  # the import reports the second key
    "modernbert": "classifier_pooling global_attn_every_n_layers layer_norm_eps position_embedding_type",
    "eurobert": "classifier_pooling head_dim is_decoder",
    "deepseek-v2-lite": "head_dim n_group num_key_value_heads topk_group topk_method",  # greedy without groups
    "deberta-v3": "max_relative_positions pooler_hidden_act pos_att_type tie_word_embeddings",
    **dict.fromkeys(("mt5", "t5", "t5-v1.1"), "n_positions tie_word_embeddings"),  # scale_decoder_outputs has priority
    "t5gemma": "initializer_range vocab_size",  # the values of the stacks are used
    "opus-mt": "max_position_embeddings",
    "phi-3": "attention_bias original_max_position_embeddings",
    "smollm-3": "max_window_layers no_rope_layer_interval sliding_window use_sliding_window",
    "gemma-2": "hidden_act",  # hidden_activation is used
    "gemma-3": "sliding_window_pattern",
    **dict.fromkeys(("qwen2.5", "qwen3", "qwen3-moe"), "max_window_layers sliding_window use_sliding_window"),
    **dict.fromkeys(("gpt2", "openai-gpt", "gpt-neo"), "summary_activation summary_type summary_use_proj"),
    "electra-discriminator": "summary_activation summary_type summary_use_proj tie_word_embeddings",
    "electra-generator": "summary_activation summary_type summary_use_proj",
    "longformer": "architectures",
}


def idle_keys(name, architectures=None):
    """Returns the keys for which the class accepts other values that do not change our config."""
    rng, found = random.Random(0), set()
    file = their_config(bases(name)["released"] | ({"architectures": architectures} if architectures else {}))
    family, before = described_model(file)
    for key, value in file.items():
        others = [1, 3, True, "mean", 0.5] if value is None else [other_value(key, value, rng) for _ in range(5)]
        for other in (x for x in others if key != "model_type" and not (type(x) is int and x < 1)):  # tested below
            changed = file | {key: copy.deepcopy(other)}
            try:
                after = family.read_config(copy.deepcopy(changed))
                idle = other != value and comparable(after) == comparable(before)
            except (UserError, *DAMAGED):
                continue
            if idle and _is_read_by_class(changed) and not _is_same_activation(key, other, value):
                found.add(key)
    return found


def _is_read_by_class(file):
    try:
        their_config(file)
    except Exception:
        return False
    return True


def _is_same_activation(key, a, b):
    if not isinstance(a, str) or not isinstance(b, str) or ("act" not in key and key != "afn"):
        return False
    return any({a, b} <= same for same in ({"swish", "silu"}, {"gelu_new", "gelu_pytorch_tanh", "gelu"}))


@pytest.mark.parametrize("name", few(NAMES))
def test_a_key_without_effect_is_known_to_have_none(name):
    assert idle_keys(name) - set(IDLE) - set(IDLE_IN.get(name, "").split()) == set()


@pytest.mark.parametrize(
    "name, architecture, keys",
    [
        (
            "electra-discriminator",
            "ElectraForMultipleChoice",
            {"summary_type", "summary_use_proj", "summary_activation"},
        ),
        ("deberta-v3", "DebertaV2ForSequenceClassification", {"pooler_hidden_act"}),
        ("deberta-v3", "DebertaV2ForMultipleChoice", {"pooler_hidden_act"}),
    ],
)
def test_a_key_that_only_a_head_reads_is_refused_with_it(name, architecture, keys):
    assert not idle_keys(name, [architecture]) & keys


# Keys that `rope_parameters` and `rope_scaling` can have too, so a message names the field and not the key.
ROTARY = "rope_theta rope_local_base_freq global_rope_theta local_rope_theta partial_rotary_factor".split()


def unstated_keys(name):
    """Returns the keys whose number becomes the value of a field, and which `HuggingFace.fields` does not contain."""
    found = set()
    for file in (file for kind, file in bases(name).items() if kind != "bare"):
        family, before = described_model(file)
        numbers = {key for key, value in file.items() if not isinstance(value, bool)}
        for key in numbers - family.fields.keys() - family.aliases.keys() - {*ROTARY}:
            common = [_changed_fields(family, before, file | {key: x}, x) for x in (2, 3, 5, 8, 0.25, 0.75)]
            if any(sum(path in paths for paths in common) > 1 for path in set().union(*common)):
                found.add(key)
    return found


def _changed_fields(family, before, file, number):
    """Returns the fields that are `number` in the model of `file`, and were not `before`."""
    try:
        after = _field_values(family.read_config(copy.deepcopy(file)))
    except (UserError, *DAMAGED):
        return set()
    old = _field_values(before)
    return {path for path, x in after.items() if type(x) is type(number) and x == number and old.get(path) != x}


def _field_values(config, path=""):
    if not dataclasses.is_dataclass(config):
        return {path: config}
    parts = (_field_values(x, f"{path}.{name}") for name, x in vars(config).items())
    return {path: x for part in parts for path, x in part.items()}


@pytest.mark.parametrize("name", RELEASED)
def test_a_family_states_each_key_that_sets_a_field(name):
    assert unstated_keys(name) == set()


# --- files that were once read incorrectly ----------------------------------------------------------------------------

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_gpt_oss_has_yarn_unless_the_file_says_default():
    yarn = YarnScaling(32.0, rounded=False)
    for changes in ({"rope_scaling": None}, {"rope_scaling": {}}, {"rope_scaling": None, "rope_parameters": None}):
        assert read("gpt-oss", **changes).position.scaling == yarn
    for parameters in ({}, {"rope_type": "default", "rope_theta": 7.0}):
        assert read("gpt-oss", rope_scaling=None, rope_parameters=parameters).position.scaling is None


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_original_length_next_to_the_parameters_has_priority(key):
    scalings = {
        "yarn": ({"factor": 4.0}, YarnScaling(4.0, original_length=10)),
        "llama3": (LLAMA_3, LongContextScaling(8.0, original_length=10)),
        "linear": ({"factor": 4.0}, LinearScaling(4.0)),
    }
    for kind, (keys, scaling) in scalings.items():
        for inner in ({}, {"original_max_position_embeddings": 12}):
            file = {"rope_scaling": None, key: {"rope_type": kind, **keys, **inner}}
            assert read("llama", **file, original_max_position_embeddings=10).position.scaling == scaling


def test_deepseek_v2_is_greedy_without_a_method():
    limited = {"n_group": 2, "topk_group": 1, "n_routed_experts": 4}
    without = {key: x for key, x in bases("deepseek-v2-lite")["released"].items() if key != "topk_method"}
    experts = described_model(without | limited)[1].experts
    assert (experts.groups, experts.top_groups) == (None, None)
    experts = read("deepseek-v2-lite", **limited, topk_method="group_limited_greedy", num_experts_per_tok=1).experts
    assert (experts.groups, experts.top_groups) == (2, 1)


def test_both_mscales_of_yarn_are_of_deepseek_alone():
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}
    for name in ("gemma-3", "llama", "gpt-oss"):
        with pytest.raises(UserError, match="mscale_all_dim 1.0 and mscale, which only DeepSeek models support"):
            read(name, rope_scaling=scaling)
    assert read("deepseek-v3", rope_scaling=scaling).position.scaling.mscale == 0.7


def test_all_layers_of_qwen_3_moe_have_the_window():
    config = read("qwen3-moe", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert (config.layer_pattern, config.window) == (("local",), 4)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "quick_gelu", "silu"])
def test_a_file_has_one_name_of_an_activation_in_two_keys(activation):
    keys = {"deberta-v3": ("hidden_act", "conv_act"), "modernbert": ("hidden_activation", "classifier_activation")}
    for name, both in keys.items():
        convolution = {"conv_kernel_size": 3} if name == "deberta-v3" else {}
        file = bases(name)["released"] | dict.fromkeys(both, activation) | convolution
        family, config = described_model(file)
        exported = family.write_config(config)
        assert [exported[key] for key in both] == [activation, activation]


def test_switch_has_the_activation_of_its_only_key_in_transformers_5():
    released = bases("switch")["released"]
    file = {key: x for key, x in released.items() if key != "feed_forward_proj"} | {"dense_act_fn": "gelu"}
    assert described_model(file)[1].activation == described_model(their_config(file))[1].activation == "gelu"


def test_an_import_tells_that_switch_skips_no_tokens(tmp_path):
    write_release(tmp_path / "source", "switch")
    (note,) = DirectoryWeights(str(tmp_path / "source")).notes()
    assert note.startswith("expert_capacity 64 was ignored")


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_labels_without_names_are_named_as_in_their_class(task):
    file = bases("bert")["released"] | {"architectures": [f"BertFor{task}"]}
    experiment = evaluation_of(described_model(file)[1], letters().vocabulary, "", label_names(file))
    assert list(experiment.objective.labels) == list(their_config(file)["id2label"].values()) == ["LABEL_0", "LABEL_1"]


def test_t5gemma_ties_embeddings_as_the_file_and_not_a_stack_says():
    file = bases("t5gemma")["released"]
    for tied in (True, False):
        stacks = {"encoder": file["encoder"] | {"tie_word_embeddings": not tied}, "decoder": file["decoder"]}
        assert read("t5gemma", **stacks, tie_word_embeddings=tied).tie_embeddings == tied


# --- one line --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("llama", {"num_attention_heads": 3}, "hidden_size 16, which must be a multiple of num_attention_heads, 3"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("llama", {"head_dim": 0}, "head_dim is 0, it must be at least 1"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0, it must be at least 1"),
        ("bert", {"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ("gpt2", {"n_head": 3}, "n_embd 16 is not a multiple of n_head 3"),
        ("t5gemma", {"num_attention_heads": 3}, None),
        ("deepseek-v3", {"topk_group": None}, "n_group 2 and topk_group None; both must be numbers"),
        ("deepseek-v3", {"n_group": 3}, "n_routed_experts 4 is not a multiple of n_group 3"),
        ("deepseek-v3", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9, it must be below"),
        (
            "smollm-3",
            {"no_rope_layers": None, "no_rope_layer_interval": 1},
            "no_rope_layer_interval is 1, it must be at",
        ),
        ("gemma-2", {"sliding_window": 1}, "sliding_window is 1, it must be at least 2"),
        ("deberta-v3", {"max_relative_positions": 1}, "max_relative_positions is 1, it must be at least"),
        ("gpt-neo", {"window_size": 1, "sliding_window": 5}, "window_size is 1, it must be at least 2"),
        ("gpt2", {"n_inner": 0}, "n_inner is 0, it must be at least 1"),
        ("gpt-neo", {"intermediate_size": 0}, "intermediate_size is 0, it must be at least 1"),
        ("electra-generator", {"embedding_size": 0}, "embedding_size is 0, it must be at least 1"),
        ("bart", {"decoder_layers": 0}, "decoder_layers is 0: it must be at least 1"),
        ("t5-v1.1", {"num_decoder_layers": 0}, "num_decoder_layers is 0: it must be at least 1"),
        ("deepseek-v3", {"n_shared_experts": -1}, "n_shared_experts is -1, it must be at least 1"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, it must be at most num_local_experts, 4"),
        ("gemma", {"num_key_value_heads": None}, "num_key_value_heads null"),
        ("albert", {"embedding_size": None}, "embedding_size null"),
        ("bart", {"decoder_layers": None}, "decoder_layers null"),
        ("smollm-3", {"no_rope_layer_interval": None}, "no_rope_layer_interval null"),
        ("gpt-oss", {"swiglu_limit": None}, "swiglu_limit null"),
        ("mistral", {"vocab_size": "99"}, "vocab_size is '99', it must be of type int"),
        ("qwen3", {"num_hidden_layers": 0}, "it must be at least 1"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_key(name, changes, message):
    if message is None:  # in both stacks
        file = bases(name)["released"]
        changes, message = {s: file[s] | changes for s in ("encoder", "decoder")}, "must be a multiple of"
    with pytest.raises(UserError, match=message) as found:
        read(name, **changes)
    assert "\n" not in str(found.value)


# --- not only equal, but right ---------------------------------------------------------------------------------------


def _is_computable(config):
    """Returns True if the batch of the parity tests fits a model, and the model has logits to compare."""
    fits = config.vocab_size >= VOCABULARY and (config.position.max_length or 99) >= 16 and config.d_model < 200
    return fits and config.head is None and not config.replaced_token_head


def _selects_factors_by_batch(config):
    """Returns True if LongRoPE in transformers selects the factors by the longest row of the parity batch."""
    scaling = getattr(config.position, "scaling", None)
    return isinstance(scaling, LongRopeScaling) and scaling.original_length < 16


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("deberta-v3", "electra-discriminator")])
def test_transformers_computes_the_same_of_mutated_files(name, tmp_path):
    done = 0
    for i, case in enumerate(mutated(3 * 42 * 12, seed=7)):
        file = case.json | ({"expert_capacity": 10**6} if name == "switch" else {})
        if case.name != name or done == 3 or outcome(case).kind != "equal" or "return_dict" in str(case.changes):
            continue
        family, config = described_model(copy.deepcopy(file))
        if not _is_computable(config) or _selects_factors_by_batch(config):
            continue
        if comparable(config) == comparable(read(name)):
            continue
        params, directory = weights(config), tmp_path / str(i)
        state = to_huggingface(family.names(config), params)
        state |= {tensor: np.zeros(shape, np.float32) for tensor, shape in family.zeros(config).items()}
        directory.mkdir()
        arrays = {tensor: np.ascontiguousarray(x) for tensor, x in state.items()}
        safetensors.numpy.save_file(arrays, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(file | {"architectures": [family.class_of(config)]}))
        assert_transformers_computes_the_same(directory, config, params, pad_id=file.get("pad_token_id") or 0)
        done += 1
    assert done
