"""Tests the tuning methods: the trained parameters, their sharding and weight decay, and users' mistakes."""

import jax
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.adapt import IA3, Adapted, BitFit, HeadAlone, LoRA, PrefixTuning, PromptTuning
from pretrainax.adapt.matrices import matching, matrices_of
from pretrainax.adapt.tuning import abstract_params
from pretrainax.config import (
    AUTO,
    LearnedPositions,
    MeshConfig,
    MixtureOfExperts,
    MultiTokenPrediction,
    SlidingWindows,
    UserError,
    kinds,
)
from pretrainax.config.validation import validate
from pretrainax.data.packing import OneEach
from pretrainax.data.sources import JsonLines
from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.compute import Compute
from pretrainax.models import build
from pretrainax.optim.decay import decay_mask
from pretrainax.sharding.param_paths import flat
from pretrainax.sharding.rules import param_specs
from pretrainax.tasks import MultipleChoice, Retrieval, TextGeneration
from tests.golden import CASES
from tests.golden.case import weights
from tests.support import tables, tiny


def trained(preset, tuning, train_heads=False):
    """Returns the shapes of the trained parameters of a preset."""
    model = Adapted(build(zoo.preset(preset), Compute()), tuning, train_heads)
    return jax.eval_shape(lambda params: model.start(params, jax.random.key(0)), tables.params(preset))


# --- trained parameters ----------------------------------------------------------------------------------------------


def test_low_rank_updates_are_of_the_matrices_that_are_named():
    paths = {path.rpartition("/")[0] for path in flat(trained("t5_base", LoRA(targets=("decoder/.*/query", "down"))))}
    attentions = {f"decoder/blocks/{kind}_attention/query" for kind in ("self", "cross")}
    assert paths == attentions | {"encoder/blocks/mlp/down", "decoder/blocks/mlp/down"}


@pytest.mark.first(6)
@pytest.mark.parametrize("preset", [name for name in zoo.PRESETS if zoo.preset(name).experts is not None])
def test_of_a_mixture_neither_router_nor_experts_are_tuned(preset):
    params = models.abstract_params(zoo.preset(preset))
    matrices = {matrix.path for matrix in matrices_of(params)}
    assert matrices and not [path for path in matrices if "/router" in path or "/experts_" in path]
    assert matrices_of(params) == matching(matrices_of(params), (".*",))


def test_a_feed_forward_behind_experts_is_rescaled_and_updated_as_others_are():
    after = {f"{stack}/blocks/mlp_after/down" for stack in ("encoder", "decoder")}
    for tuning in (IA3(), LoRA(targets=("down",))):
        assert after < {path.rpartition("/")[0] for path in flat(trained("st_moe_l", tuning))}


def test_low_rank_updates_with_parameters_that_are_trained_whole():
    paths = set(flat(trained("bert_base", LoRA(fully_trained=("token_embedding", "mlp_norm/scale", "bias")))))
    every = flat(tables.params("bert_base"))
    parts = {
        path for path in every if path.endswith(("/bias", "mlp_norm/scale")) or path.startswith("token_embedding/")
    }
    assert {path for path in paths if "/lora_" not in path} == parts and len(parts) == 16


def test_biases_alone():
    assert {path.rpartition("/")[2] for path in flat(trained("bert_base", BitFit()))} == {"bias"}
    biases = [path for path in flat(tables.params("bert_base")) if path.endswith("/bias")]
    assert sorted(flat(trained("bert_base", BitFit()))) == sorted(biases)


def test_what_adds_no_tokens_leaves_all_places_to_the_text():
    config = tiny.get_config("bert").model
    assert LoRA().limits(config) == IA3().limits(config) == {"position.max_length": 64}
    assert PromptTuning(4).limits(config) == {"position.max_length": 60}


def test_heads_alone_and_beside_what_is_tuned():
    heads = {"masked_lm_head", "unembedding", "pair_head"}
    assert {path.split("/")[0] for path in flat(trained("bert_base", HeadAlone()))} == heads
    assert {path.split("/")[0] for path in flat(trained("bert_base", IA3(), True))} == heads | {"encoder"}


