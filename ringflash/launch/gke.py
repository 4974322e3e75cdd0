"""GKE: a JobSet, queued by Kueue. Dicts as Kubernetes has them, dumped with comments that say why."""

from __future__ import annotations

import shlex
from typing import Any

from ringflash import exits
from ringflash.launch import kueue
from ringflash.launch.manifest import dump
from ringflash.launch.options import MOUNT, Options
from ringflash.launch.shape import Shape

JOBSET, KUEUE = "jobset.yaml", "kueue.yaml"
CONTAINER, JOB, VOLUME = "ringflash", "slice", "bucket"
COORDINATOR_PORT, TPU_PORT, MEGASCALE_PORT = 8476, 8471, 8080
PERSONAL = [
    exits.UNEQUAL,
    2,  # Python's own, for a command line it cannot read
    exits.CONFIG_FAULT,
    exits.DATA_FAULT,
    exits.DIVERGED,
]
# Messages of the Job controller: "Container ringflash for pod default/x failed with exit code 42 matching
# FailJob rule at index 0", "Pod default/x has condition DisruptionTarget matching FailJob rule at index 1".
TAKEN_AWAY = {"type": "DisruptionTarget", "status": "True"}  # JobSet 0.10 requires the status
SAVED = f"failed with exit code {exits.PREEMPTED} matching"
DISRUPTED = "has condition DisruptionTarget matching"
COMMENTS = {
    "exclusive-topology": ["One Job for each node pool, which is a slice, and all its pods there."],
    "failurePolicy:": [
        "All pods of a run stand and fall together, so no pod is ever replaced: the first that fails",
        "fails its Job (backoffLimit 0), and the JobSet decides by the Job's reason and message:",
        "  saved     42, which all ranks end with alike, or a node that is taken away, whatever the code",
        "            then: start again; not counted, as the run has gone further or could not help it.",
        "  person    1, 2, 3, 4, 5: starting again would not mend it.",
        "  crashed   all else, so 124 (a host hung or never came) and 127 to 255: start again, but only",
        "            maxRestarts times.",
        "A crash of one host can end the others with 1; the Job keeps the reason that was first.",
        "The first rule that fits holds. Message patterns need JobSet 0.10.",
    ],
    "restartStrategy:": ["No pod of the last attempt may meet one of the next."],
    "parallelism:": ["The hosts of a slice."],
    "podFailurePolicy:": [
        "FailJob for what is told apart above; what matches no rule is counted, and one is too many.",
        "Ignore would bring one pod back, for which the others wait in vain. The first rule that fits",
        "holds: a pod on a node that is taken away may end with any code. Such a policy takes",
        "restartPolicy Never and podReplacementPolicy Failed. containerName: not the bucket's sidecar.",
    ],
    "terminationGracePeriodSeconds:": [
        "Longer than a save takes: SIGTERM has the run finish its step and save, then comes SIGKILL.",
        "Spot nodes give 15 s, whatever stands here (120 s at most, by a setting of the node pool, from",
        "GKE 1.35 on). After a crash of one host the others are asked to end too, and may take as long.",
    ],
    "securityContext:": [
        "Root, for the TPU's device files and locked memory, whatever user the image has. Take it out",
        "where your nodes let others at them.",
    ],
    "env:": [
        "GKE itself sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, in Jobs that are Indexed and have a",
        "subdomain. What joins slices is set here, whether or not the cluster would do that too.",
    ],
    "requests:": ["Nothing else: what Kueue has no quota for, it does not admit."],
    "mountOptions:": ["All hosts must soon see what the first one writes: no metadata is kept."],
    "subdomain:": ["The pods' names in DNS: NAME-slice-SLICE-HOST.NAME"],
}


def files(options: Options, shape: Shape) -> dict[str, str]:
    """The JobSet, and what queues it."""
    head = [
        f"Written by: {options.rendered_by}",
        f"{shape.slices} x {shape.accelerator} {shape.topology}: {shape.hosts} hosts of {shape.chips} chips",
    ]
    return {
        JOBSET: dump([jobset(options, shape)], head, COMMENTS),
        KUEUE: dump(kueue.objects(options, shape), head, kueue.COMMENTS),
    }


