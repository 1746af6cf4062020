"""Rules of data, evaluation, folders, steps and checkpoints: each message has the value and the
advice."""

import pytest

from tests.config.checking import check_accepted, check_problem


@pytest.mark.parametrize(
    ("overrides", "value", "advice"),
    [
        # limits of single keys
        (
            ["data.batch_size=0"],
            "data.batch_size=0 must be at least 1",
            "Set data.batch_size to at least 1",
        ),
        (["steps=0"], "steps=0 must be at least 1", "Set steps to at least 1"),
        (["seed=-1"], "seed=-1", "Set seed to at least 0"),
        (
            ["seed=1e10"],
            "seed=10000000000 must be at most 4294967295",
            "Set seed to at most 4294967295",
        ),
        (["data.sources.stdlib.weight=-1"], "data.sources.stdlib.weight=-1.0", "to at least 0"),
        (["eval_steps=-2"], "eval_steps=-2 must be at least -1", "Set eval_steps to at least -1"),
        # the run
        (["run_name=a/b"], "run_name='a/b' must be the name of one folder", "Set run_name=NAME"),
        (["run_name=.."], "run_name='..'", "Set run_name=NAME"),
        (
            ["eval.sets={}"],
            "eval_interval=100 needs an evaluation set",
            "Add eval.sets.NAME.path=DIR, or set eval_interval=0",
        ),
        (
            ["eval_steps=0"],
            "eval_steps=0 would evaluate nothing, every eval_interval=100",
            "Set eval_steps=-1",
        ),
        # directories
        (
            ["output_dir=data/stdlib/eval/../train/"],
            "data.sources.stdlib.path=data/stdlib/train",
            "Set output_dir to another",
        ),
        (
            ["output_dir=data/stdlib", "run_name=eval"],
            "eval.sets.heldout.path=data/stdlib/eval",
            "Set output_dir to another",
        ),
        (["data.sources={}"], "data.sources is empty", "Add data.sources.NAME.path=DIR"),
        (
            ["data.seq_length=2048"],
            "data.seq_length=2048 must be at most model.max_length=1024",
            "model.max_length=2048",
        ),
        (
            ["data.corruption.span=3"],
            "data.corruption.span=3.0 is not used with data.corruption.rate=0",
            "corruption.rate=0.15",
        ),
        (
            ["data.fill_patience=3"],
            "data.fill_patience=3 is not used with data.min_fill=0.0",
            "Set data.min_fill=0.5",
        ),
        (
            ["data.on_long=skip"],
            "data.on_long=skip is not used with data.packing=stream",
            "Set data.packing=bins",
        ),
        (
            ["data.balance_rows=2"],
            "data.balance_rows=2 is for balanced, not for data.packing=stream",
            "Set data.packing=balanced",
        ),
        (
            ["data.packing=balanced", "data.balance_rows=6", "optimizer.accumulation=4"],
            "data.balance_rows=6 must be divisible by optimizer.accumulation=4",
            "Set data.balance_rows to 4 or 8",
        ),
        (
            ["data.packing=balanced", "data.balance_rows=64"],
            "data.balance_rows=64 must be at most data.batch_size=",
            "Set data.balance_rows to ",
        ),
        (
            [
                "data.packing=balanced",
                "loss.by_source=true",
                "data.sources.a.path=a",
                "data.sources.b.path=b",
            ],
            "loss.by_source=true needs rows of one source each, and data.packing=balanced puts",
            "Set loss.by_source=false",
        ),
        (
            ["checkpoint.init_partial=[head]"],
            "is not used without checkpoint.init_from",
            "Set checkpoint.init_from",
        ),
        (
            ["checkpoint.init_from=a", "checkpoint.init_partial=['(']"],
            "checkpoint.init_partial=( must be a reg",
            "special char",
        ),
        (
            ["checkpoint.copy_keep=2"],
            "checkpoint.copy_keep=2 is not used without checkpoint.copy_to",
            "Set checkpoint.copy_to",
        ),
        (
            ["checkpoint.upload_every=2"],
            "checkpoint.upload_every=2 is not used without checkpoint.local",
            "Set checkpoint.local",
        ),
        (
            ["checkpoint.copy_to=gs://bucket/a"],
            "checkpoint.copy_to=gs://bucket/a must be a directory",
            "to where it is mounted",
        ),
        (
            ["checkpoint.copy_to=runs"],
            "checkpoint.copy_to=runs is output_dir itself",
            "to a directory on another disk",
        ),
        (
            ["checkpoint.copy_to=a/../runs"],
            "checkpoint.copy_to=a/../runs is output_dir itself",
            "to a directory on another disk",
        ),
        (
            ["eval.stop_set=heldout"],
            "eval.stop_set=heldout is not used without eval.stop_patience",
            "Set eval.stop_patience=3",
        ),
        (
            ["eval.stop_patience=3", "eval.stop_set=no"],
            "eval.stop_set=no must be one of eval.sets",
            "Set eval.stop_set",
        ),
        (
            ["eval.stop_patience=3", "eval_interval=0"],
            "while training, but there are none",
            "Set eval_interval=100",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_one_problem_with_value_and_mend(overrides, value, advice):
    check_problem(overrides, value, advice)


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=auto", "schedule.warmup_steps=100000"],
        ["eval.sets={}", "eval_interval=0"],
        ["eval_steps=0", "eval_interval=0"],
        ["output_dir=data/stdlib"],
        [
            "data.sources.stdlib.path=s3://quickstart",
            "output_dir=s3:",
        ],  # a URL is no folder of this machine
        ["eval.sets.a.path=data/stdlib/train"],
        ["data.repeated=rollback", "anomaly.leave_out=3", "anomaly.max_rollbacks=9"],
        ["data.repeated=skip", "anomaly.max_rollbacks=9"],
        [
            "data.corruption.rate=0.1",
            "data.corruption.token_id=3",
            "data.min_fill=0.1",
            "data.fill_patience=3",
        ],
    ],
    ids=" ".join,
)
def test_what_is_fine_is_accepted(overrides):
    check_accepted(overrides)
