"""prepare --preferences: every usual form gives the same pairs, answers alone are targets, and bad
records go by --on-bad."""

import json

import numpy as np
import pytest

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.prepare import command as prepare
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.sources import preferences
from data_pipeline.sources.document import InputOptions
from data_pipeline.tokenizer import CharTokenizer, load_tokenizer, train_bpe

END = "</s>"
MARKED = (
    "{%- for message in messages %}<{{ message.role }}>"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '</s>' }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
COMPARED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


PROMPT = [user("hi"), says("hello"), user("how?")]
PROMPT_TEXT = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: how?\n\nAssistant:"
PAIRS = {
    "explicit messages": {
        "prompt": PROMPT,
        "chosen": [says("well")],
        "rejected": [says("no")],
    },
    "implicit messages": {
        "chosen": [*PROMPT, says("well")],
        "rejected": [*PROMPT, says("no")],
    },
    "messages with the prompt again": {
        "prompt": PROMPT,
        "chosen": [*PROMPT, says("well")],
        "rejected": [*PROMPT, says("no")],
    },
    "a last question as the prompt": {
        "prompt": "how?",
        "chosen": [*PROMPT, says("well")],
        "rejected": [*PROMPT, says("no")],
    },
    "implicit turns": {
        "chosen": f"{PROMPT_TEXT} well",
        "rejected": f"{PROMPT_TEXT} no",
    },
    "explicit turns": {"prompt": PROMPT_TEXT, "chosen": " well", "rejected": " no"},
    "sharegpt": {
        "prompt": [{"from": "human", "value": "hi"}, *PROMPT[1:]],
        "chosen": [{"from": "gpt", "value": "well"}],
        "rejected": [{"from": "gpt", "value": "no"}],
    },
}
WHOLE = "<user>hi<assistant>hello</s><user>how?<assistant>"


def write(path, records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run(tmp_path, records, *more, template=MARKED, out="out"):
    """The exit code of prepare on these records, with a template unless it is None."""
    write(tmp_path / "in.jsonl", records)
    words = [str(tmp_path / out), "--preferences", str(tmp_path / "in.jsonl"), "--workers", "1"]
    words += ["--tokenizer", "bytes"]
    if template is not None:
        (tmp_path / "template.jinja").write_text(template)
        words += ["--chat-template", str(tmp_path / "template.jinja")]
    return prepare.main([*words, *more])


def split_at_ends(ids, tokenizer):
    """Ids between end marks."""
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eod_id))
    return [part[part != tokenizer.eod_id] for part in parts]


def documents_of(directory):
    """The text of every document, with its targets in brackets, and | for end marks."""
    shards = TokenShards.open(directory, "full")
    tokenizer = load_tokenizer(directory)
    found = []
    for number in range(shards.num_documents):
        first, length = shards.document(number)
        ids = shards.read(first, length)
        (mask,) = shards.mask(np.array([first]), length)
        runs = np.split(np.arange(length), np.flatnonzero(np.diff(mask)) + 1)
        text = ""
        for run_of in runs:
            words = "|".join(
                tokenizer.decode(part) for part in split_at_ends(ids[run_of], tokenizer)
            )
            text += f"[{words}]" if mask[run_of[0]] else words
        found.append(text)
    return found


@pytest.mark.parametrize("template", [MARKED, COMPARED], ids=["marked", "compared"])
def test_every_form_of_a_pair_gives_the_same_two_documents(tmp_path, template, capsys):
    assert run(tmp_path, PAIRS.values(), template=template) == 0
    pair = [f"{WHOLE}[well{END}]", f"{WHOLE}[no{END}]"]
    assert documents_of(tmp_path / "out") == pair * len(PAIRS)
    manifest = Manifest.load(tmp_path / "out")
    assert (manifest.group, manifest.num_groups) == (2, len(PAIRS))
    assert not manifest.shards[0].has_values
    said = capsys.readouterr().out
    assert "preferences: pairs with a prompt, messages (the first record)" in said
    assert f"{len(PAIRS)} pairs, " in said and "tokens in a pair: " in said


