"""Rendered chats against transformers' apply_chat_template."""

import json
import re
import time

import checkpoints
import jinja2
import pytest
import transformers

from srt.chat_template import RESERVED, ChatTemplate, TemplateError
from srt.model_config import ModelError

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system_message + eos_token }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- eos_token }}
        {%- continue %}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

STRICT = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

THINKING = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == "user" and ns.last < 0 %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA_LIKE, "strict": STRICT, "thinking": THINKING}
USER = {"role": "user", "content": "Is 1 < 2 & 'so'? größer 日本 \n"}
CHATS = {
    "one": [USER],
    "three": [
        USER,
        {"role": "assistant", "content": "<think>hm</think>\n\nYes. "},
        {"role": "user", "content": "Sure?"},
    ],
    "answered": [USER, {"role": "assistant", "content": "Yes, it is."}],
    "system": [{"role": "system", "content": "  Be brief. "}, USER],
    "called": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é<", "y": [1, None]}}}],
        },
        {"role": "tool", "content": {"répondu": True}},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d'é <b>", "parameters": {"type": "object"}}}]
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True, "__type": "AddedToken"},
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def folder_with(path, template, config=None):
    path.mkdir(exist_ok=True)
    checkpoints.byte_level_tokenizer().save(str(path / "tokenizer.json"))
    entry = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps((config or CONFIG) | entry))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each template in ours and in transformers."""
    made = {}
    for name, template in TEMPLATES.items():
        folder = folder_with(tmp_path_factory.mktemp(name), template)
        made[name] = ChatTemplate.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    return made


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False, "date_string": "1 Jan 2030"}])
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_as_by_transformers(pairs, name, chat, generate, arguments, tools):
    ours, theirs = pairs[name]
    options = {"add_generation_prompt": generate, "tools": tools, **arguments}
    try:
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, **options)
    except (jinja2.TemplateError, TypeError) as error:
        with pytest.raises(TemplateError, match=re.escape(str(error))):
            ours.render(CHATS[chat], **options)
    else:
        assert ours.render(CHATS[chat], **options) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("words", ["The answer", "The answer is ", "Yes", "<think>Well", "a\n\n"])
def test_the_last_message_goes_on(pairs, name, words):
    ours, theirs = pairs[name]
    chat = [USER, {"role": "assistant", "content": words}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    found = ours.render(chat, **options)
    assert found == theirs.apply_chat_template(chat, tokenize=False, **options)
    assert found.endswith(words.strip() if name == "llama" else words)
    assert chat[-1]["content"] == words


def test_what_cannot_go_on(pairs):
    ours, _ = pairs["chatml"]
    for chat in ([{"role": "user", "content": ""}], [{"role": "assistant", "content": None}], [{"role": "user"}]):
        with pytest.raises(TemplateError, match="ends in text"):
            ours.render(chat, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TemplateError, match="exclude each other"):
        ours.render([USER], add_generation_prompt=True, continue_final_message=True)
    silent = ChatTemplate({"default": "nothing"}, {})
    with pytest.raises(TemplateError, match="does not print the last message"):
        silent.render([USER], add_generation_prompt=False, continue_final_message=True)


def test_parts_of_a_last_message_go_on():
    template = ChatTemplate(
        {"default": "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"}, {}
    )
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}]
    assert template.render(chat, add_generation_prompt=False, continue_final_message=True) == "a|b "


def test_a_templates_complaint_is_the_clients_sentence(pairs):
    with pytest.raises(TemplateError, match="^Roles must alternate user/assistant/user/assistant$"):
        pairs["strict"][0].render([USER, USER])
    with pytest.raises(TemplateError, match="cannot take these messages"):
        pairs["chatml"][0].render([{"role": "user", "content": 3}])
    with pytest.raises(TemplateError, match="must not be empty"):
        pairs["chatml"][0].render([])


@pytest.mark.parametrize("name", [*RESERVED, "bos_token", "eos_token"])
def test_reserved_names_cannot_be_set(pairs, name):
    if name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        return  # parameters of `render`, which no client's argument can double
    with pytest.raises(TemplateError, match=f"may not set {name}"):
        pairs["chatml"][0].render([USER], **{name: "x"})


def test_the_sandbox_holds(pairs):
    for attack in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ):
        with pytest.raises(TemplateError):
            ChatTemplate({"default": attack}, {}).render([USER])
    # What a client writes is never taken for a template.
    chat = [{"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}]
    assert "{{ 7 * 7 }} {% raw %}" in pairs["chatml"][0].render(chat)


def test_where_the_template_comes_from(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = folder_with(tmp_path / "a", named)
    assert ChatTemplate.from_folder(folder).render([USER]) == "plain"
    assert ChatTemplate.from_folder(folder).render([USER], tools=TOOLS) == "tools"
    (folder / "chat_template.jinja").write_text("from a file {{ eos_token }}")
    assert ChatTemplate.from_folder(folder).render([USER]) == "from a file </s>"
    (tmp_path / "mine.jinja").write_text("mine {{ bos_token }}")
    assert ChatTemplate.from_folder(folder, tmp_path / "mine.jinja").render([USER]) == "mine <s>"
    assert ChatTemplate.from_folder(folder_with(tmp_path / "b", None)) is None
    (tmp_path / "b" / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert ChatTemplate.from_folder(tmp_path / "b").render([USER]) == "from json"


def test_the_default_models_own_template(default_model):
    template = ChatTemplate.from_folder(default_model.tokenizer_folder)
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% endfor %}"])
def test_a_broken_template_is_found_at_the_start(tmp_path, source):
    with pytest.raises(ModelError, match="does not compile: line 1"):
        ChatTemplate.from_folder(folder_with(tmp_path / "a", source))
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.from_folder(tmp_path / "a", tmp_path / "nowhere.jinja")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.from_folder(tmp_path / "a", tmp_path / "binary.jinja")


@pytest.mark.parametrize(
    "template", [7, [1], [{"name": "default"}], [{"name": "default", "template": 5}], {"default": "x"}]
)
def test_an_entry_that_is_no_template_is_found_at_the_start(tmp_path, template):
    with pytest.raises(ModelError, match="chat_template"):
        ChatTemplate.from_folder(folder_with(tmp_path / "a", template))


def test_a_long_chat_is_rendered_quickly(pairs):
    chat = [{"role": role, "content": "word " * 200} for _ in range(500) for role in ("user", "assistant")]
    start = time.process_time()
    pairs["thinking"][0].render(chat)
    assert time.process_time() - start < 1
