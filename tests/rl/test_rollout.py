"""A rollout as a file and as rows: what is stored is what is read, and every token is where it
belongs."""

import numpy as np
import pytest

from maxtrain.objectives.grpo import ADVANTAGES, IS_FIRST, NUM_COMPLETIONS, OLD, SAMPLED
from maxtrain.rl.rollout import DamagedRolloutError, Rollout, from_bytes, load
from maxtrain.rl.rows import RowShape, batch_arrays, count_rows

GROUP = 3
PROMPTS = ([9, 8, 7], [6], [5, 4])


@pytest.fixture(scope="module")
def rollout():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, GROUP * len(PROMPTS)).astype(np.int32)
    count = int(lengths.sum())
    return Rollout(
        prompts=np.concatenate(PROMPTS).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in PROMPTS], np.int32),
        tokens=rng.integers(10, 90, count).astype(np.int32),
        lengths=lengths,
        sampled=-rng.random(count).astype(np.float32),
        old=-rng.random(count).astype(np.float32),
        reference=np.zeros(0, np.float32),
        truncated=np.arange(len(lengths)) == 4,
        rewards=np.array([[np.nan, *rng.random(len(lengths) - 1)]]),
        advantages=rng.normal(size=len(lengths)),
        about={"identity": "x", "numbers": {"reward": 0.1}},
    )


def test_what_is_stored_is_read(tmp_path, rollout):
    path = tmp_path / "rollouts" / "1.npz"
    rollout.save(path)
    again = load(path)
    assert again.digest() == rollout.digest()
    assert again.about == rollout.about
    for name, array in rollout.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array)
        assert again.arrays()[name].dtype == array.dtype


