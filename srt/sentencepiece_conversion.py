"""Shared, a short-lived process of its own: turns a sentencepiece `tokenizer.model` into tokenizer.json.

The conversion is transformers' own, so that the tokens are those its users know. Importing it takes seconds and
hundreds of megabytes, which the server's processes are spared.
"""

from __future__ import annotations

import sys


def main(source: str, target: str) -> int:
    try:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(target)
    except ImportError as error:
        print(f"{error}; pip install 'lockstep-server[sentencepiece]' adds what is missing", file=sys.stderr)
        return 1
    except Exception as error:  # whatever transformers makes of a damaged file
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
