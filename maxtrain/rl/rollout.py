"""A rollout: completions of some prompts with everything that an update needs, in memory and as a
file. No jax.

A rollout depends on the weights that sampled it, not only on config and data. So it is stored
before training on it, and a run that was killed resumes with the stored rollout.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from data_pipeline.base import strict_json
from data_pipeline.shards import write_atomic

# Subfolder of the run.
FOLDER = "rollouts"
_ABOUT = "about"
_DIGEST = "digest"
# Arrays of PPO only. Empty ones are left out of files and digests.
_OF_PPO = ("values", "token_advantages", "returns")


# Exceptions of numpy, zipfile and json for bytes that are not an archive.
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    OSError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)


class DamagedRolloutError(Exception):
    """A file is not the rollout that was stored; the message says why."""


class Rollout(NamedTuple):
    """A rollout of P prompts and N completions (those of a prompt are consecutive) with S tokens.

    The sampler returns it without rewards (R = 0), and with zeros as advantages and `old`.

    Attributes:
        prompts, prompt_lengths: tokens of all prompts, concatenated.
        tokens, lengths: tokens of all completions, concatenated, with their stop ids.
        sampled: log-probability of each token by the sampler, nats.
        old: log-probability of each token by the training forward pass, nats.
        reference: log-probability of each token by the reference, nats; empty: there is none.
        truncated: whether a completion was truncated at the longest length.
        rewards: values of R rewards; NaN: a reward does not apply.
        advantages: advantage of each completion.
        about: JSON: `identity` of prompts and settings, digests of the weights that sampled it
            (`weights`) and that scored it (`scored_by`), the step of the former (`sampled_after`),
            the first and the last step that read it, counted from 1 (`steps`), with
            determinism=full `sampling_passes` and `tokens_replaced` as in rl/sampler.py, `names`,
            `outcomes` and `details` of the rewards, `judgements` as in rewards/registry.py (for
            each reward, an outcome and a detail of each completion), `weights_of_rewards`, `texts`
            of the first prompt, and the metrics `numbers`.
        values: the value before each token; empty: there are no values, advantages of tokens or
            returns.
        token_advantages, returns: numbers of each token.
    """

    prompts: Int[np.ndarray, " T"]
    prompt_lengths: Int[np.ndarray, " P"]
    tokens: Int[np.ndarray, " S"]
    lengths: Int[np.ndarray, " N"]
    sampled: Float[np.ndarray, " S"]
    old: Float[np.ndarray, " S"]
    reference: Float[np.ndarray, " R_S"]
    truncated: Bool[np.ndarray, " N"]
    rewards: Float[np.ndarray, "R N"]
    advantages: Float[np.ndarray, " N"]
    about: dict[str, Any]
    values: Float[np.ndarray, " V_S"] = np.zeros(0, np.float32)
    token_advantages: Float[np.ndarray, " V_S"] = np.zeros(0)
    returns: Float[np.ndarray, " V_S"] = np.zeros(0)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name, without `about`."""
        found = self._asdict()
        del found[_ABOUT]
        for name in _OF_PPO:
            if not found[name].size:
                del found[name]
        return found

    def content(self) -> str:
        """Return a hex digest of all arrays, without `about`: equal for equal training data."""
        return self._digest().hexdigest()

    def digest(self) -> str:
        """Return a hex digest of everything, including `about`."""
        digest = self._digest()
        digest.update(json.dumps(self.about, sort_keys=True).encode())
        return digest.hexdigest()

    def _digest(self) -> Any:
        """Return a hash object fed with all arrays."""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in self.arrays().items():
            digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        about = json.dumps({_DIGEST: self.digest(), _ABOUT: self.about})
        content = io.BytesIO()
        metadata = np.frombuffer(about.encode(), np.uint8)
        np.savez(content, allow_pickle=False, **self.arrays(), about=metadata)
        return content.getvalue()

    def save(self, path: Path) -> None:
        """Write the file atomically. Raise a StorageError if there is no room."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_bytes())

    def joined(self, other: "Rollout") -> "Rollout":
        """Append the prompts and completions of another rollout; `about` stays."""
        arrays = {}
        others = other.arrays()
        for name, array in self.arrays().items():
            # The last axis counts tokens, prompts or completions.
            arrays[name] = np.concatenate([array, others[name]], axis=-1)
        return self._replace(**arrays)

    def taken(self, prompts: Sequence[int]) -> "Rollout":
        """Select these prompts, by their numbers, with their completions."""
        group = len(self.lengths) // len(self.prompt_lengths)
        numbers = np.array(prompts, np.int64)
        completions = (numbers[:, None] * group + np.arange(group)).reshape(-1)
        of_prompts = _places(self.prompt_lengths, numbers)
        of_tokens = _places(self.lengths, completions)
        places = dict.fromkeys(("sampled", "old", "reference", "tokens", *_OF_PPO), of_tokens)
        places |= dict.fromkeys(("lengths", "truncated", "rewards", "advantages"), completions)
        places |= {"prompts": of_prompts, "prompt_lengths": numbers}
        arrays = {}
        for name, array in self.arrays().items():
            # An empty array is not known yet.
            if array.size:
                array = array[..., places[name]]
            arrays[name] = array
        return self._replace(**arrays)


def _places(lengths: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the indices of the tokens of some pieces in their concatenation."""
    ends = np.cumsum(lengths, dtype=np.int64)[numbers].tolist()
    sizes = lengths[numbers].tolist()
    return np.concatenate([np.arange(end - size, end) for end, size in zip(ends, sizes)])


def load(path: Path) -> Rollout:
    """Load a file that `Rollout.save` wrote.

    Raises:
        DamagedRolloutError: the file is missing, cannot be read, or is damaged.
    """
    return from_bytes(read_file(path))


def read_file(path: Path) -> bytes:
    """Read a file. Raise a DamagedRolloutError if it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedRolloutError("it is not there") from error
    except OSError as error:
        raise DamagedRolloutError(f"it can't be read ({error})") from error


def from_bytes(content: bytes) -> Rollout:
    """Parse the result of `Rollout.to_bytes`. Raise a DamagedRolloutError if it is invalid."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            found = dict(file)
        metadata = strict_json.loads(found.pop(_ABOUT).tobytes())
        rollout = Rollout(**found, about=metadata[_ABOUT])
        expected = metadata[_DIGEST]
        digest = rollout.digest()
    except _UNREADABLE as error:
        raise DamagedRolloutError(f"it can't be read ({error})") from error
    if digest != expected:
        raise DamagedRolloutError(f"expected digest {expected}, found {digest}")
    return rollout
