"""Computation of a teacher's logits on prepared data, written in pieces.

What is written stays when the process is killed, and what is made is the same, bit for bit,
wherever it goes on.
"""

import dataclasses
import functools
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from data_pipeline.base import strict_json
from data_pipeline.base.errors import ConfigError, DataError, DivergedError, StorageError
from data_pipeline.plan.document_packing import document_targets
from data_pipeline.shards import TokenShards, write_atomic
from data_pipeline.shards.teacher_logits import TeacherFile, TeacherRecord, checks_of
from maxtrain.config.schema import MeshConfig
from maxtrain.models.decoder import Decoder
from maxtrain.objectives.distill import TEACHER, numbers_of
from maxtrain.ops.divergence import model_logits
from maxtrain.ops.top_divergence import TopLogProbs, top_of
from maxtrain.parallel.mesh import make_mesh
from maxtrain.trainer.reference_model import FrozenModel, digest_of, find_model

# What is done so far; gone when all is.
UNFINISHED = "unfinished.json"
# Rows of a batch for each device, and tokens of a row at least.
_ROWS = 8
_SHORTEST = 32
# Tokens of each row whose logits are there at a time.
_LOGITS = 128
# Bytes that are computed before they are written, about.
_PIECE_BYTES = 1 << 25
_SECONDS_BETWEEN_LINES = 5.0


class LoadedTeacher(NamedTuple):
    """A teacher in memory."""

    frozen: FrozenModel
    mesh: Mesh
    graphdef: nnx.GraphDef
    params: nnx.State
    digest: str


def load_teacher(place: str) -> LoadedTeacher:
    """The teacher that a run or a directory of Hugging Face holds, on all devices of this process.

    UserError: there is none, or it is damaged, or what it says of a token depends on how long a
        row is.
    """
    frozen = find_model(TEACHER, place, "teach ")
    factor = frozen.model.routing.capacity_factor
    if factor is not None:
        raise ConfigError(
            f"teach {place}: its experts have room for "
            f"model.routing.capacity_factor={factor} times an equal share of a row, so what it "
            "says of a token depends on the length of the row. "
            "Take a teacher without a capacity, or distill.teacher in place of distill.stored."
        )
    devices = jax.local_devices()
    mesh = make_mesh(MeshConfig(fsdp=len(devices)), devices)
    with jax.set_mesh(mesh):
        graphdef, shapes = frozen.abstract(mesh)
        params = frozen.load(shapes)
        return LoadedTeacher(frozen, mesh, graphdef, params, digest_of(params, frozen.function()))


def teach(
    teacher: LoadedTeacher,
    shards: TokenShards,
    record: TeacherRecord,
    folder: Path,
    tell: Callable[[str], object],
) -> None:
    """Store the logits of a teacher for all tokens of shards.

    Args:
        teacher: that reads them.
        shards: the data.
        record: of what is made, without its files.
        folder: for the files; what an earlier call with this record has left there is kept.
        tell: gets lines about how far it is.

    Raises:
        ConfigError: what is there is of another record.
        DivergedError: a log-probability is not finite.
        StorageError: there is no room.
    """
    folder.mkdir(exist_ok=True)
    done = _done(folder, record)
    began = time.monotonic()
    reported = began
    computed = 0
    files = []
    for number, entry in enumerate(shards.manifest.shards):
        path = folder / f"{Path(entry.path).stem}.top"
        files.append(path)
        if number < done["shard"]:
            continue
        finished = done["documents"]
        if number > done["shard"]:
            finished = 0
        for piece in _pieces(shards, number, record, finished):
            content = _content(teacher, shards, record, piece)
            _write(path, piece.first_byte, content)
            computed += len(content)
            state = {"record": record.digest(), "shard": number, "documents": piece.end}
            write_atomic(folder / UNFINISHED, json.dumps(state).encode())
            now = time.monotonic()
            if now - reported > _SECONDS_BETWEEN_LINES:
                reported = now
                share = (piece.first_token + len(content)) / shards.num_tokens
                rate = computed / (now - began)
                tell(f"{folder.name}: {share:.1%}, {rate:,.0f} tokens/s")
    _finish(folder, record, files)


def _finish(folder: Path, record: TeacherRecord, files: Sequence[Path]) -> None:
    """Writes the checks of the files, and the record last."""
    kept = []
    for path in files:
        checks = checks_of(path)
        write_atomic(path.with_name(f"{path.name}.crc"), checks)
        kept.append(TeacherFile(path.name, path.stat().st_size, hashlib.sha256(checks).hexdigest()))
    dataclasses.replace(record, files=tuple(kept)).save(folder)
    (folder / UNFINISHED).unlink(missing_ok=True)


