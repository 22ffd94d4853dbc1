import dataclasses
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import (
    NUM_CHARACTERS,
    DecoderSizes,
    LatentAttention,
    LearnedPositions,
    MeshConfig,
    MixtureOfExperts,
    ModelConfig,
    MultiTokenPrediction,
    NoPositions,
    RandomBlocks,
    Recurrent,
    RelativePositionBuckets,
    RotaryPositions,
    SlidingWindows,
    TrainConfig,
)
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.optim import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.sharding.arrays import put_batch, split_microbatches
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import train_step
from tests.support import tables
from tests.support.tiers import few
from tests.support.traces import limit_traces

MODELS = {
    "encoder": dict(
        position=LearnedPositions(16),
        norm_at="post",
        embedding_dim=16,
        embedding_norm=True,
        masked_lm_head=True,
        pair_head=True,
        num_token_types=2,
    ),
    "encoder_decoder": dict(position=RelativePositionBuckets(), norm="rms", use_bias=False, gated=True),
    "decoder": dict(
        position=LearnedPositions(16),
        num_kv_heads=2,
        qk_norm=True,
        norm_at="both",
        layer_pattern=("local", "global"),
        window=4,
        attention_logit_cap=5.0,
        final_logit_cap=3.0,
    ),
}
# Components that the models above lack; these tests use one mesh.
BRICKS = {
    "turned_in_part": dict(
        family="decoder",
        position=RotaryPositions(16, fraction=0.5, no_rotation_every=2),
        parallel=True,
        output_bias=True,
        tie_embeddings=False,
    ),
    "tokens_after_the_next": dict(
        family="decoder", position=RotaryPositions(16), norm="rms", multi_token=MultiTokenPrediction(depth=2)
    ),
    "recurrent": dict(
        family="recurrent",
        position=NoPositions(),
        parts=(Recurrent(character_dim=4, filters=(8, 8, 16), highways=1),),
        output_bias=True,
        tie_embeddings=False,
    ),
    "two_sizes": dict(
        family="encoder_decoder",
        position=RotaryPositions(16),
        norm="rms",
        norm_at="both",
        use_bias=False,
        layer_pattern=("local", "global"),
        window=4,
        encoder_window=8,
        separate_embeddings=True,
        num_decoder_layers=3,
        decoder=DecoderSizes(d_model=24, d_ff=48, num_heads=2, head_dim=6),
    ),
    "windows": dict(
        family="encoder",
        position=LearnedPositions(16),
        layer_pattern=("local",),
        window=4,
        sparse_attention=SlidingWindows(),
        masked_lm_head=True,
    ),
    "blocks": dict(
        family="encoder",
        position=LearnedPositions(16),
        sparse_attention=RandomBlocks(size=2, random=1),
        masked_lm_head=True,
    ),
}
MESHES = {
    "1 device": dict(data=1),
    "8 data": dict(data=8),
    "8 fsdp": dict(data=1, fsdp=8),
    "2 data 2 fsdp 2 tensor": dict(data=2, fsdp=2, tensor=2),
    "2 data 2 sequence 2 tensor": dict(data=2, sequence=2, tensor=2),
    "2 fsdp 4 sequence": dict(data=1, fsdp=2, sequence=4),
}
EXPERTS = MixtureOfExperts(num_experts=4, top_k=2, d_ff=32, balance_weight=0.05, z_weight=0.001)
LATENT = {  # as DeepSeek-V3
    "latent_attention": LatentAttention(rank=16, query_rank=16, rotary_dim=4, value_dim=8),
    "head_dim": 12,
    "position": RotaryPositions(16, interleaved=True),
    "multi_token": MultiTokenPrediction(),
    "experts": dataclasses.replace(
        EXPERTS, shared_experts=1, scores="sigmoid", first_dense=1, bias_rate=0.01, balance_over="row", scale=2.5
    ),
}
# Layers that depend on their index: the pattern must continue across stages of one or two layers.
STAGED = {"num_layers": 4, "position": RotaryPositions(16, no_rotation_every=2)}
TURNS = {  # as ST-MoE
    "experts": dataclasses.replace(EXPERTS, normalized=False, every=2, dense_after=48),
    "num_layers": 4,
    "num_decoder_layers": 2,
}
EXPERT_MESHES = {
    "8 fsdp": MESHES["8 fsdp"],
    "2 data 4 expert": dict(data=2, expert=4),
    "2 fsdp 2 expert 2 tensor": dict(data=1, fsdp=2, expert=2, tensor=2),
}
PIPELINES = {
    "4 pipeline 2 data": dict(pipeline=4, data=2),
    "2 pipeline 4 fsdp": dict(pipeline=2, data=1, fsdp=4),
    "2 pipeline 2 fsdp 2 tensor": dict(pipeline=2, data=1, fsdp=2, tensor=2),
    "2 pipeline 2 data 2 sequence": dict(pipeline=2, data=2, sequence=2),
}
ROWS = 32


