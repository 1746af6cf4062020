"""Measurements of the guarantees for every family of models, on the small ones of
tests/data/parity.

    python -m benchmarks.families [--only gemma2 gemma3] [--write]

prints the table of benchmarks/results/families.md, in half an hour on two busy cores. What
transformers and torch found lies beside each model: logits, loss and gradients of two rows in
reference.npz, twenty steps of AdamW in trajectory.npz. The tests hold the same measurements to
their tolerances.
"""

import argparse
import dataclasses
import functools
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.train_step import processor
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import (
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RegularizationConfig,
    RoutingConfig,
    ScheduleConfig,
)
from maxtrain.config.sections.mesh import axes_of
from maxtrain.inference.complete import generate
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
from maxtrain.models.hf_mapping import in_memory, tensors_in_order
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import Objective
from maxtrain.ops.digest import leaf_names
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import RULES, Rules
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import (
    TrainState,
    abstract_model,
    abstract_state,
    policy_variables,
    saved_part,
    state_from_variables,
)
from maxtrain.train_step.step import make_train_step
from maxtrain.train_step.trainable import split_buffers
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.hf_export import write_weights

RESULTS = Path(__file__).parent / "results" / "families.md"
PARITY = Path(__file__).parents[1] / "tests" / "data" / "parity"
CASES = tuple(path.name for path in sorted(PARITY.iterdir()))
DIFFERS = "**differs**"
PEAK = 2e-3
SCHEDULE = ScheduleConfig(name="constant", warmup_steps=5)
ADAMW = OptimizerConfig(
    name="adamw", learning_rate=PEAK, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=1
)
# Routers add nothing to the loss, and nothing is corrected: transformers does neither by itself.
ALONE = RoutingConfig(balance=0.0, correction_rate=0.0)
FLOAT32 = PrecisionConfig(compute="float32")
PLAIN = next_token()
# Tokens of the documents of a row. The first is longer than a window, which is 16 here.
DOCUMENTS = (23, 12, 7)
ROW = 48
# The step that is saved, of twice as many.
SAVED = 10

Batch = Mapping[str, np.ndarray]


def apart(found: Any, expected: Any) -> float:
    """The largest difference of two arrays, as a share of the largest number expected; infinite
    where a number is not finite, or where all should be 0 and are not."""
    found = np.asarray(found, np.float64)
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    difference = float(np.abs(found - expected).max())
    largest = float(np.abs(expected).max())
    # Of arrays that have no gradient, such as buffers.
    if difference == 0:
        return 0.0
    if largest == 0 or not np.isfinite(difference):
        return math.inf
    return difference / largest


def worst(found: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[float, str]:
    """Return how far apart arrays of the same names are at most, and the name of those that are."""
    assert found.keys() == expected.keys()
    return max((apart(found[name], expected[name]), name) for name in expected)


# One pass


class PassResult(NamedTuple):
    """Result of one pass forward and backward.

    Attributes:
        logits: [B, T, V].
        loss: nats per target.
        gradients: of the parameters, as the tensors that they are in files of Hugging Face, by
            name.
    """

    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]

    def norm(self) -> float:
        """Norm of all gradients together."""
        squares = [np.square(array, dtype=np.float64).sum() for array in self.gradients.values()]
        return float(np.sqrt(sum(squares)))


