"""Tests the bytes that handwritten programs read and write; the shape of each array determines its size."""

import re

import pytest

from pretrainax.planning.hlo import Program, buffers_of, memory_traffic_of
from pretrainax.planning.hlo.kernels import kernels_of, reads, writes

LAYER = 64 * 32 * 4  # bytes of f32[64,32]


def program(entry: str, *computations: str) -> Program:
    """Returns a module whose entry computation has these lines."""
    return Program("\n\n".join(["HloModule step", *computations, f"ENTRY %main () -> f32[] {{\n{entry}\n}}"]))


def moved(found: Program) -> dict[str, tuple[dict[str, int], list[int]]]:
    """Returns the nonzero bytes that one execution of each kernel reads, and the bytes that it writes."""
    return {
        kernel.instruction.name: (
            {name: size for name, size in reads(found, kernel).items() if size},
            writes(found, kernel),
        )
        for kernel in kernels_of(found)
    }


# --- instructions ----------------------------------------------------------------------------------------------------


def test_an_instruction_reads_each_operand_once_and_writes_its_result():
    found = program("""  %a = f32[64,32]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} convert(%a)
  ROOT %c = f32[64,32]{1,0} multiply(%a, %a)""")
    assert moved(found) == {"b": ({"a": LAYER}, [LAYER // 2]), "c": ({"a": LAYER}, [LAYER])}
    assert memory_traffic_of(found).total == 3.5 * LAYER


def test_a_tuple_within_the_result_of_a_fusion_counts_by_its_arrays():
    """Tests a fusion that returns a reduction of several arrays and another result."""
    found = program(
        """  %a = f32[64,32]{1,0} parameter(0)
  ROOT %f = ((f32[64]{0}, s32[64]{0}), f32[64,32]{1,0}) fusion(%a), kind=kInput, calls=%fused""",
        """%fused (p: f32[64,32]) -> ((f32[64], s32[64]), f32[64,32]) {
  %p = f32[64,32]{1,0} parameter(0)
  %i = s32[64,32]{1,0} iota(), iota_dimension=1
  %zero = f32[] constant(0)
  %none = s32[] constant(0)
  %r = (f32[64]{0}, s32[64]{0}) reduce(%p, %i, %zero, %none), metadata={op_name="jit(step)/loss/reduce"}
  %s = f32[64,32]{1,0} add(%p, %p), metadata={op_name="jit(step)/optimizer/add"}
  ROOT %t = ((f32[64]{0}, s32[64]{0}), f32[64,32]{1,0}) tuple(%r, %s)
}""",
    )
    assert moved(found) == {"f": ({"a": LAYER}, [64 * 4, 64 * 4, LAYER])}
    assert {(x.where, x.bytes) for x in buffers_of(found)} == {("loss", 64 * 4), ("optimizer", LAYER)}


def test_views_move_nothing():
    found = program("""  %a = f32[64,32]{1,0} parameter(0)
  %one = f32[] constant(1)
  %flat = f32[2048]{0} bitcast(%a)
  %both = (f32[64,32]{1,0}, f32[2048]{0}) tuple(%a, %flat)
  ROOT %again = f32[64,32]{1,0} get-tuple-element(%both), index=0""")
    assert moved(found) == {} and memory_traffic_of(found).kernels == 0


@pytest.mark.parametrize(
    "line, read, written",
    [
        ("slice(%a), slice={[0:4], [0:32]}", 4 * 32 * 4, 4 * 32 * 4),
        ("dynamic-slice(%a, %i, %i), dynamic_slice_sizes={4,32}", 4 * 32 * 4, 4 * 32 * 4),
        ("gather(%a, %i), offset_dims={1}", 4 * 32 * 4, 4 * 32 * 4),
    ],
)
def test_of_what_is_sliced_the_slice_is_read(line, read, written):
    found = program(f"""  %a = f32[64,32]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = f32[4,32]{{1,0}} {line}""")
    assert moved(found)["part"] == ({"a": read, **({"i": 4} if "%i" in line else {})}, [written])


def test_an_update_in_place_reads_and_writes_what_is_updated():
    found = program("""  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[1,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[64,32]{1,0} dynamic-update-slice(%a, %b, %i, %i)""")
    assert moved(found) == {"new": ({"b": 32 * 4, "i": 4}, [32 * 4])}


def test_each_branch_of_a_conditional_counts_as_often_as_the_others():
    near, far = (
        f"""%{name} (p: f32[64,32]) -> f32[64,32] {{
  %p = f32[64,32]{{1,0}} parameter(0)
{lines}
}}"""
        for name, lines in {
            "near": "  ROOT %n = f32[64,32]{1,0} negate(%p)",
            "far": "  %w = bf16[64,32]{1,0} convert(%p)\n  ROOT %f = f32[64,32]{1,0} convert(%w)",
        }.items()
    )
    for choice in (
        "conditional(%which, %a, %a), branch_computations={%near, %far}",
        "conditional(%is_near, %a, %a), true_computation=%near, false_computation=%far",
    ):
        lines = f"""  %a = f32[64,32]{{1,0}} parameter(0)
  %which = s32[] parameter(1)
  %is_near = pred[] parameter(2)
  ROOT %c = f32[64,32]{{1,0}} {choice}"""
        found = program(lines, near, far)
        assert found.runs["near"] == found.runs["far"] == 0.5
        # `near` reads and writes the array. `far` does the same, and writes and reads half as much in between.
        assert memory_traffic_of(found).total == (2 * LAYER + 3 * LAYER) / 2


def test_a_scatter_adds_to_what_it_has_read():
    found = program("""  %a = f32[64,32]{1,0} parameter(0)
  %i = s32[3]{0} parameter(1)
  %b = f32[3,32]{1,0} parameter(2)
  ROOT %new = f32[64,32]{1,0} scatter(%a, %i, %b), to_apply=%add""")
    rows = 3 * 32 * 4
    assert moved(found) == {"new": ({"a": rows, "i": 12, "b": rows}, [rows])}


# --- fusions ---------------------------------------------------------------------------------------------------------

SLICED = """%fused (p: f32[12,64,32], q: f32[64,32], i: s32[]) -> bf16[64,32] {
  %p = f32[12,64,32]{2,1,0} parameter(0)
  %q = f32[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  FIRST
  SECOND
  %layer = TYPE[64,32]{1,0} bitcast(%second)
  %half = TYPE[64,32]{1,0} convert(%q)
  %sum = TYPE[64,32]{1,0} add(%layer, %half)
  ROOT %result = bf16[64,32]{1,0} convert(%sum)
}"""
SLICE = "dynamic_slice_sizes={1,64,32}"


@pytest.mark.parametrize(
    "first, second, dtype",
    [
        (
            f"%first = f32[1,64,32]{{2,1,0}} dynamic-slice(%p, %i, %zero, %zero), {SLICE}",
            "%second = f32[1,64,32]{2,1,0} negate(%first)",
            "f32",
        ),
        (
            "%first = bf16[12,64,32]{2,1,0} convert(%p)",
            f"%second = bf16[1,64,32]{{2,1,0}} dynamic-slice(%first, %i, %zero, %zero), {SLICE}",
            "bf16",
        ),
    ],
    ids=["sliced and computed with", "computed with and sliced"],
)
def test_of_a_stack_a_fusion_reads_the_layer_it_needs(first, second, dtype):
    fused = SLICED.replace("FIRST", first).replace("SECOND", second).replace("TYPE", dtype)
    found = program(
        """  %stack = f32[12,64,32]{2,1,0} parameter(0)
  %x = f32[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = bf16[64,32]{1,0} fusion(%stack, %x, %i), kind=kLoop, calls=%fused""",
        fused,
    )
    assert moved(found) == {"y": ({"stack": LAYER, "x": LAYER, "i": 4}, [LAYER // 2])}


def test_a_stack_that_is_summed_beside_a_slice_of_it_is_read_whole():
    found = program(
        """  %stack = f32[12,64,32]{2,1,0} parameter(0)
  ROOT %y = (f32[64,32]{1,0}, f32[1,64,32]{2,1,0}) fusion(%stack), kind=kInput, calls=%fused""",
        """%fused (p: f32[12,64,32]) -> (f32[64,32], f32[1,64,32]) {
  %p = f32[12,64,32]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %all = f32[64,32]{1,0} reduce(%p, %zero), dimensions={0}, to_apply=%add
  %one = f32[1,64,32]{2,1,0} slice(%p), slice={[3:4], [0:64], [0:32]}
  ROOT %both = (f32[64,32]{1,0}, f32[1,64,32]{2,1,0}) tuple(%all, %one)
}""",
    )
    assert moved(found) == {"y": ({"stack": 12 * LAYER}, [LAYER, LAYER])}


UPDATED = """%fused (p: f32[12,64,32], q: f32[64,32], i: s32[]) -> RESULT {
  %p = f32[12,64,32]{2,1,0} parameter(0)
  %q = f32[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
  %zeros = f32[12,64,32]{2,1,0} broadcast(%none), dimensions={}
  %tanh = f32[64,32]{1,0} tanh(%q)
  %layer = f32[1,64,32]{2,1,0} bitcast(%tanh)
  END
}"""
NEW = "%new = f32[12,64,32]{2,1,0} dynamic-update-slice(%p, %layer, %i, %zero, %zero)"
TYPES = "(f32[64,32]{1,0}, f32[12,64,32]{2,1,0})"


@pytest.mark.parametrize(
    "result, end, read, written",
    [
        ("f32[12,64,32]{2,1,0}", "ROOT " + NEW, {"x": LAYER}, [LAYER]),
        ("f32[768,32]{1,0}", f"{NEW}\n  ROOT %flat = f32[768,32]{{1,0}} bitcast(%new)", {"x": LAYER}, [LAYER]),
        (TYPES, f"{NEW}\n  ROOT %two = {TYPES} tuple(%tanh, %new)", {"x": LAYER}, [LAYER, LAYER]),
        # The updated array is new, so the fusion writes all of it.
        ("f32[12,64,32]{2,1,0}", "ROOT " + NEW.replace("%p", "%zeros"), {"x": LAYER}, [12 * LAYER]),
        # A sum also reads the updated array, so the fusion reads all of it.
        (
            "f32[12,64,32]{2,1,0}",
            f"{NEW}\n  ROOT %sum = f32[12,64,32]{{2,1,0}} add(%new, %p)",
            {"x": LAYER, "stack": 12 * LAYER},
            [12 * LAYER],
        ),
    ],
    ids=["alone", "by another name", "as one of two results", "of a new array", "summed after it"],
)
def test_a_fusion_that_updates_a_stack_writes_the_layer_alone(result, end, read, written):
    found = program(
        f"""  %stack = f32[12,64,32]{{2,1,0}} parameter(0)
  %x = f32[64,32]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = {result} fusion(%stack, %x, %i), kind=kLoop, calls=%fused""",
        UPDATED.replace("END", end).replace("RESULT", result),
    )
    found_reads, found_writes = moved(found)["y"]
    assert ({name: size for name, size in found_reads.items() if name != "i"}, found_writes) == (read, written)


def test_a_fusion_inside_of_a_fusion_is_looked_into():
    inner = """%inner (p: f32[12,64,32], i: s32[]) -> f32[64,32] {
  %p = f32[12,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,64,32]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %layer = f32[64,32]{1,0} bitcast(%one)
}"""
    outer = """%outer (x: f32[8,64], p: f32[12,64,32], i: s32[]) -> f32[8,32] {
  %x = f32[8,64]{1,0} parameter(0)
  %p.1 = f32[12,64,32]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %matrix = f32[64,32]{1,0} fusion(%p.1, %i.1), kind=kLoop, calls=%inner
  ROOT %product = f32[8,32]{1,0} convolution(%x, %matrix), dim_labels=bf_io->bf
}"""
    entry = """  %x = f32[8,64]{1,0} parameter(0)
  %stack = f32[12,64,32]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = f32[8,32]{1,0} fusion(%x, %stack, %i), kind=kOutput, calls=%outer"""
    found = program(entry, inner, outer)
    assert moved(found) == {"y": ({"x": 8 * 64 * 4, "stack": LAYER, "i": 4}, [8 * 32 * 4])}
    assert set(memory_traffic_of(found).sum_by("kind")) == {"products"}


# --- libraries and background operations -----------------------------------------------------------------------------

QKV = 4 * 128 * 2 * 64 * 2  # bytes of bf16[4,128,2,64]
SUMS = 4 * 2 * 128 * 4


def test_a_call_of_a_library_moves_operands_and_results_without_its_workspace():
    qkv = "bf16[4,128,2,64]{3,2,1,0}"
    found = program(f"""  %q = {qkv} parameter(0)
  %k = {qkv} parameter(1)
  %v = {qkv} parameter(2)
  %a = f32[64,32]{{1,0}} parameter(3)
  %b = f32[32,64]{{1,0}} parameter(4)
  %attention = ({qkv}, f32[4,2,128]{{2,1,0}}, u8[1000]{{0}}) custom-call(%q, %k, %v), \
custom_call_target="__cudnn$fmhaScaleBiasSoftmax"
  ROOT %product = (f32[64,64]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$gemm\"""")
    assert moved(found) == {
        "attention": ({"q": QKV, "k": QKV, "v": QKV}, [QKV, SUMS, 0]),
        "product": ({"a": LAYER, "b": LAYER}, [64 * 64 * 4, 0]),
    }
    assert memory_traffic_of(found).sum_by("kind") == {
        "attention": 4 * QKV + SUMS,
        "products": 2 * LAYER + 64 * 64 * 4,
    }


def test_a_copy_in_the_background_is_one_kernel_and_the_memory_of_a_tpus_core_is_free():
    vmem = "f32[64,32]{1,0:T(8,128)S(1)}"
    found = program(f"""  %a = f32[64,32]{{1,0:T(8,128)}} parameter(0)
  %start = ({vmem}, f32[64,32]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) copy-start(%a)
  %b = {vmem} copy-done(%start)
  %part = ((f32[64,32]{{1,0:T(8,128)}}), f32[8,32]{{1,0:T(8,128)S(1)}}, s32[]{{:S(2)}}) slice-start(%a), \
slice={{[0:8], [0:32]}}
  %c = f32[8,32]{{1,0:T(8,128)S(1)}} slice-done(%part)
  ROOT %d = {vmem} negate(%b)""")
    rows = 128 * 4  # A row of 32 is padded to 128 lanes.
    assert moved(found) == {"b": ({"a": 64 * rows}, [0]), "c": ({"a": 8 * rows}, [0]), "d": ({}, [0])}
    assert memory_traffic_of(found).kernels == 3


def test_a_computation_in_the_background_is_counted_as_what_it_is():
    found = program(
        """  %a = f32[64,32]{1,0} parameter(0)
  %start = ((f32[64,32]{1,0}), f32[4,32]{1,0}, s32[]) async-start(%a), calls=%wrapped
  %update = ((f32[64,32]{1,0}), f32[4,32]{1,0}, s32[]) async-update(%start)
  ROOT %b = f32[4,32]{1,0} async-done(%update)""",
        """%wrapped (p: f32[64,32]) -> f32[4,32] {
  %p = f32[64,32]{1,0} parameter(0)
  ROOT %part = f32[4,32]{1,0} slice(%p), slice={[0:4], [0:32]}
}""",
    )
    assert moved(found) == {"b": ({"a": 4 * 32 * 4}, [4 * 32 * 4])}


def test_a_collective_in_the_fusions_of_other_work_moves_where_it_starts_and_ends():
    """Tests an all-gather that libtpu overlaps with a product: all three fusions have its operand and result."""
    gather = "%g = f32[64,32]{1,0} all-gather(%shard), channel_id=1, dimensions={1}, backend_config={"
    gather += '"async_collective_fusion_config":{}}'
    state = "(f32[64,8]{1,0}, f32[64,32]{1,0})"
    found = program(
        f"""  %s = f32[64,8]{{1,0}} parameter(0)
  %x = f32[64,32]{{1,0}} parameter(1)
  %w = f32[32,32]{{1,0}} parameter(2)
  %start = {state} fusion(%s), kind=kCustom, output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%started
  %s1 = f32[64,8]{{1,0}} get-tuple-element(%start), index=0
  %g1 = f32[64,32]{{1,0}} get-tuple-element(%start), index=1
  %both = (f32[64,32]{{1,0}}, f32[64,8]{{1,0}}, f32[64,32]{{1,0}}) fusion(%s1, %g1, %x, %w), kind=kOutput, \
output_to_operand_aliasing={{{{1}}: (0, {{}}), {{2}}: (1, {{}})}}, calls=%beside
  %y = f32[64,32]{{1,0}} get-tuple-element(%both), index=0
  %s2 = f32[64,8]{{1,0}} get-tuple-element(%both), index=1
  %g2 = f32[64,32]{{1,0}} get-tuple-element(%both), index=2
  %done = f32[64,32]{{1,0}} fusion(%s2, %g2), kind=kCustom, output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%ended
  ROOT %z = (f32[64,32]{{1,0}}, f32[64,32]{{1,0}}) tuple(%y, %done)""",
        f"""%started (shard: f32[64,8]) -> (f32[64,8], f32[64,32]) {{
  %shard = f32[64,8]{{1,0}} parameter(0)
  {gather}
  ROOT %c = {state} custom-call(%shard, %g), custom_call_target="AsyncCollectiveStart"
}}""",
        f"""%beside (shard: f32[64,8], p: f32[64,32], q: f32[64,32], r: f32[32,32]) -> (f32[64,32], f32[64,8]) {{
  %shard = f32[64,8]{{1,0}} parameter(0)
  %p = f32[64,32]{{1,0}} parameter(1)
  %q = f32[64,32]{{1,0}} parameter(2)
  %r = f32[32,32]{{1,0}} parameter(3)
  {gather}
  %d = f32[64,32]{{1,0}} dot(%q, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (f32[64,32]{{1,0}}, f32[64,8]{{1,0}}, f32[64,32]{{1,0}}) tuple(%d, %shard, %g)
}}""",
        f"""%ended (shard: f32[64,8], p: f32[64,32]) -> f32[64,32] {{
  %shard = f32[64,8]{{1,0}} parameter(0)
  %p = f32[64,32]{{1,0}} parameter(1)
  {gather}
  ROOT %e = f32[64,32]{{1,0}} custom-call(%shard, %p, %g), custom_call_target="AsyncCollectiveDone"
}}""",
    )
    assert moved(found) == {
        "start": ({}, [0, LAYER]),
        "both": ({"x": LAYER, "w": LAYER // 2}, [LAYER, 0, 0]),
        "done": ({"s2": LAYER // 4}, [0]),
    }
    assert memory_traffic_of(found).sum_by("kind") == {"products": 2.5 * LAYER, "collectives": 1.25 * LAYER}


def test_what_only_names_memory_for_a_tpu_moves_nothing():
    found = program("""  %a = f32[64,32]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %b = f32[128,32]{1,0} custom-call(%a, %a), custom_call_target="ConcatBitcast\"""")
    assert moved(found) == {}


# --- a step with loops -----------------------------------------------------------------------------------------------


def loop(name: str, body: str, init: str, turns: int) -> str:
    trips = f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    return f"  %{name} = {STATE} while(%{init}), condition=%less, body=%{body}, {trips}"


STATE = "(s32[], f32[64,32]{1,0}, f32[3,64,32]{2,1,0})"
ELEMENTS = """  %p = (s32[], f32[64,32]{1,0}, f32[3,64,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64,32]{1,0} get-tuple-element(%p), index=1
  %stack = f32[3,64,32]{2,1,0} get-tuple-element(%p), index=2"""
WRITE = """%write (p: f32[3,64,32], q: f32[64,32], i: s32[]) -> f32[3,64,32] {
  %p = f32[3,64,32]{2,1,0} parameter(0)
  %q = f32[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %layer = f32[1,64,32]{2,1,0} bitcast(%q)
  ROOT %new = f32[3,64,32]{2,1,0} dynamic-update-slice(%p, %layer, %i, %zero, %zero)
}"""
READ = """%read (p: f32[3,64,32], i: s32[]) -> f32[64,32] {
  %p = f32[3,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,64,32]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %layer = f32[64,32]{1,0} bitcast(%one)
}"""
FORWARD = f"""%forward (p: {STATE}) -> {STATE} {{
{ELEMENTS}
  %y = f32[64,32]{{1,0}} tanh(%x), metadata={{op_name="jit(step)/jvp(T)/encoder/while/body/blocks/mlp/tanh"}}
  %kept = f32[3,64,32]{{2,1,0}} fusion(%stack, %y, %i), kind=kLoop, calls=%write, \
metadata={{op_name="jit(step)/jvp(T)/encoder/while/body/dynamic_update_slice"}}
  ROOT %out = {STATE} tuple(%i, %y, %kept)
}}"""
BACKWARD = f"""%backward (p: {STATE}) -> {STATE} {{
{ELEMENTS}
  %y = f32[64,32]{{1,0}} fusion(%stack, %i), kind=kLoop, calls=%read, \
metadata={{op_name="jit(step)/transpose(jvp(T))/encoder/while/body/dynamic_slice"}}
  %dx = f32[64,32]{{1,0}} multiply(%x, %y), \
metadata={{op_name="jit(step)/transpose(jvp(T))/encoder/while/body/blocks/mlp/mul"}}
  ROOT %out = {STATE} tuple(%i, %dx, %stack)
}}"""
STEP = "\n".join(
    [
        "  %w = f32[64,32]{1,0} parameter(0)",
        "  %zero = s32[] constant(0)",
        "  %none = f32[] constant(0)",
        "  %empty = f32[3,64,32]{2,1,0} broadcast(%none), dimensions={}",
        f"  %init = {STATE} tuple(%zero, %w, %empty)",
        loop("there", "forward", "init", 3),
        "  %h = f32[64,32]{1,0} get-tuple-element(%there), index=1",
        "  %stack = f32[3,64,32]{2,1,0} get-tuple-element(%there), index=2",
        '  %dh = f32[64,32]{1,0} exponential(%h), metadata={op_name="jit(step)/jvp(loss)/exp"}',
        f"  %again = {STATE} tuple(%zero, %dh, %stack)",
        loop("back", "backward", "again", 3),
        "  %dw = f32[64,32]{1,0} get-tuple-element(%back), index=1",
        '  ROOT %new = f32[64,32]{1,0} add(%w, %dw), metadata={op_name="jit(step)/optimizer/add"}',
    ]
)
COMPUTATIONS = (WRITE, READ, FORWARD, BACKWARD)


def test_the_body_of_a_loop_counts_as_often_as_it_turns_and_each_kernel_has_a_kind():
    found = memory_traffic_of(program(STEP, *COMPUTATIONS))
    index = 4  # Each slice reads the loop counter.
    assert found.sum_by("kind") == {
        "residuals": 3 * (2 * LAYER + index) + 3 * (2 * LAYER + index),  # copied into the stack and out of it
        "elementwise": 3 * 2 * LAYER + 3 * 3 * LAYER,  # The kernels are tanh, and the product with its result.
        "fills": 3 * LAYER + 4,  # The last term is the counter.
        "optimizer": 3 * LAYER,
        "loss": 2 * LAYER,
    }
    assert found.total == sum(found.sum_by("kind").values()) == sum(found.sum_by("module").values())
    assert found.kernels == 3 * 2 + 3 * 2 + 3


def test_residuals_have_the_module_that_has_made_them():
    found = {(one.module, one.kind): one.bytes for one in memory_traffic_of(program(STEP, *COMPUTATIONS)).traffic}
    assert found["encoder/blocks/mlp", "residuals"] == 2 * 3 * (2 * LAYER + 4)
    assert found["encoder/blocks/mlp", "elementwise"] == 3 * 5 * LAYER


def test_of_a_kernel_that_computes_with_a_residual_its_slice_alone_is_one():
    fused = READ.replace("ROOT ", "").replace("\n}", "\n  ROOT %y = f32[64,32]{1,0} sine(%layer)\n}")
    found = memory_traffic_of(program(STEP, WRITE, fused, FORWARD, BACKWARD)).sum_by("kind")
    assert found["residuals"] == 3 * (2 * LAYER + 4) + 3 * LAYER
    assert found["elementwise"] == 3 * 5 * LAYER + 3 * (LAYER + 4)


def test_stacked_parameters_are_no_residuals():
    """Tests a backward loop that reads a parameter of the step instead of the result of the forward."""
    entry = re.sub(r"(%again = .*)%stack\)", r"\1%matrices)", STEP)
    entry += "\n  %matrices = f32[3,64,32]{2,1,0} parameter(1)"
    found = memory_traffic_of(program(entry, *COMPUTATIONS)).sum_by("kind")
    assert "residuals" not in found
    assert found["copies"] == 2 * 3 * (2 * LAYER + 4)


@pytest.mark.parametrize(
    "line, kind",
    [
        ('dot(%a, %b), metadata={op_name="jit(step)/jvp(T)/encoder/blocks/mlp/up/dot_general"}', "products"),
        ('dot(%a, %b), metadata={op_name="jit(step)/jvp(T)/encoder/blocks/self_attention/dot_general"}', "attention"),
        ('dot(%a, %b), metadata={op_name="jit(step)/jvp(T)/encoder/self_attention/query/dot_general"}', "products"),
        ('dot(%a, %b), metadata={op_name="jit(step)/jvp(loss)/dot_general"}', "loss"),
        ('dot(%a, %b), metadata={op_name="jit(step)/optimizer/dot_general"}', "optimizer"),
        ("all-gather(%a), replica_groups={{0,1}}, dimensions={0}", "collectives"),
        ("transpose(%a), dimensions={1,0}", "copies"),
        ("add(%a, %a)", "elementwise"),
        ("iota(), iota_dimension=0", "fills"),
    ],
)
def test_the_kind_of_a_kernel(line, kind):
    found = program(f"""  %a = f32[64,64]{{1,0}} parameter(0)
  %b = f32[64,64]{{1,0}} parameter(1)
  ROOT %c = f32[64,64]{{1,0}} {line}""")
    assert [one.kind for one in memory_traffic_of(found).traffic] == [kind]