def test_answers_of_several_turns_are_targets_from_the_first_difference_on(tmp_path):
    record = {
        "chosen": [*PROMPT, says("well"), user("why?"), says("sun")],
        "rejected": [*PROMPT, says("no"), user("oh")],
    }
    assert run(tmp_path, [record]) == 0
    assert documents_of(tmp_path / "out") == [
        f"{WHOLE}[well{END}]<user>why?<assistant>[sun{END}]",
        f"{WHOLE}[no{END}]<user>oh",
    ]


def test_text_without_a_template_stays_as_it_is_and_ends_with_a_target(tmp_path):
    records = [
        {"prompt": "2+2=", "chosen": "4", "rejected": " five"},
        PAIRS["implicit turns"],
        {
            "chosen": f"{PROMPT_TEXT} well\n\nHuman: why?\n\nAssistant: sun",
            "rejected": f"{PROMPT_TEXT} no\n\nHuman: oh",
        },
    ]
    assert run(tmp_path, records, template=None) == 0
    assert documents_of(tmp_path / "out") == [
        "2+2=[4|]",
        "2+2=[ five|]",
        f"{PROMPT_TEXT}[ well|]",
        f"{PROMPT_TEXT}[ no|]",
        f"{PROMPT_TEXT}[ well]\n\nHuman: why?\n\nAssistant:[ sun|]",
        f"{PROMPT_TEXT}[ no]\n\nHuman: oh|",
    ]


