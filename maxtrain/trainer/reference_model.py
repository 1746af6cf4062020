"""A frozen model beside the one that trains: the teacher of objective=distill, or the reference of
objective=dpo, grpo or ppo.

This module finds it, checks it against the run, and reads it onto the run's mesh. It is never saved
with the run. Checkpoints hold a digest of its arrays and of its config instead, so that a resumed
run must use the same model.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from data_pipeline.base.errors import ConfigError, DamagedError, StorageError
from data_pipeline.base.hub import download_hint
from data_pipeline.shards.teacher_logits import TeacherFiles
from data_pipeline.tokenizer import load_tokenizer
from maxtrain.checkpoint.listing import complete
from maxtrain.config.across.attention_choice import Hardware, choose, device_problems
from maxtrain.config.across.pipeline import layer_problems
from maxtrain.config.kernels import kernel_of_model
from maxtrain.config.schema import ModelConfig, PrecisionConfig, RunConfig
from maxtrain.config.sections.dpo import UNPAIRED
from maxtrain.models.families.directory import FREE, read_config, read_json
from maxtrain.objectives.distill import TEACHER
from maxtrain.objectives.objective import REFERENCE, Objective
from maxtrain.ops.digest import digests, hash_text
from maxtrain.parallel.hardware import hardware_of
from maxtrain.parallel.sharding import RULES, Rules
from maxtrain.storage.reading import readable_model
from maxtrain.train_step.state import TrainState, abstract_model
from maxtrain.trainer.saved_run import (
    load_run_tokenizer,
    read_run_config,
    restore_variables,
    step_of,
    tokenizer_place,
)
from maxtrain.weights.hf import load_weights


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """Description of a frozen model, before any of its weights are read.

    Attributes:
        role: TEACHER or REFERENCE, as objectives name it. The record of a checkpoint holds its
            digest by this name.
        name: the setting that names it, such as `distill.teacher=DIR`.
        directory: of a run, or of Hugging Face weights.
        model, precision: the config sections of this model.
        run, step: the config of the run, and the checkpoint's step; None: it is no run of maxtrain.
    """

    role: str
    name: str
    directory: Path
    model: ModelConfig
    precision: PrecisionConfig
    run: RunConfig | None = None
    step: int | None = None

    def describe(self) -> str:
        """Return the directory, and for a run the step."""
        if self.run is None:
            return f"{self.directory}"
        return f"{self.directory}, step {self.step:,}"

    def function(self) -> str:
        """Hash the config that determines what is computed with the arrays. A change of config may
        mean another model with the same weights."""
        return function_of(self.model, self.precision)

    def abstract(self, mesh: Mesh, rules: Rules = RULES) -> tuple[nnx.GraphDef, nnx.State]:
        """Return the structure, and the parameters as abstract arrays with shardings on this mesh,
        by the storage rules.

        Raises:
            ConfigError: the mesh does not divide a dim, or its devices lack a kernel.
        """
        hardware = hardware_of(next(iter(mesh.devices.flat)))
        kernel = kernel_of_model(self.model.attention)
        with self._telling_whose_keys():
            problems = list(device_problems(kernel, hardware))
            if problems:
                raise ConfigError(problems)
            return abstract_model(self.model, self.precision, mesh, rules)

    def with_kernel(self, run: RunConfig, hardware: Hardware) -> "FrozenModel":
        """Choose the attention kernel that suits the rows of a run, and use the run's pipeline
        stages.

        Raises:
            ConfigError: as for `choose`, or the stages do not divide the layers.
        """
        model = dataclasses.replace(self.model, pipeline=run.model.pipeline)
        beside = dataclasses.replace(run, model=model, precision=self.precision)
        problems = list(layer_problems(beside, has_weights=True))
        if problems:
            raise ConfigError([f"{self.name}, whose layers these are: {one}" for one in problems])
        with self._telling_whose_keys():
            kernel = choose(hardware, beside).kernel
        return dataclasses.replace(self, model=dataclasses.replace(model, attention=kernel))

    @contextlib.contextmanager
    def _telling_whose_keys(self) -> Iterator[None]:
        """Add to a ConfigError that the keys it names belong to the frozen model."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(
                f"{self.name} can't be used on these devices: {error} "
                "The keys named are its own, not the run's."
            ) from error

    def require_same_tokens(self, vocab_size: int) -> None:
        """Raise a ConfigError if the vocabulary is not of this size."""
        if self.model.vocab_size != vocab_size:
            raise ConfigError(
                f"{self.name} has a vocabulary of {self.model.vocab_size:,} "
                f"entries, and the model has {vocab_size:,}: their distributions can't be "
                f"compared. Set model.vocab_size={self.model.vocab_size} if the data's tokenizer "
                f"is that of the {self.role}, or choose another {self.role}."
            )

    def require_same_tokenizer(self, sha256: str) -> None:
        """Raise a ConfigError if the model was trained with another tokenizer than the one with
        this hash."""
        place = str(self.directory)
        if self.run is None:
            tokenizer = load_tokenizer(place)
        else:
            place = tokenizer_place(self.directory)
            tokenizer = load_run_tokenizer(self.directory, self.step)
        if tokenizer.sha256 != sha256:
            raise ConfigError(
                f"{self.name} has another tokenizer, {tokenizer.describe()}, than the data (sha256 "
                f"{sha256[:12]}), so that ids would mean different text. Prepare the data with "
                f"`--tokenizer {place}`, or choose another {self.role}."
            )

    def require_length(self, length: int) -> None:
        """Raise a ConfigError if rows have more tokens than the model's context length."""
        if length > self.model.max_length:
            raise ConfigError(
                f"{self.name} is meant for at most {self.model.max_length:,} "
                f"tokens (its max_length), and rows have {length:,}. "
                f"Set data.seq_length={self.model.max_length} or less, or choose another "
                f"{self.role}."
            )

    def load(self, params: nnx.State) -> nnx.State:
        """Read the parameters into arrays with these shapes and shardings.

        Raises:
            StorageError, DataError: the parameters cannot be read, are damaged, or are not finite.
        """
        if self.run is None:
            return load_weights(params, self.directory, self.model)
        folder = self.directory / "checkpoints"
        try:
            return restore_variables(folder, self.run, params, self.step)
        except DamagedError as damage:
            # The checkpoint belongs to another run, so it is not moved to quarantine.
            raise StorageError(
                f"{self.name}: {damage.path} is damaged: {damage.what}. Name another step of it."
            ) from damage


