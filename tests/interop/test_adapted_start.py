"""Tests starts of another family or shape as a whole: sharding of the arrays, reports and errors."""

import dataclasses
import re
import weakref

import jax
import numpy as np
import pytest

from pretrainax import models
from pretrainax.adapt import LoRA
from pretrainax.config import (
    DecoderSizes,
    LearnedPositions,
    MeshConfig,
    MixtureOfExperts,
    RelativePositionBuckets,
    RotaryPositions,
    SinusoidalPositions,
    UserError,
)
from pretrainax.config.validation import validate
from pretrainax.data.objectives import MaskedLM, SpanCorruption
from pretrainax.interop.adaptations import (
    Adaptation,
    DecoderToEncoder,
    DecoderToEncoderDecoder,
    DenseToExperts,
    Layers,
    LongerContext,
    Operation,
    WiderVocabulary,
)
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.tokenizer_check import check_tokenizer_of
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import flat
from pretrainax.sharding.rules import tree_shardings
from pretrainax.tokenization import ByteBPE
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from pretrainax.zoo import llama
from tests.golden import CASES
from tests.golden.case import Case, batch, needs_transformers, weights
from tests.support import tiny
from tests.support.adapted import planned, read, taken
from tests.support.docs_pages import how_to
from tests.support.exports import our_logits
from tests.support.huggingface_weights import write_directory, write_run

GPT2, LLAMA = CASES["gpt2"].config, CASES["llama3"].config
EXPERTS = MixtureOfExperts(num_experts=4, top_k=2)


def changed(model=GPT2, **fields):
    return dataclasses.replace(model, **fields)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Writes untrained runs."""
    folder = tmp_path_factory.mktemp("starts")
    models = {"gpt2": GPT2, "llama": LLAMA, "mixtral": CASES["mixtral"].config, "bert": CASES["bert_masked_lm"].config}
    return {name: write_run(folder / name, model) for name, model in models.items()}


# --- several at once -------------------------------------------------------------------------------------------------

WHOLE = (DecoderToEncoderDecoder(), Layers((1, 0, 1)), WiderVocabulary(), LongerContext(), DenseToExperts())
WIDE = changed(
    LLAMA,
    family="encoder_decoder",
    num_layers=3,
    vocab_size=128,
    position=RotaryPositions(64, theta=400.0),
    experts=EXPERTS,
)


@pytest.mark.slow
def test_adaptations_follow_one_another_and_every_parameter_is_copied_or_made_by_something_that_is_said(starts):
    start = planned(starts["llama"], WIDE, *WHOLE)
    assert start.copied.keys() | start.created.keys() == flat(models.abstract_params(WIDE)).keys()
    assert not start.copied.keys() & start.created.keys() and not start.unused_paths
    assert start.copied == {f"{stack}/final_norm/scale": "decoder/final_norm/scale" for stack in ("encoder", "decoder")}
    assert start.created["decoder/blocks/mlp/router/kernel"] == start.created["encoder/blocks/mlp/router/kernel"]
    assert start.created["unembedding/kernel"] == "29 new rows, each the mean of 99 (unembedding/kernel)"
    assert start.created["decoder/blocks/cross_attention/out/kernel"] == (
        "copy of self-attention in the same layer, then layers 1, 0, 1 of 2 (decoder/blocks/self_attention/out/kernel)"
    )
    params = flat(taken(starts["llama"], WIDE, *WHOLE))
    theirs = flat(weights(LLAMA))
    np.testing.assert_array_equal(
        params["encoder/blocks/mlp/experts_gate/kernel"],
        np.repeat(theirs["decoder/blocks/mlp/gate/kernel"][[1, 0, 1]][:, None], 4, axis=1),
    )


def test_each_side_has_the_decoder_s_table_of_tokens_where_they_have_one_each(tmp_path):
    source = CASES["gemma2"].config
    model = changed(source, family="encoder_decoder", separate_embeddings=True, encoder_window=8, vocab_size=128)
    params = flat(taken(write_run(tmp_path / "start", source), model, DecoderToEncoderDecoder(), WiderVocabulary()))
    table = weights(source)["token_embedding"]["embedding"]
    for side in ("", "decoder_"):
        np.testing.assert_array_equal(params[f"{side}token_embedding/embedding"][:99], table)


@pytest.mark.slow
def test_on_a_mesh_that_does_not_divide_the_start_each_device_has_its_part_of_the_model(starts):
    """99 rows are not a multiple of two devices, and 128 are."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
    params = taken(starts["llama"], WIDE, *WHOLE, mesh=mesh)
    shardings = tree_shardings(mesh, models.abstract_params(WIDE))
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    for path, x in flat(taken(starts["llama"], WIDE, *WHOLE)).items():
        # Each device adds a part of the rows of a mean.
        np.testing.assert_allclose(flat(params)[path], x, rtol=1e-6, atol=1e-6, err_msg=path)


