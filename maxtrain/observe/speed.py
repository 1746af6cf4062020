"""Speed of a run: tokens per second, model FLOPs utilisation (MFU), and waiting for data.

No jax: the caller that makes a meter passes the number of devices.
"""

from collections.abc import Mapping
from typing import NamedTuple

from maxtrain.models.cost import TokenFlops
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.stragglers import OwnTime
from maxtrain.parallel.hardware import Peak

# What the time of sampling, rewards and scoring is booked as.
ROLLOUT = "rollout"


class StepSize(NamedTuple):
    """Size of the data that a step has read."""

    targets: int
    rows: int
    length: int

    @property
    def positions(self) -> int:
        """Targets, and what is none: padding and what the loss mask leaves out."""
        return self.rows * self.length


class SpeedMeter:
    """Measures the steps between two records.

    Args:
        clock: books the time of the run.
        flops: of training on one token, for each length of rows in the plan.
        num_devices: of all processes together.

    Attributes:
        peak: of one device, which the speed is compared with; None: not known yet.
    """

    def __init__(self, clock: Stopwatch, flops: Mapping[int, TokenFlops], num_devices: int):
        self.peak: Peak | None = None
        self._clock = clock
        self._flops = flops
        self._num_devices = num_devices
        self._steps: list[StepSize] = []
        # Seconds that steps had waited for their batches at the last record, and that rollouts
        # took.
        self._waited = 0.0
        self._sampled = 0.0

    def restart(self) -> None:
        """Forgets the steps since the last record, which are made again."""
        self._steps = []
        self._waited = self._data_wait()
        self._sampled = self._clock.seconds().get(ROLLOUT, 0.0)

    def add(self, targets: int, rows: int, length: int) -> None:
        """A step that is finished."""
        self._steps.append(StepSize(targets, rows, length))

    @property
    def num_steps(self) -> int:
        """Finished steps since the last lap."""
        return len(self._steps)

    def own(self) -> OwnTime:
        """Return what this host took for its own part of the steps since the last lap."""
        return OwnTime(self._clock.own(), self._data_wait() - self._waited)

    def _data_wait(self) -> float:
        """Seconds that steps have waited for their batches since the run began."""
        return self._clock.seconds().get("data_wait", 0.0)

    def lap(self) -> dict[str, float | None]:
        """Return what to record of the steps since the last lap, of which there is at least one."""
        steps = self._steps
        self._steps = []
        seconds = self._clock.lap()
        waited = self._data_wait()
        waited_now = waited - self._waited
        self._waited = waited
        targets = sum(step.targets for step in steps)
        positions = sum(step.positions for step in steps)
        full = sum(step.positions * self._flops[step.length].full for step in steps)
        causal = sum(step.positions * self._flops[step.length].causal for step in steps)
        speed: dict[str, float | None] = {
            "fill": steps[-1].targets / steps[-1].positions,
            "tokens_per_second": targets / seconds,
            "positions_per_second": positions / seconds,
            "step_seconds": seconds / len(steps),
            "data_wait_seconds": waited_now / len(steps),
            "mfu": self._utilization(full, seconds),
            "mfu_causal": self._utilization(causal, seconds),
        }
        sampled = self._clock.seconds().get(ROLLOUT)
        if sampled is not None:
            # No part of step_seconds.
            speed["rollout_seconds"] = (sampled - self._sampled) / len(steps)
            self._sampled = sampled
        return speed

    def _utilization(self, flops: float, seconds: float) -> float | None:
        """Return the model FLOPs utilisation (MFU): achieved FLOP/s divided by peak FLOP/s; None if
        the peak is not known.
        """
        if self.peak is None:
            return None
        # The peak may be measured again, which is no time of the steps.
        with self._clock.during("compile"):
            return self.peak.share(flops / seconds / self._num_devices)
