"""Collectives of the compiled step over each axis of the mesh: kinds, counts and bytes, from first
principles, for TPUs and GPUs that are not here."""

import itertools
import platform
import sys
from collections import Counter
from typing import NamedTuple

import jax
import pytest

from maxtrain.commands.fit.lower_bounds import StepLowerBounds
from maxtrain.config import load_config
from maxtrain.parallel.compiled.collectives import Collective
from maxtrain.parallel.compiled.hlo import parse
from maxtrain.parallel.compiled.roofline import lines_of
from maxtrain.parallel.compiled.work import work_of
from maxtrain.parallel.hardware import links
from maxtrain.parallel.topologies import described_devices
from maxtrain.trainer.abstract_step import StepPrograms

pytestmark = [
    pytest.mark.usefixtures("this_process"),
    # Their compilers are for this platform alone; there, a missing package fails the test.
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="libtpu and XLA's compiler for GPUs are for Linux on x86",
    ),
]
# Rows, tokens of a row, layers, width, vocabulary, numbers of all heads; experts of a token.
B, T, L, D, V, H = 8, 256, 2, 128, 4096, 256
# Query, key, value and output; gate, up and down.
ATTENTION = 4 * D * H
LAYER = ATTENTION + 3 * D * 256
SMALL = [
    "config=llama3_8b",
    f"model.vocab_size={V}",
    f"model.num_layers={L}",
    f"model.embed_dim={D}",
    "model.mlp_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    f"model.max_length={T}",
    "model.remat=none",
    f"data.seq_length={T}",
    f"data.batch_size={B}",
]
EXPERTS = ["model.family=mixtral", "model.moe.num_experts=4", "model.moe.experts_per_token=2"]
# Bytes of a collective that is not worth a word: norms and their gradients, losses and softmax of
# tokens, numbers of experts. The smallest of the others is a part of a matrix in bfloat16.
LITTLE = 10_000
# Bytes of a type.
F32, BF16 = 4, 2
# Keys, or values, of the tokens of a device of context.
KEYS = B * T // 4 * H * BF16
# Rows of choices that a device sends to and gets from all four of expert: 1.5 times its tokens'
# two.
CHOICES = 3 * B * T // 4 * D
# Of stages: micro-batches M = 2, and one more until the last stage has the last of them.
ITERATIONS = 3
# Micro-batches of stages that take turns.
TURNS = 4


class Sent(NamedTuple):
    """Collectives of a kind over an axis, on TPUs and GPUs.

    Attributes:
        counts: as often as loops run.
        num_bytes: of operands on a device.
    """

    counts: tuple[int, int]
    num_bytes: tuple[float, float]

    @classmethod
    def on_both(cls, count: int, num_bytes: float) -> "Sent":
        """The same on TPUs and GPUs."""
        return cls((count, count), (num_bytes, num_bytes))


def whole_gradients() -> Sent:
    """The sums of gradients: in the loop over layers one for all matrices of each layer, and one
    for embedding and head; float32."""
    return Sent.on_both(L + 1, F32 * (L * LAYER + 2 * D * V))


def data() -> dict[tuple[str, str], Sent]:
    """Nothing but gradients."""
    return {("all-reduce", "data"): whole_gradients()}


def fsdp() -> dict[tuple[str, str], Sent]:
    """Each matrix is gathered forward and backward, in bfloat16; for GPUs, those of a layer are one
    collective. The embedding is gathered once, in float32, and so is the head, which GPUs gather
    before it is rounded. A gradient is scattered as it is summed, once for each layer and the head.
    That of the embedding, which tokens are added to by their number, is summed whole."""
    layers = 2 * L * LAYER * BF16
    return {
        ("all-gather", "fsdp"): Sent(
            (2 * 7 * L + 2, 2 * L + 1),
            ((layers + (F32 + BF16) * D * V) / 4, (layers + 2 * F32 * D * V) / 4),
        ),
        ("reduce-scatter", "fsdp"): Sent.on_both(L + 1, F32 * (L * LAYER + D * V)),
        ("all-reduce", "fsdp"): Sent.on_both(1, F32 * D * V),
    }


def tensor() -> dict[tuple[str, str], Sent]:
    """A device keeps a quarter of the tokens. They are gathered for attention and for the
    feed-forward block of each layer, and for the head; and so are gradients of what both blocks
    give, and of what is looked up. What the blocks give is summed and dealt out in one, and so are
    gradients of what they take, and of what the head takes, float32. What is looked up in a part of
    the vocabulary is summed, which GPUs do before they deal it out.

    Gathered are gradients in the type of products, but for those of what is looked up; and
    activations on GPUs before they are rounded to it. Of logits, only two numbers of each token are
    summed, which for GPUs are one collective, as large as a part of a matrix."""
    own = B * T // 4 * D
    whole = B * T * D * F32
    gathered = 2 * L * own * BF16
    return {
        ("all-gather", "tensor"): Sent(
            (4 * L + 2, 4 * L + 2),
            (
                gathered + (2 * L + 1) * own * BF16 + own * F32,
                gathered + (2 * L + 2) * own * F32,
            ),
        ),
        ("reduce-scatter", "tensor"): Sent(
            (4 * L + 2, 4 * L + 1), ((4 * L + 2) * whole, (4 * L + 1) * whole)
        ),
        ("all-reduce", "tensor"): Sent((0, 2), (0, whole + 2 * B * T * F32)),
    }


def order_of_tokens() -> Sent:
    """The even and the odd pieces of rows go where a ring has them and come back, forward and
    backward: half of a device's activations each."""
    return Sent.on_both(8, 8 * B * T // 4 * D * F32 / 2)


def ring() -> dict[tuple[str, str], Sent]:
    """Keys and values go to the next device three times forward and three times backward; their
    gradients go with them, in float32, and once more, to where they belong. For GPUs, what goes at
    the same time is one collective."""
    of_layer = 2 * (3 + 3) * KEYS + 2 * 4 * 2 * KEYS
    order = order_of_tokens()
    sent = order.num_bytes[0] + L * of_layer
    return {
        ("collective-permute", "context"): Sent(
            (order.counts[0] + L * (6 + 6 + 8), order.counts[1] + L * (3 + 3 + 1)), (sent, sent)
        ),
        ("all-reduce", "context"): whole_gradients(),
    }


def dealt() -> dict[tuple[str, str], Sent]:
    """Queries, keys, values and results are dealt out once, and so are their gradients. Those of
    keys and values are float32, on GPUs also those of queries."""
    return {
        ("all-to-all", "context"): Sent((8 * L, 8 * L), (10 * L * KEYS, 11 * L * KEYS)),
        ("all-reduce", "context"): whole_gradients(),
    }


def expert() -> dict[tuple[str, str], Sent]:
    """Choices go to experts and come back, and so do their gradients: four times a layer. Turns
    beyond the first, of which there are none where loads are even, count as one: they go and come
    back forward, and once more backward, with their gradients: six times. Activations are float32,
    and on TPUs rounded where they go into products alone. All other weights are as with fsdp, and
    those of experts stay."""
    layers = 2 * L * ATTENTION * BF16
    return {
        ("all-to-all", "expert"): Sent(
            (10 * L, 10 * L), (L * CHOICES * (7 * F32 + 3 * BF16), L * CHOICES * 10 * F32)
        ),
        ("all-gather", "expert"): Sent(
            (2 * 4 * L + 2, 2 * L + 1),
            ((layers + (F32 + BF16) * D * V) / 4, (layers + 2 * F32 * D * V) / 4),
        ),
        ("reduce-scatter", "expert"): Sent.on_both(L + 1, F32 * (L * ATTENTION + D * V)),
        ("all-reduce", "expert"): Sent.on_both(1, F32 * D * V),
    }


def stage() -> dict[tuple[str, str], Sent]:
    """Each iteration hands a micro-batch to the next stage, and takes its gradient back, in two
    collectives: one from the first stage and one to it. The gradient of a stage's layer is summed
        in
    each iteration, since XLA takes no sum out of a loop. The vocabulary is split over stages, so
    that embeddings and the gradient of the head's inputs are sums; and all stages get what the last
    one has found, and the gradient of what all have been given."""
    rows = B // 2 * T * D * F32
    of_data = F32 * (ITERATIONS * LAYER + D * V)
    return {
        ("collective-permute", "stage"): Sent.on_both(3 * ITERATIONS, 3 * ITERATIONS * rows / 2),
        ("all-reduce", "stage"): Sent.on_both(4, 4 * rows),
        # Of embedding and head, which GPUs sum one by one.
        ("all-reduce", "data"): Sent((ITERATIONS + 1, ITERATIONS + 2), (of_data, of_data)),
    }


def one_f_one_b() -> dict[tuple[str, str], Sent]:
    """Each of M + 1 forward parts hands a micro-batch to the next stage, and each backward part but
    the last its gradient to the one before. Sums over the vocabulary, and of what one stage has for
    all, are: embeddings of each forward part, what the last stage gives and its gradient of each
    micro-batch, and the gradient of embeddings of each backward part.

    Gradients are summed over data behind the loop that adds them up, of which two go backward: M
    micro-batches with their losses, and the last one. For GPUs, that of the head stays in it."""
    parts = TURNS + 1
    row = B // 2 // TURNS * T * D * F32
    vocabulary = V * D // 2
    layers = 2 * (LAYER + vocabulary)
    return {
        ("collective-permute", "stage"): Sent.on_both(2 * parts - 1, (2 * parts - 1) * row),
        ("all-reduce", "stage"): Sent.on_both(2 * parts + 2 * TURNS, (2 * parts + 2 * TURNS) * row),
        ("all-reduce", "data"): Sent(
            (1, 1 + TURNS),
            (F32 * (layers + vocabulary), F32 * (layers + TURNS * vocabulary)),
        ),
    }


CASES = {
    "data": (["mesh.data=4"], data),
    "fsdp": (["mesh.fsdp=4"], fsdp),
    "tensor": (["mesh.tensor=4"], tensor),
    "ring": (["mesh.context=4", "model.attention=ring"], ring),
    "dealt": (["mesh.context=4"], dealt),
    "expert": (["mesh.expert=4", *EXPERTS], expert),
    "stage": (["mesh.stage=2", "mesh.data=2", "model.pipeline.micro_batches=2"], stage),
    "1f1b": (
        [
            "mesh.stage=2",
            "mesh.data=2",
            f"model.pipeline.micro_batches={TURNS}",
            "model.pipeline.schedule=1f1b",
        ],
        one_f_one_b,
    ),
}


@pytest.fixture
def as_users_compile():
    """Compile with all optimizations; programs for devices elsewhere can't be read from a cache."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.long
@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        *itertools.product(CASES, ["v5e:2x2", "h100:4"]),
        # Whose gathers are made by a core of their own.
        ("tensor", "v5p:2x2x1"),
    ],
)
def test_what_goes_over_each_axis(name, topology):
    words, wanted = CASES[name]
    given = {"model.attention": "model.attention=xla", "mesh.fsdp": "mesh.fsdp=1"}
    given |= {word.split("=")[0]: word for word in [*SMALL, *words]}
    devices = described_devices(topology)
    programs = StepPrograms(load_config(list(given.values())), devices)
    compiled = programs.compile(B, T)
    mesh = programs.parts.mesh
    work = work_of(parse(compiled.as_text() or ""), devices[0].platform == "tpu")
    large: Counter[tuple[str, str]] = Counter()
    sent: dict[tuple[str, str], float] = dict.fromkeys(wanted(), 0.0)
    for one, count in work.collectives.items():
        if one.num_bytes >= LITTLE:
            key = (one.kind, " ".join(one.axes(dict(mesh.shape))))
            large[key] += count
            sent[key] = sent.get(key, 0.0) + count * one.num_bytes
    here = ["tpu", "gpu"].index(devices[0].platform)
    # Kinds and axes, too: there are no others.
    assert large == Counter({key: of.counts[here] for key, of in wanted().items()})
    for key, of in wanted().items():
        # Norms and what is merged with larger ones; gradients of keys that TPUs round on their way.
        assert sent[key] == pytest.approx(of.num_bytes[here], rel=0.05), key
    assert programs.warnings == []
    # What is known before anything is compiled is less, and not nothing.
    lines = lines_of(work, mesh, links(devices[0]))
    config = programs.parts.config
    least = StepLowerBounds(config, devices, programs.parts.abstract).least(config, B * T, T)
    assert 0 < least.network <= 1.001 * sum(line.seconds for line in lines)
    if name == "tensor":
        require_no_gathered_logits(work.collectives)


def require_no_gathered_logits(collectives: Counter[Collective]) -> None:
    """Logits of a device are those of all its tokens and a quarter of the vocabulary."""
    logits = B * T * V // 4 * BF16
    assert max(one.num_bytes for one in collectives) <= logits / 2
    # Nothing that is gathered is larger than the tokens that a device keeps.
    gathered = [one.num_bytes for one in collectives if one.kind == "all-gather"]
    assert max(gathered) <= B * T // 4 * D * F32


def on_two_slices(*words: str):
    """The collectives of a step on two slices of four chips, and how long they take by shapes
    alone."""
    devices = described_devices("v5e:2x2:2")
    # Heads of half as many numbers would be sent as large as these.
    heads = ["model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=128"]
    all_words = [*SMALL, *heads, "model.attention=xla", *words]
    given = {word.split("=")[0]: word for word in all_words}
    programs = StepPrograms(load_config(list(given.values())), devices)
    compiled = programs.compile(B, T)
    work = work_of(parse(compiled.as_text() or ""), has_small_memories=True)
    assert programs.warnings == []
    config = programs.parts.config
    least = StepLowerBounds(config, devices, programs.parts.abstract).least(config, B * T, T)
    lines = lines_of(work, programs.parts.mesh, links(devices[0]))
    assert 0 < least.network <= 1.001 * sum(line.seconds for line in lines)
    return lines


@pytest.mark.long
@pytest.mark.usefixtures("as_users_compile")
def test_nothing_but_gradients_goes_between_slices():
    """Two slices with a replica each: a device sums the parts of gradients that it keeps with its
    like, in float32."""
    lines = on_two_slices("mesh.dcn_data=2", "mesh.data=1", "mesh.fsdp=4")
    (between,) = [line for line in lines if line.is_between_slices]
    assert between.over == "data, between slices"
    # Of two, each sends what it has once.
    assert between.num_bytes == pytest.approx(F32 * (L * LAYER + 2 * D * V) / 4, rel=0.05)
    assert between.seconds == pytest.approx(between.num_bytes / 3.125e9)
    within = {(line.kind, line.over) for line in lines} - {(between.kind, between.over)}
    assert within == {(kind, "fsdp") for kind in ("all-gather", "reduce-scatter", "all-reduce")}


@pytest.mark.long
@pytest.mark.usefixtures("as_users_compile")
def test_axes_outside_and_inside_of_slices_are_told_apart():
    """Each slice has a half of both replicas: what goes between slices is of fsdp."""
    lines = on_two_slices("mesh.dcn_fsdp=2", "mesh.data=2", "mesh.fsdp=2")
    assert {line.axes for line in lines if line.is_between_slices} == {("fsdp",)}
    within = [line for line in lines if not line.is_between_slices]
    assert {"data", "fsdp"} == {axis for line in within for axis in line.axes}
    # Links carry what they do in a fraction of what the same bytes take between slices.
    assert all(line.seconds < line.num_bytes / 20e9 for line in within)
