"""Runners of units of work: in this process, in processes of this machine, or on the machines of a
Ray cluster.

A runner calls one function with each of many tasks, whose second item is a unit. Tasks leave files
and nothing else, and leave them whole; so one that is lost may run again, even while the first is
still at it, and results never travel.

Why Ray, and its core alone: Apache Beam 2.77 refuses the numpy, protobuf, pyarrow, pillow,
python-dateutil and beartype of constraints.txt as too new; Spark needs a Java runtime beside
Python. Ray 2.60 adds itself and four small packages and changes none. A unit is one call, so there
are no rows to move that would need Ray Data (and pandas).
"""

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from data_pipeline.base.errors import StorageError, TryAgainError, UsageError
from data_pipeline.base.extras import load_package
from data_pipeline.base.remote import is_url
from data_pipeline.base.strict_json import loads

RUNNERS = ("local", "ray")
# Tasks that Ray knows of, for each CPU: the next one is there when one ends, and a cluster that can
# grow does.
_AHEAD = 2
Job = Callable[..., None]
Task = tuple[Any, ...]
Tasks = Sequence[Task]
# Yields tasks when they are done; raises what the first that failed raised.
Run = Callable[[Job, Tasks], Iterator[Task]]


@contextlib.contextmanager
def open_runner(name: str, workers: int, options: Sequence[str]) -> Iterator[Run]:
    """A runner, one of RUNNERS. `workers`: processes of "local". `options`: KEY=VALUE of the other;
    UsageError: not usable."""
    if name == "local":
        yield functools.partial(run_local, workers)
        return
    ray = load_package("ray", "ray", f"--runner {name}")
    # A cluster that is started here reports to nobody.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    given = dict(map(_option, options))
    try:
        ray.init(**{"log_to_driver": False, "logging_level": "ERROR"} | given)
    except Exception as error:  # of many kinds, and not documented
        ray.shutdown()
        fix = "Give arguments of ray.init, such as address=HOST:6379; "
        fix += "set RAY_AUTH_MODE=token if the cluster asks for a token."
        raise UsageError(
            f"--runner-options {' '.join(options)}: Ray does not start ({error}). {fix}"
        ) from error
    try:
        yield functools.partial(_run_ray, ray)
    finally:
        ray.shutdown()


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value:
        raise UsageError(f"--runner-options {text}: must be KEY=VALUE, such as address=auto.")
    try:
        return name, loads(value)
    except ValueError:
        return name, value


def run_local(workers: int, job: Job, tasks: Tasks) -> Iterator[Task]:
    """Run tasks in `workers` processes, or in this one if one is enough; see `Run`. TryAgainError:
    a worker was killed.
    """
    if min(workers, len(tasks)) < 2:
        for task in tasks:
            job(*task)
            yield task
        return
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(
            min(workers, len(tasks)), context, _start_worker
        ) as pool:
            for task, _ in zip(tasks, pool.map(job, *zip(*tasks)), strict=True):
                yield task
    except concurrent.futures.BrokenExecutor as error:
        fix = "Run the same command again, with fewer --workers if memory was short; "
        fix += "finished work is kept."
        raise TryAgainError(f"--workers {workers}: a worker process was killed. {fix}") from error


def _start_worker() -> None:
    """Make a worker quiet, single-threaded, and unable to outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run_ray(ray: Any, job: Job, tasks: Tasks) -> Iterator[Task]:
    """See `Run`: one CPU of the cluster each. TryAgainError: Ray lost a task, and lost it again
    when it ran it anew."""
    remote = ray.remote(_call)
    here = os.getcwd()
    waiting = iter(tasks)
    running = {}
    while True:
        # Read each time: a cluster may grow.
        at_once = max(1, int(_AHEAD * ray.cluster_resources().get("CPU", 0)))
        for task in itertools.islice(waiting, at_once - len(running)):
            running[remote.remote(here, job, task)] = task
        if not running:
            return
        (done,), _ = ray.wait([*running])
        try:
            ray.get(done)
        except ray.exceptions.RayError:
            break
        yield running.pop(done)
    # Nothing may write any more when the caller removes the output.
    ray.wait([*running], num_returns=len(running))
    # The first of those that failed, in order of the tasks, as without a cluster.
    for each in running:
        try:
            ray.get(each)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            reason, _, _ = str(error).partition("\n")
            fix = "Run the same command again, with fewer CPUs of the cluster "
            fix += "if memory was short; finished work is kept."
            raise TryAgainError(f"--runner ray: {reason} {fix}") from error


def _call(directory: str, job: Job, task: Task) -> None:
    """Run a task on a machine of a cluster, as if in this directory."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        os.chdir(directory)
        for piece in task[1]:
            # A file that is missing here would count as one bad document.
            if not is_url(piece.path):
                os.stat(piece.path)
        job(*task)
    except FileNotFoundError as error:
        fix = "Give every machine the same file systems under the same paths, "
        fix += "for input, output and the working directory."
        raise StorageError(
            f"{error.filename}: is not there on {socket.gethostname()}. {fix}"
        ) from error