def jobset(options: Options, shape: Shape) -> dict[str, Any]:
    """One Job for each slice."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": options.name,
            "labels": {"kueue.x-k8s.io/queue-name": options.queue},
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": options.name},
            "failurePolicy": failure_policy(options.restarts),
            "replicatedJobs": [
                {"name": JOB, "replicas": shape.slices, "template": job(options, shape)}
            ],
        },
    }


def failure_policy(restarts: int) -> dict[str, Any]:
    """What the JobSet makes of a Job that failed."""
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    saved = {"onJobFailureMessagePatterns": [SAVED, DISRUPTED]}
    return {
        "maxRestarts": restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {"name": "saved", "action": "RestartJobSetAndIgnoreMaxRestarts", **reason, **saved},
            {"name": "person", "action": "FailJobSet", **reason},
            {"name": "crashed", "action": "RestartJobSet"},
        ],
    }


def job(options: Options, shape: Shape) -> dict[str, Any]:
    """The pods of a slice."""
    annotations = {"annotations": {"gke-gcsfuse/volumes": "true"}} if options.bucket else {}
    return {
        "spec": {
            "parallelism": shape.hosts,
            "completions": shape.hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    exit_codes([exits.PREEMPTED]),
                    {"action": "FailJob", "onPodConditions": [TAKEN_AWAY]},
                    exit_codes(PERSONAL),
                ]
            },
            "template": {**({"metadata": annotations} if annotations else {}), "spec": pod(options, shape)},
        }
    }  # fmt: skip


def exit_codes(values: list[int]) -> dict[str, Any]:
    """A rule that fails the Job where our container ends so."""
    found = {"containerName": CONTAINER, "operator": "In", "values": values}
    return {"action": "FailJob", "onExitCodes": found}


def pod(options: Options, shape: Shape) -> dict[str, Any]:
    """One host. A node with TPUs takes only pods that tolerate its taint."""
    spot = {"cloud.google.com/gke-spot": "true"} if options.spot else {}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": shape.accelerator,
            "cloud.google.com/gke-tpu-topology": shape.topology,
            **spot,
        },
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"}
            for key in ("google.com/tpu", *spot)
        ],
        "containers": [container(options, shape)],
    }
    if options.bucket:
        attributes = {
            "bucketName": options.bucket,
            "mountOptions": "implicit-dirs,metadata-cache:ttl-secs:0",
        }
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
        spec["volumes"] = [{"name": VOLUME, "csi": driver}]
    return spec


def container(options: Options, shape: Shape) -> dict[str, Any]:
    """The command of a run, with all chips of the host."""
    chips = {"google.com/tpu": shape.chips}
    ports = {"coordinator": COORDINATOR_PORT, "tpu": TPU_PORT, "megascale": MEGASCALE_PORT}
    mounts = [{"name": VOLUME, "mountPath": MOUNT}]
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": ["ringflash"],
        # $( would be taken for a variable.
        "args": [argument.replace("$(", "$$(") for argument in options.train],
        **({"env": megascale(options, shape)} if shape.slices > 1 else {}),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "securityContext": {"privileged": True, "runAsUser": 0},
        "resources": {"requests": chips, "limits": chips},
        **({"volumeMounts": mounts} if options.bucket else {}),
    }


def megascale(options: Options, shape: Shape) -> list[dict[str, Any]]:
    """What joins slices: the first host of the first, how many there are, and which one this is."""
    index = "metadata.labels['jobset.sigs.k8s.io/job-index']"
    values = {
        "MEGASCALE_COORDINATOR_ADDRESS": f"{options.name}-{JOB}-0-0.{options.name}",
        "MEGASCALE_NUM_SLICES": str(shape.slices),
        "MEGASCALE_PORT": str(MEGASCALE_PORT),
    }
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        {"name": "MEGASCALE_SLICE_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
    ]


def submit(options: Options) -> str:
    """The commands that submit it; the queue is made once."""
    paths = [shlex.quote(f"{options.out}/{file}") for file in (KUEUE, JOBSET)]
    return f"kubectl apply -f {paths[0]} && kubectl create -f {paths[1]}"
