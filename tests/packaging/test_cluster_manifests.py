"""The manifests of clusters: what slurm.sh starts, with a made-up srun, and the fields of kuberay.yaml."""

import json
import os
import subprocess

import jsonschema
import pytest
import yaml

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
FOLDER = ROOT / "docker" / "cluster"


def slurm(folder, **variables):
    """Runs slurm.sh on two made-up nodes; returns each srun: its arguments and Ray's token."""
    tools = {
        "scontrol": "printf 'one\\ntwo\\n'",
        "srun": f'echo "$RAY_AUTH_TOKEN $RAY_AUTH_MODE $*" >> {folder}/calls\n'
        'case "$*" in *"hostname -I"*) echo "10.0.0.7 172.17.0.1 ";; '
        '*hostname*) echo 127.0.1.1;; *"ip -4"*) echo "2: ib0    inet 10.9.0.7/16 brd 1";; esac',
    }
    for name, body in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "one,two", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5"}
    job |= {"SLURM_CPUS_PER_TASK": "12", "SLURM_GPUS_PER_NODE": "4", "RLPIPE_START_S": "0.3"}
    job |= {"RLPIPE_IMAGE": "image", "RLPIPE_SHARED": "/shared", "PATH": f"{folder}:{os.environ['PATH']}"}
    script = ["sh", str(FOLDER / "slurm.sh"), "+recipe=swe_rl"]
    done = subprocess.run(script, env=job | variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.split(" ", 2) for line in (folder / "calls").read_text().splitlines()]


def test_slurm_starts_ray_on_all_nodes_at_an_address_that_others_reach(tmp_path):
    asked, head, worker, run = (command for *_, command in slurm(tmp_path))
    assert "hostname -I" in asked
    assert "ray start --head --node-ip-address=10.0.0.7 --port=6379" in head and "-w one" in head
    assert "ray start --address=10.0.0.7:6379" in worker and "--exclude=one" in worker
    assert "cluster.address=10.0.0.7:6379" in run and run.endswith("run.dir=/shared/runs/5 +recipe=swe_rl")


def test_slurm_gives_every_step_its_cores_its_gpus_and_fixed_ports(tmp_path):
    for *_, command in slurm(tmp_path)[1:]:
        assert "--cpus-per-task=12" in command and "--gpus-per-node=4" in command
        assert "ray start" not in command or "--min-worker-port=20000 --max-worker-port=29999" in command


def test_slurm_gives_all_nodes_one_random_token(tmp_path):
    tokens = {(token, mode) for token, mode, _ in slurm(tmp_path)}
    ((token, mode),) = tokens
    assert mode == "token" and len(token) == 64
    (tmp_path / "calls").unlink()
    assert slurm(tmp_path)[0][0] != token


def test_slurm_takes_the_address_of_a_named_interface(tmp_path):
    *_, run = (command for *_, command in slurm(tmp_path, RLPIPE_INTERFACE="ib0"))
    assert "cluster.address=10.9.0.7:6379" in run


def test_kuberay_has_only_fields_that_its_resource_knows():
    schema = json.loads((ROOT / "tests" / "packaging" / "rayjob.schema.json").read_text())
    manifest = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    jsonschema.validate(manifest, schema)

    # The check can fail: a misspelt field is dropped by no one.
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 6
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(manifest, schema)


def test_kuberay_has_the_gpus_of_the_preset_and_one_token_in_every_pod():
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    pods = [spec["submitterPodTemplate"], cluster["headGroupSpec"]["template"], group["template"]]
    for pod in pods:
        variables = {v["name"]: v for v in pod["spec"]["containers"][0]["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "rlpipe-ray",
            "key": "token",
        }

    preset = yaml.safe_load((ROOT / "configs/cluster/many_nodes.yaml").read_text())
    rollout, trainer = preset["rollout"], preset["trainer"]
    gpus = rollout["workers"] * rollout["sglang"]["tp"] + trainer["tp"] * trainer["dp"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["replicas"] * int(limits["nvidia.com/gpu"]) == gpus
