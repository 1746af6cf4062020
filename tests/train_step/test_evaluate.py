"""Evaluation: the same sums for any batch size and any number of devices, and every target
counted."""

import math

import jax
import numpy as np
import pytest

from data_pipeline.base.errors import DataError
from data_pipeline.config import DataConfig
from data_pipeline.loader.loader import open_evaluation
from data_pipeline.shards import Manifest, ShardWriter
from data_pipeline.tokenizer import CharTokenizer
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.batches import BatchLayout
from maxtrain.train_step.evaluate import evaluate, make_eval_step

LENGTHS = np.array([40, 1, 7, 90, 33, 5, 61, 2, 24, 24, 150])


@pytest.fixture(scope="module", params=["append", "none"])
def held_out(request, tmp_path_factory):
    """A directory of token shards, with ends of documents marked or not."""
    folder = tmp_path_factory.mktemp("held-out")
    writer = ShardWriter(folder, "tokens-00000", 96)
    writer.append(np.random.default_rng(0).integers(2, 96, LENGTHS.sum()), LENGTHS)
    kept = CharTokenizer(map(chr, range(32, 127)), eod=True)
    kept.save(folder)
    tokenizer = {
        "name": "test",
        "sha256": kept.sha256,
        "vocab_size": kept.vocab_size,
        "special_ids": {"eod": kept.eod_id},
    }
    Manifest(tokenizer, "uint16", request.param, 1000, (writer.close(),)).save(folder)
    return folder


def result(tiny, held_out, rows, shape, num_batches=None, num_tokens="all"):
    """The result of `evaluate`, and the set."""
    parts = tiny.parts(shape)
    data = open_evaluation(held_out, DataConfig(seq_length=tiny.length, batch_size=rows), rows)
    layout = BatchLayout(parts.mesh, rows, tiny.length)
    batches = (layout.to_global(batch.arrays) for batch in data.iterate(layout.part, num_batches))
    with jax.set_mesh(parts.mesh):
        step = make_eval_step({POLICY: parts.graphdef}, next_token())
        params = {POLICY: parts.new_state().trainable}
        values = evaluate(
            step,
            params,
            batches,
            data.num_tokens if num_tokens == "all" else num_tokens,
            data.text_bytes,
        )
    return values, data


@pytest.mark.long
def test_batch_size_and_devices_change_nothing(tiny, held_out):
    settings = [
        (1, (1, 1, 1)),
        (3, (1, 1, 1)),
        (64, (1, 1, 1)),
        (8, (8, 1, 1)),
        (6, (1, 2, 4)),
        (4, (2, 2, 2)),
    ]
    (first, data), *others = (result(tiny, held_out, rows, shape) for rows, shape in settings)
    marks = 0 if data.manifest.eod == "append" else len(LENGTHS)
    assert first["tokens"] == data.num_tokens == LENGTHS.sum() - marks
    for values, _ in others:
        assert values["tokens"] == first["tokens"]
        np.testing.assert_allclose(
            [values[k] for k in values], [first[k] for k in values], rtol=1e-6
        )
    assert first["perplexity"] == pytest.approx(math.exp(first["nll"]))
    assert first["bits_per_byte"] == pytest.approx(
        first["nll"] * first["tokens"] / math.log(2) / 1000
    )


@pytest.mark.every_dose
@pytest.mark.long
def test_another_number_of_targets_is_an_error(tiny, held_out):
    data = open_evaluation(held_out, DataConfig(seq_length=tiny.length, batch_size=8), 8)
    with pytest.raises(
        DataError, match=r"but its manifest has 7\. Run `prepare verify` on the set"
    ):
        result(tiny, held_out, 8, (1, 1, 1), num_tokens=7)
    with pytest.raises(DataError, match=f"the evaluation read {data.batch(0).num_targets} targets"):
        result(tiny, held_out, 8, (1, 1, 1), num_batches=1)


def test_a_part_of_the_set_has_no_bits_per_byte(tiny, held_out):
    values, data = result(tiny, held_out, 8, (1, 1, 1), num_batches=1, num_tokens=None)
    assert (
        values["tokens"] == data.batch(0).num_targets < data.num_tokens
        and "bits_per_byte" not in values
    )
    assert values["nll"] == pytest.approx(math.log(96), rel=0.2)


def test_nothing_evaluated_is_not_a_number_and_a_huge_loss_is_not_an_error():
    huge = WeightedSum(jax.numpy.float32(1e30), jax.numpy.float32(1))
    values = [
        evaluate(lambda params, batch: {"nll": huge}, {}, batches, None, 0)
        for batches in ([], [{}])
    ]
    assert math.isnan(values[0]["nll"]) and values[1]["perplexity"] == math.exp(700)


def test_a_total_is_recorded_where_the_objective_says_so():
    def step(params, batch):
        return {
            "nll": WeightedSum(np.float32(3), np.float32(2)),
            "long": WeightedSum(np.float32(5), np.float32(2)),
        }

    assert evaluate(step, {}, [{}, {}], None, 0)["long"] == 2.5
    assert evaluate(step, {}, [{}, {}], None, 0, ["long"])["long"] == 10