def model_config(family, **fields):
    small = dict(vocab_size=64, num_layers=2, d_model=32, d_ff=64, num_heads=4)
    fields |= {"experts": {"experts": EXPERTS}, "latent": LATENT, "staged": STAGED, "turns": TURNS}.get(family, {})
    family = "decoder" if family in ("experts", "latent", "staged") else family
    family = "encoder_decoder" if family == "turns" else family
    return ModelConfig(**{"family": family} | small | (MODELS | BRICKS)[family] | fields)


def mesh_named(name):
    sizes = (MESHES | EXPERT_MESHES | PIPELINES)[name]
    return make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def make_batch(config, seed=0):
    """Makes random rows with different loss counts, so that the counts of micro-batches and devices differ, too."""
    rng = np.random.default_rng(seed)
    batch = {}
    for name, x in tables.example_shapes(config, batch_size=ROWS).items():
        highest = {
            "positions": 16,
            "encoder_positions": 16,
            "masked_positions": 16,
            "token_types": 2,
            "pair_labels": 2,
            "characters": NUM_CHARACTERS,
        }.get(name, 64)
        batch[name] = rng.integers(0, highest, x.shape, dtype=np.int32)
        if name.endswith("segment_ids"):  # two documents and padding
            places, length = np.arange(x.shape[1]), x.shape[1]
            ends = rng.integers(2, length // 2, (ROWS, 1)), rng.integers(length // 2, length + 1, (ROWS, 1))
            batch[name] = np.where(places < ends[1], 1 + (places >= ends[0]), 0).astype(np.int32)
    shape = batch["targets"].shape
    for name in (name for name in batch if name.endswith("weights")):
        batch[name] = (rng.random(shape) < rng.random((ROWS, 1))).astype(np.float32)
    return batch


class Run:
    """A model in training on a mesh; it enters the mesh for each call, while `main` does so once."""

    def __init__(self, config, mesh="1 device", optimizer=None, **train):
        self.config, self.train, self.mesh = config, resolve_auto(TrainConfig(**train)), mesh_named(mesh)
        self.model = models.build(config, Compute())
        self.shapes = tables.example_shapes(config, ROWS)
        schedule = WarmupCosine(warmup_steps=2).build(1e-3, 10)
        with jax.set_mesh(self.mesh):
            params = train_step.abstract_params(self.model, self.shapes)
            self.optimizer = (optimizer or AdamW()).build(schedule, params)
            self.abstract = train_step.abstract_state(params, self.optimizer, self.mesh)
            self.step = train_step.make_train_step(self.model, self.optimizer, schedule, self.train, self.mesh)

    def init(self):
        with jax.set_mesh(self.mesh):
            return train_step.make_init(self.model, self.optimizer, self.shapes, self.mesh)(self.train.seed)

    def batch(self, seed=0):
        return put_batch(make_batch(self.config, seed), self.mesh)

    @functools.cached_property
    def compiled(self):
        """Compiles the step without LLVM's optimizations, which halves the time."""
        with jax.set_mesh(self.mesh):
            lowered = self.step.lower(self.abstract, self.batch())
            return lowered.compile({"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})


@functools.cache
def run_of(family, mesh, accumulate, **train):
    # Adam divides a gradient by its own size. If a gradient is only rounding noise (the bias of a key, which softmax
    # ignores), the update would be noise, too. An epsilon above the noise makes this update small. With the default of
    # 1e-8, 34 of the decoder's 19,000 numbers differ on 8 devices, 31 of them in that bias; losses agree to 2e-7.
    optimizer = AdamW(epsilon=1e-3, weight_decay=0.1)
    train = {"accumulate": accumulate, "z_loss": 1e-4, "label_smoothing": 0.1, **train}
    return Run(model_config(family), mesh, optimizer, **train)


@functools.cache
def fresh(family):
    return jax.device_get(run_of(family, "1 device", 1).init())


@functools.cache
def five_steps(family, mesh, accumulate, **train):
    run = run_of(family, mesh, accumulate, **train)
    state = jax.device_put(fresh(family), jax.tree.map(lambda x: x.sharding, run.abstract))
    losses = []
    for seed in range(5):
        state, metrics = run.compiled(state, run.batch(seed), None, run.step.arguments)
        total, count = metrics["sums"]["loss"]
        losses.append(float(total / count))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, run.abstract)
    chex.assert_tree_all_finite(state)
    return losses, jax.device_get(state.params)


# --- the same mathematics on any mesh ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mesh"),
    few(
        itertools.product(MODELS, list(MESHES)[1:]),
        [("encoder_decoder", "2 data 2 fsdp 2 tensor")],
    ),
)
def test_devices_and_micro_batches_change_neither_losses_nor_parameters(family, mesh):
    losses, params = five_steps(family, "1 device", 1)
    other_losses, other_params = five_steps(family, mesh, 4)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)  # float32 sums in another order, over five steps
    # atol: a parameter of 0.1 has a last bit of 7e-9, and keeps this rounding error if updates move it close to zero.
    chex.assert_trees_all_close(other_params, params, rtol=2e-5, atol=2e-8)


