"""Prompts with the answers of others: the rows that plain lists give."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.ops.mismatched import ROWS, mismatched

T = 12


compiled = jax.jit(mismatched)


def program(batch):
    return compiled({name: jnp.asarray(values) for name, values in batch.items()})


def rows_of(rows):
    """A batch of rows of (prompt, answer), lists of tokens; the first token of a prompt is no
    target."""
    batch = {name: np.zeros((len(rows), T), np.int32) for name in ROWS}
    batch["loss_mask"] = np.zeros((len(rows), T), np.float32)
    for row, documents in enumerate(rows):
        column = 0
        for number, (prompt, answer) in enumerate(documents):
            tokens = prompt + answer
            here = slice(column, min(column + len(tokens) - 1, T))
            size = here.stop - here.start
            batch["inputs"][row, here] = tokens[:-1][:size]
            batch["targets"][row, here] = tokens[1:][:size]
            batch["segment_ids"][row, here] = number + 1
            batch["positions"][row, here] = np.arange(size)
            batch["loss_mask"][row, here] = (np.arange(size) >= len(prompt) - 1) * 1.0
            column += size
    return batch


def by_hand(rows):
    """The same with lists: each prompt has the answer before it in its row, or that of the row
    before."""
    found = []
    for number, row in enumerate(rows):
        prompts = [prompt for prompt, _ in row]
        answers = [answer for _, answer in row]
        given_by = [answers[-1], *answers[:-1]] if row else []
        if len(row) == 1:
            before = rows[number - 1] if len(rows) > 1 else []
            given_by = [before[-1][1]] if before else [[]]
        found.append(list(zip(prompts, given_by)))
    return found


def fits(row):
    return sum(len(prompt) + len(answer) - 1 for prompt, answer in row) <= T


tokens = st.lists(st.integers(1, 99), min_size=1, max_size=4)
a_row = st.lists(st.tuples(tokens, tokens), max_size=4).filter(fits)


@given(st.one_of(st.lists(a_row, min_size=3, max_size=3), st.lists(a_row, min_size=1, max_size=1)))
def test_each_prompt_has_the_answer_before_it(rows):
    found = program(rows_of(rows))
    expected = rows_of(by_hand(rows))
    for name in ROWS:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_an_answer_that_does_not_fit_is_cut_and_documents_without_targets_give_none():
    long = ([1, 2], [3, 4, 5, 6, 7, 8, 9, 10])
    batch = rows_of([[([11] * 9, [12])], [long]])
    found = program(batch)
    np.testing.assert_array_equal(found["targets"][0], [*[11] * 8, 3, 4, 5, 6])
    np.testing.assert_array_equal(found["loss_mask"][0], [*[0] * 8, 1, 1, 1, 1])
    batch["loss_mask"][1] = 0
    found = program(batch)
    assert found["loss_mask"][0].sum() == 0
    assert found["loss_mask"][1].sum() == 1
