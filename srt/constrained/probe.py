"""L4's CPU side, a process of its own: compiles one grammar with xgrammar, and may be killed at it.

    python -m srt.constrained.probe TOKENIZER_FOLDER EOS_IDS < grammar

Says `compiling` when it begins. Exit code 0 if it compiles; 2, with the reason on standard output, if it does not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from srt.schema_rules import GrammarError
from srt.token_bytes import TokenBytes, Vocabulary

PATIENCE_S = 10.0
BEGIN = b"compiling\n"


def probe(text: str, tokenizer_folder: Path, eos_token_ids: Sequence[int]) -> None:
    """GrammarError if the grammar does not compile, or not in time."""
    command = [sys.executable, "-m", "srt.constrained.probe", str(tokenizer_folder), ",".join(map(str, eos_token_ids))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        began = child.stdout.readline() == BEGIN  # what it imports may take its time
        try:
            answer, _ = child.communicate(text.encode(), PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise GrammarError(f"this grammar does not compile within {PATIENCE_S:.0f} s") from None
    if not began or child.returncode:
        raise GrammarError(answer.decode(errors="replace").strip() or "this grammar cannot be compiled")


def main(tokenizer_folder: str, eos_token_ids: str) -> int:
    try:
        from srt.constrained.xgrammar_backend import XGrammar
    except ImportError:
        print("\nthis grammar needs xgrammar: pip install 'lockstep-server[xgrammar]'")
        return 2
    table = TokenBytes.from_folder(Path(tokenizer_folder))
    ends = [int(token) for token in eos_token_ids.split(",") if token]
    backend = XGrammar(Vocabulary(table.table, table.is_special, ends, lambda text: []))
    print(BEGIN.decode(), end="", flush=True)
    try:
        backend.compile(sys.stdin.buffer.read().decode())
    except GrammarError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
