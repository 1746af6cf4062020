"""How conversations are written for the model that a command works on: `generate --chat` and
`serve` share the arguments, the template and the system message."""

import argparse

from data_pipeline.errors import DataError, UsageError
from data_pipeline.remote import place
from data_pipeline.shards import Manifest
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import RunConfig
from maxtrain.model_source import read_run_config, tell_on_stderr, tokenizer_place
from maxtrain.serve.chat import Chat


def add_chat_arguments(parser: argparse.ArgumentParser, condition: str = "") -> None:
    """The arguments --system and --chat-template.

    Args:
        parser: of a command with the arguments of a model.
        condition: words before their help.
    """
    add = parser.add_argument
    add(
        "--system",
        metavar="TEXT",
        help=f"{condition}the system's message of conversations that have none; '' for none "
        "(default: that which the data of the run was prepared with)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        default="",
        help=f"{condition}a template, or chatml (default: the one beside the tokenizer)",
    )


def find_chat(asked: argparse.Namespace, tokenizer: Tokenizer) -> Chat:
    """How conversations are written for the model that the arguments name. Says which system
    message is that of a run's data.

    Raises:
        DataError: there is no template, or it can't be used.
        UsageError: the sources of a run have different system messages, or one can't be used.
    """
    if asked.hf is not None:
        return Chat(tokenizer, asked.hf, asked.chat_template, system=asked.system or "")
    config = read_run_config(asked.run)
    system = asked.system
    if system is None:
        system = system_message(config)
    beside = tokenizer_place(asked.run, config)
    chat = Chat(tokenizer, beside, asked.chat_template, system=system)
    if system and asked.system is None:
        tell_on_stderr(f"system (of the run's data): {system}")
    return chat


def system_message(config: RunConfig) -> str:
    """The system message that the data of a run was prepared with, for conversations that had none;
    empty: there is none, or the data is no longer there.

    UsageError: sources have different ones.
    """
    found: dict[str, str] = {}
    for name, source in config.data.sources.items():
        try:
            settings = Manifest.load(place(source.path)).settings
        except DataError:
            continue
        # Others hold no conversations.
        if "chat_template" in settings:
            found[name] = settings.get("system", "")
    different = set(found.values())
    if len(different) > 1:
        listed = "; ".join(f"{name}: {text or 'none'}" for name, text in found.items())
        raise UsageError(
            f"the sources of this run were prepared with different system messages ({listed}). "
            "Choose with --system TEXT, or --system '' for none."
        )
    return "".join(different)