# --- sharding and weight decay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ("bert_base", "t5_base", "llama3_8b"))
def test_what_is_added_lies_as_the_matrix_that_it_is_added_to(preset):
    specs = flat(param_specs(tables.params(preset)))
    added = flat(param_specs(trained(preset, LoRA(rank=4, targets=(".*",), dora=True))))
    for matrix in matrices_of(tables.params(preset)):
        layers, *axes = specs[f"{matrix.path}/kernel"]
        cut = len(matrix.inputs)
        assert tuple(added[f"{matrix.path}/lora_a"]) == (layers, *axes[:cut], None)
        assert tuple(added[f"{matrix.path}/lora_b"]) == (layers, None, *axes[cut:])
        assert tuple(added[f"{matrix.path}/magnitude"]) == (layers, *axes[cut:])


def test_only_the_matrices_of_an_update_decay():
    decays = flat(decay_mask(trained("t5_base", LoRA(dora=True))))
    assert {path.rpartition("/")[2] for path, x in decays.items() if x} == {"lora_a", "lora_b"}
    for tuning in (IA3(), PromptTuning(), PrefixTuning(), PrefixTuning(hidden=8)):
        params = trained("t5_base", tuning)
        assert not any(flat(decay_mask(params)).values()) and len(flat(param_specs(params))) == len(flat(params))


