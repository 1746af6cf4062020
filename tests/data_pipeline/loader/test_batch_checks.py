"""The guard: every invariant broken by hand gives a message with row, source, value and advice; a
zero-weight batch is noticed."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DataError
from data_pipeline.loader import batch_checks
from data_pipeline.loader.batch_checks import BatchGuard, GuardState, check_batch, checksum

SHAPE = (3, 6)


def good():
    segments = np.array([[1, 1, 2, 2, 3, 3], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
    ids = np.full(SHAPE, 9, np.int32)
    positions = np.tile(np.arange(6, dtype=np.int32), (3, 1))
    mask = (segments > 0).astype(np.float32)
    return {
        "inputs": ids,
        "targets": ids.copy(),
        "segment_ids": segments,
        "positions": positions,
        "loss_mask": mask,
    }


def check_small(batch):
    check_batch(batch, 10, lambda row: f"source 'web', row {row + 100}")


def test_a_good_batch_passes():
    check_small(good())


BAD = [
    (
        "inputs",
        (0, 1),
        10,
        r"batch row 0 \(source 'web', row 100\), position 1: inputs=10, but must be in \[0, 10\)",
    ),
    (
        "targets",
        (2, 5),
        -1,
        r"batch row 2 \(source 'web', row 102\), position 5: targets=-1, but must be in \[0, 10\)",
    ),
    ("positions", (1, 0), 6, r"positions=6, but must be in \[0, 6\)"),
    (
        "segment_ids",
        (0, 0),
        2,
        r"position 0: segment_ids=2, but segments must count 1, 2, \.\.\. with 0 only at the end",
    ),
    ("segment_ids", (0, 0), 0, "position 1: segment_ids=1, but segments must count"),
    ("segment_ids", (0, 2), 3, "position 2: segment_ids=3, but segments must count"),
    ("segment_ids", (0, 4), 1, "position 4: segment_ids=1, but segments must count"),
    ("segment_ids", (1, 4), 1, "position 4: segment_ids=1, but segments must count"),
    ("segment_ids", (2, 0), -1, "position 0: segment_ids=-1, but segments must count"),
    ("loss_mask", (1, 3), 1, "row 101.*position 3: loss_mask=1.0, but padding must have no weight"),
    ("loss_mask", (0, 0), -1, "loss_mask=-1.0, but weights must be finite and at least 0"),
    ("loss_mask", (0, 0), np.nan, "loss_mask=nan, but weights must be finite"),
    ("loss_mask", (0, 0), np.inf, "loss_mask=inf, but weights must be finite"),
    ("value", (1, 2), np.nan, "position 2: value=nan, but numbers of documents must be finite"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), BAD)
def test_a_broken_invariant_names_row_source_value_and_mend(name, place, value, message):
    batch = good() | {"value": np.zeros(SHAPE, np.float32)}
    check_small(batch)
    batch[name][place] = value
    with pytest.raises(DataError, match=message + r".*\. Run with data\.verify=full") as caught:
        check_small(batch)
    assert caught.value.exit_code == 65


ONE = (4, 10)  # shape of a batch


def test_a_batch_without_targets_is_an_error_a_good_end_or_a_warning():
    for policy in ("raise", "stop", "warn"):
        assert BatchGuard(policy).observe(0, 1, 3, ONE, False) is None
    with pytest.raises(
        DataError,
        match=r"step 1,234: the batch has 0 target tokens.*set data\.zero_weight to stop or warn",
    ) as caught:
        BatchGuard("raise").observe(1234, 0, 4, ONE, False)
    assert caught.value.exit_code == 65
    stop = BatchGuard("stop").observe(7, 0, 4, ONE, False)
    assert stop.stop and "the run stops here" in stop.message
    warn = BatchGuard("warn")
    first, _, third = (
        warn.observe(step, targets, 0, ONE, False) for step, targets in ((7, 0), (8, 5), (9, 0))
    )
    assert (
        not first.stop
        and "1 such steps" in first.message
        and "weights stay as they are (2 such steps)" in third.message
    )


def test_too_few_targets_are_found_over_several_steps_whatever_their_shapes():
    guard = BatchGuard("warn", min_fill=0.5, patience=3)
    assert [guard.observe(s, t, 0, ONE, False) for s, t in enumerate((1, 1))] == [
        None,
        None,
    ]  # patience
    verdict = guard.observe(2, 40, 0, ONE, False)
    assert (
        "step 2: 35.00% of 3 batches are targets (data.min_fill=0.5); the run goes on"
        in verdict.message
    )
    assert guard.observe(3, 70, 0, (8, 10), False) is None, (
        "the mean of the last three is now above a half"
    )


def test_rows_without_targets_are_found():
    guard = BatchGuard("raise", max_empty_rows=0.25)
    assert guard.observe(1, 30, 1, ONE, False) is None
    with pytest.raises(
        DataError, match=r"step 2: 2 of 4 rows have no target \(data\.max_empty_rows=0\.25\)"
    ):
        guard.observe(2, 20, 2, ONE, False)


def test_the_same_tokens_in_other_rows_are_found_and_the_same_rows_are_not():
    guard = BatchGuard("raise")
    seen = [
        guard.repeats(content, place, step)
        for step, (content, place) in enumerate([(1, "a"), (2, "b"), (1, "a"), (2, "c")])
    ]
    assert seen == [False, False, False, True]
    for content in range(10, 3000):  # long ago is forgotten
        assert not guard.repeats(content, str(content), content)
    assert not guard.repeats(1, "z", 3000) and guard.repeats(2999, "z", 3001)
    with pytest.raises(
        DataError, match=r"step 5: its tokens are those of an earlier batch of other rows"
    ):
        guard.observe(5, 40, 0, ONE, True)
    for policy in ("skip", "rollback", "stop", "warn"):
        verdict = BatchGuard("raise", repeated=policy).observe(5, 40, 0, ONE, True)
        assert (verdict.stop, verdict.back) == (
            policy == "stop",
            policy if policy in ("skip", "rollback") else "",
        )
        assert "(data.repeated)" in verdict.message
    with pytest.raises(DataError, match=r"or set data\.zero_weight to stop or warn"):
        BatchGuard("raise", repeated="warn").observe(5, 0, 4, ONE, True)


def test_warnings_come_with_growing_gaps():
    guard = BatchGuard("warn")
    verdicts = [guard.observe(step, 0, 0, ONE, False) for step in range(1, 101)]
    assert not any(verdict.stop for verdict in verdicts) and guard.found == 100
    told = [step for step, verdict in enumerate(verdicts, 1) if verdict.message]
    assert told == [1, 2, 3, 4, 8, 16, 32, 64] and "(64 such steps)" in verdicts[63].message


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=30), st.data()
)
def test_a_guard_that_goes_on_from_its_state_judges_as_one_that_never_stopped(steps, data):
    def check(guard, numbered):
        return [
            guard.observe(
                step,
                targets,
                0,
                ONE,
                guard.repeats(content << 60, f"place {step % 3}", step),
            )
            for step, (targets, content) in numbered
        ]

    numbered, options = list(enumerate(steps)), ("warn", 0.5, 1.0, 4, "warn")
    stop = data.draw(st.integers(0, len(steps)))
    whole, first, second = (BatchGuard(*options) for _ in range(3))
    expected, before = check(whole, numbered), check(first, numbered[:stop])
    second.restore(GuardState(**json.loads(json.dumps(first.state()._asdict()))))
    assert before + check(second, numbered[stop:]) == expected and second.state() == whole.state()


def test_the_state_of_a_guard_is_small():
    guard = BatchGuard("warn", patience=1000)
    for step in range(5000):
        guard.repeats(step * 2**50, f"{step * 2**45:016x}", step)
        guard.observe(step, step % 40 / 3, 0, ONE, False)
    assert len(json.dumps(guard.state()._asdict())) < 15_000 + 22 * 1000


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["inputs", "targets", "segment_ids", "positions", "loss_mask"]), st.data())
def test_the_quick_look_never_misses_what_the_slow_one_finds(name, data):
    """Whatever value at whatever place, of whole rows and of columns from `first` on."""
    first = data.draw(st.sampled_from([0, 3]))
    batch = {key: np.ascontiguousarray(array[:2, :6]) for key, array in good().items()}
    batch["segment_ids"][1] = [1, 2, 2, 2, 3, 4] if data.draw(st.booleans()) else [1, 1, 1, 0, 0, 0]
    batch["loss_mask"][1] = batch["segment_ids"][1] > 0
    values = (
        [np.nan, np.inf, -1.0, -0.0, 0.5]
        if name == "loss_mask"
        else [-1, -(2**31), 0, 1, 2, 3, 4, 5, 9, 10, 2**31 - 1]
    )
    batch[name][data.draw(st.integers(0, 1)), data.draw(st.integers(0, 5))] = data.draw(
        st.sampled_from(values)
    )
    broken = any(wrong.any() for _, _, wrong, _ in batch_checks._invariants(batch, 10, first))
    assert not (broken and batch_checks._sound(batch, 10, first))
    if broken:
        with pytest.raises(DataError, match=r"position \d+: "):
            check_batch(batch, 10, str, first)
    else:
        check_batch(batch, 10, str, first)
    assert batch_checks._sound({key: array[:1] for key, array in good().items()}, 10, 0), (
        "mostly quick"
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_checksums_of_parts_sum_to_that_of_the_batch(rows, length, data):
    targets = np.random.default_rng(0).integers(0, 2**31, (rows, length)).astype(np.int32)
    whole = checksum(targets, np.arange(rows), 0)
    of_host, cut = (
        np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))),
        data.draw(st.integers(0, length)),
    )
    parts = [
        (which, first, end)
        for which in (of_host, ~of_host)
        for first, end in ((0, cut), (cut, length))
    ]
    sums = [
        checksum(targets[which, first:end], np.flatnonzero(which), first)
        for which, first, end in parts
    ]
    assert sum(sums) % 2**64 == whole < 2**64
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, length - 1))
    targets[row, column] ^= 1 << data.draw(st.integers(0, 30))
    assert checksum(targets, np.arange(rows), 0) != whole
    swapped = np.roll(targets, 1, axis=data.draw(st.integers(0, 1)))
    assert (
        checksum(swapped, np.arange(rows), 0) == checksum(targets, np.arange(rows), 0)
    ) == np.array_equal(swapped, targets)
