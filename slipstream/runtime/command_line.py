"""Conventions of all command lines: exit codes, errors, help, tables."""

import argparse
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from slipstream.configs.base import ConfigError
from slipstream.runtime.clock import WaitTimeoutError
from slipstream.runtime.disk import is_disk_full
from slipstream.runtime.process import launcher_pid

NO_ANSWER = 1
"""Exit code: store, broker, or launcher did not answer."""
BAD_INPUT = 2
"""Exit code: the user can correct the error."""
TRY_AGAIN = 75
"""Exit code: a restart may help; EX_TEMPFAIL of sysexits.h."""
TRY_ONCE = 76
"""Exit code: a restart may help, unless the error recurs."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""

SETTINGS = """\b
Most used settings:
  experiment=PRESET             digits_cpu (the default), smollm2_cpu, digits_rotary_cpu, addition_cpu,
                                picture_digits_cpu, gsm8k_1gpu, gsm8k_8gpu, gsm8k_32b_8gpu, gsm8k_moe_8gpu,
                                gsm8k_lora_1gpu, math_1gpu, retool_1gpu, search_r1_1gpu, environment_1gpu,
                                geometry_1gpu, digits_serial, digits_replay, digits_sft, sft, reward_model; or your own
                                mine.yaml
  recipe=PRESET                 algorithm: dapo, dr_grpo, gspo, cispo, ppo, ...
  name=NAME                     run folder runs/NAME; resume=true continues it
  seed=0                        every random choice of the run derives from it
  model.path=FOLDER             model to train: a transformers folder, a GGUF file, or a name on the hub
  data.train=FILE               prompts (Parquet, CSV, JSON lines); data.eval=FILE those to evaluate on
  generators.count=1            vLLM engines; generators.group_size=8 answers to each prompt
  generators.reward.function=module:function
  staleness.max_lag=4           versions that a trajectory may be old; 0 is synchronous training
  learner.max_steps=80          learner.prompts_per_step=32 prompts each
  learner.optimizer.learning_rate=3e-3

All settings: docs/settings.md; `slipstream config` prints them with their values.
"""
WITH_OVERRIDES: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}, "epilog": SETTINGS}
"""For commands with settings: `--learner.max_steps=5` gets a helpful error."""
Texts = list[str] | None
"""Values of a repeatable argument or option."""
Overrides = Annotated[Texts, typer.Argument(metavar="KEY=VALUE", help="Settings, as key=value or group=option.")]
_SOURCE = "A run's name or folder, an archive, a file of `data export`, or a redis:// address."
SourceWord = Annotated[str, typer.Argument(metavar="SOURCE", help=_SOURCE)]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run at a redis:// address.")]
RunsDir = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the run folders.")]
_TOKENIZER = "A tokenizer.json or its folder, instead of the run's."
TokenizerPath = Annotated[Path | None, typer.Option("--tokenizer", metavar="FILE", help=_TOKENIZER)]

_BUILDS = ("torch", "vllm", "deepspeed", "peft")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)

# Typer exports only this subclass of click's UsageError.
_UsageError: Any = typer.BadParameter.__bases__[0]


def exit_with_error(sentence: object, *, code: int) -> NoReturn:
    """Print one sentence to stderr and exit."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None


def exit_after_help(arguments: list[str], text: str | None) -> None:
    """Print `text` and exit if the arguments ask for help."""
    if {"-h", "--help"} & {*arguments}:
        print((text or "").strip())
        raise SystemExit(0)