@pytest.mark.parametrize("damage", ["short", "flipped", "other", "gone"])
def test_a_damaged_file_is_noticed(tmp_path, rollout, damage):
    path = tmp_path / "1.npz"
    if damage == "other":
        rollout._replace(advantages=rollout.advantages + 1).save(path)
        with np.load(path) as file:
            content = dict(file)
        rollout.save(path)
        with np.load(path) as file:
            content["about"] = file["about"]
        np.savez(path, **content)
    elif damage != "gone":
        rollout.save(path)
        content = bytearray(path.read_bytes())
        content[content.index(rollout.tokens.tobytes())] ^= 1
        if damage == "short":
            content = content[: len(content) // 2]
        path.write_bytes(bytes(content))
    with pytest.raises(DamagedRolloutError):
        load(path)


@pytest.mark.every_dose
@pytest.mark.long
def test_every_other_bit_is_noticed_or_says_nothing(rollout):
    """This includes bits for which numpy or zipfile raise undocumented exceptions."""
    content = rollout.to_bytes()
    noticed = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        try:
            assert from_bytes(bytes(flipped)).digest() == rollout.digest()
        except DamagedRolloutError:
            noticed += 1
    assert noticed > len(content) / 2


def test_how_long_it_took_is_no_part_of_what_is_learnt(rollout):
    other = rollout._replace(about=rollout.about | {"numbers": {"reward": 0.2}})
    assert other.content() == rollout.content()
    assert other.digest() != rollout.digest()


def test_every_completion_lies_in_a_row_behind_its_prompt(rollout):
    arrays, places = batch_arrays(rollout, RowShape(16, 2, 0.1), is_first=True)
    assert places.num_rows % 2 == 0
    found = {}
    for row in range(places.num_rows):
        segments = arrays["segment_ids"][row]
        for number in range(1, segments.max() + 1):
            here = segments == number
            inputs = arrays["inputs"][row, here].tolist()
            targets = arrays["targets"][row, here].tolist()
            assert inputs[1:] == targets[:-1]
            is_target = arrays["loss_mask"][row, here] > 0
            assert arrays["positions"][row, here].tolist() == list(range(len(inputs)))
            (advantage,) = set(arrays[ADVANTAGES][row, here].tolist())
            completion = tuple(np.array(targets)[is_target].tolist())
            of_tokens = [arrays[name][row, here][is_target].tolist() for name in (OLD, SAMPLED)]
            prompt = inputs[: len(inputs) + 1 - len(completion)]
            found[completion] = (prompt, advantage, *of_tokens)
    assert len(found) == len(rollout.lengths)
    ends = np.cumsum(rollout.lengths)
    for i, end in enumerate(ends):
        part = slice(end - rollout.lengths[i], end)
        assert found[tuple(rollout.tokens[part].tolist())] == (
            list(PROMPTS[i // GROUP]),
            np.float32(rollout.advantages[i]),
            rollout.old[part].tolist(),
            rollout.sampled[part].tolist(),
        )
    assert arrays[NUM_COMPLETIONS].sum() == len(rollout.lengths)
    assert arrays[IS_FIRST].all()
    flat = arrays["targets"].reshape(-1)
    np.testing.assert_array_equal(flat[places.tokens], rollout.tokens)


def test_groups_are_taken_from_two_rollouts_with_all_that_is_known_of_them(rollout):
    """The result is the one by hand, completion by completion; unknown values stay unknown."""
    other = rollout._replace(tokens=rollout.tokens + 100, prompts=rollout.prompts + 100)
    both = rollout.joined(other)
    chosen = [4, 0, 3]
    found = both.taken(chosen)
    assert [of_prompt(found, number) for number in range(3)] == [
        of_prompt(both, number) for number in chosen
    ]
    assert of_prompt(both, 4)["prompt"] == [106]
    assert found.reference.size == 0
    assert found.about == rollout.about
    np.testing.assert_array_equal(both.taken(range(3)).tokens, rollout.tokens)


def of_prompt(rollout, number):
    """Return the stored values of a prompt and its completions."""
    group = slice(GROUP * number, GROUP * (number + 1))
    end = rollout.prompt_lengths[: number + 1].sum()
    first, last = [rollout.lengths[:count].sum() for count in (group.start, group.stop)]
    found = {"prompt": rollout.prompts[end - rollout.prompt_lengths[number] : end].tolist()}
    for name in ("tokens", "sampled", "old"):
        found[name] = rollout.arrays()[name][first:last].tolist()
    for name in ("lengths", "truncated", "advantages"):
        found[name] = rollout.arrays()[name][group].tolist()
    found["rewards"] = np.nan_to_num(rollout.rewards[:, group], nan=-1.0).tolist()
    return found


def test_truncated_completions_may_be_left_out(rollout):
    whole, _ = batch_arrays(rollout, RowShape(16, 1, 0.1), is_first=False)
    masked, _ = batch_arrays(rollout, RowShape(16, 1, 0.1, mask_truncated=True), is_first=False)
    missing = whole["loss_mask"].sum() - masked["loss_mask"].sum()
    assert missing == rollout.lengths[rollout.truncated].sum()
    assert masked[NUM_COMPLETIONS].sum() == len(rollout.lengths)


def test_with_room_for_the_longest_a_place_does_not_depend_on_lengths(rollout):
    """Neither on its own, nor on those of others."""
    shape = RowShape(16, 2, 0.1, room=5)
    count = len(rollout.lengths)
    longest = rollout._replace(
        lengths=np.full(count, 5, np.int32),
        **dict.fromkeys(("sampled", "old"), np.zeros(5 * count, np.float32)),
        tokens=np.arange(5 * count, dtype=np.int32),
    )
    assert rollout.lengths.min() < 5
    firsts = []
    for each in (rollout, longest):
        _, places = batch_arrays(each, shape, is_first=True)
        begins = np.cumsum(each.lengths) - each.lengths
        firsts.append((places.num_rows, places.tokens[begins].tolist()))
    assert firsts[0] == firsts[1]


def test_there_are_few_numbers_of_rows():
    assert sorted({count_rows(least, 1) for least in range(1, 49)}) == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    ]
    assert all(count_rows(least, 6) >= least for least in range(1, 200))
    assert count_rows(13, 6) == 18
