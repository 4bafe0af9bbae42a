"""The clients that people use, unchanged, against a server with the default model.

Each has a program beside this file, which ends with 0 where all is as its user expects. Two are installed with the
tests; each of the others has an environment of its own, made once, in the user's cache. Where that cannot be done the
test is skipped and says why. Of those, only lm-eval's is made by the default tests: the others ask for the same routes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from clients import environments
from server import reference_model
from server.server_harness import Server

from srt.model_files import ModelFiles
from srt.tokenization import Tokenizer

RUN_SECONDS = 300

INSTALLED = ("openai", "instructor")
OF_THEIR_OWN = ("langchain", "litellm", "anthropic", "sglang", "aiperf")


def interpreter(client: str) -> str:
    """That has the client. pytest.skip where none can be made."""
    if client in INSTALLED:
        return sys.executable
    try:
        return environments.interpreter(client)
    except environments.NotInstalledError as error:
        pytest.skip(f"{client} cannot be installed: {error}")


def run(client: str, *arguments: str) -> str:
    """What its program prints."""
    program = Path(__file__).with_name(f"use_{client}.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [interpreter(client), str(program), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize(
    "client",
    [*INSTALLED, *(pytest.param(name, marks=pytest.mark.slow) for name in OF_THEIR_OWN)],
)
def test_a_client_gets_what_its_user_expects(client: str, server: Server, default_model: ModelFiles) -> None:
    said = run(client, f"http://127.0.0.1:{server.port}", str(default_model.tokenizer_folder))
    assert said.endswith("ok\n")  # some print more than they are asked to
    server.wait_idle()


def test_lm_eval_rates_continuations_as_transformers_does(server: Server, default_model: ModelFiles) -> None:
    answers = json.loads(run("lm_eval", f"http://127.0.0.1:{server.port}", str(default_model.folder)).splitlines()[-1])
    model, encode = reference_model.load(default_model), Tokenizer.from_folder(default_model.tokenizer_folder).encode
    assert len(answers["rated"]) == 9
    for context, continuation, rating, is_greedy in answers["rated"]:
        ids, start = encode(context + continuation, False), len(encode(context, False))
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        taken = torch.tensor(ids[start:])
        assert rating == pytest.approx(logprobs.gather(1, taken[:, None]).sum().item(), abs=1e-3)
        assert is_greedy == bool((logprobs.argmax(-1) == taken).all())
    assert [len(texts) for texts in answers["generated"]] == [4, 4]
    assert all(text.strip() for texts in answers["generated"] for text in texts)
