"""Refusals before anything is written: bad keys, meshes that do not fit, words that can't be
written into a script."""

import pytest

from data_pipeline.base.errors import UsageError
from maxtrain.commands.launch import command, names
from maxtrain.commands.launch.tpu import make_slice

SLURM = ["slurm", "--nodes", "2", "--gpus-per-node", "8"]
K8S = ["k8s", "--nodes", "2", "--gpus-per-node", "8", "--image", "maxtrain:gpu"]
TPU = ["gke-tpu", "--accelerator", "v5p", "--topology", "4x4x4", "--image", "maxtrain:tpu"]
URLS = ["data.sources.stdlib.path=gs://b/train", "eval.sets.heldout.path=gs://b/eval"]
RUN = ["config=quickstart", "data.batch_size=32", "eval.batch_size=32", *URLS]
SECRET = "hunter2"
STORED = ["--volume", "runs:/data", "output_dir=/data/runs"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([*SLURM, *RUN, "model.layers=3"], 78, "Did you mean"),
        ([*SLURM, *RUN, "mesh.data=3"], 78, "= 3 must divide the number of devices, 16"),
        ([*SLURM, "config=quickstart", "data.batch_size=24"], 78, "data.batch_size to 16 or 32"),
        ([*SLURM, *RUN, "mesh.num_processes=2"], 78, "Set mesh.num_processes=null"),
        ([*SLURM, *RUN, "mesh.simulated_devices=8"], 78, "Set mesh.simulated_devices=null"),
        ([*SLURM, *RUN, "mesh.platform=tpu"], 78, "Set mesh.platform to auto or gpu"),
        ([*SLURM, *RUN, "mesh.min_processes=3"], 78, "Set mesh.min_processes to at most 2"),
        ([*SLURM, "--processes-per-node", "3", *RUN], 64, "Set it to 1, or to the number of GPUs"),
        ([*SLURM, "--partition", "a b", *RUN], 64, "--partition 'a b' may have letters"),
        ([*SLURM, "--directive", "--x\n#SBATCH --y", *RUN], 64, "Give --directive once for each"),
        ([*SLURM, "--time", "0:05:00", *RUN], 64, "Set --time higher"),
        ([*SLURM, "--time", "soon", *RUN], 64, "for example --time 12:00:00"),
        ([*SLURM, "--env", "1A=2", *RUN], 64, "Write for example --env A=1"),
        ([*SLURM, "--nodes", "0", *RUN], 64, "Set --nodes to 1 or more"),
        ([*SLURM, "checkpoint.grace_seconds=1e6", *RUN], 64, "Set checkpoint.grace_seconds=3600"),
        ([*SLURM], 64, "Add config=NAME"),
        ([*SLURM, *RUN, "--", "--json"], 64, "Write its settings as key=value"),
        (["slum", *RUN], 64, "invalid choice: 'slum'"),
        ([*K8S, *RUN], 64, "Set --volume CLAIM:/data and output_dir=/data/runs"),
        ([*K8S, *STORED, *RUN, "--name", "My_Job"], 64, "Set --name to my-job, for example"),
        ([*K8S, *STORED, *RUN, "--name", "a" * 64], 64, f"Set --name to {'a' * 40}, for example"),
        ([*K8S, *STORED, *RUN, "--namespace", "a" * 64], 64, f"to {'a' * 63}, for example"),
        ([*K8S, *STORED, *RUN, "--queue", "Q_1"], 64, "Set --queue to q-1, for example"),
        ([*K8S, *RUN, "--volume", "A_b:/data"], 64, "Use for example a-b"),
        ([*K8S, *RUN, "--volume", f"{'a' * 254}:/data"], 64, "at most 253"),
        ([*K8S, *STORED, *RUN, "--volume", "b:/data"], 64, "/data is mounted twice"),
        ([*K8S, *RUN, "--volume", "runs"], 64, "Write for example --volume checkpoints:/data"),
        ([*TPU, *STORED, *RUN, "--topology", "4x4"], 64, "for example --topology 4x4x4"),
        ([*TPU, *STORED, *RUN, "--topology", "2x2x1", "--slices", "2"], 64, "larger topology"),
        ([*TPU, *STORED, *RUN, "--accelerator", "v3"], 64, "Use one of v4, v5e, v5p, v6e, 7x"),
        (
            [*TPU, *STORED, *RUN, "--slices", "2", "mesh.min_processes=16"],
            78,
            "launch with fewer --slices and mesh.planned_processes=32",
        ),
        (["local", "--processes", "2", *RUN, "mesh.simulated_devices=3"], 78, "batch_size"),
    ],
)
def test_what_can_not_run_is_refused_with_its_mend(words, code, said, capsys):
    assert command.main(words, "maxtrain launch") == code
    out, err = capsys.readouterr()
    assert said in err and out == ""


def test_heads_are_not_split_over_the_network_between_slices(capsys):
    """With two slices of 8 devices each, tensor=16 would span both."""
    words = [*TPU, *STORED, *RUN, "--slices", "2", "--topology", "2x2x2", "mesh.tensor=16"]
    shape = ["model.num_heads=16", "model.num_kv_heads=16", "model.mlp_dim=1024"]
    assert command.main([*words, *shape, "model.embed_dim=256"], "maxtrain launch") == 78
    said = capsys.readouterr().err
    assert "mesh.data=1 x mesh.stage=1 x mesh.fsdp=1 = 1 must be a multiple of the 2 slices" in said
    assert "Set mesh.data to 2" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:00", 43_200),
        ("2-00", 172_800),
        ("1-2:30", 95_400),
        ("1-2:30:15", 95_415),
    ],
)
def test_times_are_those_of_slurm(text, expected):
    assert names.seconds(text) == expected


