"""The launch files that are committed are what `ringflash launch render` writes for their examples."""

import shlex
from pathlib import Path

import pytest

from ringflash import cli
from ringflash.bench.report import Table
from ringflash.launch import render

ROOT = Path(__file__).parents[2]
LLAMA, QUICKSTART = "--config=configs/llama3_8b_128k.py", "--config=configs/quickstart.py"
IMAGE = "--image=us-docker.pkg.dev/my-project/ringflash/ringflash:0.1.0"
GKE = (
    *("--target=gke", LLAMA, "--workdir=/gcs/runs/llama3-8b-128k", "--bucket=my-bucket"),
    *(IMAGE, "--topology=v5p:4x4x4"),
)
SLURM = ("--target=slurm", QUICKSTART, "--workdir=runs/quickstart", "--nodes=2", "--devices=4")
XPK = (
    *("--target=xpk", LLAMA, "--workdir=/data/llama", IMAGE, "--cluster=tpus"),
    "--topology=v5p:4x4x4",
)
TPU_VM = (
    *("--target=tpu-vm", LLAMA, "--workdir=gs://my-bucket/llama", "--project=my-project"),
    *("--zone=us-east5-a", "--topology=v5p:4x4x4"),
)
LOCAL = ("--target=local", QUICKSTART, "--workdir=runs/local", "--nodes=4", "--devices=2")
REQUIRE_FIT = render.require_fit
COMMITTED = {"launch/gke": GKE, "launch": SLURM}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A config's path is that from the checkout's root; nothing is compiled."""
    monkeypatch.chdir(ROOT)

    def compiled(options, show):
        raise AssertionError(f"compiled {options}")

    monkeypatch.setattr(render, "require_fit", compiled)


def rendered(out, *arguments):
    """The files by name."""
    assert cli.main(["launch", "render", *arguments, f"--out={out}", "--unchecked"]) == 0
    return {file.name: file.read_text() for file in sorted(out.iterdir())}


@pytest.mark.parametrize("folder", COMMITTED)
def test_committed_files_are_what_is_rendered(tmp_path, folder):
    flags = COMMITTED[folder]
    verb = ["ringflash", "launch", "render"]
    command = shlex.join([*verb, *flags, f"--out={folder}", "--unchecked", "--force"])
    for name, text in rendered(tmp_path, *flags).items():
        committed = (ROOT / folder / name).read_text()
        assert committed == text, (
            f"{folder}/{name} is not what is rendered. Write it anew: {command}"
        )


def test_a_file_names_the_command_that_writes_it(tmp_path):
    text = rendered(tmp_path / "one", *GKE, "--config.steps=5")["jobset.yaml"]
    (line,) = [one for one in text.splitlines() if one.startswith("# Written by: ")]
    again = shlex.split(line.removeprefix("# Written by: "))
    assert again[:3] == ["ringflash", "launch", "render"]
    assert rendered(tmp_path / "two", *again[3:])["jobset.yaml"] == text


def test_nothing_is_overwritten_that_differs(tmp_path, capsys):
    rendered(tmp_path, *LOCAL)
    rendered(tmp_path, *LOCAL)  # the same again is no loss
    script = tmp_path / "run_local.sh"
    script.write_text("mine")
    asked = ["launch", "render", *LOCAL, f"--out={tmp_path}"]
    assert cli.main(asked) == 3
    assert "there, and different: --force overwrites" in capsys.readouterr().err
    assert script.read_text() == "mine"
    assert cli.main([*asked, "--force"]) == 0
    assert "launch/local.sh" in script.read_text()


def test_a_step_that_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    def refuse(options, show):
        raise render.step_run.DoesNotFit("needs too much")

    monkeypatch.setattr(render, "require_fit", refuse)
    out = tmp_path / "out"
    assert cli.main(["launch", "render", *GKE, f"--out={out}"]) == 1
    assert "needs too much" in capsys.readouterr().err
    assert not out.exists()


def test_what_would_fit_is_told(monkeypatch, capsys):
    """The machinery of `plan`, with its compiler left out."""
    options = render.parse(["render", *GKE, "--out=x"])
    step_run, told = render.step_run, []
    monkeypatch.setattr(step_run, "facts_of", lambda asked: told.append(asked) or "facts")
    monkeypatch.setattr(step_run, "fits", lambda asked, facts: len(told) > 1)
    monkeypatch.setattr(step_run, "advised", lambda *_: [Table("this would fit: less")])
    monkeypatch.setattr(render.step_rows, "shortage", lambda *_: "short of memory")
    with pytest.raises(step_run.DoesNotFit, match="short of memory"):
        REQUIRE_FIT(options, print)
    assert "this would fit: less" in capsys.readouterr().out
    REQUIRE_FIT(options, print)
    assert str(told[0].where) == "v5p:4x4x4"


def test_the_table(tmp_path, capsys):
    rendered(tmp_path, *GKE)
    rows = dict(
        line.strip().split(None, 1) for line in capsys.readouterr().out.splitlines()[1:4]
    )  # fmt: skip
    assert rows == {"name": "llama3-8b-128k", "hosts": "16", "chips": "a host   4"}
    rendered(tmp_path / "xpk", *XPK)
    said = capsys.readouterr().out
    assert "not checked: --unchecked" in said
    assert f"submit it with: bash {tmp_path}/xpk/xpk.sh" in said


def test_gke_without_a_bucket_warns(tmp_path, capsys):
    rendered(tmp_path, *[one for one in GKE if "bucket" not in one])
    assert "is lost with the pods" in capsys.readouterr().out


@pytest.mark.slow
def test_a_slice_from_end_to_end(monkeypatch, tmp_path, capsys):
    """The real compiler; of what does not fit `plan` has a test with it."""
    monkeypatch.setattr(render, "require_fit", REQUIRE_FIT)
    small = ["--config=configs/quickstart.py", "--config.model.layers=1", "--config.seq_len=512"]
    tpu = ["--config.model.dtype=bfloat16", "--config.attention.kernel=chunked"]
    place = ["--target=xpk", "--topology=v5e:2x4", IMAGE, "--cluster=c", "--workdir=/data/a"]
    asked = [*place, *small, *tpu, f"--out={tmp_path}"]
    assert cli.main(["launch", "render", *asked]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["xpk.sh"]
    assert "yes, by ringflash plan" in capsys.readouterr().out
