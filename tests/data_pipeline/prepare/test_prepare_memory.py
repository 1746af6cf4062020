"""Memory of `prepare`: a process stays under 1 GiB, whatever the size of its input."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MEASURED = """
import resource, sys
from data_pipeline.prepare import command as prepare
code = prepare.main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 << 20 if sys.platform == "darwin" else 1 << 10), code)
"""


def peak_megabytes(*arguments):
    """Peak resident memory, in MiB, of a build in one process, which must succeed."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split()[-3] == "peak" and done.stdout.split()[-1] == "0", done.stderr
    return int(done.stdout.split()[-2])


def lines(count):
    return (
        (json.dumps({"text": f"{number} and its text, " * 30}) + "\n").encode()
        for number in range(count)
    )


@pytest.mark.slow
@pytest.mark.processes
def test_300_megabytes_in_one_compressed_file(tmp_path):
    size = 0
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for line in lines(480_000):
            size += file.write(line)
    assert size > 300e6
    command = [
        tmp_path / "out",
        "--jsonl",
        tmp_path / "a.jsonl.gz",
        "--dedupe",
        "--tokenizer",
        "bytes",
    ]
    assert peak_megabytes(*command) < 1024


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_one_document_of_100_megabytes(tmp_path, format):
    text = "".join(f"line {number} of a long document\n" for number in range(3_200_000))
    assert len(text) > 100e6
    (tmp_path / "a").write_text(text if format == "text" else json.dumps({"text": text}))
    assert (
        peak_megabytes(
            tmp_path / "out", f"--{format}", tmp_path / "a", "--dedupe", "--tokenizer", "bytes"
        )
        < 1024
    )


@pytest.mark.slow
@pytest.mark.processes
def test_12_million_documents_in_one_unit(tmp_path):
    """Only their digests, half of them repeated, are used: everything else that is done with a
    document takes too long."""
    program = """
import resource, sys
from pathlib import Path
from data_pipeline.prepare.dedupe import Digests
from data_pipeline.sources.document import Document
digests, count = Digests(Path(sys.argv[1]), 3), 12_000_000
digests.save(Document(str(number % (count // 2)), "") for number in range(count))
flags = digests.repeated()
assert not any(flags[: count // 2]) and all(flags[count // 2 :]) and len(flags) == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 << 20 if sys.platform == "darwin" else 1 << 10))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400  # 250; 1,019 if they are sorted at once
