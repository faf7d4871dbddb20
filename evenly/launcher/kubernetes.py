"""The manifests by which Kubernetes runs a job on several nodes: a JobSet of one pod per node, and the run's secret.

Pods have names of their own in the set's network, so that all find node 0. A pod that is lost is made again and comes
back into the run, which goes on without it meanwhile where its nodes are a range; where node 0's is lost all pods end,
are made again, and go on from the newest checkpoint: each has the same command (--autoresume).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.launcher.rounds import NodeRange

PORT = 29500
RUNS = "/runs"  # where pods find the volume
REPLICA = "node"  # of the set
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # of what becomes part of a host's name of 63 letters


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What to submit.

    job:     its file, in the image. image: with the job, its libraries and evenly. volume: a claim that all pods can
             write (ReadWriteMany), in which the run's folder is. name: of the set.
    nodes:   pods; a range goes on with fewer. devices: GPUs of each, or cores.
    restarts: how often pods are made again.
    stop_before_s: what a pod that is taken away has for its step and a checkpoint.
    """

    name: str
    job: Path
    image: str
    volume: str
    secret: str
    nodes: NodeRange
    devices: int
    cpu: bool = False
    restarts: int = 10
    stop_before_s: int = 120
    namespace: str = "default"
    arguments: Sequence[str] = ()


def kubernetes_manifests(asked: KubernetesJob) -> dict[str, Any]:
    """A list of the secret and the set, as `kubectl apply -f` takes it. Raises `UserError` for names that cannot be."""
    _check(asked)
    return {"apiVersion": "v1", "kind": "List", "items": [_secret(asked), _job_set(asked)]}


def _check(asked: KubernetesJob) -> None:
    if not NAME.fullmatch(asked.name):
        found = "names have up to 40 small letters, digits and dashes, a letter first and no dash last"
        raise UserError(f"the name {asked.name!r} in Kubernetes", found, "give another: --name")


def _secret(asked: KubernetesJob) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(asked), "stringData": {"secret": asked.secret}}


def _job_set(asked: KubernetesJob) -> dict[str, Any]:
    pods = {
        "parallelism": asked.nodes.most,
        "completions": asked.nodes.most,
        "completionMode": "Indexed",
        "backoffLimit": asked.restarts * asked.nodes.most,
        "template": {"spec": _pod(asked)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(asked),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": asked.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": asked.restarts},
            "replicatedJobs": [{"name": REPLICA, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _pod(asked: KubernetesJob) -> dict[str, Any]:
    devices = {"cpu" if asked.cpu else "nvidia.com/gpu": str(asked.devices)}
    container = {
        "name": "evenly",
        "image": asked.image,
        "command": _command(asked),
        "env": [
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            {"name": "EVENLY_SECRET", "valueFrom": {"secretKeyRef": {"name": asked.name, "key": "secret"}}},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": devices, "requests": devices},
        "volumeMounts": [{"name": "runs", "mountPath": RUNS}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",  # the job makes another pod, on another node where this one is lost
        "terminationGracePeriodSeconds": asked.stop_before_s,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": asked.volume}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # a container's own is 64 MB
        ],
    }


def _command(asked: KubernetesJob) -> list[str]:
    """Of each pod; Kubernetes puts the variable NODE in."""
    first = f"{asked.name}-{REPLICA}-0-0.{asked.name}"
    return [
        *("evenly", "run", str(asked.job), "--out", f"{RUNS}/{asked.name}", "--autoresume"),
        *("--devices", str(asked.devices), "--restarts", str(asked.restarts)),
        *("--nodes", asked.nodes.to_text()),
        *("--node-rank", "$(NODE)", "--rendezvous", f"{first}:{PORT}"),
        *(word.replace("$(", "$$(") for word in asked.arguments),
    ]


def _metadata(asked: KubernetesJob) -> dict[str, str]:
    return {"name": asked.name, "namespace": asked.namespace}
