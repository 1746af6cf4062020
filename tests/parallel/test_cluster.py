"""Places in a job, by the environments that clusters give their processes."""

import sys
import types
import warnings

import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax._src.clusters.k8s_cluster import K8sCluster
from jax._src.clusters.mpi4py_cluster import Mpi4pyCluster

from data_pipeline.base.errors import ConfigError
from maxtrain.parallel.cluster import ProcessInfo, find_place, local_gpus

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[007,009-011]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
OPEN_MPI_4 = {
    "OMPI_VERSION": "4.1.6",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI_4.items() if "orte" not in name} | {
    "OMPI_VERSION": "5.0.3"
}
WORDS = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "TPU_",
    "MEGASCALE_",
    "KUBERNETES_",
    "JOB_COMPLETION_INDEX",
    "JAX_COORDINATOR",
    "JAX_LOCAL",
)


@pytest.fixture
def environment(monkeypatch):
    """Sets the environment of a cluster, in place of the one that is there."""
    import os  # noqa: PLC0415

    def be(values):
        for name in [name for name in os.environ if name.startswith(WORDS)]:
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return monkeypatch

    return be


def test_slurm_with_srun(environment):
    environment(SLURM)
    assert find_place(1) == ProcessInfo(
        "slurm", "gpu007:62344", count=7, index=5, local_count=2, local_index=1
    )
    environment(
        SLURM
        | {
            "SLURM_NODEID": "3",
            "SLURM_PROCID": "6",
            "SLURM_LOCALID": "0",
            "JAX_COORDINATOR_PORT": "99",
        }
    )
    assert find_place(1) == ProcessInfo(
        "slurm", "gpu007:99", count=7, index=6, local_count=1, local_index=0
    )


