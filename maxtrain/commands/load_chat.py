"""Chat settings for the model that a command works on: `generate --chat` and `serve` share the
arguments, the template and the system message.
"""

import argparse

from data_pipeline.base.errors import UsageError
from data_pipeline.tokenizer import CHAT_TEMPLATE, MORE_TEMPLATES, Tokenizer, TokenizerRecord
from maxtrain.inference.chat import Chat
from maxtrain.trainer.saved_run import carried_tokenizer, print_on_stderr, tokenizer_place


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


def find_chat(args: argparse.Namespace, tokenizer: Tokenizer) -> Chat:
    """Return how conversations are written for the model that the arguments name. Says which system
    message is that of a run's data.

    Raises:
        DataError: there is no template, or it can't be used.
        UsageError: the sources of a run have different system messages, or one can't be used.
    """
    if args.hf is not None:
        return Chat(tokenizer, args.hf, args.chat_template, system=args.system or "")
    place = tokenizer_place(args.run)
    carried = carried_tokenizer(args.run)
    system = args.system
    if system is None:
        system = system_message(carried)
    chat = Chat(tokenizer, place, args.chat_template, system=system)
    if system and args.system is None:
        print_on_stderr(f"system (of the run's data): {system}")
    # The tokenizer may have several templates of its own, too, which are chosen by their names.
    of_sources = [name for name in carried.files if _is_of_source(name, carried)]
    others = [f"{place}/{name}" for name in of_sources]
    if others and not args.chat_template:
        print_on_stderr(
            f"chat template: {place}/{CHAT_TEMPLATE}. Other sources of the run were rendered by "
            f"others; use --chat-template for one of {', '.join(others)}."
        )
    return chat


def _is_of_source(name: str, carried: TokenizerRecord) -> bool:
    """Return whether a file that a run carries is the chat template of one of its sources."""
    folder, _, file = name.rpartition("/")
    source = file.removesuffix(".jinja")
    while source.startswith("source-") and source not in carried.system:
        source = source.removeprefix("source-")
    return folder == MORE_TEMPLATES and source in carried.system


def system_message(carried: TokenizerRecord) -> str:
    """The system message that the data of a run was prepared with, for conversations that had none;
    empty: there is none.

    UsageError: sources have different ones.
    """
    different = set(carried.system.values())
    if len(different) > 1:
        listed = "; ".join(f"{name}: {text or 'none'}" for name, text in carried.system.items())
        raise UsageError(
            f"the sources of this run were prepared with different system messages ({listed}). "
            "Choose with --system TEXT, or --system '' for none."
        )
    return "".join(different)
