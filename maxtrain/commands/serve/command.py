"""`maxtrain serve RUN|DIR`: a model behind OpenAI's API, on this machine.

Completions and chat completions, whole or streamed, are made side by side by one engine. A client
that leaves cancels its requests. The server prints its address when it can answer, and ends at
SIGTERM or Ctrl-C, after the requests in progress.
"""

import argparse
import contextlib
import functools
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from data_pipeline.base.errors import UsageError, UserError, run_command
from data_pipeline.base.extras import load_package
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.load_chat import add_chat_arguments, find_chat
from maxtrain.commands.serve.constraints import Grammars
from maxtrain.commands.serve.protocol import ServedModel
from maxtrain.commands.serve.worker import EngineWorker
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.inference.engine import Engine
from maxtrain.inference.warm_up import first_warm_ups, more_warm_ups
from maxtrain.models.cache import PAGE
from maxtrain.models.decoder import Decoder
from maxtrain.models.multi_lora import with_banks
from maxtrain.models.unstack import for_generation
from maxtrain.parallel.distributed import start
from maxtrain.trainer.saved_run import (
    add_model_arguments,
    check_model_arguments,
    load_model,
    text_beginning,
)
from maxtrain.weights.peft import read_set
from maxtrain.weights.peft_settings import base_of