def test_what_is_used_up_is_forgotten_at_once(starts):
    start = planned(starts["gpt2"], changed(family="encoder"), DecoderToEncoder())
    params, alive = read(starts["gpt2"], start), []
    there = [weakref.ref(x) for x in jax.tree.leaves(params)]

    def counted(x):
        alive.append(sum(reference() is not None for reference in there))
        return x

    ways = {path: way._replace(operations=(Operation("counted", counted),)) for path, way in start.rules.items()}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    shardings["encoder"] = shardings.pop("decoder")
    given = [params]
    del params
    start._replace(rules=ways).take(given.pop(), shardings, {})
    # The array in use is alive too.
    assert alive == list(range(len(there), 0, -1))


def test_an_array_that_two_parameters_begin_as_is_theirs_alone(starts):
    """A step donates its parameters, so no two parameters may share an array."""
    params = jax.tree.leaves(taken(starts["gpt2"], changed(family="encoder_decoder"), DecoderToEncoderDecoder()))
    assert len({x.unsafe_buffer_pointer() for x in params}) == len(params)


def test_heads_that_the_start_lacks_are_drawn_anew_where_that_is_asked_for(starts):
    model = changed(family="encoder", masked_lm_head=True, vocab_size=128)
    with pytest.raises(UserError, match="config.model.masked_lm_head is True, there False.*fresh_heads=True"):
        planned(starts["gpt2"], model, DecoderToEncoder(), WiderVocabulary())
    start = planned(starts["gpt2"], model, DecoderToEncoder(), WiderVocabulary(), fresh_heads=True)
    assert {path.partition("/")[0] for path in start.drawn} == {"masked_lm_head", "unembedding"}
    params = flat(taken(starts["gpt2"], model, DecoderToEncoder(), WiderVocabulary(), fresh_heads=True))
    assert params["unembedding/bias"].shape == (128,) and np.std(params["masked_lm_head/dense/kernel"]) > 0.5


# --- directories of others -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hugging_face_directory_is_a_start_too(tmp_path):
    source = write_directory(tmp_path / "llama", "llama3")
    params = flat(taken(source, WIDE, *WHOLE))
    assert all(np.isfinite(x).all() for x in params.values())
    run = write_run(tmp_path / "run", LLAMA)
    for path, x in flat(taken(run, WIDE, *WHOLE)).items():
        np.testing.assert_array_equal(params[path], x, err_msg=path)


@pytest.mark.slow
@needs_transformers
def test_the_decoder_of_a_llama_that_transformers_has_written_says_what_that_does(tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=99, hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=20, initializer_range=0.2)
    ).eval()
    theirs.save_pretrained(tmp_path / "llama")
    _, source = described_model(read_config_json(str(tmp_path / "llama")))
    model = changed(source, family="encoder_decoder", num_layers=4, experts=EXPERTS, vocab_size=128)
    adaptations = (
        DecoderToEncoderDecoder(cross_attention="zero"),
        Layers("stacked", zero_init=True),
        DenseToExperts(),
        WiderVocabulary(),
    )
    arrays = batch(Case(model, llama.FAMILIES[0]))
    logits = our_logits(model, taken(tmp_path / "llama", model, *adaptations), arrays)[..., :99]
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(arrays["tokens"].astype(np.int64))).logits.numpy()
    real = arrays["segment_ids"] > 0
    np.testing.assert_allclose(logits[real], wanted[real], rtol=1e-4, atol=1e-4)  # another program, in float32


@needs_transformers
def test_a_gpt2_that_transformers_has_written_says_with_more_rows_and_positions_what_it_did(tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=99, n_positions=20, n_embd=16, n_layer=2, n_head=4, initializer_range=0.2)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    model = changed(d_ff=64, vocab_size=128, position=LearnedPositions(40))
    arrays = batch(CASES["gpt2"])
    logits = our_logits(model, taken(tmp_path / "gpt2", model, WiderVocabulary(), LongerContext()), arrays)[..., :99]
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(arrays["tokens"].astype(np.int64))).logits.numpy()
    real = arrays["segment_ids"] > 0
    np.testing.assert_allclose(logits[real], wanted[real], rtol=1e-4, atol=1e-4)  # another program, in float32


