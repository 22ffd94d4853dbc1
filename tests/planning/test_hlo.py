"""Tests the parser of compiled HLO on programs with known loops and collectives, and on XLA's spellings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrainax.config import MeshConfig
from pretrainax.planning.hlo import Program, collectives_of
from pretrainax.planning.hlo.collectives import replica_groups
from pretrainax.planning.hlo.instructions import Shape
from pretrainax.planning.hlo.modules import module_of
from pretrainax.planning.traffic import Collective
from pretrainax.sharding.mesh import AXES, make_mesh

MESH = AbstractMesh((2, 1, 2, 1, 1, 2), AXES)

# --- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling, groups",
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh[a=2,b=2] {a,b}", [[0, 1, 2, 3]]),
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", [[0, 3], [1, 2]]),
    ],
)
def test_groups_are_read_in_every_spelling(spelling, groups):
    found = replica_groups(f", channel_id=1, replica_groups={spelling}, dimensions={{0}}", devices=4)
    np.testing.assert_array_equal(found, groups)


# --- a program counted by hand -------------------------------------------------------------------------------------


@functools.cache
def scanned(turns: int = 5) -> str:
    """Compiles a scan and a sum over data; each iteration gathers a [64, 64] matrix along fsdp and multiplies by it."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))

    def step(matrices, x):
        def body(x, matrix):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ jax.lax.with_sharding_constraint(matrix, P())), None

        x, _ = jax.lax.scan(body, x, matrices)
        return jax.lax.with_sharding_constraint(x.sum(0), P())

    def shape(sizes, *spec):
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        return jax.jit(step).lower(shape((turns, 64, 64), None, "fsdp"), shape((16, 64), "data")).compile().as_text()


def scanned_collectives(turns: int = 5) -> list[Collective]:
    return collectives_of(Program(scanned(turns)), AbstractMesh((2, 1, 4, 1, 1, 1), AXES))


