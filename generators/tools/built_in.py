"""Built-in tools: arithmetic, and code in a sandbox."""

import ast
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from slipstream.generators.sandbox import Limits, LocalSandbox, RemoteSandbox, Sandbox, SandboxError


class ToolError(Exception):
    """A call that cannot be answered; the model reads the message."""


# --- arithmetic ------------------------------------------------------------------------------------------------------
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST_EXPRESSION = 200
_LARGEST_POWER = 1000
_LARGEST_NUMBER = 10**300


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, such as (3 + 4) * 12.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"an expression must have at most {_LONGEST_EXPRESSION} characters, got {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, OverflowError, ZeroDivisionError, RecursionError) as error:
        raise ToolError(f"{expression!r} cannot be calculated: {error}") from error
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    """Value of a syntax tree that has numbers and operators alone; nothing else is evaluated."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow) and not (abs(second) <= _LARGEST_POWER and abs(first) <= _LARGEST_POWER):
                raise ValueError(f"bases and exponents must be at most {_LARGEST_POWER}")
            result = _OPERATORS[type(op)](first, second)
            if isinstance(result, complex) or abs(result) > _LARGEST_NUMBER:
                raise ValueError("the result must be a real number of at most 300 digits")
            return result
    raise ValueError("only numbers, parentheses and + - * / // % ** may occur")


# --- code ------------------------------------------------------------------------------------------------------------
@cache
def _sandbox(address: str) -> Sandbox:
    """One for all answers of a generator: the probe of a local one takes seconds. Raises ConfigError."""
    return RemoteSandbox(address) if address else LocalSandbox()


class Python:
    """Python code in a sandbox, on this machine or at an address; nothing is left of a run for the next one."""

    def __init__(self, *, address: str = "", time_s: float = 5.0, memory_mib: int = 512) -> None:
        """`address`: a service with SandboxFusion's API; empty = bubblewrap on this machine. Raises ConfigError."""
        self._sandbox = _sandbox(address)
        self._limits = Limits(time_s=time_s, cpu_s=max(1, round(time_s)), memory_mib=memory_mib)

    async def __call__(self, code: str) -> str:
        """Run Python code and read what it prints.

        Args:
            code: A whole program; only what it prints is shown.
        """
        try:
            found = await self._sandbox.run(code, limits=self._limits)
        except SandboxError as error:
            raise ToolError(str(error)) from error
        if found.status == "timeout":
            raise ToolError(f"the code must end within {self._limits.time_s:g} s, it did not")
        if found.status == "output":
            raise ToolError(f"the code must print at most {self._limits.output_bytes} bytes, it printed more")
        if found.status == "error":
            raise ToolError(found.stderr.strip().rpartition("\n")[2] or f"exit code {found.exit_code}")
        return found.stdout.strip() or "(nothing was printed)"
