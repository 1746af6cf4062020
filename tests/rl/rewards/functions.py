"""Rewards of a user, as the tests name them by dotted path, and functions that do wrong."""

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np


def brevity(prompts, completions, completion_ids, **columns):
    return [-len(ids) / 100 for ids in completion_ids]


def as_array(prompts, completions, completion_ids, **columns):
    return np.array([len(text) for text in completions])


def best_of_group(prompts, completions, completion_ids, answer, **columns):
    """1 for the longest completion of those that it sees."""
    longest = max(len(text) for text in completions)
    return [float(len(text) == longest) for text in completions]


def as_told(prompts, completions, completion_ids, **columns):
    """Do what each completion names, such as hang, raise, or return a reward."""
    results = []
    for text in completions:
        if text == "hang":
            while True:
                pass
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "raise":
            raise KeyError("no such thing")
        if text == "memory":
            bytearray(1 << 40)
        results.append({"none": None, "nan": math.nan, "infinite": math.inf}.get(text, 1.0))
    return results


def too_few(prompts, completions, completion_ids, **columns):
    return [1.0] * (len(completions) - 1)


def a_word(prompts, completions, completion_ids, **columns):
    return ["good"] * len(completions)


def no_list(prompts, completions, completion_ids, **columns):
    return 1.0


def start_and_hang(file):
    """Starts a process of its own, writes both ids into a file, and hangs."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
    with open(file, "w") as written:
        written.write(f"{os.getpid()} {child}\n")
    time.sleep(600)


def start_daemon(file, hangs):
    """Starts a process that leaves its session and its parent, and writes its id into a file."""
    program = "import os, time; os.setsid(); os.fork() and os._exit(0); "
    program += f"open({file!r} + '.new', 'w').write(str(os.getpid())); "
    program += f"os.rename({file!r} + '.new', {file!r}); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", program]).wait()
    while not os.path.exists(file):
        time.sleep(0.01)
    if hangs == "hangs":
        time.sleep(600)
    if hangs == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def environment(*names):
    return [os.environ.get(name) for name in names]


def always_raises(prompts, completions, **columns):
    raise RuntimeError("no such judge")


def raises_deep_below(completions):
    return [math.factorial(-1) for _ in completions]


def fails_for_some(completions, **kwargs):
    """Fail for every second completion that is shorter than three characters."""
    if len(completions[0]) % 2:
        raise RuntimeError("an odd length")
    return [1.0]


def always_none(completions, **kwargs):
    return [None] * len(completions)


def always_nan(completions, **kwargs):
    return [math.nan] * len(completions)


def always_hangs(completions, **kwargs):
    time.sleep(600)


def always_dies(completions, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def always_takes_all_memory(completions, **kwargs):
    return [float(len(bytearray(1 << 45)))]


def as_trl_has_it(completions, answer, **kwargs):
    """A reward from TRL's documentation: conversational completions are lists of one message."""
    contents = [completion[0]["content"] for completion in completions]
    assert set(kwargs) == {"prompts", "completion_ids"}
    return [float(content == right) for content, right in zip(contents, answer)]


def without_others(completions):
    return [float(len(text)) for text in completions]


def keyword_only(*, completions, prompts):
    return [float(len(text) - len(prompt)) for text, prompt in zip(completions, prompts)]


async def asynchronous(completions, **kwargs):
    return [float(len(text)) for text in completions]


def requires(completions, nowhere, **kwargs):
    return [1.0] * len(completions)


def requires_a_trainer(completions, trainer_state):
    return [1.0] * len(completions)


def positional(completions, /):
    return [1.0] * len(completions)
