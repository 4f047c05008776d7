"""Grader of code by test cases, which run in a sandbox."""

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
# The code runs in a module of its own, and the secret is read before it: code that ends the process early, as
# os._exit(0) does, cannot have printed it.
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
    """One test. Example: TestCase(stdin="3 4\\n", stdout="7\\n")"""

    stdin: str = ""
    stdout: str | None = None
    """Expected output; None for the other kinds."""
    test: str = ""
    """Statements that raise where the code is wrong, such as `assert add(3, 4) == 7`."""
    call: tuple[str, list[Any]] | None = None
    """Function of the code and its arguments; the result is compared with `result`."""
    result: Any = None


class CodeTests:
    """Reward 1 if the code of a response passes all its tests, or the share that it passes.

    The code is the last fenced block. The ground truth, also as JSON text, is one of
    {"inputs": ["3 4\\n"], "outputs": ["7\\n"]}: programs that read stdin and write stdout, compared word by word;
    {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}: calls of a function, or of a method of `Solution`;
    ["assert add(3, 4) == 7", ...] or one text: statements that run after the code.

    Source: the forms of verl, utils/reward_score/sandbox_fusion, and of MBPP.
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
        """Make the sandbox: the local one, or the one at `address` (SandboxFusion's API). `limits`: fields of Limits.

        `max_tests`: the first ones count. `parallel`: tests of one worker that run at the same time.
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
            raise ValueError("a ground truth of code must hold at least one test, got none")
        blocks = _BLOCK.findall(sample.response)
        if not blocks:
            return Reward(total=0.0)
        if self._mode == "all":
            passed = await self._passes_all(blocks[-1], tests)
            return Reward(total=float(passed), is_correct=passed)
        results = await asyncio.gather(*(self._passes(blocks[-1], test) for test in tests))
        return Reward(total=sum(results) / len(results), is_correct=all(results))

    async def _passes_all(self, code: str, tests: list[TestCase]) -> bool:
        for start in range(0, len(tests), self._parallel):
            batch = tests[start : start + self._parallel]
            if not all(await asyncio.gather(*(self._passes(code, test) for test in batch))):
                return False
        return True

    async def _passes(self, code: str, test: TestCase) -> bool:
        # Made here, where the loop runs that it belongs to.
        self._slots = self._slots or asyncio.Semaphore(self._parallel)
        async with self._slots:
            if test.stdout is not None:
                found = await self._sandbox.run(code, stdin=test.stdin, limits=self._limits)
                return found.status == "ok" and found.stdout.split() == test.stdout.split()
            secret = secrets.token_hex(16)
            job = {"code": code, "secret": secret}
            job |= {"call": test.call} if test.call else {"test": test.test}  # type: ignore[dict-item]
            found = await self._sandbox.run(_HARNESS, stdin=json.dumps(job), limits=self._limits)
        _, mark, result = found.stdout.rpartition(secret)
        if found.status != "ok" or not mark:
            return False
        return test.call is None or _is_equal(result, test.result)


def _is_equal(text: str, expected: Any) -> bool:
    try:
        # Through JSON, which makes lists of tuples on either side.
        return bool(json.loads(text) == json.loads(json.dumps(expected)))
    except ValueError:
        return False


def read_tests(truth: Any) -> Iterator[TestCase]:
    """Yield the tests of a ground truth. Raises ValueError or TypeError for one in no known form."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        truth = json.loads(truth)
    if isinstance(truth, str):
        truth = [truth]
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