# --- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "no start": ("bert", LoRA(), {}, "config.tuning is LoRA.* set config.checkpoint.init_from"),
    "no such matrix": ("bert", LoRA(targets=("querry",)), {}, "'querry', .* the nearest is 'query'|'querry'.*'query'"),
    "no expression": ("bert", LoRA(targets=("(",)), {}, r"'\(', which is not a regular expression"),
    "no matrix": ("bert", LoRA(targets=()), {}, "config.tuning.targets is empty"),
    "no parameter": (
        "bert",
        LoRA(fully_trained=("token_embeding",)),
        {},
        "fully_trained has 'token_embeding', no parameter's path has it, did you mean 'token_embedding'",
    ),
    "rank too large": ("bert", LoRA(rank=33), {}, "rank is 33, but .* is a matrix of 32 × 32: it must be at most 32"),
    "rank too small": ("bert", LoRA(rank=0), {}, "rank is 0, it must be at least 1"),
    "dropout": ("bert", LoRA(dropout=1.0), {}, r"dropout is 1.0, it must be in \[0, 1\)"),
    "alpha": ("bert", LoRA(alpha=0.0), {}, "alpha is 0.0, it must be above 0"),
    "no biases": ("t5", BitFit(), {}, r"config.tuning is BitFit\(\), but this config.model has none"),
    "no head": ("gpt", HeadAlone(), {}, "has none of the parameters that it trains"),
    "no room": (
        "bert",
        PromptTuning(40),
        {},
        r"rows of 32 tokens, .* the 40 .*position.max_length has room for 24: .* to at most 24",
    ),
    "no room at all": (
        "bert",
        PromptTuning(70),
        {},
        r"position.max_length has room for 0: set a lower config.tuning.length",
    ),
    "room for one": (
        "bert",
        PromptTuning(63),
        {},
        r"position.max_length has room for 1: set config.data.sequence_length to at most 1$",
    ),
    "no width": ("bert", PrefixTuning(4, -1), {}, "config.tuning.hidden is -1, it must be at least 0"),
    "no length": ("bert", PrefixTuning(0), {}, "config.tuning.length is 0, it must be at least 1"),
    "packed": ("gpt", PromptTuning(4), {"packing": None}, r"set config.data.packing to OneEach\(\)"),
    "a split length": ("t5", PrefixTuning(4), {"sequence": 2}, "config.mesh.sequence is 2, .* it must be 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake):
    family, tuning, fields, line = MISTAKES[mistake]
    experiment = tiny.get_config(family)
    experiment.tuning, experiment.data.packing = tuning, fields.get("packing", OneEach())
    experiment.mesh = MeshConfig(sequence=fields.get("sequence", 1))
    experiment.checkpoint.init_from = None if mistake == "no start" else "runs/base"
    with pytest.raises(UserError, match=line) as caught:
        validate(experiment, files=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tuning",
    [LoRA(rank=1), LoRA(rank=32), LoRA(dropout=0.0), PromptTuning(1), PrefixTuning(1, 0), PrefixTuning(1, 1)],
    ids=str,
)
def test_the_smallest_and_largest_that_are_allowed_are_no_mistakes(tuning):
    experiment = tiny.get_config("bert")
    experiment.tuning, experiment.data.packing, experiment.checkpoint.init_from = tuning, OneEach(), "runs/base"
    validate(experiment, files=False)


def test_prefixes_that_a_layer_makes_are_for_layers_that_are_alike():
    experiment = tiny.get_config("gpt")
    experiment.data.packing, experiment.checkpoint.init_from = OneEach(), "runs/base"
    experiment.model.experts = MixtureOfExperts(num_experts=4, every=2)
    experiment.tuning = PrefixTuning(4)
    validate(experiment, files=False)
    experiment.tuning = PrefixTuning(4, hidden=8)
    with pytest.raises(UserError, match="config.tuning.hidden is 8, .* two kinds .*: set config.tuning.hidden to 0"):
        validate(experiment, files=False)


def test_a_vocabulary_that_is_not_known_yet_is_made_up_and_one_that_is_known_is_taken():
    config = tiny.get_config("gpt").model
    shapes = [abstract_params(config)["token_embedding"]["embedding"].shape]
    positions = [abstract_params(config)["position_embedding"]["embedding"].shape]
    config.vocab_size = config.position.max_length = AUTO
    made_up = abstract_params(config)
    shapes.append(made_up["token_embedding"]["embedding"].shape)
    positions.append(made_up["position_embedding"]["embedding"].shape)
    assert shapes == [(512, 32), (2, 32)] and config.vocab_size == AUTO
    assert positions == [(64, 32), (2, 32)]


@pytest.mark.parametrize("tuning", [PromptTuning(4), PrefixTuning(4)], ids=str)
def test_virtual_tokens_do_not_support_the_blocks_of_multi_token(tuning):
    experiment = tiny.get_config("gpt")
    experiment.tuning, experiment.checkpoint.init_from = tuning, "runs/base"
    experiment.data.packing, experiment.model.multi_token = OneEach(), MultiTokenPrediction()
    with pytest.raises(UserError, match="additional blocks of config.model.multi_token: set it to None, or use LoRA"):
        validate(experiment, files=False)


def test_a_prefix_has_no_place_in_sparse_attention():
    experiment = tiny.get_config("bert")
    experiment.tuning, experiment.checkpoint.init_from = PrefixTuning(4), "runs/base"
    experiment.model.sparse_attention = SlidingWindows()
    with pytest.raises(UserError, match="config.model.sparse_attention supports no additional keys: use LoRA"):
        validate(experiment, files=False)


def test_targets_that_are_longer_than_their_inputs_have_room_behind_a_prefix():
    experiment = tiny.get_config("t5")
    experiment.model.position = LearnedPositions(64)
    experiment.tuning, experiment.checkpoint.init_from = PrefixTuning(20), "runs/base"
    experiment.objective, experiment.data.source = TextGeneration(target_length=60), JsonLines(path="records.jsonl")
    with pytest.raises(UserError, match="makes rows of 60 tokens, .* has room for 44"):
        validate(experiment, files=False)


@pytest.mark.parametrize(("family", "room"), (("bert", 17), ("t5", 17), ("gpt", 28)))
def test_a_prefix_is_within_the_window_of_local_layers(family, room):
    """The mask lets the last token of the longest row attend to the whole prefix; in a longer row it does not."""
    experiment = tiny.get_config(family)
    model, data = experiment.model, experiment.data
    experiment.tuning, experiment.checkpoint.init_from = PrefixTuning(4), "runs/base"
    model.layer_pattern, model.window, data.packing = ("global", "local"), 32 if family == "gpt" else 40, OneEach()
    assert experiment.tuning.limits(model)["window"] == room
    seen = Mask(family == "gpt", window=model.window).materialize(room + 5, room + 5)[0, 0]
    assert seen[room + 3, 0] and not seen[room + 4, 0]
    data.sequence_length = room
    validate(experiment, files=False)
    data.sequence_length = room + 1
    with pytest.raises(UserError, match=f"config.model.window has room for {room}: .* to at most {room}"):
        validate(experiment, files=False)
    experiment.tuning = PromptTuning(4)  # layers without a window show the prompt to all tokens
    validate(experiment, files=False)


def test_a_prefix_is_within_the_narrower_of_two_windows():
    model = tiny.get_config("t5").model
    model.layer_pattern, model.window = ("local",), 10
    for window, room in ((20, 10 - 4), (30, 10 - 4), (12, 6 + 1 - 4)):  # An encoder's window has half on each side.
        model.encoder_window = window
        assert PrefixTuning(4).limits(model)["window"] == room


@pytest.mark.parametrize("tuning", (PromptTuning(4), PrefixTuning(4)))
@pytest.mark.parametrize("task", (MultipleChoice(choices=2), Retrieval()))
def test_a_prompt_is_not_for_rows_of_several_texts_of_which_one_would_see_it(task, tuning):
    """Each text is a segment of its row. The virtual tokens are in the first one, so the mask hides them elsewhere."""
    experiment = tiny.get_config("bert")
    experiment.objective, experiment.data.source = task, JsonLines(path="records.jsonl")
    experiment.tuning, experiment.checkpoint.init_from = tuning, "runs/base"
    experiment.model.masked_lm_head = False
    task.complete(experiment)
    with pytest.raises(
        UserError, match=f"the first document .* {type(task).__name__} has several .* set config.tuning to"
    ):
        validate(experiment, files=False)
    experiment.tuning = LoRA()
    validate(experiment, files=False)


def test_all_of_it_is_written_as_a_flag_and_read_back():

    for tuning in (
        LoRA(3, 1.5, 0.1, ("mlp/.*",), True),
        IA3(),
        BitFit(),
        HeadAlone(),
        PromptTuning(3),
        PrefixTuning(3, 4),
    ):
        assert kinds.Tuning.parse(str(tuning)) == tuning


def test_an_update_starts_at_zero_with_directions_of_its_own():
    params = weights(CASES["bert_masked_lm"].config)
    made = LoRA(rank=2, targets=("query", "key")).added(params, jax.random.key(0))
    query, key = (np.asarray(made[f"encoder/blocks/self_attention/{name}/lora_a"]) for name in ("query", "key"))
    assert not np.array_equal(query, key) and not np.array_equal(query[0], query[1])
    bound = 1 / np.sqrt(query.shape[1])
    assert 0.8 * bound < np.abs(query).max() <= bound
    assert not any(np.asarray(x).any() for path, x in made.items() if path.endswith("lora_b"))


def test_prefixes_start_near_zero_and_apart():
    """The standard deviation is 0.02, as for the embeddings of a model."""
    for hidden, name in ((0, "prefix"), (16, "key")):
        made = PrefixTuning(length=30, hidden=hidden).added(weights(CASES["llama3"].config), jax.random.key(0))
        values = [np.asarray(x) for path, x in made.items() if path.endswith(name)]
        assert values and not any(np.array_equal(values[0], other) for other in values[1:])
        for x in values:
            np.testing.assert_allclose([x.mean(), x.std()], [0, 0.02], atol=0.002)  # some thousand numbers each


def test_a_config_is_checked_before_the_devices_are_asked_for(monkeypatch):
    """Distributed processes must not query their devices before they have joined."""
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("asked for devices"))
    experiment = tiny.get_config("bert")
    experiment.tuning, experiment.checkpoint.init_from = LoRA(rank=2), "runs/base"
    validate(experiment, files=False)
