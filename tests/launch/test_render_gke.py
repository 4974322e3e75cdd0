"""The JobSet and Kueue's objects, against the schemas of their releases and of Kubernetes."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ringflash import exits
from ringflash.launch import gke, render
from ringflash.launch.options import parse

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.37"
FLAGS = (
    *("render", "--target=gke", "--config=configs/llama3_8b_128k.py", "--out=x"),
    *("--workdir=/gcs/run", "--image=gcr.io/p/i:1"),
)
TWO = ("--slices=2", "--config.mesh.data=2", "--config.global_batch_size=16")
CASES = {
    "v5p": ("--topology=v5p:4x4x4", "--bucket=my-bucket"),
    "two slices on spot": ("--topology=v5p:4x4x4", *TWO, "--spot", "--grace=60"),
    "v6e": ("--topology=v6e:8x8",),
    "7x": ("--topology=7x:4x4x4", "--config.mesh.context=16"),
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def objects(*flags):
    """All objects of both files, as YAML has them."""
    options = parse([*FLAGS, *flags])
    texts = gke.files(options, options.shape)
    return [one for text in texts.values() for one in yaml.safe_load_all(text)]


def validate(one, kind):
    """As an API server would: a field that it does not know is wrong."""
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
    jsonschema.validate(one, schema)
    if kind == "JobSet":
        for job in one["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            kubernetes_validate.validate(whole | job["template"], KUBERNETES, strict=True)


def pod_of(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("case", CASES)
def test_schemas(case):
    found = objects(*CASES[case])
    assert [one["kind"] for one in found] == [
        "JobSet",
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
    ]
    for one in found:
        validate(one, one["kind"])


def places(tree, path=()):
    """The path of each key that Kubernetes or a CRD names; labels and the like are the user's own."""
    free = (
        "labels",
        "annotations",
        "nodeSelector",
        "requests",
        "limits",
        "nodeLabels",
        "volumeAttributes",
    )
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            if key not in free:
                yield from places(value, (*path, key))
    elif isinstance(tree, list):
        for at, value in enumerate(tree):
            yield from places(value, (*path, at))


@pytest.mark.parametrize("number", range(4))
def test_a_misspelt_field_anywhere_is_found(number):
    good = objects(*CASES["two slices on spot"], "--bucket=my-bucket")[number]
    found = [path for path in places(good) if path[:2] != ("metadata", "name")]
    for path in found:
        if path[0] == "metadata" and len(path) > 1:
            continue  # CRDs leave an object's own metadata to Kubernetes
        bad = copy.deepcopy(good)
        above = bad
        for key in path[:-1]:
            above = above[key]
        above[f"{path[-1]}x"] = above.pop(path[-1])
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(bad, good["kind"])
    assert len(found) > 3


def outcome(jobset, code, *, disrupted=False):
    """What Job and JobSet make of a pod that ends so, as their controllers go about it."""
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for at, rule in enumerate(spec["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        end = f"matching FailJob rule at index {at}"
        codes = rule.get("onExitCodes")
        if codes and code in codes["values"]:
            reason, message = (
                "PodFailurePolicy",
                f"Container x for pod y failed with exit code {code} {end}",
            )
            break
        if not codes and disrupted:
            reason, message = "PodFailurePolicy", f"Pod y has condition DisruptionTarget {end}"
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule.get("onJobFailureReasons", [reason]) and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    raise AssertionError("no rule")


@pytest.mark.parametrize(
    ("codes", "action"),
    [
        ([exits.PREEMPTED], "RestartJobSetAndIgnoreMaxRestarts"),
        ([1, 2, exits.CONFIG_FAULT, exits.DATA_FAULT, exits.DIVERGED], "FailJobSet"),
        ([124, 127, 130, 134, 137, 139, 143, 255], "RestartJobSet"),
    ],
)
def test_what_becomes_of_an_exit_code(codes, action):
    jobset, *_ = objects(*CASES["v5p"])
    assert {outcome(jobset, code) for code in codes} == {action}


def test_a_node_that_is_taken_away_is_no_failure():
    jobset, *_ = objects(*CASES["v5p"])
    found = {outcome(jobset, code, disrupted=True) for code in (1, 42, 137, 143)}
    assert found == {"RestartJobSetAndIgnoreMaxRestarts"}


def test_one_job_a_slice_one_pod_a_host():
    jobset, *rest = objects(*CASES["two slices on spot"])
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert replicated["replicas"] == 2
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (16, 16, 0)
    assert (spec["completionMode"], spec["podReplacementPolicy"]) == ("Indexed", "Failed")
    pod = pod_of(jobset)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["terminationGracePeriodSeconds"] == 60
    (container,) = pod["containers"]
    assert (
        container["resources"]["limits"]
        == container["resources"]["requests"]
        == {"google.com/tpu": 4}
    )
    quota = rest[1]["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"]
    assert quota == 2 * 16 * 4
    variables = {one["name"]: one for one in container["env"]}
    # The name that JobSet gives the first pod of the first slice: JOBSET-JOB-0-0.SUBDOMAIN.
    name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    address = variables["MEGASCALE_COORDINATOR_ADDRESS"]["value"]
    assert address == f"{name}-{replicated['name']}-0-0.{subdomain}"
    assert variables["MEGASCALE_NUM_SLICES"]["value"] == "2"


def test_one_slice_is_told_of_no_others():
    (container,) = pod_of(objects(*CASES["v5p"])[0])["containers"]
    assert "env" not in container
    assert 8476 in [port["containerPort"] for port in container["ports"]]


def test_the_command_is_ringflash_train_and_nothing_else():
    flags = ("--topology=v5p:4x4x4", "--config.data.source=files:/gcs/a $(HOME)/*.txt")
    (container,) = pod_of(objects(*flags)[0])["containers"]
    assert container["command"] == ["ringflash"]
    assert container["args"] == [
        *("train", "--config=/app/configs/llama3_8b_128k.py", "--workdir=/gcs/run"),
        "--config.data.source=files:/gcs/a $$(HOME)/*.txt",  # Kubernetes takes $( for a variable
    ]


def test_the_bucket_is_mounted_where_the_workdir_is():
    jobset, *_ = objects(*CASES["v5p"])
    pod = pod_of(jobset)
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (volume,) = pod["volumes"]
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "my-bucket"
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/gcs")
    assert "volumes" not in pod_of(objects(*CASES["v6e"])[0])


def test_every_comment_stands_somewhere():
    options = parse([*FLAGS, *CASES["two slices on spot"], "--bucket=b-1"])
    texts = render.TARGETS["gke"].files(options, options.shape)
    told = "".join(texts.values())
    for lines in (*gke.COMMENTS.values(), *gke.kueue.COMMENTS.values()):
        assert all(f"# {line}\n" in told for line in lines), lines
