"""Messages about anomalies: each kind with its numbers and key, once for as long as it lasts."""

import numpy as np

from maxtrain.config.schema import ANOMALIES, AnomalyConfig
from maxtrain.observe.anomaly import Anomalies, counted


def value(*kinds, halted=False):
    found = np.array([kind in kinds for kind in ANOMALIES])
    numbers = {
        "loss": 9.5,
        "grad_norm": 4.0,
        "weight_norm": 7.0,
        "bad_leaf": 1,
        "bad_update": -1,
        "halted": halted,
        "found": found,
    }
    return numbers | {"median": np.array([2.0, 1.0, 5.0]), "deviation": np.array([0.5, 0.1, 0.0])}


def test_every_kind_has_its_numbers_its_key_and_a_mend():
    told = Anomalies(
        AnomalyConfig(weight_drift="stop"), ["embedding", "head"], lambda step: f"rows of {step}"
    )
    words = {found.kind: found for found in told.observe(8, value(*ANOMALIES))}
    assert list(words) == list(ANOMALIES) and all(
        found.fix and found.step == 8 for found in words.values()
    )
    expected = {
        "non_finite": "first in head; the step changed nothing (anomaly.non_finite=skip).\n  rows of 7",
        "loss_spike": "loss 9.5, gradient norm 4: more than 7 = 2 + 10 x 0.5 (median, deviations: anomaly.loss_limit)",
        "grad_spike": "more than 3 = 1 + 20 x 0.1 (median, deviations: anomaly.grad_limit); the run goes on",
        "weight_drift": "norm of all weights 7, more than anomaly.drift_limit=0.1 of it away from its median, 5",
        "dead": "for anomaly.dead_steps=16 steps no gradient, or the very same loss",
        "diverging": "the median of the loss is 2, more than anomaly.diverging_limit=1.5 times the lowest there was",
    }
    for kind, text in expected.items():
        assert f"step 8: {kind}: " in words[kind].message and text in words[kind].message


def test_an_update_that_would_not_be_finite_is_named():
    told = Anomalies(AnomalyConfig(), ["embedding", "opt_state.mu.embedding"], lambda step: "")
    (found,) = told.observe(8, value("non_finite") | {"bad_leaf": -1, "bad_update": 1})
    assert (
        "but the update would make opt_state.mu.embedding so; the step changed nothing"
        in found.message
    )


def test_what_lasts_is_told_once_and_what_halts_the_run_always():
    told = Anomalies(AnomalyConfig(dead="stop"), [], lambda step: "")
    seen = [
        [f.kind for f in told.observe(s, value(*kinds))]
        for s, kinds in enumerate([["diverging"], ["diverging"], []])
    ]
    assert seen == [["diverging"], [], []]
    again = [
        [f.kind for f in told.observe(s, value("diverging", "dead", halted=s == 4))] for s in (3, 4)
    ]
    assert again == [["dead", "diverging"]] * 2


def test_a_run_is_summed_up_in_a_line():
    assert counted({}, []) == ""
    back = [{"step": 1800, "kind": "dead", "left_out": [1793, 1800]}]
    line = "anomalies: 3 x loss_spike; back from step 1,800 (dead), left out 1,793 to 1,800"
    assert counted({"anomalies/loss_spike": 3}, back) == line
