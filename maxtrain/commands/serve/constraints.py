"""Tokens that follow a grammar, such as JSON of a schema, by llguidance.

A grammar is a text in the form of llguidance: Lark, or what `json_grammar` makes of a JSON schema.
The library says which tokens may come next; `maxtrain.inference.sampling` gives all others a
logit of minus infinity.

Source: https://github.com/guidance-ai/llguidance
"""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from data_pipeline.base.errors import UsageError
from data_pipeline.base.extras import load_package
from data_pipeline.tokenizer import Tokenizer

# Characters, nodes and depth of a schema that is accepted.
_MOST_CHARACTERS = 1 << 16
_MOST_NODES = 5000
_MOST_DEPTH = 32
# Compiled grammars that are kept for other requests.
_MOST_KEPT = 16
# Bounds of the work for a grammar as a whole and for each token, some 20 ms each.
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def check_schema(where: str, schema: Any) -> None:
    """Refuse a schema that is too large to be worked with.

    Raises:
        UsageError: the schema is no object, or too large.
    """
    if not isinstance(schema, Mapping):
        raise UsageError(f"{where} must be a JSON object. Give a JSON schema.")
    count = 0
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        inner: list[Any] = []
        for value in level:
            count += 1
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner
        if depth > _MOST_DEPTH or count > _MOST_NODES:
            raise UsageError(
                f"{where} must have at most {_MOST_NODES:,} values, {_MOST_DEPTH} deep. Simplify "
                "it."
            )
    if len(json.dumps(schema)) > _MOST_CHARACTERS:
        raise UsageError(f"{where} must have at most {_MOST_CHARACTERS:,} characters. Shorten it.")


def quoted(schema: Mapping[str, Any]) -> str:
    """Return a schema as a rule of a Lark grammar."""
    return "%json " + json.dumps(schema)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the JSON texts that a schema describes."""
    return f"start: {quoted(schema)}\n"


class GrammarConstraint:
    """A `Constraint` by a grammar, for one text.

    Args:
        matcher: llguidance's matcher, in its first state.
        vocab_size: of the tokenizer.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens may come next; none after an error, such as a limit of work."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, bool)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)

    def take(self, token: int) -> None:
        """Note the next token."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Return whether the text is whole, and nothing but its end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammars:
    """Makes constraints for the texts of one model. For several threads.

    Args:
        tokenizer: of the model.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._end_ids = tuple(i for i in end_ids if i < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._of_library: Any = None
        self._compiled: dict[str, Any] = {}

    def constraint(self, grammar: str) -> GrammarConstraint:
        """Return a constraint for one text.

        Raises:
            UsageError: the grammar cannot be used, or the package is not installed.
        """
        library = load_package("llguidance", "structured", "structured output")
        with self._lock:
            if self._of_library is None:
                self._of_library = self._convert(library)
            matcher = self._compiled.pop(grammar, None)
            if matcher is None:
                limits = library.LLParserLimits(**_LIMITS)
                matcher = library.LLMatcher(self._of_library, grammar, log_level=0, limits=limits)
                if matcher.is_error():
                    reason = str(matcher.get_error()).partition("\n")[0][:300]
                    raise UsageError(
                        f"the schema cannot be followed: {reason}. Change it, or leave it out."
                    )
            # The least recently used one is the first.
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MOST_KEPT:
                self._compiled.pop(next(iter(self._compiled)))
            return GrammarConstraint(matcher.deep_copy(), self._tokenizer.vocab_size)

    def _convert(self, library: Any) -> Any:
        """Return llguidance's form of the tokenizer, with one more entry that ends texts: not
        every tokenizer has a token for that."""
        tokenizer = self._tokenizer
        special = {i: token for token, i in tokenizer.special.items()}
        tokens = []
        for i in range(tokenizer.vocab_size):
            token = tokenizer.token_bytes(i)
            if i in special or i in self._end_ids:
                token = special.get(i, f"<|{i}|>").encode()
            tokens.append(token or b"")
        hidden = [i for i, token in enumerate(tokens) if not token]
        for i in hidden:
            # Tokens without text, or with unknown bytes, never match.
            tokens[i] = b"<|no text %d|>" % i
        end = len(tokens)
        tokens.append(b"<|end of grammar|>")
        unusable = {*special, *self._end_ids, *hidden, end}

        class CheckedGrammar:
            eos_token_id = end
            bos_token_id = None
            special_token_ids = sorted(unusable)

            def __init__(self) -> None:
                self.tokens = tokens

            def __call__(self, text: bytes | str) -> list[int]:
                if isinstance(text, bytes):
                    text = text.decode(errors="replace")
                return tokenizer.encode(text).tolist()

        wrapper = library.TokenizerWrapper(CheckedGrammar())
        return library.LLTokenizer(wrapper, eos_token=[*self._end_ids, end])
