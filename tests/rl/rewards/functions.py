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
    """What the completion says."""
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