KEY = "MAXTRAIN_API_KEY"
# Names of this machine that browsers may use in Host headers.
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
# Tokens between two looks at who comes and goes.
_CHUNK = 8
_BODY_BYTES = 10 * 2**20


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        epilog=f"Clients must give the key in the environment variable {KEY}, or one of those in "
        "--key-file. Without any key, the server listens on this machine alone.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_model_arguments(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="0: any that is free (default: %(default)s)",
    )
    add(
        "--key-file",
        metavar="FILE",
        type=Path,
        help="keys, one a line, of which clients must give one",
    )
    add(
        "--no-key",
        action="store_true",
        help="let anybody who reaches --host use the model, for example behind a proxy that asks "
        "for keys",
    )
    add(
        "--connections",
        type=int,
        default=256,
        metavar="N",
        help="open at one time; others get status 503 (default: %(default)s)",
    )
    add(
        "--client-timeout",
        type=int,
        default=30,
        metavar="SECONDS",
        help="that a client may take to send the headers of a request, to send its body, and to "
        "read what is sent (default: %(default)s)",
    )
    add("--name", help="of the model in requests (default: that of its directory)")
    add(
        "--adapter",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="also serve the model with adapters in PEFT's files, under this name; may be given "
        "several times: the weights are there once",
    )
    add_chat_arguments(parser)
    add(
        "--slots",
        type=int,
        default=8,
        metavar="N",
        help="texts that are made side by side (default: %(default)s)",
    )
    add(
        "--waiting",
        type=int,
        default=64,
        metavar="N",
        help="texts that may wait; more are refused with 429 (default: %(default)s)",
    )
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="room for this many tokens of all texts together, in pages that texts share; no text "
        "can be longer (default: each slot has room for the longest text)",
    )
    add(
        "--max-body",
        type=int,
        default=_BODY_BYTES,
        metavar="BYTES",
        help="of a request (default: 10 MiB)",
    )
    add(
        "--grace",
        type=int,
        default=30,
        metavar="SECONDS",
        help="that texts have to end when the server is stopped (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    check_model_arguments(parser, args, "serves")
    _check_adapters(args)
    if args.cache_tokens is not None and args.cache_tokens < PAGE:
        raise UsageError(f"--cache-tokens {args.cache_tokens}: must be at least {PAGE}, one page.")
    least = {"port": 0, "slots": 1, "waiting": 0, "max_body": 1, "grace": 0}
    least |= {"connections": 1, "client_timeout": 1}
    for key, value in least.items():
        if getattr(args, key) < value:
            raise UsageError(
                f"--{key.replace('_', '-')} {getattr(args, key)}: must be at least {value}."
            )
    if args.port > 65_535:
        raise UsageError(f"--port {args.port}: must be at most 65535.")
    return args


def main(argv: Sequence[str], prog: str = "maxtrain serve") -> int:
    """Runs the command; the exit code."""
    if argv is None:
        argv = sys.argv[1:]

    def job() -> None:
        args = _parse(argv, prog)
        for package in ("starlette", "uvicorn", "prometheus_client"):
            load_package(package, "serve", "maxtrain serve")
        keys = _keys(args.key_file)
        # Before the model is loaded: a port that is taken is known at once.
        with _listen(args.host, args.port) as listening:
            hosts = _require_key(args, listening, keys)
            start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
            model, tokenizer = load_model(args)
            served = _served(args, model, tokenizer)
            model = _with_adapters(for_generation(model), args.adapter)
            stop_ids = served.stop_ids
            make_engine = functools.partial(
                _warm_engine, model, args.slots, args.cache_tokens, stop_ids
            )
            worker = EngineWorker(
                make_engine, tokenizer, functools.partial(more_warm_ups, stop_ids=stop_ids)
            )
            texts = args.slots + args.waiting
            app_module = load_package("maxtrain.commands.serve.app", "serve", "maxtrain serve")
            limits = app_module.Limits(texts, args.max_body, keys, hosts)
            worker.start()
            try:
                _serve(app_module.make_app(served, worker, limits), listening, args, served)
            finally:
                worker.end()

    return run_command(job, resumes=False)


def _keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys of the environment and of a file, of which clients must give one.

    Raises:
        UsageError: the file cannot be read, or has no key.
    """
    keys = []
    if os.environ.get(KEY):
        keys.append(os.environ[KEY])
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--key-file {file}: cannot be read ({reason}). Name a file of text with one key "
                "in each line."
            ) from error
        stripped = [line.strip() for line in lines]
        found = [line for line in stripped if line]
        if not found:
            raise UsageError(f"--key-file {file}: has no key. Write one key into each line.")
        keys += found
    return tuple(keys)


def _require_key(
    args: argparse.Namespace, listening: socket.socket, keys: Sequence[str]
) -> tuple[str, ...]:
    """Refuse to listen beyond this machine without a key.

    Returns:
        The names that clients must call the server by; empty: any.

    Raises:
        UsageError: there is no key.
    """
    address = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])
    if address.is_loopback:
        return (*_LOOPBACK_HOSTS, args.host)
    if not keys and not args.no_key:
        raise UsageError(
            f"--host {args.host}: without a key, anybody who reaches this address could use the "
            f"model. Set the environment variable {KEY}, or give --key-file FILE; or --no-key if "
            "something else, such as a proxy, keeps others out."
        )
    return ()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens; UsageError: it can't."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise _cannot_listen(host, port, error) from error
    return listening


def _cannot_listen(host: str, port: int, error: OSError) -> UsageError:
    return UsageError(
        f"--host {host} --port {port}: can't listen there ({error.strerror or error}). Name "
        "another port, or 0 for any that is free."
    )


def _served(args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> ServedModel:
    """Return the served model and its settings."""
    chat = None
    try:
        chat = find_chat(args, tokenizer)
    except UserError as error:
        if args.chat_template or args.system:
            raise
        print(f"chat completions are refused: {error}", file=sys.stderr)
    name = args.name or Path(args.hf or args.run).expanduser().resolve().name
    adapters = _adapter_names(args)
    if name in adapters:
        raise UsageError(
            f"--adapter {name}: is the name of the model itself. Give one of them another name."
        )
    max_length = model.config.max_length
    if args.cache_tokens is not None:
        # A text that no page is left for could never be made.
        max_length = min(max_length, args.cache_tokens - args.cache_tokens % PAGE)
    served = ServedModel(
        name=name,
        adapters=adapters,
        tokenizer=tokenizer,
        beginning=tuple(text_beginning(args, tokenizer)),
        chat=chat,
        max_length=max_length,
        vocab_size=model.config.vocab_size or 0,
        created=int(time.time()),
        longest_token=_longest_token(tokenizer),
    )
    return served._replace(grammars=Grammars(tokenizer, served.stop_ids))


def _longest_token(tokenizer: Tokenizer) -> int:
    """Return how many characters the longest token stands for, and the space that it may lose."""
    return 1 + max(len(tokenizer.decode([i])) for i in range(tokenizer.vocab_size))


def _adapter_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of adapters in the order of their numbers, which begin with 1."""
    return tuple(given.partition("=")[0] for given in args.adapter)


def _with_adapters(model: Decoder, given: Sequence[str]) -> Decoder:
    """The model with the adapters of --adapter, side by side."""
    if not given:
        return model
    sets = []
    for name_and_place in given:
        name, _, place = name_and_place.partition("=")
        found = read_set(Path(place), f"--adapter {name}", model.config)
        made_for = base_of(Path(place)) or "a model that its files do not name"
        print(f"{name}: adapters of rank {found.lora.rank}, made for {made_for}", file=sys.stderr)
        sets.append(found)
    return with_banks(model, sets)


def _check_adapters(args: argparse.Namespace) -> None:
    """UsageError: names or directories of --adapter that are none."""
    for given in args.adapter:
        name, sign, place = given.partition("=")
        if not name or not sign or not place:
            raise UsageError(
                f"--adapter {given}: must be NAME=DIR. Say what requests call it, and where it is."
            )
    names = _adapter_names(args)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--adapter {name}: is there twice. Give one another name.")


def _warm_engine(
    model: Decoder, slots: int, cache_tokens: int | None, stop_ids: Sequence[int]
) -> Engine:
    """Return an engine whose first programs are compiled, so that the first client does not wait
    for them."""
    engine = Engine(model, slots, chunk=_CHUNK, cache_tokens=cache_tokens)
    for warm_up in first_warm_ups(engine, stop_ids):
        warm_up()
    return engine


def _serve(
    app: Any, listening: socket.socket, args: argparse.Namespace, served: ServedModel
) -> None:
    """Answers until a signal comes; KeyboardInterrupt: it was Ctrl-C."""
    uvicorn = load_package("uvicorn", "serve", "maxtrain serve")

    host, port = listening.getsockname()[:2]
    shown = host
    if ":" in host:
        shown = f"[{host}]"

    signals: list[int] = []

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            signals.append(sig)
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Says where it listens when it does: whoever asks at that line is not refused."""
            await super().startup(sockets)
            print(f"{served.name}: listening on http://{shown}:{port}/v1", flush=True)
            print("Ctrl-C ends it.", file=sys.stderr)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Handle signals as uvicorn does, except that a stop by SIGTERM is no failure."""
            kept = {
                number: signal.signal(number, self.handle_exit)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                yield
            finally:
                for number, handler in kept.items():
                    signal.signal(number, handler)

    connections = load_package("maxtrain.commands.serve.connections", "serve", "maxtrain serve")
    limits = connections.ConnectionLimits(args.connections, args.client_timeout)
    config = uvicorn.Config(
        app,
        http=connections.limited_protocol(limits),
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=connections.HEAD_BYTES,
        timeout_keep_alive=connections.KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=args.grace,
    )
    Server(config).run(sockets=[listening])
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
