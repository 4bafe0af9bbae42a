"""aiperf's benchmark of streamed chats: python use_aiperf.py BASE_URL TOKENIZER_FOLDER"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

REQUESTS, TOKENS = 6, 8

name = json.load(urllib.request.urlopen(sys.argv[1] + "/v1/models"))["data"][0]["id"]
options = {
    "--model": name,
    "--url": sys.argv[1],
    "--tokenizer": sys.argv[2],
    "--endpoint-type": "chat",
    "--concurrency": 2,
    "--request-count": REQUESTS,
    "--synthetic-input-tokens-mean": 32,
    "--output-tokens-mean": TOKENS,
    "--extra-inputs": "ignore_eos:true",
    "--ui": "none",
}
command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--streaming"]
environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}  # it would find no folder
subprocess.run([*command, *(str(word) for option in options.items() for word in option)], check=True, env=environment)
[export] = Path("artifacts").glob("*/profile_export_aiperf.json")
found = json.loads(export.read_text())
assert found["request_count"]["avg"] == REQUESTS, found
assert not found["error_summary"], found["error_summary"]
assert found["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
assert 0 < found["time_to_first_token"]["avg"] < found["request_latency"]["avg"]
print("ok")