@pytest.mark.parametrize("turns", [5, 7])
def test_a_gather_in_a_scan_counts_once_a_turn(turns):
    found = [c for c in scanned_collectives(turns) if c.kind == "all-gather"]
    # The matrix has 64 × 64 numbers of 4 bytes. A device holds a quarter of it and sends this much three times.
    assert [(c.axis, c.bytes, c.count) for c in found] == [("fsdp", 64 * 64 * 4 * 3 // 4, turns)]


def test_a_sum_outside_of_the_scan_counts_once():
    found = [c for c in scanned_collectives() if c.kind == "all-reduce"]
    assert [(c.axis, c.bytes, c.count) for c in found] == [("data", 2 * 64 * 4 * 1 // 2, 1)]


# --- HLO of the TPU compiler ---------------------------------------------------------------------------------------

FUSED = """%fused (a: f32[4,8]) -> f32[8,8] {
  %a = f32[4,8]{1,0} parameter(0)
  ROOT %gather = f32[8,8]{1,0} all-gather(%a), channel_id=9, replica_groups=mesh['x'=4,'y'=2] {'y'}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{}}
}
"""

LOOP = """HloModule step

%windowed_dot_general_body_ag.1 (p: (f32[4,8], s32[])) -> (f32[4,8], s32[]) {
  %p = (f32[4,8]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %x = f32[4,8]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=0
  %i = s32[]{:T(128)} get-tuple-element(%p), index=1
  %start = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, \
source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}, \
metadata={op_name="jit(step)/jvp(GPT)/decoder/while/body/closed_call/blocks/mlp/up/dot_general"}
  %y = f32[4,8]{1,0:T(8,128)S(1)} collective-permute-done(%start)
  %one = s32[]{:T(128)} constant(1)
  %i1 = s32[]{:T(128)} add(%i, %one)
  %i2 = s32[]{:T(128)} add(%i1, %one)
  ROOT %t = (f32[4,8]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%y, %i2)
}

%condition (p.1: (f32[4,8], s32[])) -> pred[] {
  %p.1 = (f32[4,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=1
  %limit = s32[]{:T(128)} constant(8)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

FUSED
%all-reduce-scatter.1 (c: f32[8,8]) -> f32[4,8] {
  %c = f32[8,8]{1,0} parameter(0)
  %sum = f32[8,8]{1,0} all-reduce(%c), channel_id=10, replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add
  ROOT %part = f32[4,8]{1,0} dynamic-slice(%sum), dynamic_slice_sizes={4,8}
}

ENTRY %main (b: f32[4,8]) -> f32[4,8] {
  %b = f32[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="state.params['up']"}
  %zero = s32[]{:T(128)} constant(0)
  %init = (f32[4,8]{1,0}, s32[]{:T(128)}) tuple(%b, %zero)
  %loop = (f32[4,8]{1,0}, s32[]{:T(128)}) while(%init), condition=%condition, body=%windowed_dot_general_body_ag.1
  %first = f32[8,8]{1,0:T(8,128)} fusion(%b), kind=kCustom, calls=%fused
  %again = f32[8,8]{1,0:T(8,128)} fusion(%b), kind=kCustom, calls=%fused
  %scattered = f32[4,8]{1,0:T(8,128)} fusion(%again), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %result = f32[4,8]{1,0} get-tuple-element(%loop), index=0
}
""".replace("FUSED\n", FUSED)


def test_a_counter_that_goes_up_by_two_halves_the_turns():
    program = Program(LOOP)
    assert program.trip_count("main", program.computations["main"]["loop"]) == 4


STATE = "(s32[], s32[], s32[5]{0}, s32[5,8]{1,0}, bf16[40,4]{1,0})"
BLOCKS = f"""
%body (s: (s32[])) -> (s32[]) {{
  %s = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = {STATE} tuple(%next, %i, %i, %i, %i)
}}

%condition (s.1: (s32[])) -> pred[] {{
  %s.1 = {STATE} parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %count = s32[] get-tuple-element(%s.1), index=1
  ROOT %less = pred[] compare(%i.1, %count), direction=LT
}}

ENTRY %main (init: (s32[])) -> s32[] {{
  %init = {STATE} parameter(0)
  %loop = {STATE} while(%init), condition=%condition, body=%body
  ROOT %result = s32[] get-tuple-element(%loop), index=0
}}
"""


def test_a_loop_that_ends_where_the_step_finds_so_takes_all_that_it_has_a_list_of():
    """Tests a loop over blocks of experts' rows: [J] contains the expert of each block, and [J, rows] its rows."""
    program = Program(BLOCKS)
    assert program.trip_count("main", program.computations["main"]["loop"]) == 5
    fused = BLOCKS.replace("compare(%i.1, %count), direction=LT", "fusion(%i.1, %count), kind=kLoop, calls=%less")
    program = Program(fused)
    assert program.trip_count("main", program.computations["main"]["loop"]) == 5
    program = Program(BLOCKS.replace("s32[5]{0}, s32[5,8]{1,0}, ", ""))  # Without a list, the loop counts once.
    assert program.trip_count("main", program.computations["main"]["loop"]) == 1


def test_a_loop_of_permutes_counts_as_the_gather_it_was_made_of():
    (found,) = [c for c in collectives_of(Program(LOOP), MESH) if "blocks" in c.where]
    assert found == Collective("tensor", "all-gather", 4 * 8 * 4, 4, "decoder/blocks/mlp/up")


def test_a_sum_and_its_slice_count_as_a_reduce_scatter():
    found = [c for c in collectives_of(Program(LOOP), MESH) if c.kind == "reduce-scatter"]
    assert [(c.axis, c.bytes, c.count) for c in found] == [("fsdp", 8 * 8 * 4 // 2, 1)]


def test_a_collective_that_stands_in_two_fusions_counts_once():
    copy = FUSED.replace("%fused", "%copied").replace("%gather", "%gather.1")
    text = LOOP.replace("calls=%fused\n", "calls=%copied\n", 1).replace(FUSED, FUSED + "\n" + copy)
    found = [c for c in collectives_of(Program(text), MESH) if (c.where, c.kind) == ("state/params/up", "all-gather")]
    assert [c.count for c in found] == [1]


BESIDE = """HloModule step, is_scheduled=true

ENTRY %main (a: f32[4,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %waited = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %early = f32[8,8]{1,0} all-gather-done(%waited)
  %hidden = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %product = f32[8,8]{1,0} dot(%b, %early), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %late = f32[8,8]{1,0} all-gather-done(%hidden)
  ROOT %sum = f32[8,8]{1,0} add(%product, %late)
}
"""


def test_what_is_sent_while_a_product_runs_is_told_from_what_is_waited_for():
    (found,) = collectives_of(Program(BESIDE), MESH)
    assert (found.count, found.overlapping) == (2, 1)


def test_a_collective_within_the_fusions_of_other_work_runs_beside_it():
    (found,) = [
        c for c in collectives_of(Program(LOOP), MESH) if (c.where, c.kind) == ("state/params/up", "all-gather")
    ]
    assert found.overlapping == found.count > 0


# --- shapes and modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, size",
    [
        (Shape("f32", (6, 114), "1,0"), 6 * 114 * 4),
        (Shape("f32", (6, 114), "1,0:T(8,128)"), 8 * 128 * 4),
        (Shape("bf16", (6, 114), "0,1:T(8,128)(2,1)"), 128 * 120 * 2),
        (Shape("f32", (6, 114), "1,0:T(8,128)S(1)"), 0),  # VMEM of a TPU
        (Shape("s4", (8,), "0"), 4),
        (Shape("pred", (8,), "0"), 8),
    ],
)
def test_a_buffer_takes_whole_tiles(shape, size):
    assert shape.allocated == size


@pytest.mark.parametrize(
    "op_name, module",
    [
        ("jit(step)/jvp(GPT)/decoder/while/body/closed_call/blocks/mlp/up/dot_general", "decoder/blocks/mlp/up"),
        (
            "jit(step)/transpose(jvp(T5))/encoder/while/body/checkpoint/rematted_computation/blocks/mlp_norm/mul",
            "encoder/blocks/mlp_norm",
        ),
        ("jit(step)/jvp(T5)/T5.embed/token_embedding/jit(_take)/gather", "token_embedding"),
        ("jit(step)/jvp(loss)/reduce_sum", "loss"),
        ("jit(step)/reduce_sum", ""),
        ("state.params['decoder']['final_norm']", "state/params/decoder/final_norm"),
    ],
)
def test_the_module_of_an_instruction_is_its_path_in_the_model(op_name, module):
    assert module_of(op_name) == module