def find_for(objective: Objective, config: RunConfig) -> FrozenModel | None:
    """Find the frozen model that an objective needs; None: it needs none, or its reference is the
    policy without adapters.

    Raises:
        ConfigError: there is none where the config says, or it says nothing.
        UserError: something is wrong with its config.
    """
    if TEACHER in objective.models:
        return find_model(TEACHER, config.distill.teacher or "", "distill.teacher=")
    if REFERENCE not in objective.models:
        return None
    return find_reference(config)


def find_reference(config: RunConfig) -> FrozenModel | None:
    """Find the reference model of a run; None: it is the policy without adapters.

    Raises:
        ConfigError: there is none where the config says, or it says nothing.
        UserError: something is wrong with its config.
    """
    place = config.dpo.reference
    needed_by = f"dpo.loss_type={config.dpo.loss_type}"
    without = ", or dpo.loss_type=simpo"
    if config.dpo.loss_type in UNPAIRED:
        without = ""
    if config.objective == "grpo":
        place = config.grpo.reference
        needed_by = f"grpo.beta={config.grpo.beta}"
        without = ", or grpo.beta=0"
    if config.objective == "ppo":
        place = config.ppo.reference
        needed_by = f"ppo.kl_coef={config.ppo.kl_coef}"
        without = ", or ppo.kl_coef=0"
    key = f"{config.objective}.reference"
    if place is not None:
        return find_model(REFERENCE, place, f"{key}=")
    if config.model.lora.rank is not None:
        if config.train.only:
            raise ConfigError(
                f"train.only={list(config.train.only)} trains more than adapters, so that the "
                f"model without adapters changes and is no reference. Set {key} to the model that "
                "the run begins with, or leave train.only out."
            )
        return None
    if config.checkpoint.fork_from is not None:
        raise ConfigError(
            f"objective={config.objective} with {needed_by} compares the policy with a reference, "
            f"and a fork names none. Set {key} to the one of the run that it is forked from, which "
            "may be its checkpoint.init_from."
        )
    if config.checkpoint.init_from is None:
        raise ConfigError(
            f"objective={config.objective} with {needed_by} compares the policy with a "
            "reference, and there is none. Set model=DIR or checkpoint.init_from to the model that "
            f"is to learn, or {key} to another one{without}."
        )
    return find_model(REFERENCE, config.checkpoint.init_from, "checkpoint.init_from=")