# --- a tokenizer with more pieces ------------------------------------------------------------------------------------


def test_a_wider_vocabulary_may_have_a_tokenizer_with_more_pieces_behind_those_that_there_are(tmp_path):
    origin = find_origin(str(write_run(tmp_path / "start", GPT2)))
    more = load_tokenizer(str(write_run(tmp_path / "more", GPT2, sentinels=3) / "tokenizer"))
    other = load_tokenizer(str(write_run(tmp_path / "other", GPT2, pad_id=1, sentinels=3) / "tokenizer"))
    check_tokenizer_of(origin, more, "the start", may_grow=True)
    for tokenizer, may_grow in ((more, False), (other, True)):
        with pytest.raises(UserError, match="has another tokenizer"):
            check_tokenizer_of(origin, tokenizer, "the start", may_grow)


@needs_transformers
def test_the_recipe_gives_the_tokenizer_of_a_decoder_what_objectives_that_mask_need(tmp_path, monkeypatch):
    theirs = ByteBPE(vocab_size=270).build(iter(["a text of a few words"] * 9))
    write_tokenizer(theirs, str(tmp_path / "hf" / "gpt2"), GPT2)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall("```python\n(.*?)```", how_to("convert"), re.DOTALL)
    exec(block, {})
    ours = read_tokenizer("runs/more-pieces")
    check_tokenizer_of(Origin("hf/gpt2", (), "hf/gpt2"), ours, "the start", may_grow=True)
    assert ours.vocabulary.size == theirs.vocabulary.size + 104 and len(ours.vocabulary.sentinels) == 100
    for objective in (MaskedLM(), SpanCorruption()):
        objective.check_vocabulary(ours.vocabulary, 512)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, model, adaptations, message",
    [
        ("bert", {"family": "encoder"}, [DecoderToEncoder()], "the start has family 'encoder': leave it out"),
        ("gpt2", {"family": "encoder"}, [], "config.model.family is 'encoder', there 'decoder'"),
        (
            "gpt2",
            {"family": "encoder", "position": RelativePositionBuckets()},
            [DecoderToEncoder()],
            "config.model.position is RelativePositionBuckets.*whose buckets are of other distances",
        ),
        (
            "gpt2",
            {"family": "encoder_decoder", "num_decoder_layers": 1},
            [DecoderToEncoderDecoder()],
            "num_layers 2 and num_decoder_layers 1: set the second to None, or add Layers.. after it",
        ),
        (
            "gpt2",
            {"family": "encoder_decoder", "decoder": DecoderSizes(8, 16, 2), "separate_embeddings": True},
            [DecoderToEncoderDecoder()],
            r"makes two stacks of one, and config.model.decoder is DecoderSizes\(.*\): set it to None",
        ),
        ("gpt2", {"family": "encoder", "num_token_types": 2}, [DecoderToEncoder()], "num_token_types is 2, there 0"),
        ("mixtral", {"experts": EXPERTS}, [DenseToExperts()], "there are 8 experts already: leave it out"),
        (
            "gpt2",
            {"experts": dataclasses.replace(EXPERTS, d_ff=24)},
            [DenseToExperts()],
            "a feed-forward 48 wide, and those of config.model are 24 wide: set config.model.experts.d_ff to 48",
        ),
        (
            "gpt2",
            {"experts": dataclasses.replace(EXPERTS, shared_experts=1)},
            [DenseToExperts()],
            "config.model.experts.shared_experts is 1, .* set it to None",
        ),
        (
            "gpt2",
            {"d_ff": 24, "experts": dataclasses.replace(EXPERTS, d_ff=48, first_dense=1)},
            [DenseToExperts()],
            "config.model.d_ff, of the layers without experts, is 24, there 48: set it to that",
        ),
        (
            "gpt2",
            {"num_layers": 3},
            [Layers()],
            "neither of 3 layers of config.model and the 2 of the decoder there divides the other: set",
        ),
        ("gpt2", {"num_layers": 1}, [Layers("stacked")], "config.model has 1 layer, fewer than the 2 there"),
        ("gpt2", {"num_layers": 3}, [Layers((0, 1))], "layers must be 3 numbers from 0 to 1, one for each layer"),
        ("gpt2", {"num_layers": 1}, [Layers((2,))], "layers must be 1 numbers from 0 to 1"),
        ("gpt2", {"vocab_size": 64}, [WiderVocabulary()], "config.model.vocab_size is 64, and the start has 99 rows"),
        (
            "gpt2",
            {"vocab_size": 128},
            [WiderVocabulary(100)],
            "the start has 99 rows: set tokens to at most this number",
        ),
        (
            "gpt2",
            {"position": LearnedPositions(10)},
            [LongerContext()],
            "config.model.position.max_length is 10, there 20: set it to at least that",
        ),
        (
            "gpt2",
            {"position": RotaryPositions(40)},
            [LongerContext()],
            "config.model.position is RotaryPositions.max_length=40., there LearnedPositions.* set it to that kind",
        ),
        (
            "gpt2",
            {"position": LearnedPositions(40, offset=2)},
            [LongerContext()],
            "config.model.position.offset is 2, there 0: set it to that",
        ),
        ("gpt2", {"d_ff": 64, "vocab_size": 128}, [WiderVocabulary()], "config.model.d_ff is 64, there 48"),
    ],
)
def test_what_the_shapes_rule_out_is_one_line(start, model, adaptations, message, starts):
    source = CASES[{"llama": "llama3", "bert": "bert_masked_lm"}.get(start, start)].config
    with pytest.raises(UserError, match=message) as caught:
        planned(starts[start], changed(source, **model), *adaptations)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"config.checkpoint.init_from={starts[start]}")