def _done(folder: Path, record: TeacherRecord) -> dict[str, int]:
    """Return how far an earlier call has come. ConfigError: it was of another record."""
    path = folder / UNFINISHED
    if not path.exists():
        return {"shard": 0, "documents": 0}
    fix = f"Name another one with --name, or remove {folder}"
    try:
        state = strict_json.read(path)
        found = {name: int(state[name]) for name in ("shard", "documents")}
        before = state["record"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: can't be read ({error}). {fix}.") from error
    if before != record.digest():
        raise ConfigError(
            f"{folder} was begun with another teacher, other data or other options. {fix}."
        )
    return found


class _DocumentBatch(NamedTuple):
    """Documents of a shard that are computed and written together.

    Attributes:
        numbers: of the documents, int64 [n].
        end: documents of the shard up to the last of them.
        first_token: in the stream of all shards.
        num_tokens: of these documents.
        first_byte: in the file of the shard.
    """

    numbers: np.ndarray
    end: int
    first_token: int
    num_tokens: int
    first_byte: int


def _pieces(
    shards: TokenShards, number: int, record: TeacherRecord, finished: int
) -> Iterator[_DocumentBatch]:
    """The documents of a shard behind those that are finished, in pieces that are the same wherever
    one begins."""
    before = sum(entry.documents for entry in shards.manifest.shards[:number])
    begins_at = sum(entry.tokens for entry in shards.manifest.shards[:number])
    count = shards.manifest.shards[number].documents
    first, lengths = shards.documents(before + np.arange(count))
    size = record.entry().itemsize
    most = max(1, _PIECE_BYTES // size)
    begin = 0
    while begin < count:
        end = begin + 1
        while end < count and first[end] + lengths[end] - first[begin] <= most:
            end += 1
        if begin >= finished:
            first_token = int(first[begin])
            yield _DocumentBatch(
                numbers=before + np.arange(begin, end),
                end=end,
                first_token=first_token,
                num_tokens=int(first[end - 1] + lengths[end - 1]) - first_token,
                first_byte=(first_token - begins_at) * size,
            )
        begin = end


def _content(
    teacher: LoadedTeacher, shards: TokenShards, record: TeacherRecord, piece: _DocumentBatch
) -> np.ndarray:
    """The entries of the tokens of a piece."""
    content = np.zeros(piece.num_tokens, record.entry())
    first, sizes = document_targets(shards, piece.numbers)
    begins = first.tolist()
    sizes = np.minimum(sizes, record.length).tolist()
    by_width = defaultdict[int, list[int]](list)
    for place, size in enumerate(sizes):
        if size:
            by_width[_width(size, record.length)].append(place)
    count = _ROWS * teacher.mesh.size
    for width, places in sorted(by_width.items()):
        for begin in range(0, len(places), count):
            some = places[begin : begin + count]
            tokens = np.zeros((count, width + 1), np.int32)
            lengths = np.zeros(count, np.int32)
            for row, place in enumerate(some):
                tokens[row, : sizes[place] + 1] = _ids(shards, begins[place], sizes[place])
                lengths[row] = sizes[place]
            found = _said(teacher, tokens, lengths, record)
            for row, place in enumerate(some):
                size = sizes[place]
                at = begins[place] - piece.first_token
                entries = content[at : at + size]
                entries["ids"] = found.ids[row, :size]
                entries["log_probs"] = found.log_probs[row, :size]
                entries["tail"] = found.tail[row, :size]
                if not np.isfinite(entries["log_probs"]).all():
                    raise DivergedError(
                        f"{shards.path}, document {piece.numbers[place]}: a log-probability of the "
                        "teacher is not finite. Take another checkpoint of it."
                    )
    return content


def _width(length: int, longest: int) -> int:
    """Return the columns of the program that reads `length` tokens: few programs serve all
    lengths.
    """
    return min(max(longest, 1), max(_SHORTEST, 1 << (length - 1).bit_length()))


def _ids(shards: TokenShards, first: int, size: int) -> np.ndarray:
    """Return what stands before the targets of a document, and these; int32 [size + 1]."""
    if shards.manifest.eod == "none":
        return shards.read(first - 1, size + 1)
    mark = shards.manifest.tokenizer["special_ids"]["eod"]
    return np.concatenate([[mark], shards.read(first, size)]).astype(np.int32)


def _said(
    teacher: LoadedTeacher, tokens: np.ndarray, lengths: np.ndarray, record: TeacherRecord
) -> TopLogProbs:
    """Return what the teacher says of the tokens behind the first of each row, as numpy arrays."""
    with jax.set_mesh(teacher.mesh):
        found = _top(
            teacher.graphdef, record.top, record.temperature, teacher.params, tokens, lengths
        )
        return jax.device_get(found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _top(
    graphdef: nnx.GraphDef,
    top: int,
    temperature: float,
    params: nnx.State,
    tokens: Array,
    lengths: Array,
) -> TopLogProbs:
    """[B, T, top] and [B, T] of rows [B, T + 1]; without meaning behind the length of a row."""
    model: Decoder = nnx.merge(graphdef, params)
    inputs = tokens[:, :-1]
    width = inputs.shape[1]
    column = jnp.arange(width)
    segments = (column < lengths[:, None]).astype(jnp.int32)
    positions = jnp.broadcast_to(column, inputs.shape).astype(jnp.int32) * segments
    hidden = model.hidden(inputs, segments, positions)
    parts = []
    for begin in range(0, width, _LOGITS):
        some = hidden[:, begin : begin + _LOGITS]
        logits = model_logits(some, model.output_matrix(), numbers_of(model)).rounded
        parts.append(top_of(jax.nn.log_softmax(logits / temperature), top))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)


def _write(path: Path, first_byte: int, content: np.ndarray) -> None:
    """Writes entries at a place of a file, durably; what stood behind is gone. StorageError: there
    is no room."""
    try:
        mode = "r+b"
        if not path.exists():
            mode = "w+b"
        with open(path, mode) as file:
            file.truncate(first_byte)
            file.seek(first_byte)
            file.write(content.tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{path}: can't be written ({error.strerror}). Free space, and run the same command "
            "again."
        ) from error