@contextmanager
def fail_cleanly(
    *errors: type[Exception],
    restartable: tuple[type[Exception], ...] = (),
    restartable_once: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turn expected errors and Ctrl-C into a message and an exit code; bugs propagate.

    Expected: ConfigError, WaitTimeoutError, `errors`, bad path, full disk, too many open files, missing library.
    `restartable` errors exit with TRY_AGAIN, `restartable_once` with TRY_ONCE.
    """
    try:
        yield
    except restartable_once as error:
        exit_with_error(error, code=TRY_ONCE)
    except restartable as error:
        exit_with_error(error, code=TRY_AGAIN)
    except (ConfigError, WaitTimeoutError, *errors) as error:
        exit_with_error(error, code=BAD_INPUT)
    except OSError as error:
        _exit_for_path(error)
        raise
    except ModuleNotFoundError as error:
        # Also PackageNotFoundError from importlib.metadata.
        name = (error.name or "").partition(".")[0]
        if name not in _BUILDS or not str(error).startswith("No "):
            raise
        install = "`pip install 'slipstream[cpu]'`, or 'slipstream[gpu]' on a machine with an NVIDIA GPU"
        exit_with_error(f"{name} must be installed, but is not: {install}.", code=BAD_INPUT)
    except KeyboardInterrupt:
        # Teardown is slow with torch; another signal would print a traceback.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _exit_for_path(error: OSError) -> None:
    what, reason = error.filename or "a file", error.strerror or error
    if is_disk_full(error):
        exit_with_error(f"{what} must have room on its disk, got {reason}: make some.", code=TRY_AGAIN)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        exit_with_error(f"{what} must be opened, got {reason}: raise `ulimit -n`.", code=TRY_AGAIN)
    if error.filename is not None and error.errno in _REFUSED:
        must = f"{what} must be a path that this user may read and write, got {reason}"
        # A network disk may come back: a launcher restarts the role once.
        code = TRY_ONCE if launcher_pid() not in (0, os.getpid()) else BAD_INPUT
        exit_with_error(f"{must}: correct it, its permissions or its disk.", code=code)


class _PanelGroup(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        width = max(map(len, commands))
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands.items():
            row = (f"{name:<{width}}", command.get_short_help_str(formatter.width - width - 6))
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(row)
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def make_app(text: str) -> typer.Typer:
    """Typer app; `text` is its help."""
    context = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
    plain: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False}
    return typer.Typer(cls=_PanelGroup, help=text, context_settings=context, **plain)


def make_parser(program: str, text: str | None) -> argparse.ArgumentParser:
    """Parser; `text` is its preformatted help."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {program}", description=text, formatter_class=form, allow_abbrev=False)


def run_app(app: typer.Typer, arguments: list[str], *, program: str) -> None:
    """Run a typer app; usage errors become one sentence and BAD_INPUT."""
    command: Any = typer.main.get_command(app)
    for each in (command, *getattr(command, "commands", {}).values()):
        for parameter in each.params:
            # Newer typers print `KEY=VALUE <list[str]>`.
            if parameter.param_type_name == "argument" and (shown := getattr(parameter, "display_type_rich", None)):
                parameter.display_type_rich = partial(_choices, shown)
    try:
        code = command.main(arguments or ["--help"], prog_name=program, standalone_mode=False)
    except _UsageError as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        path = error.ctx.command_path if error.ctx else program
        exit_with_error(f"{message[:1].lower()}{message[1:]}; see `{path} --help`.", code=BAD_INPUT)
    if code == INTERRUPTED:
        # Typer swallowed Ctrl-C; `fail_cleanly` handles it.
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)


_OTHER_NAMES = {
    "train start": "run",
    "sweep multirun tune": "run -m",
    "finetune sft-train": "sft",
    "info results summary report": "status",
    "dashboard ui monitor": "watch",
    "eval test": "evaluate",
    "sample rollout predict": "generate",
    "doctor": "diagnose",
    "version": "--version",
    "merge": "convert",
    "curves": "plot",
}
"""Commands of other tools -> ours, with the same arguments."""
_RESUMING = ("resume", "restart", "continue")
_SWITCH = "true|false|auto|yes|no|on|off|1|0|null"
_RESUME_GUESS = re.compile(
    rf"-+(resume\w*|continue)(=.*)?|resume\w*|continue|resume_\w+=.*|resume=(?!({_SWITCH})$).*", re.IGNORECASE
)
_TAKE_EXPERIMENTS = ("run", "config", "prepare", "plan")
_EXPERIMENT_FILE = re.compile(r"^(--config=)?([^=]+\.ya?ml)$")
_ELSEWHERE = {
    "stop kill cancel": "press Ctrl-C where the run was started, or send SIGTERM to its launcher, whose pid `status` "
    "shows",
    "logs log tail attach": "a run's logs are runs/NAME/logs/ROLE.log; `slipstream status` shows the last errors",
    "ls list runs ps": "`slipstream watch` lists the runs, `slipstream data ls` the trajectories of one",
    "serve chat infer": "the model of a run is a folder in transformers format: `vllm serve runs/NAME/final_model`",
    "grpo ppo rl": "an algorithm is a setting, such as `slipstream run recipe=dapo`",
    "save checkpoint checkpoints ckpt": "learner.checkpoint.every_steps saves checkpoints, and Ctrl-C saves one; "
    "resume=true continues from the newest",
    "rm delete clean": "a run is a folder: delete runs/NAME",
    "validate dry-run": "`slipstream diagnose KEY=VALUE` checks settings and inputs of a run",
    "reward score": "`slipstream run` tries the reward first, `slipstream evaluate` scores answers",
    "push upload": "`hf upload OWNER/NAME runs/NAME/final_model` puts a model on the hub",
    "show": "`slipstream status` shows a run, `slipstream data show` a trajectory",
    "export": "`slipstream convert` writes a model, `slipstream data export` trajectories",
    "compare": "`slipstream watch` compares runs, `slipstream evaluate MODEL MODEL` compares models",
}
"""Commands of other tools -> what to use."""


