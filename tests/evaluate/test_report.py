import json

from ringflash.evaluate import report
from ringflash.evaluate.perplexity import Score

WHOLE, EARLY, LATE = (
    Score(0, 1024, 12.0, 4, 8),
    Score(0, 512, 2.0, 2, 2),
    Score(512, 1024, 10.0, 2, 6),
)
SCORES = [WHOLE, EARLY, LATE]


def test_comes_back_as_it_was(tmp_path):
    report.write(tmp_path, 7, SCORES, ("a", "b"), "x")
    assert report.read(tmp_path, 7, "x") == SCORES
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["7.json"]
    record = json.loads((tmp_path / "eval" / "7.json").read_text())
    assert record["step"] == 7
    assert record["scores"][2]["perplexity"] == LATE.perplexity
    assert "full context" in record["policy"]


def test_what_is_not_there_or_of_other_documents_does_not_count(tmp_path):
    assert report.read(tmp_path, 7, "x") is None
    report.write(tmp_path, 7, SCORES, ("a", "b"), "x")
    assert report.read(tmp_path, 8, "x") is None
    assert report.read(tmp_path, 7, "y") is None


def test_later_steps_are_forgotten(tmp_path):
    report.forget(tmp_path, after=3)
    for step in (1, 7, 10):
        report.write(tmp_path, step, SCORES, ("a",), "x")
    (tmp_path / "eval" / "notes.json").write_text("mine")
    report.forget(tmp_path, after=7)
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {
        "1.json",
        "7.json",
        "notes.json",
    }


def test_rows_stand_beside_what_was_before():
    assert report.rows(SCORES)[0] == ("all", "4", "20.086", "2.164")
    beside = report.rows(SCORES, [WHOLE, EARLY])
    assert beside[0] == ("all", "4", "20.086", "2.164", "20.086", "2.164")
    assert beside[2] == ("512-1024", "2", "148.413", "2.404", "", "")