def passed(model: Decoder, batch: Batch) -> PassResult:
    """A pass of a model in float32."""
    graphdef, params = nnx.split(model)
    (loss, logits), grads = _loss_and_gradients(graphdef, params, dict(batch))
    leaves = zip(leaf_names(grads), jax.tree.leaves(grads), strict=True)
    named = {name: in_memory(np.asarray(leaf)) for name, leaf in leaves}
    tensors = tensors_in_order(FAMILIES[model.config.family].table(model.config), named)
    gradients = {name: tensor.whole() for name, tensor in tensors.items()}
    return PassResult(np.asarray(logits), float(loss), gradients)


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_gradients(graphdef: Any, params: nnx.State, batch: dict[str, Any]) -> Any:
    def loss_of(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        logits = model(batch["inputs"], batch.get("segment_ids"), batch.get("positions"))
        logp = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(logp, batch["targets"][..., None], axis=-1)[..., 0]
        mask = batch["loss_mask"]
        return (nll * mask).sum() / mask.sum(), logits

    return jax.value_and_grad(loss_of, has_aux=True)(params)


def reference_batch(tokens: np.ndarray) -> Batch:
    """Rows whose every token but the last has the next one as its target, without segments."""
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    return {"inputs": tokens, "targets": np.roll(tokens, -1, axis=1), "loss_mask": mask}


class PackedDocuments(NamedTuple):
    """The same documents twice.

    Attributes:
        packed: each row has them all and padding; each document is once in every place.
        alone: row d is document d from position 0, as if the whole row were one document; what
            follows it there are other tokens, which are no targets.
        places: of document d in the packed rows, as (row, column).
    """

    packed: Batch
    alone: Batch
    places: list[list[tuple[int, int]]]


def documents() -> PackedDocuments:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 160, (len(DOCUMENTS), ROW + 1)).astype(np.int32)
    alone = _empty_rows()
    alone["inputs"][:] = tokens[:, :-1]
    alone["targets"][:] = tokens[:, 1:]
    alone["segment_ids"][:] = 1
    alone["positions"][:] = np.arange(ROW)
    for number, length in enumerate(DOCUMENTS):
        alone["loss_mask"][number, : length - 1] = 1
    packed = _empty_rows()
    places: list[list[tuple[int, int]]] = [[] for _ in DOCUMENTS]
    for row in range(len(DOCUMENTS)):
        start = 0
        for place in range(len(DOCUMENTS)):
            number = (row + place) % len(DOCUMENTS)
            length = DOCUMENTS[number]
            there = slice(start, start + length)
            for name in ("inputs", "targets", "positions", "loss_mask"):
                packed[name][row, there] = alone[name][number, :length]
            packed["segment_ids"][row, there] = place + 1
            places[number].append((row, start))
            start += length
    return PackedDocuments(packed, alone, places)


def _empty_rows() -> dict[str, np.ndarray]:
    shape = (len(DOCUMENTS), ROW)
    names = ("inputs", "targets", "segment_ids", "positions")
    rows: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in names}
    return rows | {"loss_mask": np.zeros(shape, np.float32)}


class PassDifference(NamedTuple):
    """Distance between two ways to compute the same, as a share of the largest number.

    Attributes:
        logits, gradients: the latter of the array where it is most.
        where: that array's name.
    """

    logits: float
    gradients: float
    where: str


def packed_against_separate(config: ModelConfig) -> PassDifference:
    """Documents that share a row, against each in a row of its own."""
    packed, alone, places = documents()
    model = repeated(config)
    together = passed(model, packed)
    separate = passed(model, alone)
    logits = []
    for number, length in enumerate(DOCUMENTS):
        expected = separate.logits[number, :length]
        for row, start in places[number]:
            logits.append(apart(together.logits[row, start : start + length], expected))
    gradients, where = worst(together.gradients, separate.gradients)
    return PassDifference(max(logits), gradients, where)


def scan_against_unrolled(config: ModelConfig) -> PassDifference:
    """Layers as one loop, against layers one after another, on rows of several documents."""
    packed, _, _ = documents()
    scanned = passed(repeated(config), packed)
    unrolled = passed(repeated(dataclasses.replace(config, scan_layers=False)), packed)
    real = packed["segment_ids"] > 0
    gradients, where = worst(scanned.gradients, unrolled.gradients)
    return PassDifference(apart(scanned.logits[real], unrolled.logits[real]), gradients, where)