def _of_other_tools(table: Mapping[str, str], command: str) -> str:
    return next((use for names, use in table.items() if command in names.split()), "")


def _run_name(path: str) -> str:
    """Run of a folder or checkpoint."""
    *above, last = path.rstrip("/").split("/")
    return above[above.index("checkpoints") - 1] if "checkpoints" in above[1:] else last


def _check_resume(words: Sequence[str]) -> None:
    """Raise ConfigError for a guess at resuming, with the right command."""
    if not (word := next(filter(_RESUME_GUESS.fullmatch, words), "")):
        return
    named = [each.partition("=")[2] for each in (word, *words) if re.match("-*name=", each) or each == word]
    beside = [each for each in words[1:] if "=" not in each and each[:1] != "-" and each != word]
    given = (each for each in (*named, *beside) if each and not re.fullmatch(_SWITCH, each, re.IGNORECASE))
    name = _run_name(next(given, "NAME"))
    raise ConfigError(
        f"got `{word}`: write `slipstream resume {name}`, or `slipstream run name={name} resume=true`, to resume it."
    )


def with_command(app: typer.Typer, arguments: list[str]) -> list[str]:
    """Insert `run` before overrides; replace commands of other tools. Raises ConfigError."""
    first, *others = arguments or ["--help"]
    if first == "help":
        return [*others[:1], "--help"]
    first, *options = (_of_other_tools(_OTHER_NAMES, first) or first).split()
    arguments = [first, *options, *others]
    if first in _RESUMING:
        if not others:
            raise ConfigError(f"{first} must have the name of a run, such as `slipstream resume mine`, got none.")
        words = [word.removeprefix("--") for word in others if word != "--name"]
        return ["run", *(word if "=" in word else f"name={_run_name(word)}" for word in words), "resume=true"]
    if elsewhere := _of_other_tools(_ELSEWHERE, first):
        raise ConfigError(f"no command `{first}`: {elsewhere}.")
    commands = [each.name or each.callback.__name__ for each in app.registered_commands if each.callback]
    if first == "run" or "=" in first:
        _check_resume(arguments)
    if first in _TAKE_EXPERIMENTS:
        return [first, *(_EXPERIMENT_FILE.sub(r"experiment=\2", word) for word in arguments[1:])]
    if first in (*commands, "-h", "--help", "-V", "--version"):
        return arguments
    if "=" in first or first.startswith(("-", "~")):
        # An override, a deletion (~), or one mistyped with dashes.
        return ["run", *arguments]
    if close := get_close_matches(first, commands, n=1):
        raise ConfigError(f"no command `{first}`, did you mean `{close[0]}`?")
    from slipstream.configs.schema import nearest_key, peer_advice

    # `max_steps 5`: loading the settings explains the correct form.
    if len(arguments) > 1 and (nearest_key(first) or peer_advice(first)):
        return ["run", *arguments]
    raise ConfigError(f"no command `{first}`; there are: {', '.join(commands)}.")


def _choices(shown: Callable[..., str | None], *, ctx: object) -> str | None:
    text = shown(ctx=ctx)
    return text if text and "|" in text else None


_PIPED_WIDTH = 180


def make_console() -> Console:
    """Console without markup, because settings and paths contain brackets."""
    return Console(highlight=False, markup=False, width=None if Console().is_terminal else _PIPED_WIDTH)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Table; columns in `numbers` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: Any) -> None:
    """Append a row of plain text, without markup."""
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def printable(text: str) -> str:
    """Escape nonprintable characters except line ends."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