@pytest.mark.slow
@pytest.mark.parametrize("bricks", few(BRICKS, ["two_sizes"]))
def test_devices_change_neither_losses_nor_parameters_of_other_bricks(bricks):
    losses, params = five_steps(bricks, "1 device", 1)
    other_losses, other_params = five_steps(bricks, "2 data 2 fsdp 2 tensor", 4)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)  # as above
    chex.assert_trees_all_close(other_params, params, rtol=2e-5, atol=2e-8)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
@pytest.mark.parametrize("family", ["experts", "latent", "turns"])
def test_devices_change_neither_losses_nor_parameters_of_experts(family, mesh):
    """The step has one micro-batch, because the balance of micro-batches differs from the balance of the batch."""
    losses, params = five_steps(family, "1 device", 1)
    other_losses, other_params = five_steps(family, mesh, 1)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)  # float32 sums in another order, over five steps
    chex.assert_trees_all_close(other_params, params, rtol=2e-5, atol=2e-7)  # as above; gradients of few tokens


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PIPELINES)
def test_a_pipeline_changes_neither_losses_nor_parameters(mesh):
    losses, params = five_steps("staged", "1 device", 1)
    other_losses, other_params = five_steps("staged", mesh, 2)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)  # float32 sums in another order, over five steps
    chex.assert_trees_all_close(other_params, params, rtol=2e-5, atol=2e-8)  # as above


@pytest.mark.slow
@pytest.mark.parametrize("mesh", list(PIPELINES)[:3])
def test_parts_that_go_back_one_by_one_change_neither_losses_nor_parameters(mesh):
    losses, params = five_steps("staged", "1 device", 1)
    other_losses, other_params = five_steps("staged", mesh, 2, pipeline_schedule="1f1b")
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)  # float32 sums in another order, over five steps
    chex.assert_trees_all_close(other_params, params, rtol=2e-5, atol=2e-8)  # as above


