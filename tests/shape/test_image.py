"""The Dockerfile makes an image without root and without secrets, of what pyproject.toml offers."""

import re
import tomllib
from fnmatch import fnmatch

from tests.shape.tree import text

LINES = [line for line in text("Dockerfile").replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES]
FINAL = INSTRUCTIONS[max(at for at, (word, _) in enumerate(INSTRUCTIONS) if word == "FROM") :]


def test_the_image_is_made_of_instructions_stages_and_extras_that_there_are() -> None:
    known = {"ARG", "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "CMD"}
    assert {word for word, _ in INSTRUCTIONS} <= known
    stages = re.findall(r"AS (\w+)", " ".join(rest for word, rest in INSTRUCTIONS if word == "FROM"))
    copied = re.findall(r"--from=(\w+)", text("Dockerfile"))
    assert copied
    assert set(copied) <= set(stages)
    offered = set(tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"])
    (installed,) = re.findall(r'"\.\[\$BUILD,([\w,]+)\]"', text("Dockerfile"))
    assert {*installed.split(","), "cpu", "gpu"} <= offered
    assert '--constraints "constraints/$BUILD.txt"' in text("Dockerfile")
    assert "--constraints hashes.txt" in text("Dockerfile")
    assert ("ARG", "BUILD=gpu") in INSTRUCTIONS


def test_the_image_runs_without_root_as_the_user_of_the_manifests() -> None:
    users = [rest for word, rest in FINAL if word == "USER"]
    assert users == ["1000:1000"], "securityContext.runAsUser of slipstream/cluster/manifests.yaml"
    at = FINAL.index(("USER", users[0]))
    assert all(word in ("WORKDIR", "CMD") for word, _ in FINAL[at + 1 :])
    assert ("WORKDIR", "/workspace") in FINAL


def test_no_secret_gets_into_the_image() -> None:
    assert not re.search(r"(?i)\b\w*(token|password|secret|api_?key|credential)\w*=", text("Dockerfile"))
    # The final stage takes no files of the checkout, whose first stage is thrown away.
    assert all("--from=build" in rest for word, rest in FINAL if word == "COPY")
    ignored = text(".dockerignore").split()
    for path in (".git", ".venv", "runs", "data", "models", "token", "mine.token", ".env"):
        assert any(fnmatch(path, pattern) for pattern in ignored), path
