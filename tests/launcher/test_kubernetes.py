"""The manifests for Kubernetes: names that fit together, one command for all pods, and what its schemas require."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenly.errors import UserError
from evenly.launcher.kubernetes import KubernetesJob, kubernetes_manifests
from evenly.launcher.rounds import NodeRange

ASKED = KubernetesJob(
    name="big-run", job=Path("/work/job.py"), image="registry/me:1", volume="shared", secret="words",
    nodes=NodeRange(2, 4), devices=8, namespace="team", arguments=["--set", "text=$(NODE)"],
)  # fmt: skip

# The fields of JobSet v1alpha2, Job and Pod that manifests may have, and those that each must (their CRD's openAPI).
FIELDS = {
    "jobset": ({"network", "failurePolicy", "replicatedJobs"}, {"replicatedJobs"}),
    "job": ({"parallelism", "completions", "completionMode", "backoffLimit", "template"}, {"template"}),
    "pod": ({"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes"}, {"containers"}),
    "container": ({"name", "image", "command", "env", "ports", "resources", "volumeMounts"}, {"name"}),
}


def parts(asked: KubernetesJob) -> dict[str, Any]:
    secret, job_set = kubernetes_manifests(asked)["items"]
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    found = {"secret": secret, "set": job_set, "jobset": job_set["spec"], "job": job, "pod": pod}
    return {**found, "container": pod["containers"][0]}


def test_fields_are_those_of_the_schemas_and_numbers_are_numbers() -> None:
    found = parts(ASKED)
    for name, (allowed, needed) in FIELDS.items():
        assert needed <= found[name].keys() <= allowed, name
    job, pod, container = found["job"], found["pod"], found["container"]
    assert all(type(job[name]) is int for name in ("parallelism", "completions", "backoffLimit"))
    assert (job["completionMode"], job["parallelism"]) == ("Indexed", job["completions"])
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # all that a Job may have
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert json.loads(json.dumps(found)) == found


def test_all_pods_have_one_command_that_finds_node_0() -> None:
    found = parts(ASKED)
    command, variables = found["container"]["command"], {one["name"] for one in found["container"]["env"]}
    assert variables == {"NODE", "EVENLY_SECRET"}
    replica, subdomain = found["jobset"]["replicatedJobs"][0]["name"], found["jobset"]["network"]["subdomain"]
    host = f"{found['set']['metadata']['name']}-{replica}-0-0.{subdomain}"  # as JobSet names pods
    assert command[command.index("--rendezvous") + 1] == f"{host}:29500"
    assert command[command.index("--nodes") + 1] == "2:4"
    assert command[command.index("--node-rank") + 1] == "$(NODE)"
    assert command[-1] == "text=$$(NODE)"  # which Kubernetes leaves alone
    assert "--autoresume" in command and shlex.join(command).startswith("evenly run /work/job.py --out /runs/big-run")
    assert found["secret"]["metadata"] == found["set"]["metadata"] == {"name": "big-run", "namespace": "team"}


def test_cores_are_asked_for_where_there_are_no_gpus() -> None:
    assert parts(replace(ASKED, cpu=True, devices=2))["container"]["resources"]["requests"] == {"cpu": "2"}


@pytest.mark.parametrize("name", ["Run", "run_1", "-run", "run-", "", "1st", "r" * 41])
def test_names_that_hosts_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="in Kubernetes"):
        kubernetes_manifests(replace(ASKED, name=name))