def test_rows_of_the_test_batches_have_unequal_loss_counts():
    counts = make_batch(model_config("decoder"))["loss_weights"].sum(1)
    assert len({counts[i::4].sum() for i in range(4)}) == 4  # micro-batches
    assert len({c.sum() for c in np.split(counts, 8)}) >= 7  # devices


def test_fresh_parameters_are_the_same_on_any_mesh():
    sharded = run_of("decoder", "2 data 2 fsdp 2 tensor", 4).init()
    # The generator gives the same bits. The polynomial of the normal distribution is compiled for another shape, and
    # may round differently.
    chex.assert_trees_all_close(jax.device_get(sharded), fresh("decoder"), rtol=1e-6)


# --- no device has a whole array -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_fsdp_a_device_holds_an_eighth_of_each_matrix_and_of_its_moments():
    state = run_of("decoder", "8 fsdp", 4).init()
    for name, x in zip(parameter_names(state), jax.tree.leaves(state), strict=True):
        if name.endswith(("kernel", "embedding")):
            assert {s.data.size for s in x.addressable_shards} == {x.size // 8}, name


def collectives(family, mesh):
    """Returns (name, result shapes) of each collective in the compiled step."""
    pattern = r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
    return [(name, shapes) for shapes, name in re.findall(pattern, run_of(family, mesh, 4).compiled.as_text())]


@pytest.mark.first(1)
@pytest.mark.parametrize("family", MODELS)
def test_fsdp_gathers_parameters_and_sums_gradients_and_moves_no_row(family):
    found = collectives(family, "8 fsdp")
    assert {name for name, _ in found} - {"reduce-scatter"} == {"all-gather", "all-reduce"}
    # A micro-batch has 8 rows of 16 tokens. Each gathered array has one axis of 32 or more. No gathered array has the
    # shape of activations, [8 × 16, …] or [8, 16, …].
    gathered = [shapes for name, shapes in found if name == "all-gather"]
    assert not [shapes for shapes in gathered if re.search(r"\[(8,16|128)\b", shapes)]
    assert not [shapes for shapes in gathered if shapes.startswith("s32")]


@pytest.mark.slow
def test_data_parallel_devices_exchange_sums_alone():
    assert {name for name, _ in collectives("decoder", "8 data")} == {"all-reduce"}


# --- the update ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps():
    """Runs two steps through `jit` itself; returns the run, the three states, and the metrics of both steps."""
    with pytest.MonkeyPatch.context() as patch:
        limit_traces(patch)
        run = Run(model_config("decoder", dropout_rate=0.1), "8 fsdp", accumulate=2)
    with jax.set_mesh(run.mesh):
        first = run.init()
        second, metrics = run.step(first, run.batch(0))
        batch = run.batch(1)
        with jax.transfer_guard("disallow"):
            third, more = run.step(second, batch)
    return run, (first, second, third), (metrics, more)


@pytest.mark.slow
def test_the_state_is_donated(two_steps):
    _, (first, second, _), _ = two_steps
    assert all(x.is_deleted() for x in jax.tree.leaves((first, second)))


@pytest.mark.slow
def test_the_new_state_lies_where_the_old_one_lay_and_the_step_compiles_once(two_steps):
    run, (_, _, third), _ = two_steps
    assert jax.tree.map(lambda x: x.sharding, third) == jax.tree.map(lambda x: x.sharding, run.abstract)
    assert run.step.jitted._cache_size() == 1


def test_metrics_name_what_the_contract_names(two_steps):
    _, _, (metrics, _) = two_steps
    assert set(metrics) == {
        *("sums", "text", "gradient_norm", "gradient_squares", "learning_rate", "finite", "bad_parameter")
    }


def test_metrics_are_finite_scalars_of_their_types(two_steps):
    _, _, (metrics, _) = two_steps
    chex.assert_tree_all_finite(metrics)
    of_parameters = {"gradient_squares"}  # one number per parameter
    chex.assert_shape(jax.tree.leaves({n: x for n, x in metrics.items() if n not in of_parameters}), ())
    names = "gradient_norm", "learning_rate", "finite", "bad_parameter"
    chex.assert_type([metrics[name] for name in names], [jnp.float32, jnp.float32, bool, jnp.int32])


def test_the_learning_rate_is_that_of_the_step(two_steps):
    _, _, metrics = two_steps
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [5e-4, 1e-3], rtol=1e-6)  # float32 rounding