@pytest.mark.parametrize(
    "model, adaptations",
    [
        ({"family": "encoder"}, "DecoderToEncoder()"),
        ({"family": "encoder_decoder", "num_layers": 4}, "DecoderToEncoderDecoder(), Layers()"),
        ({"vocab_size": 128, "position": LearnedPositions(40)}, "WiderVocabulary(), LongerContext()"),
        ({"experts": EXPERTS}, "DenseToExperts()"),
        ({"family": "encoder", "d_ff": 64}, ""),
        ({"vocab_size": 64}, ""),
    ],
)
@pytest.mark.parametrize("kind", ["run", "directory"])
def test_a_start_that_an_adaptation_would_make_the_model_of_says_which(kind, model, adaptations, starts, tmp_path):
    start = starts["gpt2"] if kind == "run" else write_directory(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError) as caught:
        planned(start, changed(**model))
    said = f'; config.checkpoint.adapt="{adaptations}" converts the start'
    assert str(caught.value).endswith(said) if adaptations else "checkpoint.adapt=" not in str(caught.value)
    if adaptations:
        planned(start, changed(**model), *Adaptation.parse_several(adaptations))


@pytest.mark.parametrize(
    "adaptation, model, message",
    [
        (DecoderToEncoder(), {}, "config.model.family is 'decoder': set it to 'encoder'"),
        (DecoderToEncoderDecoder(), {}, "config.model.family is 'decoder': set it to 'encoder_decoder'"),
        (DecoderToEncoderDecoder("zero"), {"norm_at": "both"}, "norm_at is 'both', .* set cross_attention='self'"),
        (DenseToExperts(), {}, "config.model.experts is None: set it, for example to MixtureOfExperts"),
        (Layers(), {"share_layers": True}, "config.model.share_layers shares one layer: set it to False"),
        (Layers(zero_init=True), {"norm_at": "post"}, "config.model.norm_at is 'post', .*: set zero_init=False"),
        (WiderVocabulary(0), {}, "tokens must be at least 1; None: all rows are tokens"),
        (LongerContext(), {"position": SinusoidalPositions()}, "which has no maximum length: leave it out"),
    ],
)
def test_what_cannot_be_with_any_start_is_said_before_it_is_looked_for(adaptation, model, message):
    experiment = tiny.get_config("gpt")
    experiment.model = dataclasses.replace(experiment.model, **model)
    experiment.checkpoint.init_from, experiment.checkpoint.adapt = "runs/gone", (adaptation,)
    with pytest.raises(UserError, match=message):
        validate(experiment)


def test_an_adaptation_needs_a_start_of_its_own_that_nothing_keeps_as_it_is():
    experiment = tiny.get_config("gpt")
    experiment.checkpoint.adapt = (Layers(),)
    with pytest.raises(UserError, match="adapt has Layers.., which gives config.checkpoint.init_from another shape: "):
        validate(experiment)
    experiment.checkpoint.init_from, experiment.tuning = "runs/gone", LoRA()
    with pytest.raises(UserError, match="config.tuning keeps its start as it is: train a model of this shape"):
        validate(experiment)
    experiment.tuning, experiment.checkpoint.adapt = None, (Layers(), Layers("stacked"))
    with pytest.raises(UserError, match="adapt has Layers.. and another of its kind: give one"):
        validate(experiment)