def repeated(config: ModelConfig, repeats: int = 2) -> Decoder:
    """A model of a config, but that the period of its layers comes so often; with random numbers in
    all arrays, biases and sinks, too."""
    stack = FAMILIES[config.family].spec(config).stack
    num_layers = len(stack.prefix) + repeats * len(stack.period)
    config = dataclasses.replace(config, num_layers=num_layers)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    graphdef, abstract = abstract_model(config, FLOAT32, mesh)
    rng = np.random.default_rng(1)
    arrays = []
    for name, leaf in zip(leaf_names(abstract), jax.tree.leaves(abstract), strict=True):
        numbers = 0.1 * rng.standard_normal(leaf.shape, np.float32)
        if name.endswith(".scale"):
            numbers += 1
        arrays.append(jax.device_put(numbers, leaf.sharding))
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(abstract), arrays))


# Training


class Training(NamedTuple):
    """Parts of a training step."""

    mesh: Mesh
    graphdef: nnx.GraphDef
    abstract: TrainState
    # The first.
    state: TrainState
    step: Any
    layout: BatchLayout


def training(
    model: Decoder,
    mesh: Mesh,
    shape: tuple[int, int, int],
    accumulation: int = 1,
    objective: Objective = PLAIN,
    rules: Rules = RULES,
) -> Training:
    """The step of a model (donated) that is on a mesh, by the rule of trajectory.npz. shape: steps,
    rows, and tokens of a row. rules: by which the model is stored."""
    steps, rows, columns = shape
    schedule = make_schedule(SCHEDULE, PEAK, steps)
    with jax.set_mesh(mesh):
        graphdef, variables = abstract_model(model.config, FLOAT32, mesh, rules)
        params, buffers = split_buffers(variables)
        optimizer = make_optimizer(ADAMW, SCHEDULE, steps, params)
        abstract = abstract_state(params, optimizer, mesh, buffers=buffers, rules=rules)
        state = state_from_variables(abstract, nnx.state(model), optimizer)
        step = make_train_step(
            abstract, {"policy": graphdef}, objective, optimizer, schedule, accumulation
        )
    return Training(mesh, graphdef, abstract, state, step, BatchLayout(mesh, rows, columns - 1))


