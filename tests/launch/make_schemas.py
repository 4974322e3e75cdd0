"""Make tests/launch/schemas/*.json: which fields JobSet and Kueue know, from the CRDs of a release.

    python tests/launch/make_schemas.py FOLDER

FOLDER holds the files of `config/components/crd/bases` of kubernetes-sigs/jobset and kubernetes-sigs/kueue at
the versions below. Kept are names, types, required fields, enums and patterns: what a wrong manifest is found
by. Pods are left out: they are validated as Kubernetes has them.
"""

import json
import sys
from pathlib import Path

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {  # file of the CRD: release, version of the API
    "jobset.x-k8s.io_jobsets": ("jobset v0.12.0", "v1alpha2"),
    "kueue.x-k8s.io_clusterqueues": ("kueue v0.19.2", "v1beta2"),
    "kueue.x-k8s.io_localqueues": ("kueue v0.19.2", "v1beta2"),
    "kueue.x-k8s.io_resourceflavors": ("kueue v0.19.2", "v1beta2"),
}
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "maxItems", "maxLength")
POD_TEMPLATE = ("spec", "replicatedJobs", "template")
NOT_OURS = ("status",)


def compact(schema: dict, path: tuple[str, ...] = ()) -> dict:
    """The schema without prose, closed: a field that is not named is wrong."""
    if path == POD_TEMPLATE:
        return {"type": "object"}
    found = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "items" in schema:
        found["items"] = compact(schema["items"], path)
    if "properties" in schema:
        left = () if path else NOT_OURS
        fields = {key: value for key, value in schema["properties"].items() if key not in left}
        found["properties"] = {
            key: compact(value, (*path, key)) for key, value in sorted(fields.items())
        }
        found["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = compact(schema["additionalProperties"], path)
    return found


def fields_of(crd: dict, version: str, release: str) -> dict:
    """The schema of one version of a CRD; its apiVersion and kind are required too."""
    (served,) = (one for one in crd["spec"]["versions"] if one["name"] == version)
    schema = compact(served["schema"]["openAPIV3Schema"])
    group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
    schema["properties"] |= {
        "apiVersion": {"const": f"{group}/{version}"},
        "kind": {"const": kind},
    }
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return {"title": f"{kind} of {release}", **schema}


def main(folder: Path) -> None:
    SCHEMAS.mkdir(exist_ok=True)
    for name, (release, version) in KINDS.items():
        crd = yaml.safe_load((folder / f"{name}.yaml").read_text())
        schema = fields_of(crd, version, release)
        kind = crd["spec"]["names"]["kind"]
        text = json.dumps(schema, indent=1, sort_keys=True)
        (SCHEMAS / f"{kind}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
