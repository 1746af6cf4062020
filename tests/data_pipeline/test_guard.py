"""The guard: every invariant broken by hand gives a message with row, source, value and mend; a zero-weight batch is judged."""

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.guard import BatchGuard, check_batch

SHAPE = (3, 6)


def good():
    segments = np.array([[1, 1, 2, 2, 3, 3], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
    ids = np.full(SHAPE, 9, np.int32)
    positions = np.tile(np.arange(6, dtype=np.int32), (3, 1))
    mask = (segments > 0).astype(np.float32)
    return {"inputs": ids, "targets": ids.copy(), "segment_ids": segments, "positions": positions, "loss_mask": mask}


def check_small(batch):
    check_batch(batch, 10, lambda row: f"source 'web', row {row + 100}")


def test_a_good_batch_passes():
    check_small(good())


BAD = [
    ("inputs", (0, 1), 10, r"batch row 0 \(source 'web', row 100\), position 1: inputs=10, but must be in \[0, 10\)"),
    ("targets", (2, 5), -1, r"batch row 2 \(source 'web', row 102\), position 5: targets=-1, but must be in \[0, 10\)"),
    ("positions", (1, 0), 6, r"positions=6, but must be in \[0, 6\)"),
    ("segment_ids", (0, 0), 2, r"position 0: segment_ids=2, but segments must count 1, 2, \.\.\. with 0 only at the end"),
    ("segment_ids", (0, 0), 0, "position 1: segment_ids=1, but segments must count"),
    ("segment_ids", (0, 2), 3, "position 2: segment_ids=3, but segments must count"),
    ("segment_ids", (0, 4), 1, "position 4: segment_ids=1, but segments must count"),
    ("segment_ids", (1, 4), 1, "position 4: segment_ids=1, but segments must count"),
    ("segment_ids", (2, 0), -1, "position 0: segment_ids=-1, but segments must count"),
    ("loss_mask", (1, 3), 1, "row 101.*position 3: loss_mask=1.0, but padding must have no weight"),
    ("loss_mask", (0, 0), -1, "loss_mask=-1.0, but weights must be finite and at least 0"),
    ("loss_mask", (0, 0), np.nan, "loss_mask=nan, but weights must be finite"),
    ("loss_mask", (0, 0), np.inf, "loss_mask=inf, but weights must be finite"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), BAD)
def test_a_broken_invariant_names_row_source_value_and_mend(name, place, value, message):
    batch = good()
    batch[name][place] = value
    with pytest.raises(DataError, match=message + r".*\. Run with data\.verify=full") as caught:
        check_small(batch)
    assert caught.value.exit_code == 65


ONE = (4, 10)  # shape of a batch


def test_a_batch_without_targets_is_an_error_a_good_end_or_a_warning():
    for policy in ("raise", "stop", "warn"):
        assert BatchGuard(policy).observe(0, 1, 3, ONE, False) is None
    with pytest.raises(
        DataError, match=r"step 1,234: the batch has 0 target tokens.*set data\.zero_weight to stop or warn"
    ) as caught:
        BatchGuard("raise").observe(1234, 0, 4, ONE, False)
    assert caught.value.exit_code == 65
    stop = BatchGuard("stop").observe(7, 0, 4, ONE, False)
    assert stop.stop and "the run stops here" in stop.message
    warn = BatchGuard("warn")
    first, _, third = (warn.observe(step, targets, 0, ONE, False) for step, targets in ((7, 0), (8, 5), (9, 0)))
    assert not first.stop and "1 such steps" in first.message and "weights stay as they are (2 such steps)" in third.message


def test_too_few_targets_are_found_over_several_steps_whatever_their_shapes():
    guard = BatchGuard("warn", min_fill=0.5, patience=3)
    assert [guard.observe(s, t, 0, ONE, False) for s, t in enumerate((1, 1))] == [None, None]  # patience
    verdict = guard.observe(2, 40, 0, ONE, False)
    assert "step 2: 35.00% of 3 batches are targets (data.min_fill=0.5); the run goes on" in verdict.message
    assert guard.observe(3, 70, 0, (8, 10), False) is None, "the mean of the last three is now above a half"


def test_rows_without_targets_are_found():
    guard = BatchGuard("raise", max_empty_rows=0.25)
    assert guard.observe(1, 30, 1, ONE, False) is None
    with pytest.raises(DataError, match=r"step 2: 2 of 4 rows have no target \(data\.max_empty_rows=0\.25\)"):
        guard.observe(2, 20, 2, ONE, False)


def test_the_same_tokens_in_other_rows_are_found_and_the_same_rows_are_not():
    guard = BatchGuard("raise")
    seen = [
        guard.repeats(content, place, step) for step, (content, place) in enumerate([(1, "a"), (2, "b"), (1, "a"), (2, "c")])
    ]
    assert seen == [None, None, None, 1]
    for content in range(10, 3000):  # long ago is forgotten
        assert guard.repeats(content, str(content), content) is None
    assert guard.repeats(1, "z", 3000) is None and guard.repeats(2999, "z", 3001) == 2999
    with pytest.raises(DataError, match=r"step 5: its tokens are those of an earlier batch of other rows"):
        guard.observe(5, 40, 0, ONE, True)
