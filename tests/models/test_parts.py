"""Tests model parts of another package, which `config.model.parts` selects: feed-forward, attention, head and model."""

import copy
import dataclasses

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import Experiment, MeshConfig, ModelConfig, TrainConfig, UserError, serialization
from pretrainax.config.kinds import ModelPart
from pretrainax.config.metric import METRICS, Metric
from pretrainax.config.validation import validate
from pretrainax.layers import multi_head
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.layers.feed_forward import base as feed_forwards
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.models import base, flops
from pretrainax.models.heads import base as heads
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.outputs import Outputs
from pretrainax.optim import AdamW, WarmupConstant
from pretrainax.planning.search import estimate_run
from pretrainax.planning.topologies import Topology
from pretrainax.sharding import rules
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.training import train_step
from tests.support import tables, tiny


@dataclasses.dataclass
class Wide(ModelPart):
    times: int = 3

    def problems(self, experiment: Experiment):
        if self.times < 1:
            yield f"config.model.parts has {self}: times must be at least 1"


@dataclasses.dataclass
class Past(ModelPart):
    pass


@dataclasses.dataclass
class Parity(ModelPart):
    weight: float = 0.5


@dataclasses.dataclass
class Bag(ModelPart):
    pass


def register_parts_of_blocks():
    """Registers the parts of blocks, as an import of the other package would."""

    @feed_forwards.register_feed_forward
    class WideFeedForward(feed_forwards.FeedForward):
        partition_rules = ((r"blocks/mlp/wide/kernel", "layers d_model features"),)

        @staticmethod
        def is_in(config):
            return config.part(Wide) is not None

        @staticmethod
        def flops(config, length):
            return 2 * length * config.d_model * config.part(Wide).times * config.d_model

        @nn.compact
        def __call__(self, x, real=None):
            width, times = self.config.d_model, self.config.part(Wide).times
            init = normal_init(self.config, width)
            y = Linear((times * width,), ("d_model", "features"), init, use_bias=False, name="wide")(x)
            return jnp.square(nn.relu(y)).reshape(*x.shape[:2], times, width).sum(2), {}

    @multi_head.register_attention
    class PastMean(multi_head.Attention):
        has_pairs = False

        @staticmethod
        def is_in(config):
            return config.part(Past) is not None

        @staticmethod
        def flops(config, length, read):
            return 2 * length * config.d_model**2

        @nn.compact
        def __call__(self, x, source, mask, positions, ring=None, index=None):
            mean = jnp.cumsum(source, axis=1) / jnp.arange(1.0, 1 + x.shape[1])[None, :, None].astype(x.dtype)
            heads = mean.reshape(*x.shape[:2], self.config.num_heads, -1).astype(x.dtype)
            return self.out(heads), None


def register_head_and_model():
    @flax.struct.dataclass
    class ParityOutput:
        logits: jax.Array  # [B, T]
        weight: float = flax.struct.field(pytree_node=False)

    @heads.register_head
    class ParityHead(heads.Head):
        name, loss_name = "parity", "parity_loss"
        partition_rules = ((r"parity/kernel", "d_model labels"),)
        metrics = (Metric("parity_loss", "nats a token, whether its position is odd", in_total_loss=True),)

        def is_in(self, config):
            return config.part(Parity) is not None

        def modules(self, config):
            return {"parity": Linear((1,), ("d_model", "labels"), normal_init(config, config.d_model), use_bias=False)}

        def output(self, model, x, batch, *, deterministic):
            return ParityOutput(model.parity(x)[..., 0].astype(jnp.float32), model.config.part(Parity).weight)

        def count(self, batch):
            return batch["loss_weights"].sum()

        def sums(self, output, batch, **options):
            odd, weights = (batch["positions"] % 2).astype(jnp.float32), batch["loss_weights"]
            loss = weights * (nn.softplus(output.logits) - odd * output.logits)
            return output.weight * loss.sum(), {"parity_loss": (jax.lax.stop_gradient(loss.sum()), weights.sum())}

    @base.register_model
    class BagOfWords(base.AnyFamily):
        @staticmethod
        def is_in(config):
            return config.part(Bag) is not None

        @staticmethod
        def flops(config, inputs, targets):
            return base.Flops(0.0, 2.0 * targets * config.d_model * config.vocab_size)

        @nn.compact
        def __call__(self, batch, *, deterministic):
            table = nn.Embed(self.config.vocab_size, self.config.d_model, name="token_embedding")
            x = jnp.cumsum(table(batch["tokens"]), axis=1) / (1.0 + batch["positions"][..., None].astype(jnp.float32))
            return Outputs({"lm": LanguageModelOutput(x.astype(self.compute.dtype), table.embedding.T)})


@pytest.fixture(autouse=True)
def package():
    """Registers the parts for one test."""
    lists = feed_forwards.FEED_FORWARDS, multi_head.ATTENTIONS, base.MODELS, rules.PARTITION_RULES
    tables = heads.HEADS, METRICS
    before = [copy.copy(x) for x in (*lists, *tables)]
    register_parts_of_blocks()
    register_head_and_model()
    yield
    for one, kept in zip(lists, before, strict=False):
        one[:] = kept
    for one, kept in zip(tables, before[len(lists) :], strict=True):
        one.clear()
        one.update(kept)


