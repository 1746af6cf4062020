"""A rollout: the completions of some prompts with all that an update needs to know of them; in
memory and as a file. No jax.

A rollout is no function of config and data alone: it depends on the weights that made it. So it is
stored before anything is learnt from it, and a run that was killed goes on with what it has read.
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

# The folder below that of the run.
FOLDER = "rollouts"
_ABOUT = "about"
_DIGEST = "digest"
# Arrays of PPO alone. Where they are empty, files and digests are as without them.
_OF_PPO = ("values", "token_advantages", "returns")


# What numpy, zipfile and json raise where bytes are not those of an archive.
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
    """A file is not the rollout that was stored; says what is wrong with it."""


class Rollout(NamedTuple):
    """P prompts, N completions (those of a prompt follow each other), S tokens of completions.

    As the sampler leaves it, there are no rewards yet (R = 0), and advantages and `old` are 0.

    Attributes:
        prompts, prompt_lengths: tokens of all prompts, back to back.
        tokens, lengths: tokens of all completions, back to back, with those that ended them.
        sampled: of each token, its log-probability as the sampler has it, nats.
        old: likewise, by the training forward.
        reference: likewise, of the reference; empty: there is none.
        truncated: whether a completion was cut at its longest.
        rewards: by R rewards; NaN: one does not apply.
        advantages: of each completion.
        about: JSON: `identity` of what was asked for, digests of the weights that sampled it
            (`weights`) and that scored it (`scored_by`), after how many steps the former were
            (`sampled_after`), the first and the last step that read it, counted from 1 (`steps`),
            with determinism=full `sampling_passes` and `tokens_replaced` as of rl/sampler.py,
            `names`, `outcomes` and `details` of the rewards, `judgements` as of rewards/registry.py
            (for each reward, an outcome and a detail of each completion), `weights_of_rewards`,
            `texts` of the first prompt, and `numbers` to record.
        values: of each token, what was to be expected before it; empty: there are none, and so for
            what follows.
        token_advantages, returns: of each token.
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
        """All but `about`, by name."""
        found = self._asdict()
        del found[_ABOUT]
        for name in _OF_PPO:
            if not found[name].size:
                del found[name]
        return found

    def content(self) -> str:
        """A digest of all numbers, hex: the same for what is learnt alike, however long it took."""
        return self._digest().hexdigest()

    def digest(self) -> str:
        """Of every bit of it, hex."""
        digest = self._digest()
        digest.update(json.dumps(self.about, sort_keys=True).encode())
        return digest.hexdigest()

    def _digest(self) -> Any:
        digest = hashlib.blake2b(digest_size=16)
        for name, array in self.arrays().items():
            digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest

    def to_bytes(self) -> bytes:
        """What a file of it holds."""
        about = json.dumps({_DIGEST: self.digest(), _ABOUT: self.about})
        content = io.BytesIO()
        said = np.frombuffer(about.encode(), np.uint8)
        np.savez(content, allow_pickle=False, **self.arrays(), about=said)
        return content.getvalue()

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all. StorageError: there is no room."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_bytes())

    def joined(self, other: "Rollout") -> "Rollout":
        """The prompts of both with their completions, these first; with what is known of these."""
        arrays = {}
        theirs = other.arrays()
        for name, array in self.arrays().items():
            # The last axis is that of tokens, prompts or completions.
            arrays[name] = np.concatenate([array, theirs[name]], axis=-1)
        return self._replace(**arrays)

    def taken(self, prompts: Sequence[int]) -> "Rollout":
        """These prompts, by their numbers, with their completions."""
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
            # One that is empty is not known yet.
            if array.size:
                array = array[..., places[name]]
            arrays[name] = array
        return self._replace(**arrays)


def _places(lengths: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Of pieces that lie back to back, where the tokens of these pieces are."""
    ends = np.cumsum(lengths, dtype=np.int64)[numbers].tolist()
    sizes = lengths[numbers].tolist()
    return np.concatenate([np.arange(end - size, end) for end, size in zip(ends, sizes)])


def load(path: Path) -> Rollout:
    """What `Rollout.save` has written.

    Raises:
        DamagedRolloutError: the file is missing, can't be read, or is not what was written.
    """
    return from_bytes(read_file(path))


def read_file(path: Path) -> bytes:
    """The content of a file. DamagedRolloutError: it is missing, or can't be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedRolloutError("it is not there") from error
    except OSError as error:
        raise DamagedRolloutError(f"it can't be read ({error})") from error


def from_bytes(content: bytes) -> Rollout:
    """What `Rollout.to_bytes` gave. DamagedRolloutError: it is something else."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            found = dict(file)
        said = strict_json.loads(found.pop(_ABOUT).tobytes())
        rollout = Rollout(**found, about=said[_ABOUT])
        expected = said[_DIGEST]
        digest = rollout.digest()
    except _UNREADABLE as error:
        raise DamagedRolloutError(f"it can't be read ({error})") from error
    if digest != expected:
        raise DamagedRolloutError(f"expected digest {expected}, found {digest}")
    return rollout