def test_a_finite_update_counts_as_one(two_steps):
    _, (_, _, third), (metrics, _) = two_steps
    assert (int(third.step), bool(metrics["finite"]), int(metrics["bad_parameter"])) == (2, True, -1)


def test_runs_of_other_seeds_share_what_is_compiled():
    one, other = (Run(model_config("decoder", dropout_rate=0.1), seed=seed) for seed in (1, -2))
    with jax.set_mesh(one.mesh):
        first, second = (run.step.lower(run.abstract, run.batch()).as_text() for run in (one, other))
    assert first == second
    assert one.step.numbers.numbers["dropout"] != other.step.numbers.numbers["dropout"]


@pytest.mark.parametrize("seed", [0, -1, -(2**31), 2**31, 2**32 - 1])
def test_a_seed_that_is_an_argument_draws_as_the_number_does(seed):
    asked = jax.jit(lambda number: train_step._key(number, "dropout"))(np.uint32(seed % 2**32))
    assert (jax.random.key_data(asked) == jax.random.key_data(train_step._key(seed, "dropout"))).all()


def test_evaluation_of_a_batch_needs_no_dropout_key():
    config = model_config("decoder", dropout_rate=0.5, attention_dropout_rate=0.5)
    run = Run(config)
    with jax.set_mesh(run.mesh):
        sums, _ = train_step.make_eval_step(run.model, run.train, run.mesh)(run.init().params, run.batch())
    np.testing.assert_allclose(sums["loss"][1], make_batch(config)["loss_weights"].sum())


def test_evaluation_has_no_dropout():
    def evaluated(**fields):
        run = Run(model_config("decoder", **fields))
        with jax.set_mesh(run.mesh):
            return train_step.make_eval_step(run.model, run.train, run.mesh)(fresh("decoder").params, run.batch())

    chex.assert_trees_all_equal(evaluated(dropout_rate=0.5), evaluated())


@pytest.mark.parametrize("asked", [False, True])
def test_whole_sequences_are_counted_where_they_are_asked_for(asked):
    run = Run(model_config("decoder"))
    options = {"sequences": True} if asked else {}
    with jax.set_mesh(run.mesh):
        step = train_step.make_eval_step(run.model, run.train, run.mesh, **options)
        assert ("sequence_accuracy" in jax.eval_shape(step, run.abstract.params, run.batch())[0]) == asked


# --- micro-batches -------------------------------------------------------------------------------------------------


def test_a_micro_batch_takes_rows_of_each_device():
    mesh = mesh_named("8 data")
    rows = put_batch({"tokens": np.arange(32, dtype=np.int32)[:, None]}, mesh)
    micro = jax.jit(lambda batch: split_microbatches(batch, 4, mesh))(rows)["tokens"][..., 0]
    assert micro[0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28]


def test_cutting_into_micro_batches_moves_no_row():
    mesh = mesh_named("8 data")
    rows = put_batch({"tokens": np.zeros((32, 16), np.int32)}, mesh)
    text = jax.jit(lambda batch: split_microbatches(batch, 4, mesh)).lower(rows).compile().as_text()
    assert not re.search("all-|collective|reduce-scatter", text)
