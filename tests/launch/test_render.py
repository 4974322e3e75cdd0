"""`ringflash launch render`: what it writes, held to the published schemas, and what it refuses."""

import copy
import json
import re
import shlex
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ringflash import cli
from ringflash.launch import render as command
from ringflash.launch.shape import of_slice
from ringflash.plan import step_search
from ringflash.plan.step_run import DoesNotFit
from ringflash.plan.where import Where

ROOT = Path(__file__).parents[2]
SCHEMAS = {f.stem: json.loads(f.read_text()) for f in (Path(__file__).parent / "schemas").iterdir()}
LLAMA = "--config=configs/llama3_8b_128k.py"
GKE = ("--target=gke", "--topology=v5p:4x4x4", "--image=us-docker.pkg.dev/p/r/ringflash:1")
BUCKET = ("--bucket=my-bucket", "--workdir=/gcs/runs/a")
NODES = ("--nodes=2", "--devices=4", "--config=configs/quickstart.py", "--workdir=runs/a")
TPU_VM = ("--target=tpu-vm", "--topology=v5p:4x4x4", "--project=p-1", "--zone=us-east5-a")
XPK = ("--target=xpk", "--topology=v5p:4x4x4", "--image=i/r:1", "--cluster=c", "--workdir=/mnt/a")
NASTY = '--config.data.source=files:my books/it\'s "so"; $(x) `y` $HOME/**/*.txt'
REWRITE = (
    "it is what the command in its first lines writes: run that again with --out=launch/... --force"
)


@pytest.fixture
def rendered(monkeypatch, tmp_path, capsys):
    """rendered(*arguments, code=0): the files written, and what was said; nothing is compiled."""
    monkeypatch.chdir(ROOT)
    compiled = []
    monkeypatch.setattr(command, "require_fit", lambda options, show: compiled.append(options))

    def rendered(*arguments, code=0):
        out = tmp_path / "out"
        assert cli.main(["launch", "render", *arguments, f"--out={out}"]) == code
        files = {f.name: f.read_text() for f in out.iterdir()} if out.is_dir() else {}
        return files, capsys.readouterr()

    rendered.compiled = compiled
    return rendered


@pytest.mark.parametrize("path", ["gke/jobset.yaml", "gke/kueue.yaml", "slurm.sbatch"])
def test_the_files_here_are_what_it_writes(rendered, path):
    there = (ROOT / "launch" / path).read_text()
    line = re.search("Written by: ringflash launch render (.*)", there)[1]
    files, _ = rendered(*shlex.split(line))
    assert files[Path(path).name] == there, REWRITE


def documents(text):
    return list(yaml.safe_load_all(text))


def check(found):
    """Raises where an object is not as its schema, or the pods of a JobSet not as Kubernetes has them."""
    jsonschema.validate(found, SCHEMAS[found["kind"]])
    for job in found["spec"].get("replicatedJobs", []):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        kubernetes_validate.validate({**whole, **job["template"]}, "1.34", strict=True)


GENERATIONS = ("v4:2x2x4", "v5e:4x4", "v5p:4x4x4", "v6e:4x4", "tpu7x:2x2x4")


@pytest.mark.parametrize("topology", GENERATIONS)
@pytest.mark.parametrize("slices", [1, 2])
def test_every_generation_and_several_slices_are_as_the_schemas_say(rendered, topology, slices):
    chips = of_slice(Where(topology)).devices
    mesh = [
        f"--config.mesh.context={chips}",
        "--config.mesh.fsdp=1",
        f"--config.mesh.data={slices}",
    ]
    asked = [*GKE[:1], f"--topology={topology}", GKE[2], f"--slices={slices}", LLAMA, *BUCKET]
    files, _ = rendered(*asked, *mesh, "--spot")
    (jobset,) = documents(files["jobset.yaml"])
    kinds = [one["kind"] for one in documents(files["kueue.yaml"])]
    assert kinds == ["ResourceFlavor", "ClusterQueue", "LocalQueue"]
    for one in (jobset, *documents(files["kueue.yaml"])):
        check(one)
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == slices
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    hosts = job["template"]["spec"]["parallelism"]
    shape = of_slice(Where(topology))
    assert hosts * container["resources"]["limits"]["google.com/tpu"] == shape.hosts * shape.chips
    names = [one["name"] for one in container.get("env", [])]
    assert ("MEGASCALE_NUM_SLICES" in names) == (slices > 1)


