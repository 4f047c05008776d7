"""Build the search index of a corpus for the tool and the agent `search`.

    python -m slipstream.scripts.make_search_index corpus.jsonl --out=data/index

The corpus is a JSON lines or Parquet file. A row has `contents`, with the title in the first line, or `text` and
optionally `title`.
"""

import time
from pathlib import Path

from slipstream.generators.tools.search import write_index
from slipstream.runtime.command_line import fail_cleanly, make_parser


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Write the index."""
    parser = make_parser("slipstream.scripts.make_search_index", __doc__)
    parser.add_argument("corpus", type=Path, help="file with the passages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; replaced if it exists")
    parser.add_argument(
        "--language", default="english", help="language of stop words and stems; empty: unchanged words (english)"
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    number = write_index(options.corpus, options.out, language=options.language)
    print(f"{options.out}: {number} passages in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
