"""Curves and the summary, also of runs that are short, empty or broken."""

import io
import itertools
import math
import warnings

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from maxtrain.observe.curves import plot_curves
from maxtrain.observe.report import summary, terminal_curve


def train(step, **values):
    return {
        "kind": "train",
        "step": step,
        "loss": 2 + 6 * math.exp(-step / 50),
        "learning_rate": 1e-3,
        **values,
    }


def evaluation(step, name="val", nll=3.0):
    return {"kind": "eval", "step": step, "set": name, "nll": nll, "bits_per_byte": 1.0}


RUN = [
    train(s, tokens_seen=s * 512, tokens_per_second=1e4, grad_norm=1.0) for s in range(10, 400, 10)
] + [
    evaluation(200),
    evaluation(390, nll=2.2),
]


def has_color(image, red, green, blue):
    return (
        np.abs(image[..., :3] - np.array([red, green, blue]) / 255).max(axis=-1) < 0.02
    ).sum() > 20


def test_the_picture_shows_losses_evaluations_speed_and_rate(tmp_path):
    plot_curves(RUN, tmp_path / "curves.png", "a run", "small print")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    image = matplotlib.image.imread(tmp_path / "curves.png")
    assert image.shape[0] > 800 and image.shape[1] > 1200
    for color in ((31, 119, 180), (255, 127, 14), (140, 86, 75), (44, 160, 44), (148, 103, 189)):
        assert has_color(image, *color), color


def test_small_print_of_many_stages_leaves_room_for_the_curves(tmp_path):
    """On one line it was wider than the picture, and all charts shrank to nothing."""
    stages = "; ".join(f"from step {n}00 on 8 rows x {n}96 tokens" for n in range(1, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves(RUN, tmp_path / "curves.png", "a run", f"{stages}; $cost 5% $")
    image = matplotlib.image.imread(tmp_path / "curves.png")
    # The curve of training goes from the left to the right.
    blue = np.abs(image[..., :3] - np.array([31, 119, 180]) / 255).max(axis=-1) < 0.02
    columns = np.flatnonzero(blue.any(axis=0))
    assert columns[-1] - columns[0] > 0.7 * image.shape[1]


@pytest.mark.every_dose
@pytest.mark.long
def test_where_a_run_went_on_and_where_batches_changed_is_marked(tmp_path):
    def picture(**marks):
        plot_curves(RUN, tmp_path / "curves.png", "a run", **marks)
        return matplotlib.image.imread(tmp_path / "curves.png")[..., :3]

    without = picture()
    for marks in ({"resumes": [100, 200]}, {"changes": [300]}):
        assert (picture(**marks) != without).any(axis=-1).sum() > 500, marks


def test_the_summary_says_what_the_training_loss_is_a_mean_of():
    records = [train(s, tokens_seen=s * 512, loss=3.5, step_loss=3.0) for s in (10, 20)]
    text = " ".join(printed(summary("r", 20, records, {})).replace("│", " ").split())
    assert "training loss 3.5000 (mean of 10 steps)" in text
    records[1] |= {"loss": None}
    assert "training loss 3.5000 (mean of 10 steps)" in " ".join(
        printed(summary("r", 20, records, {})).replace("│", " ").split()
    )


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    "records",
    [
        [],
        [train(1)],
        [evaluation(0)],
        [train(1, loss=math.nan), train(2, loss=math.inf), evaluation(2, nll=math.nan)],
        [train(s, loss=5.0, tokens_per_second=None) for s in range(3)],
        [evaluation(s, name) for name in "abcdefgh" for s in range(30)],
        [{"kind": "train", "step": 1}],
    ],
    ids=["none", "one", "only eval", "not finite", "constant", "many sets", "no numbers"],
)
def test_any_run_can_be_drawn(tmp_path, records):
    plot_curves(records, tmp_path / "curves.png", "run $1_2$ — é")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def heights(chart, height):
    """The curve's height in eighths of a line, for each column of characters."""
    rows = [line.split("┤" if "┤" in line else "│", 1)[1] for line in chart.splitlines()[:height]]
    return [sum(" ▁▂▃▄▅▆▇█".index(cell) for cell in column) for column in zip(*rows, strict=True)]


def test_a_falling_line_falls_in_the_terminal():
    chart = terminal_curve(range(0, 1001, 10), np.linspace(8, 2, 101), width=60, height=12)
    lines = chart.splitlines()
    assert len(lines) == 14 and max(map(len, lines)) == 60
    assert (
        lines[0].startswith("  8 ┤")
        and lines[3].startswith("6.5 ┤")
        and lines[-1].endswith("step 1,000")
    )
    found = heights(chart, 12)
    assert found[0] == 96 and found[-1] == 1, "from the upper left to the lower right"
    assert all(0 <= a - b <= 3 for a, b in itertools.pairwise(found)), (
        "one connected line that only falls"
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), max_size=80),
    st.integers(20, 120),
    st.integers(3, 20),
)
def test_a_chart_always_fits_and_has_every_column(values, width, height):
    chart = terminal_curve(range(len(values)), values, width, height)
    if sum(map(math.isfinite, values)) < 2:
        assert chart == ""
        return
    lines = chart.splitlines()
    assert len(lines) == height + 2 and max(map(len, lines)) <= max(width, len(lines[-2]))
    assert all(1 <= n <= 8 * height for n in heights(chart, height))


def printed(renderable, width=80, **terminal):
    file = io.StringIO()
    Console(file=file, width=width, **terminal).print(renderable)
    return file.getvalue()