def whole_rows(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a batch whose rows are one document each. tokens: [B, T + 1]."""
    B, T = tokens.shape[0], tokens.shape[1] - 1
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((B, T), np.int32),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        "loss_mask": np.ones((B, T), np.float32),
    }


class StepsResult(NamedTuple):
    """Result of some steps."""

    state: TrainState
    losses: list[float]
    norms: list[float]


def make_steps(parts: Training, state: TrainState, batches: np.ndarray) -> StepsResult:
    """Steps from a state, which is donated. batches: tokens, [steps, B, T + 1]."""
    losses = []
    norms = []
    with jax.set_mesh(parts.mesh):
        for tokens in batches:
            state, metrics = parts.step(state, parts.layout.to_global(whole_rows(tokens)))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    return StepsResult(state, losses, norms)


class TrajectoryResult(NamedTuple):
    """Result of the steps of trajectory.npz."""

    losses: list[float]
    norms: list[float]
    # Of the probe, after the last step.
    logits: jax.Array


def twenty_steps(
    case: str, axes: Mapping[str, Any], accumulation: int = 1, **changes: Any
) -> TrajectoryResult:
    """The case's steps on a mesh; `changes`: keys of the model."""
    theirs = np.load(PARITY / case / "trajectory.npz")
    mesh_config = MeshConfig(**axes)
    devices = math.prod(axes_of(mesh_config).values())
    mesh = make_mesh(mesh_config, jax.devices()[:devices])
    chosen: dict[str, Any] = {"routing": ALONE} | changes
    model, _ = load_pretrained(PARITY / case, mesh=mesh, **chosen)
    parts = training(model, mesh, theirs["tokens"].shape, accumulation)
    made = make_steps(parts, parts.state, theirs["tokens"])
    with jax.set_mesh(parts.mesh):
        trained = nnx.merge(parts.graphdef, policy_variables(made.state))
        logits = jax.jit(lambda model, tokens: model(tokens))(trained, jnp.asarray(theirs["probe"]))
    return TrajectoryResult(made.losses, made.norms, logits)


def unlike_after_resuming(config: ModelConfig, folder: Path) -> list[str]:
    """Return what differs in any bit between steps without a stop and those that go on from a
    checkpoint in `folder`: names of arrays of the state, `loss` and `grad_norm`.

    The steps have what a run's have: dropout, and the losses and corrections of routers.
    """
    assert config.vocab_size is not None
    rng = np.random.default_rng(7)
    shape = (2 * SAVED, 4, ROW + 1)
    batches = rng.integers(0, config.vocab_size, shape, np.int32)
    noisy = next_token(regularization=RegularizationConfig(residual_dropout=0.1))
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    parts = training(repeated(config), mesh, shape, objective=noisy)
    before = make_steps(parts, parts.state, batches[:SAVED])
    checkpoints = Checkpoints(folder, CheckpointConfig(asynchronous=False))
    try:
        checkpoints.save(SAVED, saved_part(before.state), {"step": SAVED})
        straight = make_steps(parts, before.state, batches[SAVED:])
        expected = _bits(straight.state)
        jax.tree.map(lambda x: x.delete(), straight.state)
        restored, record = checkpoints.restore(saved_part(parts.abstract))
    finally:
        checkpoints.close()
    resumed = make_steps(parts, restored, batches[record["step"] :])
    found = _bits(resumed.state)
    assert found.keys() == expected.keys()
    unlike = [name for name in expected if found[name] != expected[name]]
    if resumed.losses != straight.losses:
        unlike.append("loss")
    if resumed.norms != straight.norms:
        unlike.append("grad_norm")
    return unlike


def _bits(state: TrainState) -> dict[str, bytes]:
    leaves = zip(leaf_names(state), jax.tree.leaves(state), strict=True)
    return {name: np.asarray(leaf).tobytes() for name, leaf in leaves}


# The table


def greedy_is_theirs(case: str) -> bool:
    """Return whether the likeliest tokens, by the cache, are those of transformers."""
    model, _ = load_pretrained(PARITY / case)
    reference = np.load(PARITY / case / "reference.npz")
    prompts = reference["tokens"]
    expected = reference["greedy"][:, prompts.shape[1] :].tolist()
    found = generate(model, prompts.tolist(), max_tokens=len(expected[0]), temperature=0.0)
    return found == expected


def files_come_back(case: str, folder: Path) -> bool:
    """Return whether the file that is read is the file that is written, byte for byte, and is read
    again as the same parameters.
    """
    model, config = load_pretrained(PARITY / case)
    params = nnx.state(model)
    write_weights(folder, params, config, "float32", 1 << 30, lambda line: None)
    name = "model.safetensors"
    if (folder / name).read_bytes() != (PARITY / case / name).read_bytes():
        return False
    shutil.copy(PARITY / case / "config.json", folder)
    again, _ = load_pretrained(folder)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(nnx.state(again)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


HEAD = (
    ("case", ":--"),
    ("logits", "--:"),
    ("loss", "--:"),
    ("norm", "--:"),
    ("gradients", "--:"),
    ("greedy text", ":-:"),
    ("files", ":-:"),
    ("20 steps: loss", "--:"),
    ("norm", "--:"),
    ("8 devices: loss", "--:"),
    ("norm", "--:"),
    ("packed: logits", "--:"),
    ("gradients", "--:"),
    ("scan: logits", "--:"),
    ("gradients", "--:"),
    ("resumed", ":-:"),
)


def row(case: str, folder: Path) -> list[str]:
    """The cells of one model."""
    reference = np.load(PARITY / case / "reference.npz")
    model, _ = load_pretrained(PARITY / case)
    ours = passed(model, reference_batch(reference["tokens"]))
    named = {name: name.removeprefix("grad/") for name in reference.files if "grad/" in name}
    gradients = [apart(ours.gradients[there], reference[name]) for name, there in named.items()]
    cells = [
        case,
        shown(float(np.abs(ours.logits - reference["logits"]).max())),
        shown(apart(ours.loss, reference["loss"])),
        shown(apart(ours.norm(), reference["grad_norm"])),
        shown(max(gradients)),
        same(greedy_is_theirs(case)),
        same(files_come_back(case, folder)),
    ]
    theirs = np.load(PARITY / case / "trajectory.npz")
    one = twenty_steps(case, {"fsdp": 1})
    eight = twenty_steps(case, {"fsdp": 4, "tensor": 2})
    for found, losses, norms in (
        (one, theirs["loss"], theirs["grad_norm"]),
        (eight, one.losses, one.norms),
    ):
        cells.append(shown(furthest(found.losses, losses)))
        cells.append(shown(furthest(found.norms, norms)))
    config = model.config
    for ways in (packed_against_separate(config), scan_against_unrolled(config)):
        cells.append(shown(ways.logits))
        cells.append(shown(ways.gradients))
    cells.append(same(unlike_after_resuming(config, folder / "checkpoints") == []))
    return cells


def furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of a number from the one of its step, as a share of that."""
    return max(apart(one, other) for one, other in zip(found, expected, strict=True))


def shown(difference: float) -> str:
    if difference == 0:
        return "0"
    return f"{difference:.1e}"


def same(is_same: bool) -> str:
    if is_same:
        return "same"
    return DIFFERS


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written_rows() -> dict[str, str]:
    """The lines of the file of results, by case."""
    if not RESULTS.exists():
        return {}
    found = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        case = line.removeprefix("| ").partition(" |")[0]
        if case in CASES:
            found[case] = line
    return found


def report(lines: Mapping[str, str]) -> str:
    """The file of results. lines: by case."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax"))
    head = (
        f"`python -m benchmarks.families --write` on {processor()}; Python "
        f"{platform.python_version()}, {packages}."
    )
    names = line_of([name for name, _ in HEAD])
    sides = line_of([side for _, side in HEAD])
    table = [names, sides, *(lines[case] for case in sorted(lines))]
    return "\n".join(["# Every family", "", head, EXPLAINED, *table, ""])