@pytest.mark.parametrize(
    ("kind", "topology", "hosts", "chips", "devices"),
    [
        ("v5p", "2x2x1", 1, 4, 4),
        ("v5p", "4x4x4", 16, 4, 4),
        ("v5e", "2x4", 1, 8, 8),
        ("v5e", "4x8", 8, 4, 4),
        ("v6e", "1x1", 1, 1, 1),
        ("7x", "4x4x4", 16, 4, 8),
    ],
)
def test_topologies_are_dealt_out_to_hosts(kind, topology, hosts, chips, devices):
    found = make_slice(kind, topology)
    assert (found.hosts, found.chips_per_host, found.devices_per_host) == (hosts, chips, devices)


def test_a_small_topology_may_be_of_several_hosts():
    assert make_slice("v6e", "2x4", 4).hosts == 2
    with pytest.raises(UsageError, match="set --chips-per-node"):
        make_slice("v6e", "2x2", 3)


def test_fewer_slices_than_planned_are_checked_as_they_will_be(capsys):
    """Three of four slices: the settings are those of four."""
    words = [*TPU, *STORED, *RUN, "data.batch_size=768", "eval.batch_size=192"]
    words += ["--slices", "3", "mesh.dcn_data=4", "--env", "A=b"]
    assert command.main(words, "maxtrain launch") == 78
    said = capsys.readouterr().err
    assert "mesh.dcn_data=4 must be the number of slices, 3. Set mesh.dcn_data so that" in said
    assert "set mesh.planned_processes to the hosts of these" in said
    words.append("mesh.planned_processes=64")
    assert command.main(words, "maxtrain launch") == 0
    assert "mesh.planned_processes=64" in capsys.readouterr().out


def test_the_kernel_of_attention_is_told_for_the_devices_that_the_job_gets(capsys):
    words = [*TPU, "--topology", "2x2x2", *STORED, *RUN]
    assert command.main(words, "maxtrain launch") == 0
    said = capsys.readouterr().err
    assert "attention: flash, since devices are TPUs, and rows are multiples of 128" in said
    assert "a run that goes on keeps the kernel that it has" in said
    assert command.main([*SLURM, *RUN], "maxtrain launch") == 0
    said = capsys.readouterr().err
    assert "attention: xla, since devices are GPUs, and model.attention=cudnn does not" in said
    assert command.main([*SLURM, *RUN, "model.attention=flash"], "maxtrain launch") == 78
    out, said = capsys.readouterr()
    assert (
        "model.attention=flash is for TPUs only, and the devices here are of platform gpu" in said
    )
    assert "Set model.attention=xla" in said and out == ""
    assert command.main([*SLURM, *RUN, "model.attention=xla"], "maxtrain launch") == 0
    assert "attention" not in capsys.readouterr().err


@pytest.mark.parametrize("target", [SLURM, [*K8S, *STORED]], ids=["slurm", "k8s"])
@pytest.mark.parametrize(
    "words",
    [
        ["data.sources.stdlib.path=s3://user:hunter2@host/data"],
        ["data.sources.stdlib.path=https://host/data?X-Amz-Signature=hunter2&a=b"],
        ["--env", "AWS_SECRET_ACCESS_KEY=hunter2"],
        ["--env", "HF_TOKEN=hunter2"],
        ["--env", "WANDB_API_KEY=hunter2"],
    ],
)
def test_secrets_are_not_written(target, words, capsys):
    assert command.main([*target, *RUN, *words], "maxtrain launch") == 64
    out, err = capsys.readouterr()
    assert SECRET not in out + err and "***" in err and out == ""


def test_secrets_in_files_and_lines_of_bash_are_not_written(capsys, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("# see http://u:hunter2@h/\nrun_name: a\n")
    pod = tmp_path / "pod.yaml"
    pod.write_text("containers: [{env: [{name: A, value: 'http://u:hunter2@h'}]}]\n")
    words = ["data.batch_size=16", *URLS, "output_dir=gs://b/runs"]
    for more in (
        [*K8S, *words, f"config={config}"],
        [*K8S, *words, "config=quickstart", "--pod", str(pod)],
        [*SLURM, *words, "config=quickstart", "--setup", "export P=https://u:hunter2@h"],
        [*SLURM, *words, "config=quickstart", "--srun=--export=P=https://u:hunter2@h"],
    ):
        assert command.main(more, "maxtrain launch") == 64, more
        out, err = capsys.readouterr()
        assert SECRET not in out + err and "***" in err and out == ""


def test_what_only_looks_like_a_secret_is_written(capsys):
    more = ["--env", "TOKENIZERS_PARALLELISM=false", "--env", "AWS_PROFILE=a"]
    more += ["--env", "GOOGLE_APPLICATION_CREDENTIALS=/etc/key.json"]
    assert command.main([*SLURM, *RUN, *more], "maxtrain launch") == 0
    assert "TOKENIZERS_PARALLELISM=false" in capsys.readouterr().out
