"""Launch plan, checked before anything is written: a bad key is refused here, and not hours later
in a queue.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipeline.base.errors import ConfigError, UsageError
from maxtrain.config import RunConfig, fit_to_devices, fit_to_fewer, fit_to_planned
from maxtrain.config.across.attention_choice import Hardware, choose
from maxtrain.config.kernels import AUTO
from maxtrain.config.load import ModelLookup, load_with_notes
from maxtrain.config.sections.mesh import num_slices, slow_axes_of
from maxtrain.config.shipped import find_file, shipped_configs

# The verbs that can be launched.
VERBS = ("train", "doctor")
_PLACE = ("coordinator", "num_processes", "process_id")


class JobDevices(NamedTuple):
    """Devices of a job."""

    # Description for messages, such as "2 nodes with 8 GPUs each".
    words: str
    processes: int
    # Devices of each process; 0: CPUs, as many as mesh.simulated_devices says, or else one; None:
    # that is known only there.
    per_process: int | None
    # What mesh.platform may be.
    platforms: tuple[str, ...]
    # Groups of devices between which there is only the network of hosts; 1: that does not matter.
    slices: int = 1

    def count(self, config: RunConfig) -> int | None:
        """All devices of the job; None: not known here."""
        simulated = config.mesh.simulated_devices
        if simulated:
            return self.processes * simulated
        if self.per_process is None:
            return None
        return self.processes * (self.per_process or 1)

    def platform(self, config: RunConfig) -> str | None:
        """Return the kind of these devices; None if it is not known here."""
        if config.mesh.simulated_devices:
            return "cpu"
        if config.mesh.platform != "auto":
            return config.mesh.platform
        known = [platform for platform in self.platforms if platform != "auto"]
        if len(known) == 1:
            return known[0]
        return None


class LaunchPlan(NamedTuple):
    """Command and config of each process of a job."""

    config: RunConfig
    verb: str
    # Arguments of the verb, as they were typed.
    arguments: list[str]
    # Words that run `maxtrain`.
    program: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The whole command."""
        return [*self.program, self.verb, *self.arguments]

    @property
    def config_file(self) -> Path | None:
        """The config file, if it is none of those that come with the package."""
        for word in self.arguments:
            name, _, reference = word.partition("=")
            if name == "config" and reference not in _packaged():
                return find_file(reference)
        return None

    def with_setting(self, key: str, value: int) -> "LaunchPlan":
        """The same with a setting, in place of one of this key."""
        kept = [word for word in self.arguments if not word.startswith(f"{key}=")]
        return self._replace(arguments=[*kept, f"{key}={value}"])

    def with_config_at(self, place: str) -> "LaunchPlan":
        """The same with the config file at another place."""
        arguments = []
        for word in self.arguments:
            if word.startswith("config="):
                word = f"config={place}"
            arguments.append(word)
        return self._replace(arguments=arguments)


