"""A live line that fits the terminal, plain lines that align, or nothing."""

import io
import math

import pytest
from rich.console import Console

from maxtrain.observe.progress import Progress

RECORD = {
    "loss": 2.34567,
    "tokens_per_second": 12_345,
    "mfu": 0.412,
    "step_seconds": 0.05,
    "other": None,
}


def run(mode, width=100, **terminal):
    """Return the output of a short run at its end."""
    file = io.StringIO()
    with Progress(mode, 2000, Console(file=file, width=width, **terminal)) as progress:
        progress.phase("compiling the step ...")
        progress.update(1)
        progress.update(340, RECORD)
        progress.evaluated(
            340,
            "val",
            {"nll": 2.5, "perplexity": 12.18, "bits_per_byte": 1.25, "tokens": 1_234_567},
        )
        progress.message("saved [the] checkpoint", style="dim")
        progress.update(2000, RECORD | {"loss": math.nan})
    return file.getvalue()


def test_plain_lines_are_compact_and_aligned():
    lines = run("plain", width=40).splitlines()
    assert lines == [
        "compiling the step ...",
        "step   340/2,000  loss  2.3457  12.3k tok/s  MFU 41.2%   1:23 left",
        "step   340/2,000  eval val: nll 2.5000  perplexity 12.18  1.2500 bits/byte  (1.23M tokens)",
        "saved [the] checkpoint",
        "step 2,000/2,000  loss     nan  12.3k tok/s  MFU 41.2%",
    ]


def test_auto_is_plain_without_a_terminal_and_live_in_one():
    assert run("auto") == run("plain")
    assert "\x1b[" in run("auto", force_terminal=True)


ROLLOUT = {
    "loss": 0.5,
    "reward": 0.359,
    "kl": None,
    "completion_length": 4.57,
    "sampling_seconds": 17.5,
    "sampled_tokens_per_second": 133.3,
    "reward_seconds": 0.1,
    "scoring_seconds": 4.12,
    "step_seconds": 3.0,
    "rollout_seconds": 22.0,
    "tokens_per_second": 783.0,
}


def test_steps_that_learn_from_rewards_say_what_their_time_went_to():
    """The time that is left has that of rollouts in it, of which not every step has one."""
    file = io.StringIO()
    with Progress("plain", 20, Console(file=file)) as progress:
        progress.update(1, ROLLOUT)
        progress.update(2, ROLLOUT | {"rollout_seconds": 0.0, "accuracy": 0.25, "kl": 0.0123})
        answered = {"reward": 0.5, "completion_length": 5.0, "truncated": 0.1, "prompts": 1319}
        progress.evaluated(2, "held", answered | {"accuracy": 0.496})
        progress.evaluated(2, "bare", {"prompts": 2, "completion_length": 5.0})
    assert file.getvalue().splitlines() == [
        "step  1/20  reward  0.3590  length    4.6   7:55 left  sampling  17.5 s  (133 tok/s)  "
        "rewards   0.1 s  scoring   4.1 s  training   3.0 s  (783 tok/s)",
        "step  2/20  reward  0.3590  accuracy  25.0%  length    4.6  KL  0.0123   4:12 left  "
        "sampling  17.5 s  (133 tok/s)  rewards   0.1 s  scoring   4.1 s  training   3.0 s  "
        "(783 tok/s)",
        "step  2/20  eval held: accuracy 49.6%  reward 0.5000  length 5.0  truncated 10.0%  "
        "(1,319 prompts)",
        "step  2/20  eval bare: length 5.0  (2 prompts)",
    ]


def test_off_prints_nothing():
    assert run("off") == ""


def test_live_messages_stand_above_the_line():
    output = run("rich", force_terminal=True, color_system=None)
    assert output.count("eval val: nll 2.5000") == 1 and output.count("saved [the] checkpoint") == 1
    assert "compiling the step ..." in output
    assert "━" in output and output.rstrip().endswith("MFU 41.2%\n\x1b[?25h"), (
        "the last state stays, the cursor comes back"
    )


def test_some_records_stay_above_the_live_line():
    file = io.StringIO()
    with Progress(
        "rich", 2000, Console(file=file, width=100, force_terminal=True, color_system=None)
    ) as progress:
        for step in range(10, 2001, 10):
            progress.update(step, RECORD | {"loss": float(step)})
    output = file.getvalue()
    standing = [
        line
        for line in output.splitlines()
        if "loss" in line and "━" not in line and "─" not in line
    ]
    losses = [float(line.split("loss")[1].split()[0]) for line in standing]
    assert {10.0, 30.0, 1990.0} <= set(losses) and not {20.0, 40.0} & set(losses)


def test_samples_stand_with_their_step():
    file = io.StringIO()
    with Progress("plain", 2000, Console(file=file, width=40)) as progress:
        progress.sample(340, "Once [upon]", " a time")
    assert file.getvalue() == "step   340/2,000  sample: Once [upon] a time\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("phase", ["", "evaluating the validation set ..."])
def test_the_live_line_is_one_line_of_the_terminal(width, phase):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    progress = Progress("rich", 20_000, console)
    progress.update(1234, RECORD)
    console.file.seek(0)
    console.file.truncate()
    progress.phase(phase)
    console.print(progress, end="")
    (line,) = console.file.getvalue().splitlines()
    assert len(line) < width
    assert ("─" in line) == (width >= 80)
    if not phase and width >= 80:
        assert line.endswith("15:38 left") and "loss  2.3457" in line


def test_a_record_may_lack_anything():
    file = io.StringIO()
    with Progress("plain", 0, Console(file=file)) as progress:
        progress.update(0, {})
        progress.evaluated(0, "val", {"nll": 3.0})
    assert file.getvalue() == "step 0/0\nstep 0/0  eval val: nll 3.0000\n"


def test_plain_lines_are_flushed_one_by_one():
    class FlushedFile(io.StringIO):
        flushed = ""

        def flush(self):
            self.flushed = self.getvalue()

    file = FlushedFile()
    with Progress("plain", 2000, Console(file=file)) as progress:
        for say in (
            lambda: progress.phase("compiling"),
            lambda: progress.update(1, RECORD),
            lambda: progress.message("saved"),
        ):
            say()
            assert file.flushed == file.getvalue() and file.flushed.endswith("\n")
