"""SGLang's frontend language: python use_sglang.py BASE_URL"""

import importlib.util
import sys
import types

# The package's own beginning would load the engine. Of the language only the modules are loaded, which are unchanged.
package = types.ModuleType("sglang")
package.__path__ = list(importlib.util.find_spec("sglang").submodule_search_locations)
sys.modules["sglang"] = package

from sglang.lang import api as sgl  # noqa: E402
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint  # noqa: E402
from sglang.lang.choices import greedy_token_selection  # noqa: E402

COLOURS = ["red", "blue"]
PERSON = (
    '{"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"], "additionalProperties": false}'
)


@sgl.function
def talk(s, question):
    s += sgl.system("You are brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0))


@sgl.function
def choose(s):
    s += "The sky is " + sgl.select("colour", ["blue", "made of old cheese"])
    s += ", and grass is " + sgl.select("other", COLOURS, choices_method=greedy_token_selection)


@sgl.function
def fill(s):
    s += "There are " + sgl.gen("number", dtype=int, max_tokens=4, temperature=0)
    s += " flowers. They are " + sgl.gen("colour", regex="(red|blue)", temperature=1)
    s += ", and this is " + sgl.gen("person", json_schema=PERSON, max_tokens=40)
    branches = s.fork(2)
    for number, branch in enumerate(branches):
        branch += f" Number {number} is" + sgl.gen("word", max_tokens=3, return_logprob=True, top_logprobs_num=2)
    branches.join()
    s += branches[0]["word"] + branches[1]["word"]


backend = RuntimeEndpoint(sys.argv[1])
sgl.set_default_backend(backend)
assert backend.get_model_name()
answer = talk.run("Say hello.")["answer"]
assert answer
assert "".join(talk.run("Say hello.", stream=True).text_iter("answer")) == answer
questions = [{"question": "Say hello."}, {"question": "Who are you?"}, {"question": "Say hello."}]
first, _, third = [state["answer"] for state in talk.run_batch(questions, num_threads=3)]
assert first == third == answer

assert choose.run()["colour"] == "blue"
assert choose.run()["other"] in COLOURS
filled = fill.run()
assert int(filled["number"]) is not None
assert filled["colour"] in COLOURS
assert "age" in filled["person"]
assert filled.get_meta_info("number")["completion_tokens"] > 0
assert filled.error() is None

backend.cache_prefix("Once upon a time")
backend.flush_cache()
assert backend.get_server_info()["version"]
print("ok")
