"""Reports about token shards: the summary of a build, and a row as training reads it. Plain text,
80 columns.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from rich.text import Text

from data_pipeline.base.errors import DataError
from data_pipeline.loader.packing import Windows, count_rows, pack, pack_documents, phase
from data_pipeline.plan.document_packing import open_bins
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

# Characters of the longest bar.
_BAR = 44
# Documents whose lengths are read at a time.
_AT_ONCE = 1 << 20
# Of segments, in turn.
_COLOURS = ("cyan", "yellow", "green", "magenta")
_WIDTH = 78
# Around targets, where there is no colour: ⟦ ⟧, which text hardly has.
OPEN = "\u27e6"
CLOSE = "\u27e7"
# Documents that are looked at for answers without an end.
_MOST_CHECKED = 64
# Tokens before the first target, and from it on.
_EXAMPLE_TOKENS = 16
_TARGETS_BY = {
    "marked": "what {% generation %} holds in the chat template",
    "compared": "what the template adds for an answer; it has no {% generation %}",
    "mixed": "what {% generation %} holds, or without it, what the template adds for an answer",
}


def summary(shards: TokenShards) -> Iterator[str]:
    """Yield lines about a directory: sizes, bytes per token, lengths of documents, and documents
    that were left out or repaired.
    """
    m = shards.manifest
    size = f"{m.num_groups:,} {m.unit}s, {m.num_tokens:,} tokens in {len(m.shards):,} shards"
    yield f"{shards.path}: {size}"
    tokenizer = f"{m.tokenizer['name']}, {m.tokenizer['vocab_size']:,} entries"
    if shards.masked:
        per = m.text_bytes / max(1, m.num_targets)
        yield f"  {m.num_targets:,} of them targets, {m.text_bytes:,} bytes of text of targets"
        yield f"  {per:.3f} bytes per target ({tokenizer})"
    else:
        per = m.text_bytes / m.num_tokens
        yield f"  {m.text_bytes:,} bytes of text"
        yield f"  {per:.3f} bytes per token ({tokenizer})"
    form = m.settings.get("preferences")
    if form:
        yield f"  preferences: {form} (the first record)"
    if shards.valued:
        yield f"  {_values(shards)}"
    found = _TARGETS_BY.get(m.settings.get("chat_targets", ""))
    # A prompt has no answer.
    if found and not m.settings.get("prompts"):
        yield f"  targets: {found}"
        yield f"    such as {_example(shards)}"
    if shards.masked or shards.has_columns:
        yield f"  {row_beginning(shards, load_tokenizer(shards.path))}"
    if shards.masked and not shards.has_columns:
        yield from _warn_of_endless_answers(shards)
    counts, longest = histogram(shards)
    mean = m.num_tokens / m.num_groups
    yield f"  tokens in a {m.unit}: {mean:,.1f} on average, {longest:,} at most"
    yield from bars(counts)
    if m.problems:
        yield from _problem_lines(m)


def _problem_lines(m: Manifest) -> Iterator[str]:
    """Yield the numbers of documents that were left out or repaired, with examples."""
    # A document is left out for one reason; older manifests do not say how many were.
    read = m.num_groups + sum(entry.get("left_out", 0) for entry in m.problems.values())
    yield f"  left out or repaired, of {read:,} {m.unit}s:"
    for kind, entry in m.problems.items():
        count = entry["count"]
        yield f"  {count:>9,} x {kind} ({count / read:.2%}), such as"
        for where in entry["examples"]:
            yield f"{'':14}{where}".encode(errors="backslashreplace").decode()


def _example(shards: TokenShards) -> str:
    """The first target of a directory and a few tokens around it, in one line, with marks around
    what is a target."""
    first, length = shards.document(0)
    mask = shards.mask(np.array([first]), length)[0]
    ids = shards.read(first, length)
    at = int(mask.argmax())
    tokenizer = load_tokenizer(shards.path)
    before = one_line(spell(tokenizer, ids[max(at - _EXAMPLE_TOKENS, 0) : at]), 4 * _WIDTH)
    after = marked_text(tokenizer, ids[at : at + _EXAMPLE_TOKENS], mask[at : at + _EXAMPLE_TOKENS])
    return before[-_WIDTH // 2 :] + one_line(after, _WIDTH // 2 - len("    such as "))


def row_beginning(shards: TokenShards, tokenizer: Tokenizer, number: int = 0) -> str:
    """Say which token a row begins with that holds document `number` first."""
    begin = shards.manifest.tokenizer["special_ids"]["eod"]
    why = "the end-of-document token"
    has_own = shards.manifest.eod == "none" or (shards.is_rendered and shards.has_columns)
    if has_own:
        first, _ = shards.document(number)
        begin = int(shards.read(first, 1)[0])
        why = "the chat template's first token" if shards.is_rendered else "its own first token"
    token = one_line(spell(tokenizer, np.array([begin])), _WIDTH // 2)
    return f"begins with {token or f'token {begin}'}, {why}"


def _warn_of_endless_answers(shards: TokenShards) -> Iterator[str]:
    """Lines about answers that are learnt without the token that ends them: a model that learns
    from them does not learn to stop. Looks at the first documents."""
    tokenizer = load_tokenizer(shards.path)
    names = {number: name for name, number in tokenizer.special.items()}
    if tokenizer.eod_id is not None:
        names.setdefault(tokenizer.eod_id, "the end-of-document token")
    endless = 0
    behind: dict[str, int] = {}
    count = min(shards.num_documents, _MOST_CHECKED)
    for number in range(count):
        first, length = shards.document(number)
        ids = shards.read(first, length)
        (learnt,) = np.nonzero(shards.mask(np.array([first]), length)[0])
        if not learnt.size or int(ids[learnt[-1]]) in names:
            continue
        endless += 1
        after = [names[i] for i in ids[learnt[-1] + 1 :].tolist() if i in names]
        token = after[0] if after else ""
        behind[token] = behind.get(token, 0) + 1
    if not endless:
        return
    token = max(behind, key=lambda name: behind[name])
    yield f"  WARNING: {endless:,} of the first {count:,} documents teach no end of an answer,"
    yield "    so that a model would not learn to stop."
    if token and shards.manifest.settings.get("chat_targets") != "compared":
        yield f"    {token} follows the answer and is no target: write it inside of"
        yield "    {% generation %} in the chat template."
    elif token:
        yield f"    {token} follows the answer and is no target."
    elif not shards.is_rendered:
        yield "    Give --eod append to end each answer with the end-of-document token."
    elif not tokenizer.special:
        yield "    The tokenizer has no special token that could end it. Use one that has."
    else:
        yield "    The chat template writes no special token behind an answer: write one, such as"
        yield f"    {_example_end(tokenizer)}, inside of what is a target."


def _example_end(tokenizer: Tokenizer) -> str:
    """A token that could end an answer."""
    for name, number in tokenizer.special.items():
        if number == tokenizer.eod_id:
            return name
    return next(iter(tokenizer.special))


def _values(shards: TokenShards) -> str:
    """Summarise the numbers that belong to documents."""
    numbers = np.arange(0, shards.num_documents, shards.group)
    values = []
    for first in range(0, len(numbers), _AT_ONCE):
        values.append(shards.values(numbers[first : first + _AT_ONCE]))
    found = np.concatenate(values)
    if shards.group == 1:
        good = np.count_nonzero(found > 0)
        return f"labels: {good:,} desirable, {len(found) - good:,} undesirable"
    mean = found.mean(dtype=float)
    return f"margins: {mean:.4g} on average, {found.min():.4g} to {found.max():.4g}"


def histogram(shards: TokenShards) -> tuple[np.ndarray, int]:
    """Documents, or groups of them, of 2^i up to 2^(i + 1) - 1 tokens, int64 [largest i + 1], and
    the length of the longest."""
    counts = np.zeros(64, np.int64)
    longest = 0
    step = _AT_ONCE * shards.group
    for first in range(0, shards.num_documents, step):
        lengths = shards.documents(np.arange(first, min(first + step, shards.num_documents)))[1]
        lengths = lengths.reshape(-1, shards.group).sum(axis=1)
        counts += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)
        longest = max(longest, int(lengths.max()))
    return np.trim_zeros(counts, "b"), longest


def bars(counts: np.ndarray) -> Iterator[str]:
    """A line for each power of two from the first to the last that occurs, with its share."""
    total = int(counts.sum())
    most = int(counts.max())
    for power in range(int(np.flatnonzero(counts)[0]), len(counts)):
        count = int(counts[power])
        bar = "#" * -(-count * _BAR // most)
        yield f"  {2**power:>11,} or more {count / total:>7.2%}  {bar}".rstrip()


def row_arrays(
    shards: TokenShards,
    row: int,
    length: int,
    packing: Literal["stream", "bins", "pad"],
    seed: int,
    epoch: int = 0,
) -> dict[str, np.ndarray]:
    """The arrays [T] of row `row` of an epoch, before permutation, of T = `length` positions, as
    training reads it.

    Rows of whole documents are planned, and the plan kept beside the manifest, as training does;
    long documents are cut, and long groups of documents left out.
    DataError: there is no such row.
    """
    source = np.array([0])
    if packing == "stream" and shards.group > 1:
        what = f"{shards.path} holds {shards.manifest.unit}s, which windows of a stream would tear"
        raise DataError(f"--packing stream: {what} apart. Give --packing bins or pad.")
    if packing == "stream":
        _check_row(shards, row, length, count_rows(shards.num_tokens, length))
        start = phase(seed, shards.uid, epoch, shards.num_tokens) + row * length
        count = min(length, shards.num_tokens - row * length)
        windows = Windows(source, np.array([start]), np.array([count]))
        batch = pack([shards], windows, length, True, False)
    else:
        on_long = "truncate"
        if shards.group > 1:
            on_long = "skip"
        bins = open_bins(shards, length, packing, on_long)
        _check_row(shards, row, length, bins.num_rows)
        batch = pack_documents([shards], [bins], source, np.array([row]), length, True, False)
    return {name: array[0] for name, array in batch.items()}


def shown_tokens(arrays: dict[str, np.ndarray], eod: str) -> dict[str, np.ndarray]:
    """Return arrays [T] of a row whose `targets` are the tokens of its documents, as people read
    them, and whose `loss_mask` says which of these are learnt.

    Without end marks (`eod` "none") the tokens of documents are the inputs of a row: each is the
    target of the position before it, and the first of a document of none.
    """
    if eod != "none":
        return arrays
    learnt = np.zeros_like(arrays["loss_mask"])
    segments = arrays["segment_ids"]
    same = segments[1:] == segments[:-1]
    learnt[1:] = np.where(same, arrays["loss_mask"][:-1], 0)
    return {**arrays, "targets": arrays["inputs"], "loss_mask": learnt}


def _check_row(shards: TokenShards, row: int, length: int, num_rows: int) -> None:
    """DataError: there is no such row."""
    if not 0 <= row < num_rows:
        fix = f"Choose one of 0 to {num_rows - 1}"
        raise DataError(f"--row {row}: {shards.path} has {num_rows:,} rows of {length:,}. {fix}.")


def group_arrays(shards: TokenShards, group: int) -> dict[str, np.ndarray]:
    """The documents of a group, by its number, as the arrays [T] of a row that holds nothing else.
    DataError: there is no such group."""
    if not 0 <= group < shards.num_groups:
        fix = f"Choose one of 0 to {shards.num_groups - 1}"
        raise DataError(f"{shards.path}: {shards.manifest.unit} {group} does not exist. {fix}.")
    numbers = group * shards.group + np.arange(shards.group)
    first, sizes = shards.documents(numbers)
    targets, mask = shards.spans(first, sizes)
    arrays = {
        "targets": targets,
        "loss_mask": mask.astype(np.float32),
        "segment_ids": np.repeat(np.arange(1, shards.group + 1), sizes),
    }
    if shards.valued:
        arrays["value"] = np.repeat(shards.values(numbers), sizes)
    return arrays


def describe_row(
    arrays: dict[str, np.ndarray], tokenizer: Tokenizer, marks: bool = False, group: int = 1
) -> Iterator[Text]:
    """The targets of a row, decoded: a headline for each segment, then its text in its colour, dim
    where nothing is learnt.

    `marks`: there are no colours, so marks are put around what is learnt, in segments of which some
        is not.
    `group`: segments that belong together; 2: pairs, of which the first is the chosen one.
    """
    segments = arrays["segment_ids"]
    targets = arrays["targets"]
    learnt = arrays["loss_mask"] > 0
    for segment in range(1, int(segments.max()) + 1):
        (places,) = np.nonzero(segments == segment)
        colour = _COLOURS[(segment - 1) % len(_COLOURS)]
        count = int(np.count_nonzero(learnt[places]))
        name = f"segment {segment}"
        if group > 1:
            name += f", {_member(segment, group)}"
        if "value" in arrays:
            name += f", {describe_value(float(arrays['value'][places[0]]), group)}"
        head = f"{name}: positions {places[0]:,} to {places[-1]:,}, "
        head += f"{count:,} of {len(places):,} are targets"
        marked = marks and 0 < count < len(places)
        if marked:
            head += f", in {OPEN}{CLOSE}"
        yield Text(f"--- {head} ".ljust(_WIDTH, "-"), style=f"bold {colour}")
        yield coloured_text(tokenizer, targets[places], learnt[places], colour, marked)
    if padding := np.count_nonzero(segments == 0):
        yield Text(f"--- padding: {padding:,} positions ".ljust(_WIDTH, "-"), style="dim")


def describe_value(value: float, group: int) -> str:
    """Describe the number of a document: a label, or where documents belong together the margin."""
    if group == 1:
        return f"label {value:+g}"
    return f"margin {value:g}"


def _member(segment: int, group: int) -> str:
    """Name the document and group of a segment in a row; both are counted from 1."""
    number, place = divmod(segment - 1, group)
    if group != 2:
        return f"{place + 1} of group {number + 1}"
    which = "rejected" if place else "chosen"
    return f"{which} of pair {number + 1}"


def coloured_text(
    tokenizer: Tokenizer,
    ids: np.ndarray,
    learnt: np.ndarray,
    colour: str = _COLOURS[0],
    marks: bool = False,
) -> Text:
    """The text of ids [T] in a colour, dim where they are no targets, bool [T]; `marks`: with marks
    around targets, too."""
    text = Text()
    for run, learnt_here in _runs(ids, learnt):
        words = spell(tokenizer, run)
        style = colour
        if not learnt_here:
            style = f"dim {colour} italic"
        elif marks:
            words = f"{OPEN}{words}{CLOSE}"
        text.append(words, style=style)
    return text


def token_lines(tokenizer: Tokenizer, ids: np.ndarray, learnt: np.ndarray) -> Iterator[Text]:
    """A line for each of ids [T]: its number in the document, what it is for the loss, bool [T],
    its id and its text, with what can't be printed as Python writes it."""
    yield Text(f"{'token':>7}  {'':6}  {'id':>7}  text", style="bold")
    for number, (token, learnt_here) in enumerate(zip(ids, learnt, strict=True)):
        word = one_line(spell(tokenizer, np.array([token])), _WIDTH)
        role = ""
        style = f"dim {_COLOURS[0]} italic"
        if learnt_here:
            role = "target"
            style = _COLOURS[0]
        yield Text(f"{number:>7,}  {role:6}  {int(token):>7}  {word}", style=style)


def marked_text(tokenizer: Tokenizer, ids: np.ndarray, learnt: np.ndarray) -> str:
    """The text of ids [T], with marks around those that are targets, bool [T]."""
    parts = []
    for run, learnt_here in _runs(ids, learnt):
        words = spell(tokenizer, run)
        if learnt_here:
            words = f"{OPEN}{words}{CLOSE}"
        parts.append(words)
    return "".join(parts)


def spell(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """The text of ids, in which special tokens are written by their names: an end of turn is a
    target like others."""
    names = {number: name for name, number in tokenizer.special.items()}
    special = np.isin(ids, list(names))
    parts = []
    for run, named in _runs(ids, special):
        if named:
            parts += [names[number] for number in run.tolist()]
        else:
            parts.append(tokenizer.decode(run))
    return "".join(parts)


def one_line(text: str, most: int) -> str:
    """Return a text in one line of at most `most` characters, with control characters as Python
    writes them.
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


def _runs(ids: np.ndarray, flags: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
    """Stretches of ids [T] with the same flag, bool [T], and that flag."""
    borders = np.flatnonzero(np.diff(flags)) + 1
    for part in np.split(np.arange(len(ids)), borders):
        if part.size:
            yield ids[part], bool(flags[part[0]])
