"""Grades code by running test cases in a sandbox."""

import asyncio
import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.sandbox import Limits, LocalSandbox, RemoteSandbox, Sandbox

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Code that exits early, e.g. with os._exit(0), has not printed the secret, because its namespace lacks it.
_HARNESS = """
import json, sys
job = json.loads(sys.stdin.read())
space = {"__name__": "solution"}
exec(compile(job["code"], "solution.py", "exec"), space)
if "test" in job:
    exec(compile(job["test"], "test.py", "exec"), space)
    print("\\n" + job["secret"])
else:
    name, values = job["call"]
    function = getattr(space["Solution"](), name) if "Solution" in space else space[name]
    print("\\n" + job["secret"] + json.dumps(function(*values)))
"""


class TestCase(NamedTuple):
    """A program run, statements, or a function call."""

    stdin: str = ""
    stdout: str | None = None
    """Expected output; None in other kinds of tests."""
    test: str = ""
    """Statements that raise if the code is wrong, such as `assert add(3, 4) == 7`."""
    call: tuple[str, list[Any]] | None = None
    """Function and arguments. The call must return `result`."""
    result: Any = None


class CodeTests:
    """Reward 1 if the code in a response passes all tests; with mode `share`, the fraction that pass.

    The code is the last fenced block. The ground truth, optionally as JSON text, is one of
    {"inputs": ["3 4\\n"], "outputs": ["7\\n"]}: programs that read stdin and write stdout, compared word by word;
    {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}: calls of a function, or of a method of `Solution`;
    ["assert add(3, 4) == 7", ...] or a single string: statements that run after the code.

    Source: formats of verl, utils/reward_score/sandbox_fusion, and of MBPP.
    """

    def __init__(
        self,
        *,
        mode: Literal["all", "share"] = "all",
        address: str = "",
        limits: dict[str, Any] | None = None,
        max_tests: int | None = None,
        parallel: int = 2,
        python: str = "python3",
    ) -> None:
        """`address`: service with SandboxFusion's API; empty = local sandbox. `limits`: fields of Limits. `parallel`:
        concurrent tests per worker.
        """
        if mode not in ("all", "share") or parallel < 1:
            raise ConfigError(f"mode of code must be all or share, and parallel >= 1, got {mode!r} and {parallel}.")
        self._mode, self._max_tests, self._parallel = mode, max_tests, parallel
        self._limits = msgspec.convert(limits or {}, Limits)
        self._sandbox: Sandbox = RemoteSandbox(address) if address else LocalSandbox(python=python)
        self._slots: asyncio.Semaphore | None = None

    async def __call__(self, sample: RewardInput) -> Reward:
        tests = list(read_tests(sample.ground_truth))[: self._max_tests]
        if not tests:
            raise ValueError("a ground truth of code must contain at least one test, got none")
        if not (blocks := _BLOCK.findall(sample.response)):
            return Reward(total=0.0)
        results: list[bool] = []
        size = self._parallel if self._mode == "all" else len(tests)
        for start in range(0, len(tests), size):
            batch = tests[start : start + size]
            results += await asyncio.gather(*(self._passes(blocks[-1], test) for test in batch))
            if self._mode == "all" and not all(results):
                return Reward(total=0.0)
        return Reward(total=sum(results) / len(results), is_correct=all(results))

    async def _passes(self, code: str, test: TestCase) -> bool:
        # Created here, because it must belong to the running event loop.
        self._slots = self._slots or asyncio.Semaphore(self._parallel)
        async with self._slots:
            if test.stdout is not None:
                found = await self._sandbox.run(code, stdin=test.stdin, limits=self._limits)
                return found.status == "ok" and found.stdout.split() == test.stdout.split()
            secret = secrets.token_hex(16)
            own: dict[str, Any] = {"call": test.call} if test.call else {"test": test.test}
            job = json.dumps({"code": code, "secret": secret, **own})
            found = await self._sandbox.run(_HARNESS, stdin=job, limits=self._limits)
        _, mark, result = found.stdout.rpartition(secret)
        if found.status != "ok" or not mark:
            return False
        if test.call is None:
            return True
        try:
            # JSON converts tuples to lists on both sides.
            return bool(json.loads(result) == json.loads(json.dumps(test.result)))
        except ValueError:
            return False


def read_tests(truth: Any) -> Iterator[TestCase]:
    """Raises ValueError or TypeError for an unknown format."""
    if isinstance(truth, str):
        truth = json.loads(truth) if truth.lstrip()[:1] in ("{", "[") else [truth]
    if isinstance(truth, list) and all(isinstance(text, str) for text in truth):
        yield from (TestCase(test=text) for text in truth if text.strip())
    elif isinstance(truth, dict) and {"inputs", "outputs"} <= truth.keys():
        name = truth.get("fn_name")
        for given, expected in zip(truth["inputs"], truth["outputs"], strict=True):
            if name is None:
                yield TestCase(stdin=str(given), stdout=str(expected))
            else:
                yield TestCase(call=(name, given if isinstance(given, list) else [given]), result=expected)
    else:
        raise TypeError(
            "a ground truth of code must be statements, a list of them, or a record with `inputs` and `outputs`, got "
            f"{str(truth)[:60]!r}"
        )
