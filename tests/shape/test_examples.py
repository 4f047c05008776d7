"""The examples are whole: each has a page with a curve and a row in the list, and one command makes all it needs."""

import re
from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.preflight import check_surroundings
from tests.shape.tree import ROOT, paths, text

FOLDERS = sorted({path.split("/")[1] for path in paths() if re.match("examples/[^/]+/", path)})


def test_every_example_has_a_page_with_its_curve_and_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\) \|", text("examples/README.md"), re.MULTILINE)
    assert sorted(listed) == [(folder, folder) for folder in FOLDERS]
    for folder in FOLDERS:
        page = text(f"examples/{folder}/README.md")
        assert re.search(r"^!\[.+\]\(curve\.png\)$", page, re.MULTILINE), folder
        assert (ROOT / "examples" / folder / "curve.png").is_file()
        assert re.search(r"^slipstream run experiment=", page, re.MULTILINE), folder


RUNS = [path for path in paths("run.yaml") if path.startswith("examples/")]


@pytest.mark.parametrize("path", RUNS)
def test_an_example_starts_in_a_clone_without_data_and_models(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    try:
        check_surroundings(load([f"experiment={path}"]))
    except ConfigError as error:
        if "needs the library" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("path", RUNS)
def test_a_model_that_an_example_begins_with_is_made_by_its_first_step(path: str) -> None:
    run = load([f"experiment={path}"])
    made = [step for step in run.prepare if step.module == "slipstream"]
    # Named twice: where it is made and where it is used.
    assert sorted(2 * [step.creates for step in made]) == sorted(re.findall(r"runs/\w+/final_model", text(path)))
    for step in made:
        command, *overrides = step.args
        first = load(overrides)
        assert (command, first.mode) == ("sft", "sft")
        assert Path(step.creates) == Path(first.runs_dir) / first.name / "final_model"
