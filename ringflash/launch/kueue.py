"""What queues a JobSet in a cluster: a flavor of nodes, a quota of chips, and a queue of the namespace."""

from __future__ import annotations

from typing import Any

from ringflash.launch.options import Options
from ringflash.launch.shape import Shape

API = "kueue.x-k8s.io/v1beta2"
TPU = "google.com/tpu"
COMMENTS = {
    "nominalQuota:": [
        "Chips of all runs that may go on at once: raise it to what your node pools hold. No pod of",
        "another run is started before it finds room.",
    ]
}


def objects(options: Options, shape: Shape) -> list[dict[str, Any]]:
    """To be applied once in a cluster; the quota is that of this run."""
    flavor = f"{shape.accelerator}-{shape.topology}"
    chips = shape.slices * shape.hosts * shape.chips
    labels = {
        "cloud.google.com/gke-tpu-accelerator": shape.accelerator,
        "cloud.google.com/gke-tpu-topology": shape.topology,
    }
    quota = {"name": flavor, "resources": [{"name": TPU, "nominalQuota": chips}]}
    groups = [{"coveredResources": [TPU], "flavors": [quota]}]
    return [
        of_kind("ResourceFlavor", flavor, {"nodeLabels": labels}),
        of_kind("ClusterQueue", options.queue, {"namespaceSelector": {}, "resourceGroups": groups}),
        of_kind("LocalQueue", options.queue, {"clusterQueue": options.queue}, namespace="default"),
    ]


def of_kind(kind: str, name: str, spec: dict[str, Any], **metadata: str) -> dict[str, Any]:
    """An object of Kueue."""
    return {
        "apiVersion": API,
        "kind": kind,
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }
