"""Messages of a run about batches with few targets or none."""

import pytest

from data_pipeline.base.errors import DataError
from data_pipeline.loader.batch_checks import CHECK_DATA, BatchGuard
from maxtrain.config import load_config
from maxtrain.trainer.health import advice_on_targets

SAMPLES = {
    "grpo": ["objective=grpo", "grpo.rewards=[gsm8k]"],
    "ppo": ["objective=ppo", "model.value=true", "grpo.rewards=[gsm8k]"],
    "distill": [
        "objective=distill",
        "distill.on_policy=true",
        "distill.teacher=runs/teacher",
        "distill.weight=1",
    ],
}


@pytest.fixture(scope="module")
def advice(tmp_path_factory, tiny_run):
    """The advice of a config with further settings."""
    config = tiny_run(tmp_path_factory.mktemp("health"), texts=1)
    return lambda *settings: advice_on_targets(load_config([f"config={config}", *settings]))


@pytest.mark.parametrize(
    ("objective", "section"), [("grpo", "grpo"), ("ppo", "grpo"), ("distill", "distill")]
)
def test_masked_completions_are_the_cause_where_they_are_masked(advice, objective, section):
    masks = f"{section}.mask_truncated_completions"
    longest = f"{section}.max_completion_length"
    samples = [*SAMPLES[objective], "data.packing=pad", f"{longest}=7"]
    masked = advice(*samples, f"{masks}=true")
    assert f"{masks}=true" in masked and f"{masks}=false" in masked and f"{longest}=7" in masked
    unmasked = advice(*samples)
    assert masks not in unmasked
    for text in (masked, unmasked):
        assert ("reward" in text) == (objective == "ppo")
        assert "documents" not in text


def test_runs_that_read_documents_are_told_to_look_at_them(advice):
    assert advice() == CHECK_DATA


@pytest.mark.parametrize("policy", ["raise", "stop", "warn"])
def test_the_guard_gives_the_advice_for_missing_targets_alone(policy):
    def message(targets, repeated):
        guard = BatchGuard(policy, repeated=policy, advice="Do this")
        try:
            found = guard.observe(3, targets, 0, (4, 8), repeated)
        except DataError as error:
            return str(error)
        return found.message

    assert "Do this" in message(0, False) and CHECK_DATA not in message(0, False)
    assert "Do this" not in message(9, True) and CHECK_DATA in message(9, True)