def nodes_of_slices_are_known(plan: LaunchPlan, given: JobDevices, per_node: int) -> bool:
    """Return whether each slice of the mesh is a node, or a process: which nodes make a larger one
    is not known before its devices are.
    """
    return num_slices(plan.config.mesh) in (1, given.processes // per_node, given.processes)


def enough_nodes(plan: LaunchPlan, given: JobDevices, per_node: int) -> list[int]:
    """Numbers of nodes, fewer than those of a job, that its run can do with; the most first.

    Args:
        plan: of the run; without mesh.min_processes it needs all.
        given: what the job is given.
        per_node: processes on each node.
    """
    config = plan.config
    least = config.mesh.min_processes
    count = given.count(config)
    if plan.verb != "train" or least is None or count is None:
        return []
    if not nodes_of_slices_are_known(plan, given, per_node):
        return []
    nodes = given.processes // per_node
    had = max(given.processes, config.mesh.planned_processes or 0)
    found = []
    for fewer in range(nodes - 1, 0, -1):
        processes = fewer * per_node
        if processes < least:
            break
        if fit_to_fewer(config, had, processes, count // given.processes):
            found.append(fewer)
    return found


def _packaged() -> list[str]:
    """Names of the configs that come with the package."""
    here = Path("configs").absolute()
    return [name for name, path in shipped_configs().items() if path.absolute().parent != here]


def make_plan(
    verb: str,
    settings: Sequence[str],
    options: Sequence[str],
    given: JobDevices,
    models: ModelLookup,
    program: Sequence[str],
) -> LaunchPlan:
    """A checked plan; what the config has to say is printed to stderr.

    Args:
        verb: what each process runs.
        settings: `config=NAME` and overrides.
        options: of the verb, after its settings.
        given: what the job is given.
        models: what is known of models elsewhere.
        program: words that run `maxtrain`.

    Raises:
        UsageError: a run has no options.
        ConfigError: every problem of the config, or the mesh does not fit the devices.
    """
    if verb == "train" and options:
        raise UsageError(f"{options[0]}: a run has no options. Write its settings as key=value.")
    config = RunConfig()
    if settings or verb == "train":
        loaded = load_with_notes(settings, models)
        config = loaded.config
        for note in loaded.notes:
            print(f"maxtrain launch: {note}", file=sys.stderr)
    _require_fit(config, given)
    count = given.count(config)
    if count and verb == "train":
        planned = config.mesh.planned_processes or 0
        here = config
        if planned > given.processes:
            per_process = count // given.processes
            here = fit_to_planned(config, given.processes, per_process)
        fitted = fit_to_devices(here, count)
        _require_slices(fitted, given)
        _print_attention(fitted, given)
    # A config may be named without `config=`; nothing else is without a key here.
    named = [word if "=" in word else f"config={word}" for word in settings]
    return LaunchPlan(config, verb, [*named, *options], tuple(program))


def _require_fit(config: RunConfig, given: JobDevices) -> None:
    """ConfigError: a key of `mesh` does not go with what the job is given."""
    mesh = dataclasses.asdict(config.mesh)
    problems = []
    for name in _PLACE:
        if mesh[name] is not None:
            problems.append(
                f"mesh.{name}={mesh[name]} is found out by each process of a job that is launched. "
                f"Set mesh.{name}=null."
            )
    if config.mesh.platform not in given.platforms:
        choices = " or ".join(given.platforms)
        problems.append(
            f"mesh.platform={config.mesh.platform} is not what {given.words} are. "
            f"Set mesh.platform to {choices}."
        )
    if config.mesh.simulated_devices and "cpu" not in given.platforms:
        problems.append(
            f"mesh.simulated_devices={config.mesh.simulated_devices} are CPUs, and {given.words} "
            "are not. Set mesh.simulated_devices=null."
        )
    least = config.mesh.min_processes
    if least is not None and least > given.processes:
        problems.append(
            f"mesh.min_processes={least} is more than the {given.processes} processes of "
            f"{given.words}. Set mesh.min_processes to at most {given.processes}."
        )
    is_tpu = "tpu" in given.platforms and "cpu" not in given.platforms
    if is_tpu and least is not None and least < given.processes:
        problems.append(
            f"mesh.min_processes={least}: a job of TPUs starts with all hosts of all its slices, "
            "or not at all. Leave it out. To go on with fewer slices, launch with fewer --slices "
            f"and mesh.planned_processes={given.processes}."
        )
    if problems:
        raise ConfigError(problems)


def _print_attention(config: RunConfig, given: JobDevices) -> None:
    """Prints which kernel auto will choose.

    Args:
        config: with all axes of its mesh filled in.
        given: what the job is given.

    Raises:
        ConfigError: its devices do not have the kernel that is named.
    """
    platform = given.platform(config)
    if platform is None:
        return
    choice = choose(Hardware(platform, f"{platform.upper()}s"), config)
    # On CPUs it is the same for all, and processes here say it themselves.
    if config.model.attention == AUTO and platform != "cpu":
        note = "a run that goes on keeps the kernel that it has"
        print(f"maxtrain launch: {choice.line} ({note})", file=sys.stderr)


def _require_slices(config: RunConfig, given: JobDevices) -> None:
    """ConfigError: heads or rows would be split over the network between slices, or there are
    other slices than the mesh has.

    Args:
        config: with all axes of its mesh filled in.
        given: what the job is given.
    """
    mesh = config.mesh
    slow = slow_axes_of(mesh)
    if given.slices > 1 and slow and math.prod(slow.values()) != given.slices:
        axes = " x ".join(f"{key}={size}" for key, size in slow.items())
        raise ConfigError(
            f"{axes} must be the number of slices, {given.slices}. Set {' and '.join(slow)} so "
            "that they multiply to it; or, if the settings are meant for more slices, set "
            "mesh.planned_processes to the hosts of these."
        )
    parts = mesh.data * mesh.stage * mesh.fsdp * math.prod(slow.values())
    if parts % given.slices:
        axes = f"mesh.data={mesh.data} x mesh.stage={mesh.stage} x mesh.fsdp={mesh.fsdp}"
        rule = f"must be a multiple of the {given.slices} slices of {given.words}"
        why = "only the network of the hosts is between slices, too slow for mesh.tensor or context"
        raise ConfigError(
            f"{axes} = {parts} {rule}: {why}. "
            f"Set mesh.data to {given.slices}, or mesh.tensor and mesh.context lower."
        )