def test_one_task_of_slurm_is_alone(environment):
    environment(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert find_place(1) is None


@pytest.mark.parametrize(
    "batch",
    [
        {
            "SLURM_JOB_ID": "5000",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        {
            "SLURM_JOB_ID": "5000",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "0",
        },
    ],
)
def test_slurm_without_srun_names_srun(environment, batch):
    environment(batch)
    with pytest.raises(
        ConfigError,
        match=r"SLURM_\w+=[48] \(a Slurm job.*would train alone\. Start it by `srun python",
    ):
        find_place(1)


def test_a_batch_job_of_one_task_needs_no_srun(environment):
    environment(
        {
            "SLURM_JOB_ID": "5000",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
        }
    )
    assert find_place(1) is None


def test_open_mpi(environment):
    environment(OPEN_MPI_4)
    place = find_place(1)
    assert place == ProcessInfo(
        "ompi", "10.96.0.1:62624", count=16, index=9, local_count=8, local_index=1
    )


def test_open_mpi_5_asks_mpi4py(environment):
    patch = environment(OPEN_MPI_5)
    patch.setattr(Mpi4pyCluster, "is_env_present", classmethod(lambda _: False))
    with pytest.raises(
        ConfigError,
        match=r"a cluster \(ompi\) .* Open MPI 5 or newer requires mpi4py .*\. Set mesh",
    ):
        find_place(1)
    patch.setattr(Mpi4pyCluster, "is_env_present", classmethod(lambda _: True))
    patch.setattr(
        Mpi4pyCluster, "get_coordinator_address", classmethod(lambda *_, **__: "head:63000")
    )
    for method, value in (("count", 16), ("id", 9)):
        patch.setattr(
            Mpi4pyCluster, f"get_process_{method}", classmethod(lambda _, value=value: value)
        )
    patch.setattr(Mpi4pyCluster, "get_local_process_id", classmethod(lambda _: 1))
    assert find_place(1) == ProcessInfo(
        "ompi", "head:63000", count=16, index=9, local_count=8, local_index=1
    )


def test_another_mpi_is_not_taken_for_one_process(environment):
    environment({"PMI_SIZE": "4", "PMI_RANK": "1"})
    with pytest.raises(
        ConfigError,
        match=r"PMI_SIZE=4 \(mpirun\).*Set mesh.coordinator.*PMI_RANK.*or mesh.num_processes=1",
    ):
        find_place(1)


@pytest.fixture
def tpu_vm(monkeypatch):
    """A machine with TPUs, and what the service of metadata says there."""
    said = {}
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(
        cloud_tpu_cluster,
        "get_metadata",
        lambda key: (said[key], 200) if key in said else ("", 404),
    )
    monkeypatch.setattr(
        cloud_tpu_cluster.BaseTpuCluster, "wait_for_coordinator", classmethod(lambda *_: None)
    )
    return said


def test_tpu_vms_of_gce(environment, tpu_vm):
    environment({})
    tpu_vm |= {
        "agent-worker-number": "3",
        "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2,c:3:10.0.0.3,d:4:10.0.0.4",
    }
    tpu_vm |= {"tpu-env": "ACCELERATOR_TYPE: 'v5p-32'"}
    assert find_place(1) == ProcessInfo("gcetpu", "10.0.0.1:8482", count=4, index=3)
    assert find_place(1, with_tpu=False) is None
    tpu_vm |= {"agent-worker-number": "0", "worker-network-endpoints": "10.0.0.1"}
    assert find_place(1) is None, "a single host"


def test_tpus_of_gke_in_two_slices(environment, tpu_vm):
    hosts = "job-0-0.sub,job-0-1.sub"
    slices = {
        "MEGASCALE_COORDINATOR_ADDRESS": "job-0-0.sub:9",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }
    environment(
        {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "1", **slices}
    )
    place = find_place(1)
    assert place == ProcessInfo("gketpu", "job-0-0.sub:8482", count=4, index=3) and place.is_tpu


def test_pods_of_kubernetes(environment):
    pods = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    patch = environment(pods)
    patch.setitem(sys.modules, "kubernetes", None)
    with (
        warnings.catch_warnings(),
        pytest.raises(ConfigError, match=r"JOB_COMPLETION_INDEX=2 .* Install `kubernetes`"),
    ):
        warnings.simplefilter("ignore")
        find_place(1)

    class RefusedError(Exception):
        pass

    api = types.SimpleNamespace(
        CoreV1Api=object,
        BatchV1Api=object,
        exceptions=types.SimpleNamespace(ApiException=RefusedError),
    )
    config = types.SimpleNamespace(load_incluster_config=lambda: None)
    patch.setitem(sys.modules, "kubernetes", types.SimpleNamespace(client=api, config=config))
    patch.setattr(
        K8sCluster, "get_coordinator_address", classmethod(lambda *_, **__: "train-0.pods:55527")
    )
    patch.setattr(K8sCluster, "get_process_count", classmethod(lambda _: 8))
    assert find_place(1) == ProcessInfo("k8s", "train-0.pods:55527", count=8, index=2)

    def refuse(*_, **__):
        raise RuntimeError("Kubernetes API Error: 403 - Forbidden")

    patch.setattr(K8sCluster, "get_process_count", classmethod(refuse))
    with pytest.raises(
        ConfigError,
        match=r"a cluster \(k8s\) started this process, .*403 - Forbidden\. Set mesh.coordinator",
    ):
        find_place(1)
    environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert find_place(1) is None, "a pod of its own"


@pytest.mark.parametrize(
    ("count", "visible", "place", "taken"),
    [
        (8, None, None, None),
        (8, None, (1, 0), None),  # one process a host takes all
        (8, None, (8, 3), [3]),
        (8, None, (2, 1), [4, 5, 6, 7]),
        (8, "0,1,2,3", (4, 2), [2]),
        (8, "5", (8, 5), None),  # the cluster gives each process its own
        (8, "", (8, 5), None),
        (0, None, (2, 1), None),
    ],
)
def test_processes_of_a_host_share_its_gpus(tmp_path, count, visible, place, taken):
    for number in range(count):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    place = place and ProcessInfo("slurm", "host:1", 16, 0, *place)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_gpus(place, environment, str(tmp_path)) == taken
    assert local_gpus(place, environment | {"JAX_LOCAL_DEVICE_IDS": "0"}, str(tmp_path)) is None


def test_gpus_that_can_not_be_shared_evenly_are_refused(tmp_path):
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    with pytest.raises(
        ConfigError,
        match=r"3 processes on this host see 8 GPUs, which they can't share evenly\. Start one",
    ):
        local_gpus(ProcessInfo("slurm", "host:1", 3, 0, 3, 0), {}, str(tmp_path))