def config_of(*parts: ModelPart) -> ModelConfig:
    return dataclasses.replace(tiny.get_config("gpt").model, vocab_size=64, parts=parts)


def trained(config: ModelConfig, **sizes: int) -> tuple[list[float], dict, dict]:
    """Returns the losses of three updates on a mesh, the final parameters, and the sums of the last update."""
    mesh = make_mesh(MeshConfig(**{"data": 1} | sizes), jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))])
    model, shapes = models.build(config, Compute()), tables.example_shapes(config, 8, 32)
    rng, losses = np.random.default_rng(0), []
    batch = {name: rng.integers(1, 64, x.shape).astype(np.int32) for name, x in shapes.items()}
    batch |= {"positions": np.tile(np.arange(32, dtype=np.int32), (8, 1)), "segment_ids": np.ones((8, 32), np.int32)}
    batch["loss_weights"] = np.ones((8, 32), np.float32)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):  # The optimizer requires it.
        schedule, train = WarmupConstant(0).build(1e-2, 3), resolve_auto(TrainConfig(global_batch_size=8))
        optimizer = AdamW(epsilon=1e-3).build(schedule, train_step.abstract_params(model, shapes))
        state = train_step.make_init(model, optimizer, shapes, mesh)(0)
        step = train_step.make_train_step(model, optimizer, schedule, train, mesh)
        for _ in range(3):
            state, metrics = step(state, put_batch(batch, mesh))
            losses.append(float(np.divide(*metrics["sums"]["loss"])))
    return losses, jax.device_get(state.params), metrics["sums"]


@pytest.mark.first(1)
@pytest.mark.parametrize("part", [Parity(), Past(), Wide()])
def test_a_brick_learns_and_eight_devices_learn_what_one_does(part):
    losses, params, _ = trained(config_of(part))
    others, sharded, _ = trained(config_of(part), data=2, fsdp=2, tensor=2)
    assert losses[2] < losses[0]
    np.testing.assert_allclose(others, losses, rtol=2e-5)  # float32 sums in another order over three updates
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), sharded, params)


def test_a_brick_takes_the_place_of_the_one_there_was():
    blocks = models.abstract_params(config_of(Wide(times=5)))["decoder"]["blocks"]
    assert blocks["mlp"]["wide"]["kernel"].shape == (2, 32, 160) and blocks["mlp"].keys() == {"wide"}
    assert models.abstract_params(config_of(Past()))["decoder"]["blocks"]["self_attention"].keys() == {"out"}


def test_the_loss_of_a_head_is_trained_and_is_in_the_total():
    _, _, sums = trained(config_of(Parity()))
    assert np.divide(*map(float, sums["parity_loss"])) < np.log(2)
    assert METRICS["parity_loss"].in_total_loss


def test_a_model_of_its_own_is_built_and_counts_its_flops():
    losses, params, _ = trained(config_of(Bag()))
    assert losses[2] < losses[0] and params.keys() == {"token_embedding"}
    assert flops.other_flops(config_of(Bag()), 32, 32) == (0.0, 2.0 * 32 * 32 * 64)
    assert list(flops.attentions(config_of(Bag()), 32, 32)) == []


def test_flops_are_those_of_the_brick():
    (wide, _), (plain, _) = (flops.other_flops(config_of(*parts), 32, 32) for parts in ((Wide(),), ()))
    assert plain - wide == 2 * (2 * 32 * 32 * 64 * 2 - 2 * 32 * 32 * 3 * 32)


def test_config_json_names_the_parts_and_one_without_them_is_as_before():
    experiment = tiny.get_config("gpt")
    assert "parts" not in serialization.to_json(experiment)["model"]
    other = copy.deepcopy(experiment)
    other.model = config_of(Wide(times=2), Parity())
    again = serialization.from_json(Experiment, serialization.to_json(other))
    assert again.model == other.model and again.model.part(Wide).times == 2
    assert serialization.differences(experiment, other)


def test_what_is_wrong_with_a_part_is_said():
    experiment = tiny.get_config("gpt")
    experiment.model.parts = (Wide(times=0),)
    with pytest.raises(UserError, match="times must be at least 1"):
        validate(experiment, files=False)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("part", "parameter"), [(Wide(), "wide"), (Past(), "out"), (Parity(), "parity"), (Bag(), "token_embedding")]
)
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_a_plan_counts_the_brick(part, parameter, topology):
    experiment = tiny.get_config("gpt")
    experiment.model, experiment.mesh.fsdp = config_of(part), 4
    plain = dataclasses.replace(experiment, model=config_of())
    found, others = (estimate_run(one, Topology.parse(topology)) for one in (experiment, plain))
    assert found.memory.parameters != others.memory.parameters
    assert any(parameter in where for where, _ in found.memory.largest)
    # The FLOPs of a single output are not part of the estimate.
    assert (found.roofline.flops == others.roofline.flops) == isinstance(part, Parity)
    assert 0 < found.roofline.seconds < 1