def test_the_summary_says_everything_and_fits():
    text = printed(
        summary(
            run_name="quick[start]",
            steps=1500,
            records=[
                *(train(s, tokens_seen=3_072_000, loss=2.34567) for s in (1499, 1500)),
                evaluation(1000, nll=9.0),
                evaluation(1500, nll=2.19)
                | {"perplexity": 8.935, "bits_per_byte": 0.95364, "tokens": 1_234_567},
                {"kind": "eval", "step": 1500, "set": "bare", "nll": 3.0},
                {"kind": "eval", "step": 500, "set": "early", "nll": 300.0, "perplexity": 1.94e130},
            ],
            seconds={"eval": 20.0, "step": 130.0, "data_wait": 0.0},
            comparison="gzip -9 reaches 1.98 bits per byte on the same text",
            ending="the plan ended: source a finished its epochs",
            files={"checkpoints": "runs/[x]/checkpoints"},
        )
    )
    squeezed = " ".join(text.replace("│", " ").split())
    for part in (
        "quick[start]",
        "1,500 steps, 3.07M targets (tokens with a loss), training loss 2.3457, 2:30 of wall time",
        "step 1,500 ",
        "val 2.1900 8.94 0.9536 1,234,567",
        "bare 3.0000 - - -",
        "early, step 500 300.0000 1.94e+130 - -",
        "gzip -9 reaches 1.98 bits per byte on the same text",
        "the plan ended",
        "step 2:10 86.7%",
        "data wait 0:00 0.0%",
        "checkpoints runs/[x]/checkpoints",
    ):
        assert part in squeezed, part
    assert "\x1b" not in text and all(len(line) <= 80 for line in text.splitlines())


def test_the_summary_has_what_the_objective_evaluates_with_its_unit():
    records = [
        evaluation(2) | {"distill": 0.19661, "tokens": 10},
        {"kind": "eval", "step": 2, "set": "bare", "nll": 3.0},
    ]
    records[0]["agreement"] = 0.5
    units = {"distill": "nats per target", "agreement": "share of targets", "z": "not evaluated"}
    text = printed(summary(run_name="r", steps=2, records=records, seconds={}, units=units))
    squeezed = " ".join(text.replace("│", " ").split())
    assert "val, distill 0.1966 nats per target" in squeezed
    assert "val, agreement 0.5000 share of targets" in squeezed
    assert "not evaluated" not in squeezed and "bare," not in squeezed
    assert all(len(line) <= 80 for line in text.splitlines())


def rollout(step, **values):
    """A record of a step that learns from rewards."""
    return train(
        step,
        tokens_seen=step * 100,
        reward=step / 100,
        completion_length=5.0,
        entropy=0.5,
        **values,
    )


@pytest.mark.every_dose
@pytest.mark.long
def test_rewards_are_drawn_in_the_place_of_the_loss(tmp_path):
    """There is a panel for each number; one more makes the picture higher."""

    def height(records):
        plot_curves(records, tmp_path / "curves.png", "a run")
        return matplotlib.image.imread(tmp_path / "curves.png").shape[0]

    plain = height(RUN)
    rewards = [rollout(step) for step in range(1, 50)]
    answered = {"kind": "eval", "step": 49, "set": "held", "reward": 0.6, "prompts": 3}
    without = height(rewards)
    assert without - plain == pytest.approx(2 * 1.2 * 150, abs=3)
    more = [rollout(step, kl=0.1) for step in range(1, 50)]
    assert height([*more, answered]) - without == pytest.approx(1.2 * 150, abs=3)
    # An accuracy that is evaluated has a panel, too.
    right = answered | {"accuracy": 0.5}
    assert height([*more, right]) - without == pytest.approx(2 * 1.2 * 150, abs=3)
    parts = [record | {"reward/a": 0.1, "reward/b": 0.2} for record in more]
    assert height(parts) - without == pytest.approx(2 * 1.2 * 150, abs=3)


def test_the_summary_of_rewards_has_them_before_and_after():
    records = [
        rollout(1),
        rollout(2),
        {"kind": "eval", "step": 0, "set": "held", "reward": 0.25, "prompts": 1319}
        | {"accuracy": 0.125, "completion_length": 8.0, "truncated": 0.5},
        {"kind": "eval", "step": 2, "set": "held", "reward": 1.5, "prompts": 1319},
        evaluation(2, "text"),
    ]
    text = printed(summary("r", 2, records, {}, samples="SAMPLES"))
    squeezed = " ".join(text.replace("│", " ").split())
    assert "reward 0.0100 at first and 0.0200 in the end" in squeezed
    assert "training loss" not in squeezed
    assert "held, step 0 12.5% 0.2500 8.0 50.0% 1,319" in squeezed
    assert "held, step 2 - 1.5000 - - 1,319" in squeezed
    assert "text 3.0000" in squeezed and "SAMPLES" in squeezed


def test_the_summary_of_nothing():
    nothing = summary(run_name="r", steps=0, records=[], seconds={})
    text = printed(nothing)
    assert "0 steps, 0:00 of wall time" in text and "loss" not in text
    assert "\x1b[" in printed(nothing, force_terminal=True)


@pytest.mark.every_dose
@pytest.mark.long
def test_anomalies_are_marked_and_what_was_left_out_is_shaded(tmp_path):
    """Neither is drawn where all is well; a record of nothing has no loss."""
    records = [
        r | ({"anomalies/dead": 2} if r["step"] >= 200 else {}) for r in RUN if r["kind"] == "train"
    ]
    records[3] |= {"loss": None}
    red, shade = (214, 39, 40), (249, 222, 223)
    for left_out, marked in (((), records[:15]), ([[50, 90]], records)):
        plot_curves(marked, tmp_path / "curves.png", "a run", left_out=left_out)
        image = matplotlib.image.imread(tmp_path / "curves.png")
        assert has_color(image, *red) == has_color(image, *shade) == bool(left_out)