def test_a_wrong_field_or_value_is_found(rendered):
    files, _ = rendered(*GKE, LLAMA, *BUCKET)
    (jobset,) = documents(files["jobset.yaml"])
    spec = ("spec", "replicatedJobs", 0, "template", "spec")
    wrong = [
        ("spec", "failurePolicy", "maxRestart"),
        ("spec", "failurePolicy", "rules", 0, "actions"),
        ("spec", "networks"),
        (*spec, "backofLimit"),
        (*spec, "template", "spec", "containers", 0, "argv"),
        (*spec, "template", "spec", "terminationGracePeriod"),
    ]
    for *path, name in wrong:
        broken = copy.deepcopy(jobset)
        at = broken
        for step in path:
            at = at[step]
        at[name] = 3
        with pytest.raises(Exception, match=name):
            check(broken)
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    with pytest.raises(jsonschema.ValidationError, match="Restart"):
        check(jobset)


def test_the_exit_codes_decide(rendered):
    files, _ = rendered(*GKE, LLAMA, *BUCKET)
    (jobset,) = documents(files["jobset.yaml"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    codes = [
        r["onExitCodes"]["values"] for r in job["podFailurePolicy"]["rules"] if "onExitCodes" in r
    ]
    assert codes == [[42], [1, 2, 3, 4, 5]]
    policy = jobset["spec"]["failurePolicy"]
    actions = [rule["action"] for rule in policy["rules"]]
    assert actions == ["RestartJobSetAndIgnoreMaxRestarts", "FailJobSet", "RestartJobSet"]
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["args"][0] == "train"


def test_arguments_arrive_as_they_were_given(rendered):
    asked = {
        "slurm.sbatch": ("--target=slurm", *NODES),
        "run_local.sh": ("--target=local", *NODES),
        "run_tpu_vm.sh": (*TPU_VM, LLAMA, "--workdir=gs://b/runs/a"),
        "xpk.sh": (*XPK, LLAMA),
        "jobset.yaml": (*GKE, LLAMA, *BUCKET),
    }
    for name, arguments in asked.items():
        files, _ = rendered(*arguments, NASTY)
        if name == "jobset.yaml":
            (jobset,) = documents(files[name])
            pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            assert NASTY.replace("$(", "$$(") in pod["containers"][0]["args"]
            continue
        script = "\n".join(x for x in files[name].splitlines() if not x.startswith("#"))
        words = shlex.split(script.split("srun")[0] if "slurm" in name else script)
        if name == "xpk.sh":
            (told,) = [word for word in words if word.startswith("--command=")]
            words = shlex.split(told.partition("=")[2])
            assert words[:2] == ["exec", "ringflash"]
        assert NASTY in words, name


def test_a_mesh_that_is_not_of_these_hosts_is_refused(rendered):
    files, said = rendered(*GKE, LLAMA, *BUCKET, "--config.mesh.context=4", code=3)
    assert files == {}
    assert "mesh" in said.err
    assert rendered.compiled == []
    _, said = rendered("--target=slurm", *NODES, "--config.mesh.context=16", code=3)
    assert "2 nodes of 4" in said.err


def test_slices_must_divide_data(rendered):
    _, said = rendered(*GKE, LLAMA, *BUCKET, "--slices=2", code=3)
    assert "slices" in said.err


def test_what_does_not_fit_is_not_written(rendered, monkeypatch):
    def too_large(options, show):
        raise DoesNotFit("does not fit v5p:4x4x4")

    monkeypatch.setattr(command, "require_fit", too_large)
    files, said = rendered(*GKE, LLAMA, *BUCKET, code=1)
    assert files == {}
    assert "does not fit v5p:4x4x4" in said.err
    files, said = rendered(*GKE, LLAMA, *BUCKET, "--unchecked")
    assert "not checked" in said.out
    assert set(files) == {"jobset.yaml", "kueue.yaml"}


def test_the_step_is_compiled_as_plan_does(rendered):
    _, said = rendered(*GKE, LLAMA, *BUCKET)
    (options,) = rendered.compiled
    assert str(options.where) == "v5p:4x4x4"
    assert "yes, by ringflash plan" in said.out
    assert "kubectl create -f" in said.out


@pytest.mark.slow
@pytest.mark.parametrize(("width", "code"), [(0, 0), (2**25, 1)])
def test_a_slice_from_end_to_end(monkeypatch, tmp_path, capsys, width, code):
    """The real compiler: what does not fit is told with what would, and nothing is written."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(step_search, "nearest", lambda *asked: None)
    small = ["--config=configs/quickstart.py", "--config.model.layers=1", "--config.seq_len=512"]
    tpu = ["--config.model.dtype=bfloat16", "--config.attention.kernel=chunked"]
    asked = ["--target=xpk", "--topology=v5e:2x4", *XPK[2:], *small, *tpu, f"--out={tmp_path}"]
    asked.append(f"--config.model.mlp_width={width}")
    assert cli.main(["launch", "render", *asked]) == code
    assert bool(list(tmp_path.iterdir())) == (code == 0)
    said = capsys.readouterr()
    assert ("does not fit v5e:2x4" in said.err) == (code == 1)


def test_other_files_are_not_overwritten(rendered, tmp_path):
    rendered("--target=slurm", *NODES)
    rendered("--target=slurm", *NODES)
    _, said = rendered("--target=slurm", *NODES, "--name=other", code=3)
    assert "--force overwrites" in said.err
    files, _ = rendered("--target=slurm", *NODES, "--name=other", "--force")
    assert "--job-name=other" in files["slurm.sbatch"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), ["--target is missing", "--config is missing", "--workdir is missing"]),
        (("--target=nowhere",), ["nowhere"]),
        ((*GKE, LLAMA, "--workdir=runs/a"), ["wanted a whole path"]),
        ((*GKE, LLAMA, *BUCKET, "--zone=us-east5-a"), ["--target=gke has no use for it"]),
        ((*GKE, LLAMA, *BUCKET, "--name=Not_A_Label"), ["--name"]),
        ((*GKE[:1], "--topology=v5p:3x3x3", GKE[2], LLAMA, *BUCKET), ["v5p:3x3x3"]),
        ((*GKE, LLAMA, *BUCKET, "--config.steps=x", "--wrong=1"), ["steps", "--wrong"]),
        (
            ("--target=tpu-vm", "--topology=tpu7x:2x2x1", LLAMA),
            ["--project is missing", "has no TPU VMs"],
        ),
    ],
)
def test_all_that_is_wrong_is_told_at_once(rendered, arguments, told):
    files, said = rendered(*arguments, code=3)
    assert files == {}
    for one in told:
        assert one in said.err


def test_another_verb(capsys):
    assert cli.main(["launch", "submit"]) == 3
    assert "wanted ringflash launch render" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "kind"),
    [
        ("v4:4x4x4", 16, 4, "v4-128"),
        ("v5e:2x4", 1, 8, "v5litepod-8"),
        ("v5e:16x16", 64, 4, "v5litepod-256"),
        ("v5p:4x4x8", 32, 4, "v5p-256"),
        ("v6e:16x16", 64, 4, "v6e-256"),
    ],
)
def test_shapes(topology, hosts, chips, kind):
    shape = of_slice(Where(topology), tpu_vm=True)
    assert (shape.hosts, shape.chips, shape.accelerator_type) == (hosts, chips, kind)
