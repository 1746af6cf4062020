"""The plan: bijections, exact shares, whole epochs, an end that brute force confirms, and errors
that say what to do."""

import collections
import dataclasses
import itertools
import json
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from data_pipeline.config import DataConfig, SourceConfig, StageConfig
from data_pipeline.plan.order import integer_weights, permute, prefix_counts, round_keys
from data_pipeline.plan.plan import Cursor, Plan, PlanRows, PlanSource

LENGTH = 16
LENGTHS = (LENGTH, 8, 40)


def plan_source(uid, tokens):
    return PlanSource(uid, tokens, {length: -(-tokens // length) for length in LENGTHS})


def shuffled(length, keys):
    return permute(np.arange(length), np.full(length, length), np.tile(keys, (length, 1)))


def solve(
    sizes, batch_size=4, steps="auto", weights=None, epochs=None, seed=0, cursor=None, **config
):
    """Plan over sources named a, b, ... of `sizes` rows."""
    names = "abcdefgh"[: len(sizes)]
    weights, epochs = weights or [1.0] * len(sizes), epochs or [1.0] * len(sizes)
    sources = {
        n: plan_source(f"uid-{n}", size * LENGTH) for n, size in zip(names, sizes, strict=True)
    }
    given_sources = {
        n: SourceConfig(n, w, e) for n, w, e in zip(names, weights, epochs, strict=True)
    }
    config = DataConfig(sources=given_sources, seq_length=LENGTH, batch_size=batch_size, **config)
    return Plan.solve(seed, sources, config, steps, cursor)


@st.composite
def plans(draw, policies=("stop", "renormalize", "repeat"), shapes=True):
    """Arguments of `solve` that have a solution with an end: 1 to 6 sources, weights over 5 orders
    of magnitude, stages."""
    count = draw(st.integers(1, 6))
    weight = st.floats(-5, 0).map(lambda x: 10**x)
    case = {
        "sizes": draw(st.lists(st.integers(1, 300), min_size=count, max_size=count)),
        "weights": draw(st.lists(weight, min_size=count, max_size=count)),
        "epochs": draw(
            st.lists(
                st.one_of(st.integers(1, 3).map(float), st.floats(0.3, 3)),
                min_size=count,
                max_size=count,
            )
        ),
        "seed": draw(st.integers(0, 2**63)),
        "batch_size": draw(st.integers(1, 9)),
        "on_exhausted": draw(st.sampled_from(policies)),
    }
    names = "abcdefgh"[:count]
    ends = sorted(draw(st.sets(st.integers(1, 40), max_size=2)))
    if ends:
        mixtures = st.dictionaries(st.sampled_from(names), weight)
        sizes, lengths = st.sampled_from([None, 3, 5]), st.sampled_from([None, *LENGTHS])
        shape = st.tuples(sizes, lengths) if shapes else st.just((None, None))
        case["stages"] = (
            *(StageConfig(e, "steps", draw(mixtures), *draw(shape)) for e in ends),
            StageConfig(None, "steps", dict.fromkeys(names, 1), *draw(shape)),
        )
    return case


def solved(case):
    """The plan of a case, with a smaller batch where the case has less than one."""
    try:
        plan = solve(**case)
    except ConfigError as error:
        assert "larger than the data set" in str(error)
        plan = solve(
            **case | {"batch_size": 1, "stages": ()} | {"epochs": [1.0] * len(case["sizes"])}
        )
    if num_rows(plan) > 20_000:  # a rare source with `repeat` or `renormalize` can make a run long
        plan = dataclasses.replace(plan, num_steps=min(plan.num_steps, 2_000))
    return plan


def num_rows(plan):
    return plan.row_range(plan.num_steps)[0]


def triples(rows):
    return list(zip(*(part.tolist() for part in rows), strict=True))


def everything(plan):
    return plan.rows(0, num_rows(plan))


@pytest.mark.parametrize(
    "lengths",
    [range(1, 601), [2**k + d for k in range(10, 17) for d in (-1, 0, 1)]],
    ids=["small", "powers"],
)
def test_permutation_is_a_bijection(lengths):
    for length in lengths:
        assert np.array_equal(
            np.sort(shuffled(length, round_keys(1, "x", length % 3))), np.arange(length)
        ), length


@pytest.mark.slow
@pytest.mark.parametrize("k", range(17, 21))
def test_permutation_is_a_bijection_of_long_sources(k):
    for length in (2**k - 1, 2**k, 2**k + 1):
        assert np.array_equal(
            np.sort(shuffled(length, round_keys(1, "x", 0))), np.arange(length)
        ), length


@given(st.integers(1, 2**42), st.integers(0, 2**64 - 1), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_permutation_of_any_length_stays_inside_and_apart(length, seed, epoch):
    keys = round_keys(seed, "uid", epoch)
    position = np.unique(np.linspace(0, length - 1, 500).astype(np.int64))
    result = permute(position, np.full(position.size, length), np.tile(keys, (position.size, 1)))
    assert result.min() >= 0 and result.max() < length and np.unique(result).size == position.size


def test_neighbouring_seeds_epochs_and_positions_are_unrelated():
    length = 10_007
    orders = {
        (s, e): shuffled(length, round_keys(s, "uid", e)) for s in (6, 7, 8) for e in (0, 1, 2)
    }
    orders["identity"] = np.arange(length)
    for (name, first), (other, second) in itertools.combinations(orders.items(), 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.05, (name, other)
    for order in [orders[7, 0], orders[7, 1]]:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        low_bits = (order & 1).astype(
            float
        )  # a linear round function would leave these predictable
        assert (
            max(abs(np.corrcoef(low_bits[:-lag], low_bits[lag:])[0, 1]) for lag in (1, 2, 3, 4, 8))
            < 0.05
        )


@given(st.lists(st.floats(-5, 0).map(lambda x: 10**x), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_shares_of_every_prefix_are_right_within_two_rows(weights):
    whole = integer_weights(weights)
    assert sum(whole) == 1 << 20 and min(whole) >= 1
    order = sorted(whole, reverse=True)
    k = np.arange(50_000) if len(weights) < 4 else np.arange(0, 1 << 22, 997)
    counts = np.stack(prefix_counts(k, order))
    assert (counts.sum(0) == k).all()
    assert np.abs(counts - np.outer(np.array(order) / (1 << 20), k)).max() < 2
    assert (np.diff(np.stack(prefix_counts(np.arange(5000), order))) >= 0).all()
    assert [int(c[-1]) for c in counts] == prefix_counts(int(k[-1]), order)


@given(plans(), st.integers(1, 64), st.data())
@settings(max_examples=100, deadline=None)
def test_stream_is_one_for_every_split_into_hosts_and_batches(case, hosts, data):
    plan = solved(case)
    total = num_rows(plan)
    stream = triples(everything(plan))
    assert len(stream) == total and len(set(stream)) == total, "a row came twice"
    edges = [plan.row_range(step) for step in range(plan.num_steps)]
    assert [first for first, _ in edges[1:]] == [end for _, end in edges[:-1]] and edges[0][0] == 0
    step = data.draw(st.integers(0, plan.num_steps - 1))
    (first, end), span = plan.row_range(step), plan.span(step)
    batch = plan.rows(first, end)
    assert end - first == span.batch_size
    cuts = [h * span.batch_size // hosts for h in range(hosts + 1)]
    split = [triples(part[a:b] for part in batch) for a, b in itertools.pairwise(cuts)]
    assert triples(batch) == list(itertools.chain.from_iterable(split)) == stream[first:end]
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    assert [r for a, b in itertools.pairwise(cuts) for r in triples(plan.rows(a, b))] == stream


def wire(cursor):
    """A cursor as it comes back from a checkpoint's record."""
    return Cursor(**json.loads(json.dumps(cursor._asdict())))


@given(plans(), st.data())
@settings(max_examples=100, deadline=None)
def test_from_a_cursor_the_same_settings_give_the_same_plan(case, data):
    try:
        whole = solve(**case)
    except ConfigError as error:
        assert "larger than the data set" in str(error)
        return
    step = data.draw(st.integers(0, whole.num_steps))
    try:
        rest = solve(**case, cursor=wire(whole.cursor_at(step)))
    except ConfigError as error:
        assert "larger than the data set" in str(error)
        return
    steps = min(whole.num_steps, step + 2_000)
    rest = dataclasses.replace(rest, num_steps=min(rest.num_steps, steps))
    first, end = whole.row_range(step)[0], whole.row_range(steps)[0]
    assert (
        rest.num_steps == steps
        and rest.row_range(steps)[0] == end
        and rest.tokens_at(steps) == whole.tokens_at(steps)
    )
    assert (
        triples(rest.rows(first, end)) == triples(whole.rows(first, end)) if end > first else True
    )
    assert rest.epochs_at(steps) == whole.epochs_at(steps) and rest.fingerprint_at(step) != ""


@given(plans(shapes=False), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_the_stream_goes_on_with_another_batch_size(case, batch_size, data):
    case = case | {"stages": (), "batch_size": min(case["batch_size"], sum(case["sizes"]))}
    try:
        before = solve(**case)
    except ConfigError as error:
        assert "larger than the data set" in str(error)
        return
    step = data.draw(st.integers(0, before.num_steps))
    try:
        after = solve(**case | {"batch_size": batch_size}, cursor=wire(before.cursor_at(step)))
    except ConfigError as error:
        assert "larger than the data set" in str(error)
        return
    first = before.row_range(step)[0]
    end = min(first + 500, num_rows(before), num_rows(after))
    assert (
        triples(after.rows(first, end)) == triples(before.rows(first, end)) if end > first else True
    )
    if case["on_exhausted"] != "repeat":  # there the last step is filled up
        assert abs(num_rows(before) - num_rows(after)) < 9


@pytest.mark.parametrize("change", ["seed", "rows"])
def test_another_order_or_other_rows_begin_a_fresh_pass_at_the_cursor(change):
    before = solve([40, 20], epochs=[3.0, 3.0])
    cursor = wire(before.cursor_at(6))
    sources = {n: plan_source(f"uid-{n}", size * LENGTH) for n, size in (("a", 40), ("b", 20))}
    if change == "rows":  # as where rows become whole documents
        sources = {
            n: s._replace(num_rows={length: rows + 1 for length, rows in s.num_rows.items()})
            for n, s in sources.items()
        }
    given_sources = {n: SourceConfig(n, 1.0, 3.0) for n in "ab"}
    config = DataConfig(sources=given_sources, seq_length=LENGTH, batch_size=4)
    after = Plan.solve(int(change == "seed"), sources, config, "auto", cursor)
    rows = triples(after.rows(24, num_rows(after)))
    assert (
        not set(rows) & set(triples(before.rows(0, 24))) and min(epoch for _, epoch, _ in rows) == 1
    )
    drawn, left = before.epochs_at(6), after.epochs_at(after.num_steps)
    assert (
        drawn == {"a": 0.3, "b": 0.6} and 2.8 < max(left.values()) <= 3.0 and left["a"] > drawn["a"]
    )


@pytest.mark.parametrize("policy", ["stop", "renormalize", "repeat", "error"])
def test_a_source_that_read_more_than_it_now_may_is_finished_and_ends_nothing_else(policy):
    before = solve([100, 100], epochs=[1.0, 1.0])
    later = (StageConfig(20, weights={"a": 1, "b": 1}), StageConfig(None, weights={"b": 1}))
    cursor = wire(before.cursor_at(20))
    plan = solve([100, 100], epochs=[0.2, 1.0], stages=later, on_exhausted=policy, cursor=cursor)
    assert plan.ends_because == "'b' completes epoch 1" or policy == "repeat"
    assert plan.num_steps == 35 and plan.epochs_at(35) == {"a": 0.4, "b": 1.0}
    both = solve([100, 100], epochs=[0.2, 1.0], on_exhausted="renormalize", cursor=cursor)
    assert both.num_steps == 35 and both.epochs_at(35) == {"a": 0.4, "b": 1.0}


def test_a_source_left_out_for_a_while_goes_on_where_it_was():
    first = solve([100, 100])
    config = DataConfig(sources={"b": SourceConfig("b")}, seq_length=LENGTH, batch_size=4)
    without = Plan.solve(
        0, {"b": plan_source("uid-b", 100 * LENGTH)}, config, 20, wire(first.cursor_at(10))
    )
    assert without.epochs_at(15) == {"b": 0.4}
    again = solve([100, 100], cursor=wire(without.cursor_at(15)))
    assert again.epochs_at(15) == {"a": 0.2, "b": 0.4}
    assert not set(triples(again.rows(60, 100))) & set(triples(first.rows(0, 40)))


@pytest.mark.parametrize("step", range(20, 24))
def test_a_stage_that_ends_in_tokens_ends_at_one_step_wherever_it_is_planned_from(step):
    stages = (
        StageConfig(20, batch_size=4),
        StageConfig(20 * 64 + 32 * 4 + 16, "tokens", batch_size=2),
        StageConfig(None),
    )
    whole = solve([400], stages=stages, epochs=[None], steps=60)
    rest = solve([400], stages=stages, epochs=[None], steps=60, cursor=wire(whole.cursor_at(step)))
    assert whole.spans[-1].step == rest.spans[-1].step == 25


@given(plans())
@settings(max_examples=100, deadline=None)
def test_every_finished_epoch_covers_every_row(case):
    plan = solved(case)
    rows = collections.defaultdict(list)
    for source, epoch, row in triples(everything(plan)):
        rows[source, epoch].append(row)
    grids = list({s.grid: None for s in plan.segments})
    for (source, epoch), found in rows.items():
        grid = next(g for g in reversed(grids) if g.epoch[source] <= epoch)
        size = grid.num_rows[source]
        cut_off = any(g.epoch[source] == epoch + 1 for g in grids)  # by a new grid
        later = (source, epoch + 1) in rows and not cut_off
        assert sorted(found) == list(range(size)) if later else set(found) <= set(range(size))
    if len(grids) == 1:
        counts = np.bincount(everything(plan).source, minlength=len(plan.names))
        passes = counts / list(grids[0].num_rows)
        assert plan.epochs_at(plan.num_steps) == dict(zip(plan.names, passes.tolist(), strict=True))


@pytest.mark.long
@given(
    st.lists(st.floats(0, 6).map(lambda x: int(10**x)), min_size=1, max_size=6),
    st.integers(1, 64),
    st.data(),
)
@settings(max_examples=12, deadline=None)
def test_sources_of_up_to_a_million_rows_are_read_once_an_epoch_and_whole(sizes, hosts, data):
    """This repeats the two tests above, counted in arrays, in the first million rows."""
    policy = data.draw(st.sampled_from(["stop", "renormalize", "repeat"]))
    weights = data.draw(
        st.lists(st.floats(-5, 0).map(lambda x: 10**x), min_size=len(sizes), max_size=len(sizes))
    )
    plan = solve(
        sizes,
        1,
        weights=weights,
        epochs=[2.0] * len(sizes),
        seed=data.draw(st.integers(0, 99)),
        on_exhausted=policy,
    )
    total = min(num_rows(plan), 1_000_000)
    stream = plan.rows(0, total)
    source, epoch, row = (np.asarray(part, np.int64) for part in stream)
    passes = (source << 20) + epoch
    assert np.unique((passes << 20) + row).size == total, "a row came twice"
    assert (row >= 0).all() and (row < np.array(sizes)[source]).all()
    for one, count in (seen := collections.Counter(passes.tolist())).items():
        assert count == sizes[one >> 20] if one + 1 in seen else count <= sizes[one >> 20]
    first = data.draw(st.integers(0, max(0, total - 256)))
    cuts = [first + (min(total, 256) * host) // hosts for host in range(hosts + 1)]
    split = [triples(plan.rows(a, b)) for a, b in itertools.pairwise(cuts) if a < b]
    assert list(itertools.chain.from_iterable(split)) == triples(
        part[first : cuts[-1]] for part in stream
    )


def brute_force_end(case):
    """Steps until the end, counted row by row from each stage's shares."""
    names = "abcdefgh"[: len(case["sizes"])]
    tokens = {n: s * LENGTH for n, s in zip(names, case["sizes"], strict=True)}
    epochs, own = (dict(zip(names, case[what], strict=True)) for what in ("epochs", "weights"))
    stages = case.get("stages") or (StageConfig(None),)
    drawn, passes, row, in_step, step, length = (
        dict.fromkeys(names, 0),
        dict.fromkeys(names, 0.0),
        0,
        0,
        0,
        None,
    )
    used = {n for stage in stages for n in stage.weights or own}
    policy, mixture, limits = case["on_exhausted"], None, {}
    for stage in stages:
        batch_size = stage.batch_size or case["batch_size"]
        if (stage.seq_length or LENGTH) != length:
            sizes = {n: -(-tokens[n] // length) if length else 1 for n in names}
            passes = {n: passes[n] + drawn[n] / sizes[n] for n in names}
            length, drawn, mixture = stage.seq_length or LENGTH, dict.fromkeys(names, 0), None
            sizes = {n: -(-tokens[n] // length) for n in names}
            limits = {
                n: max(passes[n] == 0, round((epochs[n] - passes[n]) * sizes[n])) for n in names
            }
        while stage.until is None or step < stage.until:
            weights = stage.weights or own
            order = sorted(weights, key=lambda n: (-weights[n], f"uid-{n}"))
            going = [n for n in order if policy != "renormalize" or drawn[n] < limits[n]]
            if mixture:
                same = [n for n in order if n in mixture[0]]
                kept = (
                    same == mixture[0] and integer_weights([weights[n] for n in same]) == mixture[1]
                )
                mixture = (
                    mixture
                    if kept and (same == order or (policy == "renormalize" and {*going} <= {*same}))
                    else None
                )
            if not mixture:
                if not going:
                    return step
                mixture = going, integer_weights([weights[n] for n in going])
                since, before = row, dict(drawn)
            order = mixture[0]
            counts = prefix_counts(row + 1 - since, mixture[1])
            now = before | {n: before[n] + c for n, c in zip(order, counts, strict=True)}
            if any(now[n] > limits[n] for n in order) and policy == "stop":
                return step
            if any(now[n] > limits[n] for n in order) and policy == "renormalize":
                mixture = None
                continue
            drawn, row, in_step = now, row + 1, in_step + 1
            if in_step == batch_size:
                step, in_step = step + 1, 0
            if policy == "repeat" and all(drawn[n] >= limits[n] for n in used):
                return step + (in_step > 0)
            if row > 5000:
                return None
    return step


@given(plans())
@settings(max_examples=200, deadline=None)
def test_end_equals_brute_force(case):
    end = brute_force_end(case)
    try:
        plan = solve(**case)
    except ConfigError as error:
        assert "larger than the data set" in str(error)
        return
    assert num_rows(plan) > 4990 if end is None else plan.num_steps == end


def test_a_source_keeps_its_order_whatever_else_is_read():
    alone = [(e, r) for _, e, r in triples(everything(solve([50], batch_size=5, epochs=[2.0])))]
    mixed = triples(everything(solve([50, 70], batch_size=7, epochs=[2.0, None], weights=[1, 3])))
    assert [(e, r) for s, e, r in mixed if s == 0] == alone[: sum(s == 0 for s, _, _ in mixed)]


def test_sources_go_on_where_they_left_off_in_the_next_stage():
    stages = (
        StageConfig(10, "steps", {"a": 1.0}),
        StageConfig(20, "steps", {"b": 1.0}),
        StageConfig(None, weights={"a": 1.0}),
    )
    plan = solve([100, 100], stages=stages)
    assert (plan.num_steps, plan.ends_because) == (35, "'a' completes epoch 1")
    assert plan.epochs_at(10) == {"a": 0.4, "b": 0.0} and plan.epochs_at(20) == plan.epochs_at(
        10
    ) | {"b": 0.4}
    assert sorted(r for s, _, r in triples(everything(plan)) if s == 0) == list(range(100))


def test_stage_ends_in_tokens_and_fractions():
    tokens = (
        StageConfig(10 * 4 * LENGTH, "tokens", {"a": 1.0}),
        StageConfig(None, weights={"b": 1.0}),
    )
    fractions = (StageConfig(0.5, "fraction", {"a": 1.0}), StageConfig(1.0, "fraction", {"b": 1.0}))
    for stages in (tokens, fractions):
        source = everything(solve([100, 100], stages=stages, steps=20)).source
        assert (source[:40] == 0).all() and (source[40:] == 1).all()


@pytest.mark.parametrize(
    ("policy", "steps", "reason"),
    [
        ("stop", 7, "'b' completes epoch 1"),
        ("renormalize", 12, "every source completes"),
        ("repeat", 20, "every source completes"),
    ],
)
def test_what_a_finished_source_does(policy, steps, reason):
    plan = solve([40, 10], weights=[2, 1], epochs=[1.0, 1.0], on_exhausted=policy)
    expected = {"stop": 30 // 4, "renormalize": 50 // 4, "repeat": 60 // 4}[policy]
    assert plan.num_steps == expected and reason in plan.ends_because


def test_on_exhausted_error_refuses_what_would_be_left_over():
    with pytest.raises(
        ConfigError,
        match=r"'b' completes its 1 epochs while there is more of a\. Set steps to a lower number",
    ):
        solve([40, 10], weights=[2, 1], on_exhausted="error")
    assert solve([40, 10], weights=[2, 1], on_exhausted="error", steps=5).num_steps == 5
    assert solve([40], on_exhausted="error").num_steps == 10
    with pytest.raises(ConfigError, match="steps=12 is beyond the plan's end at step 7"):
        solve([40, 10], weights=[2, 1], on_exhausted="error", steps=12)


def test_steps_beyond_the_end_names_both_numbers_and_the_choices():
    with pytest.raises(ConfigError) as caught:
        solve([40, 10], weights=[2, 1], steps=5000)
    message = str(caught.value)
    assert "steps=5,000 is beyond the plan's end at step 7, where 'b' completes epoch 1" in message
    for choice in (
        "at most 7",
        "steps=auto",
        "data.sources.NAME.epochs higher (now a 1, b 1; null: no end)",
        "(now stop) to renorm",
    ):
        assert choice in message
    assert solve([40, 10], weights=[2, 1], steps=5000, epochs=[None, None]).num_steps == 5000
    assert solve([40, 10], weights=[2, 1], steps=5000, on_exhausted="repeat").num_steps == 5000


BAD = [
    ({"sizes": []}, r"data\.sources is empty.*Set data\.sources\.NAME\.path"),
    (
        {"sizes": [3]},
        r"batch_size=4 is larger than the data set: 3 rows of 16 \(a 48 tokens\)\. Set .*at most 3",
    ),
    ({"sizes": [3], "epochs": [None], "steps": 10}, "Set data.batch_size to at most 3"),
    (
        {"sizes": [9, 9], "weights": [0, 0]},
        "all weights are 0.*Set one data.sources.NAME.weight above 0",
    ),
    (
        {"sizes": [9], "epochs": [None]},
        "steps=auto, but the plan has no end.*Set steps to a number",
    ),
    ({"sizes": [9], "epochs": [None], "steps": 1 << 41}, r"where 2\^42 rows are drawn"),
]


@pytest.mark.parametrize(("case", "message"), BAD)
def test_bad_sources(case, message):
    with pytest.raises(ConfigError, match=message):
        solve(**case)


def test_bad_stages_are_all_listed():
    stages = (
        StageConfig(10, "steps", {"a": 1.0, "web": 1.0}),
        StageConfig(10, "steps", {"a": 0.0}),
        StageConfig(None, weights={"a": 1.0}),
        StageConfig(0.5, "fraction", {"a": -1.0, "b": 1.0}),
    )
    with pytest.raises(ConfigError) as caught:
        solve([100, 100], stages=stages)
    expected = [
        "data.stages[0].weights.web=1.0: there is no such source. Choose from a, b",
        "data.stages[1].weights sum to 0, so nothing would be drawn. Give at least one",
        "data.stages[1].until=10 steps is step 10, but stages must increase and the one before ends at step 10. Set it to more",
        "data.stages[2].until=null, but only the last stage may be open. Set it to where",
        "data.stages[3].weights.a=-1.0 must be a finite number",
        "data.stages[3].until=0.5 is a fraction of `steps`, which is auto. Set steps to a number",
    ]
    assert len(caught.value.problems) == len(expected)
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("unit", ["steps", "tokens"])
@pytest.mark.parametrize(
    ("until", "fix"),
    [
        (0.8, "Write {until: 0.8, unit: fraction}"),
        (10.5, "Set it to 10"),
        (0.0, "Set it to more"),
        (-3.0, "Set it to more"),
    ],
)
def test_a_stage_ends_after_a_whole_number(unit, until, fix):
    """A share of the run is no number of steps, and would be rounded to a stage that is empty."""
    stages = (StageConfig(until, unit), StageConfig(None))
    with pytest.raises(ConfigError) as caught:
        solve([1000, 1000], stages=stages, steps=100)
    (problem,) = caught.value.problems
    assert f"data.stages[0].until={until:g}" in problem and fix in problem
    plan = solve([1000, 1000], stages=(StageConfig(0.8, "fraction"), StageConfig(None)), steps=100)
    assert plan.num_steps == 100


def test_the_same_data_under_two_names_is_refused():
    sources = dict.fromkeys("ab", plan_source("same", 100))
    config = DataConfig(sources=dict.fromkeys("ab", SourceConfig("x")), seq_length=LENGTH)
    with pytest.raises(
        ConfigError,
        match=r"data\.sources\.b and data\.sources\.a hold the same tokens.*Keep one of them",
    ):
        Plan.solve(0, sources, config, "auto")


def test_description_says_length_reason_and_epochs():
    plan = solve([40, 10], weights=[2, 1])
    assert (
        plan.describe()
        == "plan: 7 steps, 448 tokens (rows x length); ends because 'b' completes epoch 1; a 0.475 epochs, b 0.9 epochs"
    )
    assert "2.5 epochs" in solve([40], epochs=[2.5]).ends_because
    assert (
        solve([40], steps=3)
        .describe()
        .startswith("plan: 3 steps, 192 tokens (rows x length); ends because steps=3; a 0.3 epochs")
    )
    assert "1.6 k tokens" in solve([40], epochs=[2.5], batch_size=2).describe()


def fingerprint(plan):
    return plan.fingerprint_at(plan.num_steps)


def test_fingerprint_changes_with_the_stream_and_only_with_it():
    base = solve([40, 10], weights=[2, 1])
    for same in (solve([40, 10], weights=[4, 2]), pickle.loads(pickle.dumps(base))):
        assert fingerprint(same) == fingerprint(base)
    others = [
        solve([40, 10], weights=[2, 1], seed=1),
        solve([41, 10], weights=[2, 1]),
        solve([40, 10], weights=[3, 1]),
    ]
    others += [
        solve([40, 10], weights=[2, 1], batch_size=5),
        solve([40, 10], weights=[2, 1], steps=6),
    ]
    assert len({fingerprint(p) for p in [base, *others]}) == len(others) + 1
    longer = solve([40, 10], weights=[2, 1], on_exhausted="repeat", steps=50)
    assert longer.fingerprint_at(7) == fingerprint(base) and longer.fingerprint_at(
        3
    ) == base.fingerprint_at(3)
    assert others[-3].fingerprint_at(3) != base.fingerprint_at(3)


def test_looking_up_4096_rows_at_1e12_takes_under_10_ms():
    plan = solve([10**9, 10**8], weights=[9, 1], epochs=[None, None], batch_size=4096, steps=10**9)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        rows = plan.rows(10**12, 10**12 + 4096)
        seconds.append(time.perf_counter() - start)
    assert isinstance(rows, PlanRows) and rows.row.size == 4096 and min(seconds) < 0.010


def test_an_epoch_of_a_mixture_is_as_many_tokens_as_all_its_sources_hold():
    plan = solve(
        [30, 10], weights=[1.0, 1.0], epochs=[2.0, None], batch_size=4
    )  # half the rows are of each
    assert plan.num_steps == 30 and plan.epochs_at(15) == {"a": 1.0, "b": 3.0}
    assert plan.all_epochs_at(15) == 1.5 and plan.all_epochs_at(0) == 0
    assert [step for step in range(1, 31) if plan.falls_on("0.5 epochs", step)] == [
        5,
        10,
        15,
        20,
        25,
        30,
    ]
    assert [step for step in range(1, 31) if plan.falls_on("0.7 epochs", step)] == [7, 14, 21, 28]
    assert [step for step in range(1, 31) if plan.falls_on("1 epoch", step)] == [10, 20, 30]
    assert [step for step in range(1, 31) if plan.falls_on(12, step)] == [12, 24]
    assert not any(plan.falls_on(0, step) for step in range(1, 31))
    assert all(plan.falls_on("0.001 epochs", step) for step in range(1, 31)), (
        "shorter than a step: after each"
    )