def find_model(role: str, place: str, asked_by: str) -> FrozenModel:
    """Find the model in a directory; for a run without a step, its newest checkpoint.

    Args:
        role: TEACHER or REFERENCE.
        place: a run of maxtrain, RUN/checkpoints/STEP, or a Hugging Face directory.
        asked_by: the key or option that names it.

    Raises:
        ConfigError: there is no model.
        UserError: something is wrong with its config.
    """
    name = f"{asked_by}{place}"
    found = _find_model(role, place, name)
    if found.model.score:
        raise ConfigError(
            f"{name} is a reward model, whose score can't be compared with the logits of another. "
            f"Name a model of text as the {role}."
        )
    return found


def _find_model(role: str, place: str, name: str) -> FrozenModel:
    """Find the model in a directory, which may be a reward model."""
    directory = readable_model(place).absolute()
    if (directory / "config.json").exists():
        precision = _stored_precision(directory)
        return FrozenModel(role, name, directory, read_config(directory), precision)
    run = directory
    requested = None
    if directory.name.isdecimal() and directory.parent.name == "checkpoints":
        run = directory.parents[1]
        requested = int(directory.name)
    if not (run / "config.yaml").exists():
        raise ConfigError(
            f"{name} is neither a run of maxtrain, nor one of its checkpoints, "
            "nor a Hugging Face directory. Name a directory with config.yaml or config.json."
            f"{download_hint(place)}"
        )
    step = step_of(run, requested)
    steps = complete(run / "checkpoints")
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"{name} has no complete checkpoint there. Complete steps: {known}. Name one of them, "
            "or another run, or wait for a step to be saved."
        )
    config = read_run_config(run)
    model = dataclasses.replace(config.model, value=False)
    return FrozenModel(role, name, run, model, config.precision, config, step)


def frozen_digests(frozen: FrozenModel | None, state: TrainState) -> dict[str, str]:
    """Return one digest of the frozen model's arrays and config by its role, the same on every
    mesh; empty: there is no such model."""
    if frozen is None:
        return {}
    return {frozen.role: digest_of(state.frozen[frozen.role], frozen.function())}


def digest_of(variables: nnx.State, function: str) -> str:
    """Return one digest of all arrays of a model and of its `function_of`, the same on every
    mesh."""
    return f"{hash_text(digests(variables))}-{function}"


def function_of(model: ModelConfig, precision: PrecisionConfig) -> str:
    """Hash the settings that determine what is computed with the arrays of a model without a
    score."""
    values = dataclasses.asdict(model)
    decides = {key: value for key, value in values.items() if key not in {*FREE, "score"}}
    text = json.dumps([decides, dataclasses.asdict(precision)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def require_same_stored_teacher(
    teacher: TeacherFiles | None, before: Mapping[str, str]
) -> dict[str, str]:
    """Check the stored teacher logits against those that the run used before, and return their
    digest by role.

    Args:
        teacher: the stored logits that the run learns from; None: there are none.
        before: as for `require_same_frozen_model`.

    Raises:
        ConfigError: the run learned from another teacher up to now.
    """
    if teacher is None:
        return {}
    digest = f"stored-{teacher.digest()}"
    if before.get(TEACHER, digest) != digest:
        raise ConfigError(
            f"distill.stored: what is stored has the digest {digest}, and this run has learnt from "
            f"{before[TEACHER]} until now. Bring it back, or set run_name to a new name to start "
            "afresh."
        )
    return {TEACHER: digest}


def require_same_frozen_model(
    frozen: FrozenModel | None, digests: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Raise a ConfigError if a run would continue with another frozen model than before in the same
    role.

    Args:
        frozen: the frozen model of the run.
        digests: from `frozen_digests`.
        before: digests by role at the checkpoint that the run resumes from.
    """
    for role, digest in digests.items():
        assert frozen is not None
        if before.get(role, digest) == digest:
            continue
        key = frozen.name.partition("=")[0]
        raise ConfigError(
            f"{frozen.name} has other {_what_differs(before[role], digest)} (digest {digest}) than "
            f"the {role} that this run has learnt from until now (digest {before[role]}). Set "
            f"{key} to that one, such as RUN/checkpoints/STEP, or set run_name to a new name to "
            "start afresh."
        )


def _what_differs(before: str, now: str) -> str:
    """Say whether two digests differ in the weights or in the config."""
    if before.partition("-")[0] != now.partition("-")[0]:
        return "weights"
    return "settings of `model` or `precision` in its config"


def _stored_precision(directory: Path) -> PrecisionConfig:
    """Return the precision in which a Hugging Face directory stores its weights."""
    values = read_json(directory / "config.json")
    stored = values.get("dtype", values.get("torch_dtype"))
    dtype = "float32"
    if stored == "bfloat16":
        dtype = "bfloat16"
    return PrecisionConfig(params=dtype, compute=dtype)
