"""Tests that the laws reproduce the papers' tables, and that a budget gives a run that can start."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from pretrainax import zoo
from pretrainax.config import Choice, UserError
from pretrainax.data.objectives import CausalLM
from pretrainax.scaling import budget as budget_lib
from pretrainax.scaling import compute_optimal
from pretrainax.scaling.budget import Budget, report
from pretrainax.scaling.compute_optimal import MIN_STEPS, RECIPES, Space, count_parameters, make_plan, run_of
from pretrainax.scaling.power_laws import (
    LAWS,
    PF_DAY,
    LossLaw,
    critical_batch_size,
    kaplan_learning_rate,
    kaplan_loss_by_flops,
    kaplan_loss_by_parameters,
    kaplan_loss_by_tokens,
    law_of,
    learning_rate,
)
from tests.support.runs import ROOT

# The rows are (parameters, FLOPs, tokens) of Hoffmann et al. 2022. The tables omit the rows of 67 B, because these rows
# do not have 67e9 parameters: Gopher's 5.76e23 FLOPs divided by 6 · 67e9 are 1.43e12 tokens, but the paper's table says
# 1.5e12.
TABLE_3 = [  # approach 1
    (4e8, 1.92e19, 8.0e9),
    (1e9, 1.21e20, 20.2e9),
    (1e10, 1.23e22, 205.1e9),
    (175e9, 3.85e24, 3.7e12),
    (280e9, 9.90e24, 5.9e12),
    (520e9, 3.43e25, 11.0e12),
    (1e12, 1.27e26, 21.2e12),
    (1e13, 1.30e28, 216.2e12),
]
TABLE_A3_2 = [  # approach 2
    (4e8, 1.84e19, 7.7e9),
    (1e9, 1.20e20, 20.0e9),
    (1e10, 1.32e22, 219.5e9),
    (175e9, 4.54e24, 4.3e12),
    (280e9, 1.18e25, 7.1e12),
    (520e9, 4.19e25, 13.4e12),
    (1e12, 1.59e26, 26.5e12),
    (1e13, 1.75e28, 292.0e12),
]
TABLE_A3_3 = [(4e8, 9.2e9), (1e9, 27.1e9), (1e10, 410.1e9), (175e9, 12.0e12), (1e12, 94.1e12), (1e13, 1425.5e12)]


@pytest.fixture(scope="module")
def spaces():
    return {family: Space(family, None, None) for family in RECIPES}


# --- the published laws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, table", [("hoffmann1", TABLE_3), ("hoffmann2", TABLE_A3_2)])
def test_chinchillas_tables_are_reproduced(name, table):
    for size, flops, tokens in table:
        found, read = LAWS[name].optimum(flops)
        # The FLOPs have three digits, which is an error of 0.4 %; N has half of this error. The two rows that determine
        # the line have an error of the same size.
        assert found == pytest.approx(size, rel=0.005)
        # The tokens have two digits (5.9e12), which is an error of 0.85 %. The error of the FLOPs adds to it.
        assert read == pytest.approx(tokens, rel=0.013)


def test_gophers_budget_is_for_67_billion_parameters():
    size, tokens = LAWS["hoffmann1"].optimum(5.76e23)
    assert 67e9 < size < 68e9 and 1.4e12 < tokens < 1.5e12  # Table 3 truncates the parameters and rounds the tokens up.


def test_a_budget_of_1e21_is_for_2_86_billion_parameters():
    assert LAWS["hoffmann1"].optimum(1e21)[0] == pytest.approx(2.86e9, rel=0.005)  # Hoffmann et al. 2022, appendix D.4


@pytest.mark.parametrize("size, tokens", TABLE_A3_3)
def test_approach_3_is_near_its_table(size, tokens):
    law = LAWS["hoffmann"]
    # At the optimum, alpha A / N^alpha = beta B / D^beta.
    found = (law.beta * law.B / (law.alpha * law.A) * size**law.alpha) ** (1 / law.beta)
    # The table uses an exponent of 0.459, and the constants give 0.456. The difference is 19 % at either end.
    assert found == pytest.approx(tokens, rel=0.2)


def test_constants_are_those_of_equation_10_rounded():
    law = LAWS["hoffmann"]
    rounded = round(law.E, 2), law.A, law.B, round(law.alpha, 2), round(law.beta, 2)
    assert rounded == (1.69, 406.4, 410.7, 0.34, 0.28)


@pytest.mark.parametrize(
    "name, exponent",
    [("hoffmann1", 0.50), ("hoffmann2", 0.49), ("hoffmann", 0.46), ("besiroglu", 0.51), ("kaplan", 0.73)],
)
def test_exponents_are_the_published_ones(name, exponent):
    # Sources: Hoffmann et al. 2022, table 2; Besiroglu et al. 2024: 0.512.
    assert round(LAWS[name].exponent, 2) == exponent


def test_kaplans_parameters_grow_as_compute_to_the_073():
    sizes = [LAWS["kaplan"].optimum(flops)[0] for flops in (PF_DAY, 10 * PF_DAY)]
    assert sizes[0] == pytest.approx(1.3e9) and sizes[1] / sizes[0] == pytest.approx(10**0.73)


@pytest.mark.parametrize("name", ["hoffmann", "besiroglu"])
def test_the_closed_form_is_the_least_loss(name):
    law = LAWS[name]
    size, tokens = law.optimum(1e22)
    assert 6 * size * tokens == pytest.approx(1e22)
    assert all(law.loss(size * f, tokens / f) > law.loss(size, tokens) for f in (0.98, 1.02))


def test_kaplans_losses_and_batch():
    # At the scale constants (in parameters, tokens and petaflop/s-days), the loss is 1 nat.
    assert kaplan_loss_by_parameters(8.8e13) == kaplan_loss_by_tokens(5.4e13) == 1
    assert kaplan_loss_by_flops(3.1e8 * PF_DAY) == pytest.approx(1)
    # The source says "doubles for every 13 % decrease in loss" (section 1.2; recalled).
    assert critical_batch_size(0.87 * 2.5) / critical_batch_size(2.5) == pytest.approx(2, rel=0.05)
    assert kaplan_learning_rate(1e6) == pytest.approx(0.003239 - 0.0001395 * 6 * math.log(10))
    assert kaplan_learning_rate(1e11) == 0


def test_the_rate_falls_with_the_size_and_is_near_those_of_published_runs():
    rates = [learning_rate(size) for size in np.geomspace(1e6, 1e12, 50)]
    assert rates == sorted(rates, reverse=True)
    # The rates are from Brown et al. 2020, table 2.1, and Hoffmann et al. 2022, table 4 (recalled). A single rule
    # cannot be closer to all of them.
    published = {125e6: 6e-4, 1.3e9: 2e-4, 2.7e9: 1.6e-4, 6.7e9: 1.2e-4, 13e9: 1e-4, 70e9: 1e-4, 175e9: 0.6e-4}
    assert all(0.5 < learning_rate(size) / rate < 2 for size, rate in published.items())


# --- architectures --------------------------------------------------------------------------------------------------


def test_tables_are_not_counted_without_embeddings():
    gpt2 = zoo.preset("gpt2_124m")
    everything, rest = count_parameters(gpt2)
    assert everything - rest == (50_257 + 1024) * 768
    untied = zoo.preset("llama3_8b")
    everything, rest = count_parameters(untied)
    assert everything - rest == 2 * 128_256 * 4096


@pytest.mark.slow
def test_a_decoder_costs_a_little_more_than_6_n_d(spaces):
    # Hoffmann et al. 2022, table A4, has ratios of 1.10 to 0.99 from 305 M to 6.8 B; its heads read and write tied
    # tables. Our tables are untied. The input table, a sixth of the smallest model, costs no FLOPs.
    ratios = [s.flops_per_token / 6 / s.parameters for s in spaces["decoder"].ladder if 3e8 < s.parameters < 7e9]
    assert all(1.0 < ratio < 1.2 for ratio in ratios)


@pytest.mark.slow
def test_an_encoder_decoder_costs_half_of_6_n_d(spaces):
    # Each token of text passes through one of two stacks. 568 tokens of text become 512 + 114.
    big = spaces["encoder_decoder"].ladder[-1]
    assert 0.5 < big.flops_per_token / 6 / big.parameters < 0.65


@pytest.mark.slow
def test_an_encoders_head_costs_what_its_masks_ask(spaces):
    space = spaces["encoder"]
    objective = dataclasses.replace(RECIPES["encoder"].objective, rate=0.6)
    lengths = objective.lengths(space.sequence_length)
    small = space.ladder[0]
    more = (
        compute_optimal.flops_per_step(small.config, 1, lengths.inputs, lengths.targets) / lengths.raw
        - small.flops_per_token
    )
    head = 6 * small.config.d_model * (small.config.vocab_size + small.config.d_model)
    # The head predicts 30 % more of the tokens. The tolerance covers whole numbers of positions, and two positions of
    # each row that are not text.
    assert more == pytest.approx(0.3 * head, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECIPES)
def test_the_built_model_is_as_large_as_asked(spaces, family):
    law = LAWS["besiroglu"]
    for size in (3e7, 1e9, 5e10):
        # The tolerance is half of one layer of about 10, at the small end.
        assert spaces[family].nearest(law, size).parameters == pytest.approx(size, rel=0.06)


@pytest.mark.first(2)
@pytest.mark.parametrize("family", RECIPES)
def test_more_compute_is_more_of_both(spaces, family):
    plans = [make_plan(spaces[family], LAWS["besiroglu"], flops) for flops in (1e18, 1e20, 1e22)]
    for smaller, larger in zip(plans, plans[1:], strict=False):
        assert larger.size > smaller.size and larger.tokens > smaller.tokens and larger.loss < smaller.loss
        assert larger.examples >= smaller.examples
    assert all(p.flops == pytest.approx(f, rel=0.02) for p, f in zip(plans, (1e18, 1e20, 1e22), strict=True))


def test_the_optimum_is_close_to_chinchillas(spaces):
    size, _ = LAWS["besiroglu"].optimum(1e22)
    # The counted cost is a few percent above 6 N D, so the model is a few percent smaller.
    assert spaces["decoder"].optimum(LAWS["besiroglu"], 1e22) == pytest.approx(size, rel=0.05)


def test_a_budget_of_tokens_is_read_at_the_optimum(spaces):
    space, law = spaces["decoder"], LAWS["besiroglu"]
    flops = space.flops_for(law, 1e11)
    size = space.optimum(law, flops)
    assert flops / space.cost(law, size) == pytest.approx(1e11, rel=0.005)  # The grid of sizes has steps of 0.1 %.


def test_a_budget_out_of_range_is_refused(spaces):
    with pytest.raises(UserError, match="give another budget"):
        make_plan(spaces["decoder"], LAWS["besiroglu"], 2e12)


# --- the report -----------------------------------------------------------------------------------------------------


def test_a_report_has_the_figures():
    text = report(Budget(hours=24, topology="v5p:4x4x4"))
    said = re.search(r"^time +([\d.]+) hours on v5p:4x4x4 at 40% MFU, assumed", text, re.M)
    assert float(said[1]) == pytest.approx(24, rel=0.05)  # The report rounds to whole layers.
    for name in "parameters tokens FLOPs architecture published batch steps loss half double Kaplan USD".split():
        assert name in text
    assert "NOTE" not in text


def test_the_nearest_published_model_is_dense(spaces):
    # DeepSeek-V2-Lite has 15.7 B parameters, but 2.7 B per token.
    shape = spaces["decoder"].nearest(LAWS["besiroglu"], 2.7e9)
    name = re.match(r"nearest model: (\w+), ", compute_optimal.published(shape))[1]
    assert not zoo.preset(name).experts and count_parameters(zoo.preset(name))[0] == pytest.approx(2.7e9, rel=0.1)


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_other_families_get_no_law_of_decoders(family):
    with pytest.raises(UserError, match=f"measured on runs of the family decoder, and --family is {family}"):
        report(Budget(flops=1e19, family=family))


@pytest.mark.first(1)
@pytest.mark.parametrize("flops", [1e12, 1e13, 1e14, 1e15, 1e16])
def test_small_budgets_have_a_run_of_their_flops(flops):
    values = budget_lib.values(Budget(flops=flops))
    assert values["flops"] == pytest.approx(flops, rel=0.02)  # The number of steps is an integer of at least 500.
    assert 4 * values["parameters_without_embeddings"] > values["parameters"] or flops == 1e12


def test_a_small_run_has_a_thousand_steps(spaces):
    """Tests small runs, for which the critical batch size of a law would leave 39 steps."""
    law = LossLaw(2.2, 7.4, 0.17, 408.0, 0.43, source="small runs", with_embeddings=False)
    space = spaces["decoder"]
    for tokens in (2.6e6, 2.6e7, 2.6e9):
        plan = run_of(space, space.build(64, 2), law, tokens)
        assert plan.steps >= MIN_STEPS and plan.tokens == pytest.approx(tokens, rel=1e-3)
    assert plan.steps < 20 * MIN_STEPS  # MIN_STEPS does not limit the batch size of this run.


def test_a_law_that_is_not_identified_sizes_no_run(tmp_path):
    constants = dict(E=1.5, A=300.0, alpha=0.01, B=400.0, beta=0.3)
    values = dict(constants=constants, source="mine", family="decoder", with_embeddings=False, unidentified=["A / N"])
    (tmp_path / "law.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="is not identified by its runs: A / N"):
        report(Budget(flops=1e18, law=str(tmp_path / "law.json")))


def test_a_law_in_bits_per_byte_sizes_no_batch(tmp_path):
    constants = dict(E=0.5, A=300.0, alpha=0.3, B=400.0, beta=0.3)
    values = dict(constants=constants, source="mine", family="decoder", with_embeddings=False, metric="bits_per_byte")
    (tmp_path / "law.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="predicts bits_per_byte, and the batch size of a budget follows from a loss"):
        report(Budget(flops=1e18, law=str(tmp_path / "law.json")))


def test_one_learning_rate_is_printed_and_used():
    text = report(Budget(flops=1e18))
    (said,) = re.findall(r"^learning rate +peak ([\d.e-]+), for Adam", text, re.M)
    assert f"--config.optimizer.learning_rate={said}\n" in text and "Bi et al." not in text


def test_twice_the_mfu_is_half_the_time():
    times = []
    for mfu in (0.25, 0.5):
        text = report(Budget(flops=1e20, topology="h100:8", mfu=mfu))
        times.append(float(re.search(r"^time +([\d.]+)", text, re.M)[1]))
    assert times[0] / times[1] == pytest.approx(2, rel=0.01)  # The report prints three digits.


CONSTANTS = dict(E=1.5, A=300.0, alpha=0.3, B=400.0, beta=0.3)


def law_file(folder, family) -> str:
    """Writes a law of a model family; returns the path."""
    path = folder / "law.json"
    path.write_text(json.dumps(dict(constants=CONSTANTS, source="mine", family=family, with_embeddings=False)))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECIPES)
def test_the_printed_flags_make_a_sound_config(family, tmp_path):
    law = "besiroglu" if family == "decoder" else law_file(tmp_path, family)  # The published laws are for decoders.
    text = report(Budget(flops=1e18, family=family, vocab_size=8192, law=law))
    flags = text[text.index("--config=") :].partition("\n\n")[0].replace("\\\n", " ")
    code = (
        "from pretrainax import cli\nfrom pretrainax.models import abstract_params\n"
        "def main():\n    e = cli.experiment(); abstract_params(e.model)\n"
        "    print(e.train.steps, e.model.vocab_size, e.data.source)\n"
        "    return 0\ncli.run(main)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    command = f"{sys.executable} {script} {flags}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = re.search(r"^steps +([\d,]+)", text, re.M)[1].replace(",", "")
    said_steps, vocab_size, source = done.stdout.strip().split(" ", 2)
    assert (said_steps, vocab_size) == (steps, "8192")
    assert source == "HuggingFace(path='HuggingFaceFW/fineweb', name='sample-10BT', streaming=True)"


@pytest.mark.parametrize(
    "tokens, name", [(9e9, "sample-10BT"), (2e10, "sample-100BT"), (3e11, "sample-350BT"), (1e12, None)]
)
def test_the_printed_text_is_as_long_as_the_run_reads(tokens, name):
    (source,) = re.findall(r'--config\.data\.source="(HuggingFace[^"]+)"', report(Budget(tokens=tokens)))
    assert Choice.parse(source).name == name


def test_a_law_from_a_file(tmp_path):
    path = law_file(tmp_path, "encoder")
    assert law_of(path) == LossLaw(**CONSTANTS, source="mine", with_embeddings=False, family="encoder")
    text = report(Budget(flops=1e18, family="encoder", law=path))
    assert "law            mine" in text and "NOTE" not in text
    with open(path) as file:
        values = json.load(file) | {"config": {"model": {"vocab_size": 1024}}}
    with open(path, "w") as file:
        json.dump(values, file)
    text = report(Budget(flops=1e18, family="encoder", law=path))
    assert "the runs of the law have a vocabulary of 1,024, which changes the loss: set --vocab_size=1024" in text


@pytest.mark.parametrize(
    "content", ["", "[]", "[" * 100_000, "{}", '{"constants": {"E": 1}}', '{"constants": {"E": "x"}}'], ids=range(6)
)
def test_a_file_that_is_no_law_is_refused(tmp_path, content):
    path = tmp_path / "law.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is not a law that --fit writes|is not a JSON"):
        law_of(str(path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "set exactly one of --flops, --hours, --tokens, --corpus and --fit; got none"),
        ({"flops": 1e20, "tokens": 1e9}, "got --flops=1e[+]20 --tokens=1e[+]09"),
        ({"hours": 3}, "needs a --topology"),
        ({"flops": 1e11}, "the budget is 1e[+]11 FLOPs, it must be at least 1e[+]12"),
        ({"flops": -1.0}, "--flops=-1: the budget must be above 0"),
        ({"tokens": 0.0}, "the budget must be above 0"),
        ({"flops": 1e20, "mfu": 1.5}, "--mfu=1.5"),
        ({"flops": 1e20, "law": "hofman"}, "did you mean 'hoffmann'"),
        ({"flops": 1e20, "law": "none.json"}, "cannot be read"),
        ({"flops": 1e20, "vocab_size": -4}, "--vocab_size=-4"),
        ({"flops": 1e20, "topology": "v5q:4"}, "v5q"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, message):
    with pytest.raises(UserError, match=message):
        report(Budget(**arguments))


def test_d_counts_the_text_that_the_steps_read(spaces):
    space = spaces["decoder"]
    plan = make_plan(space, LAWS["besiroglu"], 1e19)
    assert space.lengths == CausalLM().lengths(2048)
    assert plan.tokens == plan.steps * plan.examples * space.lengths.raw
