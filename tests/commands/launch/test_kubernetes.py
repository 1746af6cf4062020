"""JobSets: held to the schema of the official definition, and to what a schema can't say."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from data_pipeline.base.errors import FINAL, WORTH_RESTARTING
from maxtrain.commands.launch import command
from maxtrain.config import load_config

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "jobset" / "crd.json").read_text())
STORED = ["--volume", "runs:/data", "output_dir=/data/runs"]
K8S = ["k8s", "--nodes", "4", "--gpus-per-node", "8", "--image", "registry/a/maxtrain:gpu", *STORED]
TPU = ["gke-tpu", "--accelerator", "v5p", "--topology", "4x4x4", "--image", "tpu:1", *STORED]
URLS = ["data.sources.stdlib.path=gs://b/train", "eval.sets.heldout.path=gs://b/eval"]
RUN = ["config=quickstart", "data.batch_size=512", "eval.batch_size=512", "run_name=A_run", *URLS]


def manifests(capsys, *words: str) -> list[dict]:
    """Return the manifests that a command prints, checked against the schema."""
    assert command.main([*words], "maxtrain launch") == 0, capsys.readouterr().err
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    jsonschema.validate(found[-1], SCHEMA)
    job = job_of(found[-1])
    # What the API refuses, and the schema does not say.
    (rule,) = job["podFailurePolicy"]["rules"]
    values = rule["onExitCodes"]["values"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert values == sorted(set(values)) and 0 not in values
    assert job["completions"] == job["parallelism"] and job["podReplacementPolicy"] == "Failed"
    names = [mount["name"] for mount in container_of(found[-1])["volumeMounts"]]
    assert sorted(names) == sorted(v["name"] for v in job["template"]["spec"]["volumes"])
    longest = f"{found[-1]['metadata']['name']}-workers-9999-99999-abcde"
    assert len(longest) <= 63
    return found


def job_of(job_set: dict) -> dict:
    (replicated,) = job_set["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(job_set: dict) -> dict:
    container, *_ = job_of(job_set)["template"]["spec"]["containers"]
    return container


def test_the_schema_refuses_what_the_definition_does_not_have(capsys):
    *_, job_set = manifests(capsys, *K8S, *RUN)
    job_of(job_set)["restartPolicy"] = "Never"
    with pytest.raises(jsonschema.ValidationError, match="restartPolicy"):
        jsonschema.validate(job_set, SCHEMA)
    del job_of(job_set)["restartPolicy"]
    del job_set["spec"]["failurePolicy"]["rules"][0]["name"]
    with pytest.raises(jsonschema.ValidationError, match="'name' is a required"):
        jsonschema.validate(job_set, SCHEMA)


def test_pods_of_gpus_find_each_other_and_end_as_exit_codes_say(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*K8S, "--namespace", "team", "--queue", "q", "--time", "1-00", "--env", "A=$(B)"]
    (job_set,) = manifests(capsys, *words, *RUN, "observe.prompts=['$(HOME) it''s']")
    assert job_set["metadata"] == {
        "name": "a-run",
        "namespace": "team",
        "labels": {"kueue.x-k8s.io/queue-name": "q"},
    }
    spec = job_set["spec"]
    policy = spec["failurePolicy"]
    assert policy["maxRestarts"] == 100 and policy["restartStrategy"] == "BlockingRecreate"
    (final,) = policy["rules"]
    assert final["action"] == "FailJobSet"
    assert final["onJobFailureReasons"] == ["PodFailurePolicy", "DeadlineExceeded"]
    job = job_of(job_set)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == "maxtrain"
    assert set(rule["onExitCodes"]["values"]) == set(FINAL)
    assert not set(FINAL) & set(WORTH_RESTARTING)
    assert job["completions"] == 4 and job["backoffLimit"] == 0
    assert job["activeDeadlineSeconds"] == 86_400
    # A pod has its grace, and some seconds to leave.
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 330
    container = container_of(job_set)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    environment = {entry["name"]: entry for entry in container["env"]}
    address = environment["JAX_COORDINATOR_ADDRESS"]["value"]
    # As spec.network and spec.coordinator say, whose replicated job has this name.
    assert address == "a-run-workers-0-0.a-run:8476"
    assert spec["coordinator"]["replicatedJob"] == spec["replicatedJobs"][0]["name"] == "workers"
    assert environment["JAX_NUM_PROCESSES"]["value"] == "4"
    index = environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert environment["A"]["value"] == "$$(B)"
    assert container["command"] == ["maxtrain"]
    assert container["args"][:2] == ["train", "output_dir=/data/runs"]
    assert container["args"][-1] == "observe.prompts=['$$(HOME) it''s']"


def test_the_first_pod_that_is_there_leads_where_fewer_may_do(capsys):
    *_, job_set = manifests(capsys, *K8S, *RUN, "mesh.min_processes=2")
    environment = {entry["name"]: entry.get("value") for entry in container_of(job_set)["env"]}
    pods = [f"a-run-workers-0-{pod}.a-run:8476" for pod in range(4)]
    assert environment["JAX_COORDINATOR_ADDRESS"] == ",".join(pods)
    assert environment["JAX_NUM_PROCESSES"] == "4"


def test_rows_that_fewer_pods_can_not_share_are_told_of(capsys):
    words = [
        "k8s",
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--image",
        "i",
        "config=quickstart",
        *URLS,
    ]
    for rows, is_told in ((64, True), (96, False)):
        changes = [f"data.batch_size={rows}", "mesh.min_processes=3", "output_dir=gs://b/runs"]
        assert command.main([*words, *changes], "maxtrain launch") == 0
        said = capsys.readouterr().err
        assert ("can't be divided by fewer than 4 nodes, so it trains on all" in said) == is_told
    # What a doctor examines is not trained.
    assert command.main([*words, "--job", "doctor", "mesh.min_processes=3"], "maxtrain launch") == 0
    assert "mesh.min_processes" not in capsys.readouterr().err
    slices = [
        "mesh.dcn_data=2",
        "data.batch_size=64",
        "mesh.min_processes=2",
        "output_dir=gs://b/r",
    ]
    assert command.main([*words, *slices], "maxtrain launch") == 0
    assert "which of 4 nodes make one of 2 slices is not known" in capsys.readouterr().err


def test_slices_of_tpus_have_a_node_pool_each(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (job_set,) = manifests(capsys, *TPU, "--slices", "2", *RUN)
    annotations = job_set["metadata"]["annotations"]
    assert annotations == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2 and job_of(job_set)["completions"] == 16
    assert job_of(job_set)["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    container = container_of(job_set)
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    # GKE gives each host the names of the others.
    assert container["env"] == []
    (alone,) = manifests(capsys, *TPU, "--topology", "2x2x1", *RUN)
    assert "annotations" not in alone["metadata"]
    assert container_of(alone)["env"] == [{"name": "JAX_NUM_PROCESSES", "value": "1"}]


def test_a_config_file_belongs_to_its_job_set(capsys, tmp_path):
    """It is a part of the JobSet, so that no other run can change it; pods read it as it is here."""
    file = tmp_path / "mine.yaml"
    file.write_text("# it's $(A)\ndata:\n  batch_size: 32\nrun_name: 'two  words'\n")
    words = [*K8S, str(file), "data.sources.a.path=/data/d"]
    (job_set,) = manifests(capsys, *words)
    assert job_set["metadata"] == {"name": "two-words"}
    template = job_of(job_set)["template"]
    ((name, text),) = template["metadata"]["annotations"].items()
    assert text == file.read_text()
    (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "config"]
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{name}']"
    (mount,) = [m for m in container_of(job_set)["volumeMounts"] if m["name"] == "config"]
    place = f"{mount['mountPath']}/{item['path']}"
    assert f"config={place}" in container_of(job_set)["args"]
    (tmp_path / "there.yaml").write_text(text)
    args = container_of(job_set)["args"][1:]
    there = [word.replace(place, str(tmp_path / "there.yaml")) for word in args]
    assert load_config(there).data.batch_size == 32
    file.write_text(file.read_text() + "#" * 300_000)
    assert command.main(words, "maxtrain launch") == 64
    assert "must be at most" in capsys.readouterr().err


def test_pods_request_what_they_use(capsys, tmp_path):
    (job_set,) = manifests(capsys, *K8S, *RUN)
    resources = container_of(job_set)["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 8
    assert {"cpu", "memory", "ephemeral-storage"} < set(resources["requests"])
    words = [word for word in K8S if word not in ("--gpus-per-node", "8")]
    (job_set,) = manifests(capsys, *words, *RUN)
    assert {"cpu", "memory", "ephemeral-storage"} == set(
        container_of(job_set)["resources"]["requests"]
    )
    file = tmp_path / "pod.yaml"
    limits = {"memory": "2Gi", "nvidia.com/gpu": "8"}
    more = {"requests": {"cpu": 3}, "limits": limits}
    file.write_text(yaml.safe_dump({"containers": [{"resources": more}]}))
    (job_set,) = manifests(capsys, *K8S, *RUN, "--pod", str(file))
    requests = container_of(job_set)["resources"]["requests"]
    # A request above a limit would be refused; without one, Kubernetes requests the limit.
    assert requests["cpu"] == 3 and "memory" not in requests


GPUS = {"nvidia.com/gpu": 4}
SCRATCH = [{"name": "s", "mountPath": "/scratch"}]


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        ({"toleration": []}, "Did you mean tolerations?"),
        ({"service_account_name": "a"}, "Did you mean serviceAccountName?"),
        ({"spec": {"tolerations": []}}, "Write the contents of `spec` alone"),
        ({"containers": [{"volumemounts": []}]}, "Did you mean volumeMounts?"),
        ({"containers": [{}, {"imge": "a"}]}, "containers[1]: 'imge' is not a field"),
        ({"initContainers": [{"commands": []}]}, "Did you mean command?"),
        ({"containers": {"name": "a"}}, "containers must be a list"),
        ({"containers": [3]}, "containers must be a list of sections"),
        ({"volumes": {"a": 1}}, "volumes must be a list"),
        ({"securityContext": 3}, "securityContext must be a section"),
        ({"restartPolicy": "Always"}, "must be Never"),
        ({"containers": [{"resources": {"limits": GPUS}}]}, "set --gpus-per-node 4"),
        ({"containers": [{"resources": {"requests": GPUS}}]}, "set --gpus-per-node 4"),
        ({"containers": [{"volumeMounts": SCRATCH}]}, "there is no volume 's'"),
        ({"volumes": [{"name": "shm", "emptyDir": {}}]}, "volume 'shm' is there twice"),
        (
            {
                "volumes": [{"name": "s", "emptyDir": {}}],
                "containers": [{"volumeMounts": [{"name": "s", "mountPath": "/data/"}]}],
            },
            "/data is mounted twice",
        ),
    ],
)
def test_a_pod_file_that_kubernetes_would_refuse_is_refused(pod, said, capsys, tmp_path):
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump(pod))
    assert command.main([*K8S, *RUN, "--pod", str(file)], "maxtrain launch") == 64
    out, err = capsys.readouterr()
    assert said in err and out == ""


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("data.sources.stdlib.path=data/stdlib", "data.sources.stdlib.path"),
        ("data.sources.stdlib.path=/database/a", "data.sources.stdlib.path"),
        ("data.sources.stdlib.path=/data/../a", "data.sources.stdlib.path"),
        ("eval.sets.heldout.path=/a", "eval.sets.heldout.path"),
        ("output_dir=/scratch/runs", "output_dir"),
        ("checkpoint.copy_to=/scratch/runs", "checkpoint.copy_to"),
        ("checkpoint.copy_to=/b", "checkpoint.copy_to"),
    ],
)
def test_files_that_are_in_no_pod_are_refused(word, key, capsys, tmp_path):
    """Checkpoints on a disk that disappears with its pod are refused, too; data may be there."""
    file = tmp_path / "pod.yaml"
    volumes = [{"name": "s", "emptyDir": {}}]
    file.write_text(yaml.safe_dump({"volumes": volumes, "containers": [{"volumeMounts": SCRATCH}]}))
    words = [*K8S, *RUN, "--pod", str(file)]
    manifests(capsys, *words, "data.sources.stdlib.path=/scratch/train", "data.cache=/tmp/x")
    assert command.main([*words, word], "maxtrain launch") == 64
    out, err = capsys.readouterr()
    assert f"{key}=" in err and "--volume CLAIM:/data" in err and out == ""


def documented_pod() -> str:
    """The example of docs/devices.md for --pod."""
    text = (Path(__file__).parents[3] / "docs" / "devices.md").read_text()
    _, _, after = text.partition("**Runs in a bucket**")
    _, _, block = after.partition("```yaml\n")
    block, _, _ = block.partition("```")
    return block


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([word for word in K8S if word not in STORED], "s3://bucket/runs"),
        ([word for word in TPU if word not in STORED], "gs://bucket/runs"),
    ],
    ids=["k8s", "gke-tpu"],
)
def test_a_run_in_a_bucket_needs_no_volume(words, url, capsys, tmp_path, monkeypatch):
    """Pods may use it by what --pod says, as in the document; a run in a path needs a volume."""
    monkeypatch.chdir(tmp_path)
    place = f"output_dir={url}"
    *_, job_set = manifests(capsys, *words, *RUN, place)
    pod = job_of(job_set)["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["shm"]
    assert place in container_of(job_set)["args"]
    file = tmp_path / "pod.yaml"
    file.write_text(documented_pod())
    region = "AWS_DEFAULT_REGION=eu-west-1"
    options = ["--pod", str(file), "--env", region, "local_dir=/scratch"]
    *_, job_set = manifests(capsys, *words, *options, *RUN, place)
    pod = job_of(job_set)["template"]["spec"]
    assert pod["serviceAccountName"] == "trainer"
    container = container_of(job_set)
    assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert container["env"][-1] == {"name": "AWS_DEFAULT_REGION", "value": "eu-west-1"}
    assert container["volumeMounts"][-1] == {"name": "scratch", "mountPath": "/scratch"}
    assert "local_dir=/scratch" in container["args"]
    assert command.main([*words, *RUN, "output_dir=/runs"], "maxtrain launch") == 64
    assert "output_dir=/runs is on no volume" in capsys.readouterr().err
    # What tries the bucket needs none, either.
    *_, job_set = manifests(capsys, *words, "--job", "doctor", *RUN, place)
    assert container_of(job_set)["args"][0] == "doctor"


def test_what_a_pod_file_says_is_merged(capsys, tmp_path):
    file = tmp_path / "pod.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "containers": [
                    {
                        "resources": {"limits": {"memory": "1Ti"}},
                        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                    }
                ],
            }
        )
    )
    *_, job_set = manifests(capsys, *K8S, "--pod", str(file), *RUN)
    pod = job_of(job_set)["template"]["spec"]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    container = container_of(job_set)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "1Ti"}
    assert container["volumeMounts"][-1]["mountPath"] == "/scratch"
    assert container["name"] == "maxtrain"


@pytest.mark.parametrize(
    ("words", "program"),
    [(K8S, "kubectl create -f -"), (["slurm", "--nodes", "64"], "sbatch")],
    ids=["kubectl", "sbatch"],
)
def test_it_is_submitted(words, program, capsys, tmp_path, monkeypatch):
    """The submitted manifest is the one that would be printed; a scheduler that refuses it is an
    error."""
    name, *arguments = program.split()
    (tmp_path / name).write_text(
        f'#!/bin/sh\n[ "$*" = {shlex.quote(" ".join(arguments))} ] || exit 3\n'
        f"cat >{tmp_path}/got\n[ ! -e {tmp_path}/refuse ]\n"
    )
    (tmp_path / name).chmod(0o755)
    assert command.main([*words, *RUN], "maxtrain launch") == 0
    printed = capsys.readouterr().out
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file = tmp_path / "written"
    options = ["--submit", "--output", str(file)]
    assert command.main([*words, *options, *RUN], "maxtrain launch") == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "got").read_text() == file.read_text() == printed
    (tmp_path / "refuse").touch()
    assert command.main([*words, "--submit", *RUN], "maxtrain launch") == 74
    assert f"`{program}` ended with 1; nothing was started" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert command.main([*words, "--submit", *RUN], "maxtrain launch") == 64
    assert "write the file by --output FILE" in capsys.readouterr().err
