"""Twenty AdamW steps through the project's own step, against the same steps by transformers and
torch.

`trajectory.npz` beside each parity case holds the batches, the learning rates, and what torch found
for them: losses and gradient norms before clipping, in float32 and again in float64, and the logits
of other tokens after the last step.
"""

import numpy as np
import pytest

from benchmarks.families import PARITY, PEAK, SCHEDULE, TrajectoryResult, twenty_steps
from maxtrain.config.schema import RematNamesConfig
from maxtrain.train_step.schedule import make_schedule
from tests.support.shared import PARITY_CASES, in_time

ON_HOST = RematNamesConfig(on_device=(), on_host=("product", "attention"))
# Losses of torch's float32 run are up to 2.6e-7 from those of its float64 run, norms up to 1.6e-6,
# of Mixtral 6.2e-6.
TOLERANCE = 2e-5


def assert_as_torch(case, found: TrajectoryResult) -> None:
    theirs = np.load(PARITY / case / "trajectory.npz")
    schedule = make_schedule(SCHEDULE, PEAK, len(theirs["tokens"]))
    rates = [float(schedule(step)) for step in range(len(theirs["tokens"]))]
    np.testing.assert_allclose(rates, theirs["learning_rate"], rtol=1e-6)
    np.testing.assert_allclose(found.losses, theirs["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(found.norms, theirs["grad_norm"], rtol=TOLERANCE)
    apart = np.abs(theirs["probe_logits"] - theirs["probe_logits64"]).max()
    atol = max(2e-5, 10 * apart)
    np.testing.assert_allclose(found.logits, theirs["probe_logits64"], rtol=0, atol=atol)


def thorough(*case):
    return pytest.param(*case, marks=pytest.mark.long)


def by_name(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize(
    ("case", "axes", "accumulation", "changes"),
    [
        thorough("llama3", {"fsdp": 1}, 1, {}),
        thorough("llama3", {"data": 2, "fsdp": 1, "tensor": 2}, 2, {"scan_layers": False}),
        thorough("llama_tied_mha", {"fsdp": 2}, 2, {"remat": "full"}),
        thorough("qwen3", {"fsdp": 1}, 1, {"attention": "eager"}),
        thorough("qwen3", {"data": 2, "fsdp": 2}, 1, {"loss_chunk": 32}),
        thorough("qwen3_moe", {"fsdp": 1}, 1, {}),
        thorough("mixtral", {"data": 2, "fsdp": 1, "tensor": 2}, 2, {"scan_layers": False}),
        thorough("llama3", {"fsdp": 2, "context": 2, "tensor": 2}, 2, {"attention": "ring"}),
        by_name("llama3", {"fsdp": 1, "context": 8}, 1, {"attention": "ring", "remat": "full"}),
        thorough("qwen3", {"fsdp": 2, "context": 2}, 1, {}),
        by_name(
            "mistral", {"fsdp": 2, "context": 4}, 1, {"attention": "ring", "scan_layers": False}
        ),
        thorough("mixtral", {"fsdp": 2, "context": 4}, 1, {"attention": "ring"}),
        by_name("gpt_oss", {"fsdp": 1, "context": 4}, 1, {"attention": "ring"}),
        by_name("deepseek_v3", {"fsdp": 2, "context": 4}, 1, {"attention": "ring"}),
        by_name("gemma2", {"fsdp": 2, "context": 4}, 1, {"attention": "ring"}),
        by_name("gpt2", {"fsdp": 2, "context": 2}, 2, {}),
        by_name("deepseek_v3", {"fsdp": 2, "stage": 2, "tensor": 2}, 1, {}),
        by_name("deepseek_v2", {"data": 2, "fsdp": 1, "stage": 2}, 2, {"remat": "full"}),
        by_name("llama3", {"fsdp": 2, "tensor": 2}, 1, {"remat": "named", "kept": ON_HOST}),
        thorough("mixtral", {"fsdp": 1, "expert": 4}, 1, {"scan_layers": False}),
        by_name("qwen3_moe", {"fsdp": 2, "expert": 2, "tensor": 2}, 1, {}),
        by_name("deepseek_v2", {"fsdp": 1, "expert": 8}, 1, {}),
        by_name("deepseek_v3", {"fsdp": 2, "expert": 2, "tensor": 2}, 1, {"remat": "full"}),
        by_name("gpt_oss", {"fsdp": 2, "expert": 4}, 1, {}),
        by_name("mixtral", {"fsdp": 2, "context": 2, "expert": 2}, 1, {"attention": "ring"}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_twenty_steps_are_those_of_transformers_and_torch(case, axes, accumulation, changes):
    assert_as_torch(case, twenty_steps(case, axes, accumulation, **changes))


@pytest.mark.usefixtures("optax_dtypes")
# Half a minute each, or a whole one.
@pytest.mark.parametrize("case", in_time(PARITY_CASES, ("llama3", "mixtral")))
def test_every_family_trains_the_same_on_eight_devices(case):
    """Training on one device equals that on eight, and both equal torch."""
    one = twenty_steps(case, {"fsdp": 1})
    assert_as_torch(case, one)
    eight = twenty_steps(case, {"fsdp": 4, "tensor": 2})
    assert_as_torch(case, eight)
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-5)
