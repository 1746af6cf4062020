"""The work of a compiled program, counted from its text, against numbers counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.parallel.compiled.collectives import Collective
from maxtrain.parallel.compiled.hlo import parse, shapes_of
from maxtrain.parallel.compiled.loops import LoopBody, rounds
from maxtrain.parallel.compiled.work import work_of

# As the compiler for GPUs writes it: 3 rounds of a gather, a product and a reduction; and a branch.
OF_GPU = """HloModule jit_step

%fused_product (param_0: bf16[8,64], param_1: bf16[64,32]) -> f32[8,32] {
  %param_0 = bf16[8,64]{1,0} parameter(0)
  %param_1 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_slice (param_0: bf16[3,8,64], param_1: s32[]) -> bf16[1,8,64] {
  %param_0 = bf16[3,8,64]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,8,64]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,8,64}
}

%fused_update (param_0: f32[3,8,32], param_1: f32[8,32], param_2: s32[]) -> f32[3,8,32] {
  %param_0 = f32[3,8,32]{2,1,0} parameter(0)
  %param_1 = f32[8,32]{1,0} parameter(1)
  %row = f32[1,8,32]{2,1,0} bitcast(%param_1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[3,8,32]{2,1,0} dynamic-update-slice(%param_0, %row, %param_2, %zero, %zero)
}

%body (state: (s32[], bf16[3,8,64], f32[3,8,32])) -> (s32[], bf16[3,8,64], f32[3,8,32]) {
  %state = (s32[], bf16[3,8,64]{2,1,0}, f32[3,8,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %weights = bf16[3,8,64]{2,1,0} get-tuple-element(%state), index=1
  %kept = f32[3,8,32]{2,1,0} get-tuple-element(%state), index=2
  %mine = bf16[1,8,64]{2,1,0} fusion(%weights, %i), kind=kLoop, calls=%fused_slice
  %part = bf16[8,64]{1,0} bitcast(%mine)
  %start = ((bf16[8,64]), bf16[64,64]) all-gather-start(%part), channel_id=1, replica_groups=mesh['a'=8,'b'=2] {'a'}
  %done = bf16[64,64]{1,0} all-gather-done(%start)
  %half = bf16[64,32]{1,0} slice(%done), slice={[0:64], [0:32]}
  %product = f32[8,32]{1,0} fusion(%part, %half), kind=kCustom, calls=%fused_product
  %sum = f32[8,32]{1,0} all-reduce(%product), channel_id=2, replica_groups=[8,2]<=[16], to_apply=%add
  %saved = f32[3,8,32]{2,1,0} fusion(%kept, %sum, %i), kind=kLoop, calls=%fused_update
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %after = (s32[], bf16[3,8,64]{2,1,0}, f32[3,8,32]{2,1,0}) tuple(%next, %weights, %saved)
}

%goes_on (state.1: (s32[], bf16[3,8,64], f32[3,8,32])) -> pred[] {
  %state.1 = (s32[], bf16[3,8,64]{2,1,0}, f32[3,8,32]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

%nothing (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8]{1,0} parameter(0)
}

%squared (x.1: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (w: bf16[3,8,64], k: f32[3,8,32], p: pred[], y: f32[8,8]) -> f32[8,8] {
  %w = bf16[3,8,64]{2,1,0} parameter(0)
  %k = f32[3,8,32]{2,1,0} parameter(1)
  %p = pred[] parameter(2)
  %y = f32[8,8]{1,0} parameter(3)
  %from = s32[] constant(0)
  %begin = (s32[], bf16[3,8,64]{2,1,0}, f32[3,8,32]{2,1,0}) tuple(%from, %w, %k)
  %loop = (s32[], bf16[3,8,64], f32[3,8,32]) while(%begin), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %chosen = f32[8,8]{1,0} conditional(%p, %y, %y), true_computation=%nothing, false_computation=%squared
}
"""

# As TPU's compiler writes it: no count of rounds; a gather in three parts; a scattered reduction;
# products as convolutions; arrays beside the cores.
OF_TPU = """HloModule jit_step

%begun (param_0: bf16[16,64]) -> (bf16[16,64], bf16[64,64]) {
  %param_0 = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %async = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%ended (param_0: bf16[16,64], param_1: bf16[64,64]) -> bf16[64,64] {
  %param_0 = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.2 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %async.1 = bf16[64,64]{1,0} custom-call(%param_1, %all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.3 (input: f32[64,64]) -> f32[16,64] {
  %input = f32[64,64]{1,0} parameter(0)
  %all-reduce.1 = f32[64,64]{1,0} all-reduce(%input), channel_id=8, replica_groups={{0,1},{2,3}}, to_apply=%add
  %from = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[32,64]{1,0} dynamic-slice(%all-reduce.1, %from, %from), dynamic_slice_sizes={32,64}
}

%inner_body (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%s), index=0
  %to = s32[]{:T(128)} get-tuple-element(%s), index=1
  %two = s32[] constant(2)
  %j.1 = s32[] add(%j, %two)
  %a = f32[4,8,16]{2,1,0} constant({...})
  %b = f32[4,16,32]{2,1,0} constant({...})
  %batched = f32[4,8,32]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
  ROOT %t = (s32[], s32[]) tuple(%j.1, %to)
}

%inner_goes_on (s.1: (s32[], s32[])) -> pred[] {
  %s.1 = (s32[], s32[]) parameter(0)
  %j.2 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %to.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=1
  ROOT %lt = pred[] compare(%j.2, %to.1), direction=LT
}

%outer_body (o: (s32[], bf16[16,64], s32[])) -> (s32[], bf16[16,64], s32[]) {
  %o = (s32[], bf16[16,64]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%o), index=0
  %copy = s32[]{:T(128)S(6)} copy(%i)
  %x = bf16[16,64]{1,0:T(8,128)(2,1)} get-tuple-element(%o), index=1
  %bound = s32[] get-tuple-element(%o), index=2
  %start = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) fusion(%x), kind=kCustom, calls=%begun
  %sent = bf16[16,64]{1,0} get-tuple-element(%start), index=0
  %got = bf16[64,64]{1,0} get-tuple-element(%start), index=1
  %whole = bf16[64,64]{1,0} fusion(%sent, %got), kind=kCustom, calls=%ended
  %near = f32[64,64]{1,0:T(8,128)S(1)} convert(%whole)
  %scattered = f32[32,64]{1,0:T(8,128)S(1)} fusion(%near), kind=kCustom, calls=%all-reduce-scatter.3
  %none = s32[] constant(0)
  %within = (s32[], s32[]) tuple(%none, %bound)
  %loop.1 = (s32[], s32[]) while(%within), condition=%inner_goes_on, body=%inner_body
  %one = s32[] constant(1)
  %i.1 = s32[] add(%copy, %one)
  ROOT %o.1 = (s32[], bf16[16,64]{1,0}, s32[]) tuple(%i.1, %x, %bound)
}

%outer_goes_on (o.2: (s32[], bf16[16,64], s32[])) -> pred[] {
  %o.2 = (s32[], bf16[16,64]{1,0}, s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%o.2), index=0
  %five = s32[] constant(5)
  ROOT %lt.1 = pred[] compare(%i.2, %five), direction=LT
}

ENTRY %main (x.1: bf16[16,64]) -> bf16[16,64] {
  %x.1 = bf16[16,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  %begin = (s32[], bf16[16,64]{1,0}, s32[]) tuple(%zero, %x.1, %seven)
  %loop.2 = (s32[], bf16[16,64]{1,0}, s32[]) while(%begin), condition=%outer_goes_on, body=%outer_body
  ROOT %end = bf16[16,64]{1,0} get-tuple-element(%loop.2), index=1
}
"""


def test_rounds_of_a_loop_multiply_what_its_body_does():
    work = work_of(parse(OF_GPU), has_small_memories=False)
    # Three products, and the branch that has one.
    assert work.flops == 3 * 2 * 8 * 64 * 32 + 2 * 8 * 8 * 8
    found = {(one.kind, one.num_bytes): count for one, count in work.collectives.items()}
    assert found == {("all-gather", 8 * 64 * 2): 3, ("all-reduce", 8 * 32 * 4): 3}
    slice_ = 2 * (8 * 64 * 2) + 4
    gathered = 8 * 64 * 2 + 64 * 64 * 2
    half = 2 * 64 * 32 * 2
    product = 8 * 64 * 2 + 64 * 32 * 2 + 8 * 32 * 4
    reduced = 2 * 8 * 32 * 4
    # What is kept stays where it is, but for a slice; counters are four bytes.
    kept = 2 * 8 * 32 * 4 + 4
    counter = 3 * 4
    body = slice_ + gathered + half + product + reduced + kept + counter
    assert work.memory_bytes == 3 * body + 3 * 8 * 8 * 4
    assert work.loops_of_unknown_length == 0


def test_rounds_that_nobody_wrote_down_follow_from_the_condition():
    module = parse(OF_TPU)
    work = work_of(module, has_small_memories=True)
    # 0, 2, 4, 6 are less than 7: four rounds of the inner loop, in each of five.
    assert work.flops == 5 * 4 * 4 * 2 * 8 * 16 * 32
    found = {one.kind: (one.num_bytes, count) for one, count in work.collectives.items()}
    assert found == {"all-gather": (16 * 64 * 2, 5), "reduce-scatter": (64 * 64 * 4, 5)}
    elsewhere = work_of(module, has_small_memories=False)
    beside = 5 * (2 * 64 * 64 * 4 + 32 * 64 * 4)
    assert elsewhere.memory_bytes - work.memory_bytes == pytest.approx(beside, rel=0.01)


# As the compiler for TPUs writes what a SparseCore does beside a product.
OF_ANOTHER_CORE = """HloModule jit_step

%gathers (param_0: bf16[128,256]) -> bf16[128,512] {
  %param_0 = bf16[128,256]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[128,512]{1,0} all-gather(%param_0), channel_id=1, replica_groups=[4,2]<=[8], dimensions={1}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[128,256], w: bf16[256,64]) -> (bf16[128,512], f32[128,64]) {
  %x = bf16[128,256]{1,0} parameter(0)
  %w = bf16[256,64]{1,0} parameter(1)
  %call-start = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%gathers
  %call-update = ((bf16[128,256]{1,0}), bf16[128,512]{1,0}) call-update(%call-start, %x)
  %dot.1 = f32[128,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %call-done = bf16[128,512]{1,0} call-done(%call-update)
  ROOT %both = (bf16[128,512]{1,0}, f32[128,64]{1,0}) tuple(%call-done, %dot.1)
}
"""


def test_what_another_core_does_counts():
    work = work_of(parse(OF_ANOTHER_CORE), has_small_memories=True)
    part = 128 * 256 * 2
    assert work.collectives == {Collective("all-gather", part, "[4,2]<=[8]"): 1}
    assert work.flops == 2 * 128 * 256 * 64
    # The gather reads its part and writes two; the product reads both its inputs.
    assert work.memory_bytes == 3 * part + part + 256 * 64 * 2 + 128 * 64 * 4


def test_a_gather_that_goes_on_in_a_loop_counts_once():
    """TPU's compiler overlaps one with all rounds of a loop; one that begins there counts in each
    round."""
    goes_on = OF_TPU.replace(
        "%inner_body (s",
        "%async_collective_fusion.5 (param_0: bf16[16,64]) -> bf16[64,64] {\n"
        "  %param_0 = bf16[16,64]{1,0} parameter(0)\n"
        "  ROOT %all-gather.9 = bf16[64,64]{1,0} all-gather(%param_0), channel_id=CHANNEL, "
        "replica_groups={{0,1,2,3}}, dimensions={0}\n}\n\n%inner_body (s",
        1,
    ).replace(
        "  %two = ",
        "  %going = bf16[64,64]{1,0} fusion(%s), kind=kLoop, calls=%async_collective_fusion.5\n"
        "  %two = ",
        1,
    )
    counts = []
    for text in (OF_TPU, goes_on.replace("CHANNEL", "7"), goes_on.replace("CHANNEL", "99")):
        work = work_of(parse(text), has_small_memories=True)
        gathers = [n for one, n in work.collectives.items() if one.kind == "all-gather"]
        counts.append(sum(gathers))
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize(
    "change",
    [
        ("add(%copy, %one)", "multiply(%copy, %one)"),
        ("direction=GT", "direction=LT"),  # nothing
        ("compare(%i.2, %five), direction=LT", "compare(%i.2, %five), direction=NE"),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_is_told(change):
    text = OF_TPU.replace(*change)
    work = work_of(parse(text), has_small_memories=True)
    is_known = text == OF_TPU
    assert work.loops_of_unknown_length == (0 if is_known else 1)
    assert work.flops == (5 if is_known else 1) * 4 * 4 * 2 * 8 * 16 * 32


def test_programs_of_this_machine_have_the_products_of_their_loops():
    """The program is XLA's own text, for CPUs."""

    def of_layers(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    compiled = jax.jit(jax.grad(of_layers, argnums=(0, 1))).lower(weights, x).compile()
    module = parse(compiled.as_text())
    # Forward, and the gradients of both.
    assert work_of(module, has_small_memories=False).flops == 3 * 5 * 2 * 16 * 32 * 32
    loops = [one for one in module.entry.instructions.values() if one.opcode == "while"]
    assert [rounds(module, one, LoopBody(module.entry)) for one in loops] == [5, 5]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=1,'b'=4] {'b'}", [[0, 1, 2, 3]]),
        ("mesh['b'=4] {'b':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['b'=4] {'b':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
        ("mesh['a'=2,'b'=2, device_ids=([2,2]<=[2,2]T(1,0))] {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_are_read_as_xla_writes_them(places, expected):
    found = Collective("all-reduce", 1.0, places).groups(4)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("transfer", "target", "kind", "groups"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:1}"', "all-reduce", [[0, 3], [1, 2]]),
        (
            "ALL_GATHER",
            "{{100000,200000},{100001,200001}}",
            "all-gather",
            [[0, 3], [1, 2]],
        ),
        (
            "ONE_TO_ONE",
            "{{100000->200000},{200001->100001}}",
            "collective-permute",
            [[0, 3], [2, 1]],
        ),
    ],
)
def test_what_goes_from_slice_to_slice_is_a_message_to_the_host(transfer, target, kind, groups):
    """The text is that of TPU's compiler; the devices of the mesh are 100000, 100001, 200001,
    200000."""
    text = f"""HloModule jit_step

ENTRY %main (x: f32[16,8]) -> token[] {{
  %x = f32[16,8]{{1,0}} parameter(0)
  %before = token[] after-all()
  %send = (f32[16,8]{{1,0}}, u32[]{{:S(2)}}, token[]) send(%x, %before), channel_id=2, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={target},_xla_megascale_transfer_type="{transfer}"}}
  ROOT %done = token[] send-done(%send), channel_id=2, is_host_transfer=true
}}
"""  # noqa: E501
    ((one, count),) = work_of(parse(text), has_small_memories=True).collectives.items()
    assert (one.kind, one.num_bytes, one.is_between_slices, count) == (kind, 512, True, 1)
    placed = one.placed([100000, 100001, 200001, 200000])
    assert placed.groups(4).tolist() == groups
    unknown = text.replace(transfer, "ANY_TO_ANY")
    with pytest.raises(ValueError, match="goes between slices as ANY_TO_ANY, which is not known"):
        work_of(parse(unknown), has_small_memories=True)


def test_what_a_device_sends_is_that_of_rings():
    def sent(kind: str) -> float:
        return Collective(kind, 1200.0, "{{0,1,2,3}}").sent(4)

    assert sent("all-gather") == 3 * 1200
    assert sent("reduce-scatter") == sent("all-to-all") == 900
    assert sent("all-reduce") == 1800
    pairs = Collective("collective-permute", 1200.0, "{{0,1},{1,0},{2,3},{3,2}}")
    assert pairs.sent(4) == 1200
    assert pairs.axes({"data": 2, "fsdp": 1, "context": 2}) == ("context",)


def test_shapes_have_the_memory_that_their_layout_names():
    text = "(f32[8,16]{1,0:T(8,128)S(1)}, /*index=1*/bf16[<=4]{0}, s32[], token[], s4[6]{0:E(4)})"
    found = shapes_of(text)
    assert [shape.num_bytes for shape in found] == [512, 8, 4, 0, 3]
    assert [shape.space for shape in found] == [1, 0, 0, 0, 0]


def test_a_text_without_an_entry_is_no_program():
    with pytest.raises(ValueError, match="must have an ENTRY"):
        parse("HloModule nothing\n")
