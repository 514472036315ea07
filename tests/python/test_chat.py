"""Chat templates."""

import pytest

from effinfer import _core
from effinfer.text.chat import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "Hé?"}]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def test_renders_messages():
    expected = "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\nHé?<|im_end|>\n"
    template = ChatTemplate(CHATML)
    assert template.render(MESSAGES, add_generation_prompt=False) == expected
    assert template.render(MESSAGES) == expected + "<|im_start|>assistant\n"


def test_names_and_filters_of_templates():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ tools }}{{ eos_token }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    expected = '<s>{"role": "system", "content": "Be <brief>."}4None</s>'
    assert template.render(MESSAGES) == expected


def test_variables_reach_the_template():
    template = ChatTemplate("{{ enable_thinking }}")
    assert template.render(MESSAGES, enable_thinking=False) == "False"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_the_sandbox_holds(attack):
    with pytest.raises(_core.InvalidArgumentError, match="chat"):
        ChatTemplate(attack).render(MESSAGES)


def test_what_the_template_refuses_is_the_callers_mistake():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(_core.InvalidArgumentError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_that_does_not_parse():
    with pytest.raises(_core.FormatError, match="template"):
        ChatTemplate("{% for x in %}")


@pytest.mark.parametrize("messages", [[], ["hello"], [{"content": "no role"}]])
def test_bad_messages(messages):
    with pytest.raises(_core.InvalidArgumentError, match="messages"):
        ChatTemplate(CHATML).render(messages)
