"""Conversations and prompts in Parquet or Arrow are those of the same rows in JSON lines; what JSON has
no form for becomes text or is left out, and what is damaged is named."""

import datetime
import decimal
import json
import shlex

import pytest

from data_pipeline.shards import TokenShards

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

PLAIN = (
    "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MAP = ["--map", "user={q} {n}", "assistant={turns.0.a}"]


@pytest.fixture
def options(tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    return ["--tokenizer", "bytes", "--chat-template", template]


def rows(count):
    return [
        {"q": f"q é {n} " * (n % 5 + 1), "n": n, "turns": [{"a": f"a{n}"}], "ok": n % 2 == 0}
        for n in range(count)
    ]


def write(folder, records, **others):
    """The records in both formats; `others` are columns that are in Parquet alone."""
    lines = folder / "a.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    table = pyarrow.Table.from_pylist(records)
    for name, column in others.items():
        table = table.append_column(name, column)
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=40, compression="none")
    return lines, folder / "a.parquet"


def test_rows_are_what_lines_are(tmp_path, prepared, options):
    records = rows(300)
    lines, table = write(
        tmp_path,
        records,
        picture=pyarrow.array([b"\xff"] * 300),
        day=pyarrow.array([0] * 300, pyarrow.date32()),
    )
    for option, more in (("--chat", MAP), ("--prompts", MAP)):
        of_lines = prepared.out(option, lines, *options, *more)
        of_rows = prepared.out(option, table, *options, *more)
        assert prepared.read(of_rows) == prepared.read(of_lines)
        assert len(prepared.read(of_rows)) == 300
    found = TokenShards.open(of_rows, "full").columns(range(300))
    assert [record | {"prompt": None} for record in found] == [
        record | {"prompt": None, "day": "1970-01-01"} for record in records
    ]


def test_rows_are_held_out(tmp_path, prepared, options):
    _, table = write(tmp_path, rows(300))
    command = ["--chat", table, *options, *MAP]
    tail = prepared.out(*command, "--holdout", "0.1", "--holdout-by", "tail")
    whole = prepared.read(tail / "train") + prepared.read(tail / "eval")
    assert whole == prepared.texts(*command) and len(prepared.read(tail / "eval")) == 30
    apart = prepared.out(*command, "--holdout", "0.2")
    sizes = [len(prepared.read(apart / part)) for part in ("train", "eval")]
    assert sum(sizes) == 300 and 30 < sizes[1] < 90


def test_bad_rows_are_named_by_their_number(tmp_path, prepared, options):
    records = rows(50)
    records[47]["q"] = None
    _, table = write(tmp_path, records)
    error = prepared.error(65, "--chat", table, *options, *MAP)
    assert "a.parquet, row 47: column 'q' holds null, not text or a number" in error


def test_files_that_can_not_be_used_are_named(tmp_path, prepared, options):
    broken = tmp_path / "b.parquet"
    broken.write_bytes(b"PAR1 broken")
    error = prepared.error(65, "--chat", broken, *options, *MAP)
    assert "b.parquet: is not a Parquet file" in error
    binary = pyarrow.table({"x": pyarrow.array([b"a"])})
    pyarrow.parquet.write_table(binary, broken)
    error = prepared.error(65, "--chat", broken, *options, *MAP)
    assert "or none with values that JSON has; columns: x. Write it with others." in error
    _, table = write(tmp_path, rows(100))
    data = bytearray(table.read_bytes())
    at = data.index(b"q \xc3\xa9 60 ")
    data[at : at + 4] = b"\xff" * 4
    table.write_bytes(data)
    error = prepared.error(65, "--chat", table, *options, *MAP)
    assert "a.parquet, row " in error and "can't be read" in error


def test_objects_have_the_keys_that_they_were_given_and_nan_is_nothing(tmp_path, prepared, options):
    """Arrow gives each object of a column the keys of all; pandas writes NaN where there is none."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]},
    ]
    records = [{"messages": turns}, {"messages": [turns[0], turns[1] | {"tool_calls": None}]}]
    del records[1]["messages"][1]["tool_calls"]
    score = pyarrow.array([float("nan"), 1.0])
    lines, table = write(tmp_path, records, score=score)
    template = options[-1]
    seen = "{% if 'tool_calls' in m %}calls{% endif %}{{ m.role }}"
    template.write_text(PLAIN.replace("{{ m.role }}", seen))
    of_lines = prepared.read(prepared.out("--chat", lines, *options))
    assert prepared.read(prepared.out("--chat", table, *options)) == of_lines
    assert len(of_lines) == 2


def test_pairs_and_labels_in_parquet_are_those_of_lines(tmp_path, prepared, options):
    def says(role, text):
        return {"role": role, "content": text}

    asked = [says("user", "how?")]
    forms = {
        "explicit": {"prompt": "how?", "chosen": "well", "rejected": "no", "score_chosen": 2.5},
        "messages": {
            "prompt": asked,
            "chosen": [says("assistant", "well")],
            "rejected": [says("assistant", "no")],
        },
        "implicit": {
            "chosen": [*asked, says("assistant", "well")],
            "rejected": [*asked, says("assistant", "no")],
        },
        "turns": {
            "chosen": "\n\nHuman: how?\n\nAssistant: well",
            "rejected": "\n\nHuman: how?\n\nAssistant: no",
        },
        "labels": {"prompt": "how?", "completion": "well", "label": True},
    }
    for name, record in forms.items():
        folder = tmp_path / name
        folder.mkdir()
        more = []
        if name == "explicit":
            record = record | {"score_rejected": 1}
            more = ["--margin"]
        lines, table = write(folder, [record | {"n": n} for n in range(3)])
        of_lines = prepared.out("--preferences", lines, *options, *more)
        of_rows = prepared.out("--preferences", table, *options, *more)
        assert prepared.read(of_rows) == prepared.read(of_lines)
        shards = TokenShards.open(of_rows, "full")
        assert shards.num_groups == 3
        assert shards.valued == (name in ("explicit", "labels"))


def test_a_list_of_objects_is_read_like_lines(tmp_path, prepared, options):
    records = []
    for n in range(50):
        records.append({"instruction": f"Add {n}.", "input": "1 2" * (n % 2), "output": f"{n} é"})
    lines, _ = write(tmp_path, records)
    whole = tmp_path / "alpaca.json"
    whole.write_text(json.dumps(records, indent=2))
    options = [*options, "--map", "alpaca"]
    of_lines = prepared.out("--chat", lines, *options)
    of_list = prepared.out("--chat", whole, *options)
    assert prepared.read(of_list) == prepared.read(of_lines)
    first, second, *_ = prepared.read(of_list)
    assert first.endswith("Add 0.assistant0 é")
    assert second.endswith("userAdd 1.\n\n1 2assistant1 é")
    prepared.out("--chat", whole, *options, "--holdout", "0.3")
    for content, message in (
        ("[]", "is an empty list"),
        ('[{"instruction": "a"}, 3]', "item 1 of its list is no object"),
        ('[{"instruction": "a"', "begins like a list and is not JSON"),
        ('[{"instruction": "a", "input": ""}]', "alpaca.json, row 0: no column 'output'"),
    ):
        whole.write_text(content)
        assert message in prepared.error(65, "--chat", whole, *options)


def saved(folder, table):
    """A folder as Hugging Face's save_to_disk makes it."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    state = {"_data_files": [{"filename": name}], "_indices_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_saved_dataset_is_read_like_lines(tmp_path, prepared, options):
    says = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": [says[0], says[1] | {"content": f"b{n}"}]} for n in range(40)]
    lines, _ = write(tmp_path, records)
    folder = saved(tmp_path / "it's saved" / "train", pyarrow.Table.from_pylist(records))
    of_lines = prepared.texts("--chat", lines, *options)
    assert prepared.texts("--chat", folder, *options) == of_lines
    assert prepared.texts("--chat", folder / "*.arrow", *options) == of_lines
    tail = prepared.out("--chat", folder, *options, "--holdout", "0.1", "--holdout-by", "tail")
    assert len(prepared.read(tail / "eval")) == 4
    splits = json.dumps({"splits": ["train", "test"]})
    (folder.parent / "dataset_dict.json").write_text(splits)
    error = prepared.error(65, "--chat", folder.parent, *options)
    # The shell reads what is printed as the path again.
    words = shlex.split(error.partition("Name one of them: ")[2].partition(" or ")[0])
    assert words == ["--chat", str(folder)]
    pairs = [{"prompt": "a", "chosen": "b", "rejected": f"c{n}"} for n in range(5)]
    folder = saved(tmp_path / "pairs", pyarrow.Table.from_pylist(pairs))
    lines, _ = write(tmp_path, pairs)
    plain = ["--tokenizer", "bytes"]
    of_lines = prepared.texts("--preferences", lines, *plain)
    assert prepared.texts("--preferences", folder, *plain) == of_lines
    prompts = [{"prompt": "a", "level": n} for n in range(5)]
    folder = saved(tmp_path / "prompts", pyarrow.Table.from_pylist(prompts))
    shards = TokenShards.open(prepared.out("--prompts", folder))
    assert shards.columns([4]) == [prompts[4]]
    (folder / "data-00000-of-00001.arrow").write_bytes(b"ARROW1 broken")
    assert "is not an Arrow file" in prepared.error(65, "--prompts", folder)


WHEN = datetime.datetime(2026, 1, 2, 3, 4, 5)
# Values that JSON has no form for, and what is read of them.
OTHERS = {
    "timestamp": (WHEN, "2026-01-02T03:04:05"),
    "zone": (WHEN.replace(tzinfo=datetime.UTC), "2026-01-02T03:04:05+00:00"),
    "date": (WHEN.date(), "2026-01-02"),
    "time": (WHEN.time(), "03:04:05"),
    "decimal": (decimal.Decimal("1.50"), "1.50"),
    "bytes": (b"ab", "ab"),
    "other bytes": (b"\xff", ""),
    "inside": ({"at": [{"when": WHEN, "no": None}]}, '{"at": [{"when": "2026-01-02T03:04:05"}]}'),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("place", ["parquet", "saved"])
def test_messages_with_values_that_json_has_no_form_for_are_read(
    tmp_path, prepared, options, kind, place
):
    value, expected = OTHERS[kind]
    says = [{"role": "user", "content": "a", "at": value}, {"role": "assistant", "content": "b"}]
    table = pyarrow.Table.from_pylist([{"messages": says}])
    file = tmp_path / "b.parquet"
    if place == "saved":
        file = saved(tmp_path / "saved", table)
    else:
        pyarrow.parquet.write_table(table, file)
    shown = "{% if m.at %}{{ m.at if m.at is string else m.at | tojson }}{% endif %}{{ m.role }}"
    options[-1].write_text(PLAIN.replace("{{ m.role }}", shown))
    (text,) = prepared.texts("--chat", file, *options)
    assert text == f"{expected}usera" + "assistantb"