def test_no_token_has_parts_of_both_prompt_and_answer(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    tokenizer = train_bpe(["ab"] * 9, 258)
    tokenizer.save(tmp_path / "tokenizer")
    assert len(tokenizer.encode("ab")) == 1
    record = {"prompt": "a", "chosen": "b", "rejected": "ab"}
    assert run(tmp_path, [record], "--tokenizer", str(tmp_path / "tokenizer"), template=None) == 0
    assert documents_of(tmp_path / "out") == ["a[b|]", "a[ab|]"]
    assert TokenShards.open(tmp_path / "out").num_tokens == 6


def test_plain_text_with_a_template_becomes_turns(tmp_path):
    record = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
    assert run(tmp_path, [record]) == 0
    before = "<user>2+2=<assistant>"
    assert documents_of(tmp_path / "out") == [f"{before}[4{END}]", f"{before}[five{END}]"]


def test_margins_are_kept_if_they_are_asked_for(tmp_path, capsys):
    pair = PAIRS["implicit messages"]
    records = [
        pair | {"margin": 0.5, "score_chosen": 9, "score_rejected": 1},
        pair | {"score_chosen": 7.5, "score_rejected": 9},
    ]
    assert run(tmp_path, records, "--margin") == 0
    shards = TokenShards.open(tmp_path / "out")
    assert shards.values(np.arange(4)).tolist() == [0.5, 0.5, -1.5, -1.5]
    assert "margins: -0.5 on average, -1.5 to 0.5" in capsys.readouterr().out
    assert run(tmp_path, records, out="without") == 0
    assert not TokenShards.open(tmp_path / "without").valued
    capsys.readouterr()
    assert run(tmp_path, [*records, pair], "--margin", out="missing") == 65
    assert "no margin: neither column 'margin' nor 'score_chosen'" in capsys.readouterr().err


def test_answers_with_a_label_are_single_documents_with_a_number(tmp_path, capsys):
    records = [
        {"prompt": PROMPT, "completion": [says("well")], "label": True},
        {"prompt": "how?", "completion": "no", "label": False},
        {"prompt": "how?", "completion": [*PROMPT, says("well")], "label": True},
    ]
    assert run(tmp_path, records) == 0
    assert documents_of(tmp_path / "out") == [
        f"{WHOLE}[well{END}]",
        f"<user>how?<assistant>[no{END}]",
        f"{WHOLE}[well{END}]",
    ]
    shards = TokenShards.open(tmp_path / "out")
    assert (shards.group, shards.values(np.arange(3)).tolist()) == (1, [1, -1, 1])
    assert "labels: 2 desirable, 1 undesirable" in capsys.readouterr().out


def test_columns_may_have_other_names(tmp_path, capsys):
    record = {"question": "2+2=", "win": "4", "lose": "5"}
    assert run(tmp_path, [record]) == 65
    said = capsys.readouterr().err
    assert "its keys are question, win, lose. Name them, such as --columns chosen=win,rej" in said
    columns = "prompt=question,chosen=win,rejected=lose"
    assert run(tmp_path, [record], "--columns", columns, template=None) == 0
    assert documents_of(tmp_path / "out") == ["2+2=[4|]", "2+2=[5|]"]
    assert f"--columns {columns}" in Manifest.load(tmp_path / "out").command


def problems_of(tmp_path, record, template, **changes):
    """Return the problem of a record that comes after a valid one, and its detail."""
    good = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    if "label" in record or "completion" in record:
        good = {"prompt": "2+2=", "completion": "4", "label": True}
    path = write(tmp_path / "in.jsonl", [good | {"margin": 1}, record])
    options = InputOptions(vocab_size=257, tokenizer="bytes", **changes)
    if template:
        (tmp_path / "template.jinja").write_text(MARKED)
        options = options._replace(chat_template=str(tmp_path / "template.jinja"))
    (piece,) = preferences.find(str(path), options)
    first, second = preferences.documents(piece)
    assert not first.problem
    assert second.empty and second.problem
    return second.problem + second.detail


PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
BAD = [
    (PAIR | {"rejected": "4"}, "chosen and rejected are the same"),
    (PAIR | {"rejected": " \n"}, "an empty answer"),
    (PAIR | {"rejected": ""}, "an empty answer"),
    (
        PAIR | {"rejected": None},
        "no column 'rejected'; its keys are prompt, chosen, rejected. Name",
    ),
    (PAIR | {"rejected": 5}, "column 'rejected' is neither text nor a list of messages"),
    (PAIR | {"prompt": 5}, "column 'prompt' is neither text nor a list of messages"),
    (PAIR | {"rejected": [says("5")]}, "one is text and the other a list of messages"),
    ({"chosen": "4", "rejected": "5"}, "no prompt: neither a column for it nor turns of Human"),
    ({"prompt": "2+2=", "completion": "4", "label": 1}, "column 'label' is neither true nor false"),
    ({"prompt": "2+2=", "completion": "4"}, "no column 'label'; its keys are"),
    ({"completion": "4", "label": True}, "no column 'prompt'; its keys are"),
]
BAD_TEXT = [
    (PAIR | {"prompt": " "}, "an empty prompt"),
    (PAIR | {"prompt": [user("2+2=")]}, "messages, and no --chat-template"),
    (
        {"chosen": f"{PROMPT_TEXT} a", "rejected": "\n\nHuman: other\n\nAssistant: a"},
        "no prompt: chosen and rejected begin with different turns",
    ),
    ({"chosen": f"{PROMPT_TEXT} a", "rejected": f"{PROMPT_TEXT} "}, "an empty answer"),
    ({"chosen": f"{PROMPT_TEXT} a", "rejected": "\n\nHuman: hi"}, "no answer of the assistant's"),
]
BAD_MESSAGES = [
    (
        {"chosen": [user("a"), says("b")], "rejected": [user("c"), says("b")]},
        "no prompt: chosen and rejected begin with different messages",
    ),
    ({"chosen": [*PROMPT, says("a")], "rejected": PROMPT}, "no answer of the assistant's after"),
    ({"chosen": [*PROMPT, says("a")], "rejected": [*PROMPT, says("")]}, "an empty answer"),
    (PAIR | {"chosen": ["x"], "rejected": ["y"]}, "a message is not a JSON object"),
    (
        {"chosen": f"{PROMPT_TEXT} a", "rejected": f"{PROMPT_TEXT}  a"},
        "chosen and rejected are the same",
    ),
]


@pytest.mark.parametrize(("record", "problem"), BAD + BAD_TEXT)
def test_a_bad_record_of_text_is_told(tmp_path, record, problem):
    assert problem in problems_of(tmp_path, record, template=False)


@pytest.mark.parametrize(("record", "problem"), BAD + BAD_MESSAGES)
def test_a_bad_record_is_told_where_there_is_a_template(tmp_path, record, problem):
    assert problem in problems_of(tmp_path, record, template=True)


@pytest.mark.parametrize("margin", ["1", True, 10**40, [1]])
def test_a_margin_is_a_number(tmp_path, margin):
    said = problems_of(tmp_path, PAIR | {"margin": margin}, template=False, margin=True)
    assert "column 'margin' is not a number, or too large" in said


def test_bad_records_go_by_on_bad_and_the_same_answer_twice_is_only_counted(tmp_path, capsys):
    same = PAIR | {"rejected": "4"}
    nul = PAIR | {"chosen": "4\0"}
    records = [PAIR, same, "", same]
    assert run(tmp_path, records, template=None, out="same") == 0
    assert Manifest.load(tmp_path / "same").num_groups == 1
    said = capsys.readouterr().out
    assert "left out or repaired, of 4 pairs:" in said
    assert "2 x chosen and rejected are the same (50.00%)" in said
    assert run(tmp_path, [PAIR, nul], template=None) == 65
    assert (
        "in.jsonl:2: NUL character. Correct the file, or give --on-bad" in capsys.readouterr().err
    )
    empty = PAIR | {"chosen": ""}
    assert run(tmp_path, [nul, PAIR, empty], "--on-bad", "replace", template=None) == 0
    assert documents_of(tmp_path / "out")[:2] == ["2+2=[4\ufffd|]", "2+2=[5|]"]
    assert Manifest.load(tmp_path / "out").num_groups == 2


def test_pairs_are_held_out_and_deduplicated_as_pairs(tmp_path):
    records = []
    for number in range(40):
        pair = {"prompt": f"{number % 30}?", "chosen": "a", "rejected": "b"}
        records += [pair, pair | {"chosen": "b", "rejected": "a"}, pair | {"rejected": "c"}]
    assert run(tmp_path, records, "--dedupe", "--holdout", "0.3", template=None) == 0
    parts = {part: documents_of(tmp_path / "out" / part) for part in ("train", "eval")}
    pairs = []
    for found in parts.values():
        assert len(found) % 2 == 0 and found
        pairs += zip(found[::2], found[1::2])
    assert len(pairs) == len(set(pairs)) == 90


def test_the_same_answer_with_another_label_is_no_duplicate(tmp_path):
    good = {"prompt": "2+2=", "completion": "4", "label": True}
    records = [good, good | {"label": False}, good]
    assert run(tmp_path, records, "--dedupe", template=None) == 0
    assert TokenShards.open(tmp_path / "out").values(np.arange(2)).tolist() == [1, -1]
    assert Manifest.load(tmp_path / "out").num_documents == 2


def test_a_text_of_a_pair_writes_no_special_token(tmp_path, capsys):
    (tmp_path / "tokenizer").mkdir()
    CharTokenizer("2+=45|", eod=True).save(tmp_path / "tokenizer")
    given = ["--tokenizer", str(tmp_path / "tokenizer")]
    assert run(tmp_path, [PAIR, PAIR | {"rejected": "six"}], *given, template=None) == 65
    assert "character without an id in the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--columns", "best=win"], "--columns best=win: must be NAME=COLUMN, and NAME one of pr"),
        (["--columns", "chosen"], "--columns chosen: must be NAME=COLUMN"),
        (["--tokenizer", "bpe:300"], "--preferences: needs a tokenizer that is there, not one to"),
    ],
)
def test_options_that_cannot_be_are_told(tmp_path, capsys, options, message):
    assert run(tmp_path, [PAIR], *options, template=None) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_what_is_stored_differently_does_not_share_a_directory(tmp_path, capsys):
    label = write(tmp_path / "label.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    text = write(tmp_path / "text.jsonl", [{"text": "b"}])
    assert run(tmp_path, [PAIR], str(label), template=None) == UsageError.exit_code
    assert run(tmp_path, [PAIR], "--preferences", str(label), template=None) == 64
    said = capsys.readouterr().err
    assert (
        "there are pairs with a prompt, text and answers with a label, text, which are st" in said
    )
    assert run(tmp_path, [PAIR], "--jsonl", str(text), template=None) == UsageError.exit_code
    assert "--jsonl: has documents in another form" in capsys.readouterr().err
    words = [str(tmp_path / "out"), "--jsonl", str(text), "--margin"]
    assert prepare.main(words) == UsageError.exit_code
    assert "--margin: belongs to --preferences" in capsys.readouterr().err
    words = [str(tmp_path / "out"), "--preferences", str(label), "--tokenizer", "bytes", "--margin"]
    assert prepare.main(words) == UsageError.exit_code
    assert "--margin: is of pairs" in capsys.readouterr().err


def test_messages_need_a_template(tmp_path, capsys):
    assert run(tmp_path, [PAIRS["implicit messages"]], template=None) == DataError.exit_code
    assert (
        "--preferences: there is no chat template beside the tokenizer" in capsys.readouterr().err
    )


def test_show_has_both_documents_of_a_pair(tmp_path, capsys):
    pair = PAIR | {"margin": 0.5}
    assert run(tmp_path, [PAIR | {"margin": 2}, pair], "--margin", template=None) == 0
    out = str(tmp_path / "out")
    capsys.readouterr()
    assert prepare.main(["show", out, "--pair", "1"]) == 0
    said = capsys.readouterr()
    assert "pair 1 of 2: 12 tokens in 2 documents" in said.err
    first, chosen, second, rejected = said.out.splitlines()
    assert "segment 1, chosen of pair 1, margin 0.5: positions 0 to 5, 2 of 6 are targets" in first
    assert "segment 2, rejected of pair 1, margin 0.5: positions 6 to 11, 2 of 6 are" in second
    assert (chosen, rejected) == ("2+2=\u27e64\u27e7", "2+2=\u27e65\u27e7")
    assert prepare.main(["show", out, "--row", "0", "--seq-length", "24"]) == 0
    said = capsys.readouterr().out
    assert "segment 3, chosen of pair 2, margin" in said and "padding" not in said
    assert prepare.main(["show", out, "--document", "3"]) == 0
    said = capsys.readouterr()
    assert (
        said.out == "2+2=\u27e65\u27e7"
        and "document 3 of 4: 6 tokens from 18, margin 0.5" in said.err
    )
    assert prepare.main(["show", out, "--pair", "2"]) == DataError.exit_code
    assert "pair 2 does not exist. Choose one of 0 to 1" in capsys.readouterr().err
    label = {"prompt": "2+2=", "completion": "4", "label": False}
    assert run(tmp_path, [label], template=None, out="label") == 0
    capsys.readouterr()
    assert prepare.main(["show", str(tmp_path / "label")]) == 0
    assert "document 0 of 1: 6 tokens from 0, label -1" in capsys.readouterr().err
    assert prepare.main(["show", str(tmp_path / "label"), "--pair", "0"]) == UsageError.exit_code
    assert "holds single documents, not pairs. Give --document N" in capsys.readouterr().err


MAPPED = {"q": "2+2=", "about": {"tone": "short"}, "good": "4", "bad": 5, "gap": 0.5}
MAP = ["--map", "user={q} ({about.tone})", "chosen={good}", "rejected={bad}"]


def test_columns_become_pairs_by_a_map(tmp_path, capsys):
    assert run(tmp_path, [MAPPED], *MAP, "--margin", "--columns", "margin=gap") == 0
    before = "<user>2+2= (short)<assistant>"
    assert documents_of(tmp_path / "out") == [f"{before}[4{END}]", f"{before}[5{END}]"]
    assert TokenShards.open(tmp_path / "out").values(np.arange(2)).tolist() == [0.5, 0.5]
    assert "preferences: pairs with a prompt, messages" in capsys.readouterr().out
    told = ["--system", "Be kind."]
    assert run(tmp_path, [MAPPED], *MAP, *told, out="told") == 0
    assert documents_of(tmp_path / "told")[1] == f"<system>Be kind.{before}[5{END}]"
    # Those that need no map have the system message, too, before what both have in common.
    assert run(tmp_path, [PAIRS["implicit messages"]], *told, out="plain") == 0
    assert documents_of(tmp_path / "plain")[0] == f"<system>Be kind.{WHOLE}[well{END}]"
    other = {name: value for name, value in MAPPED.items() if name != "bad"}
    capsys.readouterr()
    assert run(tmp_path, [MAPPED, other], *MAP, out="missing") == 65
    assert "no column 'bad'; its keys are q, about, good, gap" in capsys.readouterr().err


def test_columns_become_answers_with_a_label_by_a_map(tmp_path):
    (tmp_path / "map.json").write_text(
        json.dumps({"messages": [user("{q}")], "completion": "{good}"})
    )
    record = MAPPED | {"up": False}
    more = ["--map", str(tmp_path / "map.json"), "--columns", "label=up"]
    assert run(tmp_path, [record], *more) == 0
    assert documents_of(tmp_path / "out") == [f"<user>2+2=<assistant>[4{END}]"]
    assert TokenShards.open(tmp_path / "out").values(np.arange(1)).tolist() == [-1]


def test_a_map_is_of_what_it_is_used_for(tmp_path, capsys):
    assert run(tmp_path, [MAPPED], "--map", "user={q}", "chosen={good}") == 64
    assert "and these are chosen. Give them" in capsys.readouterr().err
    words = [str(tmp_path / "chat"), "--chat", str(tmp_path / "in.jsonl"), *MAP]
    assert prepare.main([*words, "--tokenizer", "bytes"]) == 64
    assert "chosen is an answer of a preference, and --chat has none" in capsys.readouterr().err


def test_pairs_have_the_system_message_and_the_weights_of_their_records(tmp_path):
    says = [{"role": "assistant", "content": "well", "reasoning": None}]
    pair = {"prompt": "how?", "chosen": says, "rejected": [says[0] | {"content": "no"}]}
    earlier = {"role": "assistant", "content": "hm", "weight": 0}
    more = {"role": "user", "content": "so?"}
    two = pair | {name: [earlier, more, *pair[name]] for name in ("chosen", "rejected")}
    assert run(tmp_path, [pair | {"system": "be"}, two], template=MARKED) == 0
    before = "<system>be<user>how?<assistant>"
    later = "<user>how?<assistant>hm</s><user>so?<assistant>"
    assert documents_of(tmp_path / "out") == [
        f"{before}[well{END}]",
        f"{before}[no{END}]",
        f"{later}[well{END}]",
        f"{later}[no{END}]",
    ]


def test_plain_pairs_may_have_no_end_marks_and_then_do_not_learn_to_end(tmp_path, capsys):
    record = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    assert run(tmp_path, [record], "--eod", "none", template=None) == 0
    said = capsys.readouterr().out
    assert "begins with 2, its own first token" in said
    assert "WARNING: 2 of the first 2 documents" in said and "Give --eod append" in said
    assert documents_of(tmp_path / "out") == ["2+2=[4]", "2+2=[5]"]