EXPLAINED = """
Each case is a small model with random weights that transformers made (`tests/data/parity`), in
float32. Of `logits`, the largest difference is absolute; of all others it is a share of the largest
number of the array, of the loss, or of the norm.

* `logits`, `loss`, `norm`, `gradients`: one pass over two rows of 48 tokens, against transformers;
  `norm` is of the gradients of all parameters, `gradients` are those of two arrays, element by element.
* `greedy text`: the likeliest next tokens, made with the cache, against transformers.
* `files`: a file that is read and written again, byte for byte, and its parameters read again, bit
  for bit.
* `20 steps`: each step of AdamW against the same step by transformers and torch, whose own norms in
  float32 are up to 6.2e-6 from those in float64 (Mixtral). `8 devices`: the same steps on simulated
  devices with fsdp=4, tensor=2, against one device.
* `packed`: documents of 23, 12 and 7 tokens and padding in one row, in each order, against each document
  in a row of its own; windows are 16 tokens. `gradients` are those of all arrays.
* `scan`: layers as one loop against layers unrolled, on the packed rows.
* `resumed`: 20 steps with dropout, routers' losses and corrections, against 10, a checkpoint and 10
  more: all of the state, losses and norms, bit for bit.

The last three are measured on models of the same sizes whose period of layers comes twice, so that
the loop has two rounds, with random numbers in all arrays, biases and sinks too. That is twelve layers
of Gemma 3, whose gradients are rounded otherwise by another compilation: by 2.3e-5 for the same
unrolled layers with and without the compiler's optimizations. Without them, its loop and its
unrolled layers give the same bits.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0, or 1 if something differs that must be the same."""
    parser = argparse.ArgumentParser("python -m benchmarks.families", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=CASES, help="measure these; others' rows stay"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write results/{RESULTS.name}, after each case"
    )
    args = parser.parse_args(argv)
    lines = {}
    for case in args.only:
        with tempfile.TemporaryDirectory() as folder:
            lines[case] = line_of(row(case, Path(folder)))
        print(lines[case], flush=True)
        # No other model has the same programs.
        jax.clear_caches()
        if args.write:
            RESULTS.write_text(report(written_rows() | lines), encoding="utf-8")
    return int(any(DIFFERS in line for line in lines.values()))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
