"""effinfer chat: a full context, and what starts with a slash."""

import json

import pytest

from effinfer import LLM, _core
from effinfer.cli.conversation import Conversation
from tests.cli.in_process import effinfer
from tests.reference import tiny

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "tiny.gguf"
    return tiny.write_gguf(tiny.FAMILIES["llama"], path, chat_template=TEMPLATE)


def chat(model, *lines: str, options: tuple[object, ...] = ()):
    stdin = "".join(f"{line}\n" for line in lines).encode()
    fixed = ("--temperature", 0, "-n", 4, "--ignore-eos", "--json")
    ended = effinfer("chat", "-m", model, *fixed, *options, stdin=stdin)
    return ended, [json.loads(line) for line in ended.stdout.splitlines()]


def prompt_tokens(answers) -> list[int]:
    return [answer["metrics"]["prompt_tokens"] for answer in answers]


def test_a_full_context_forgets_the_oldest_turns(model):
    questions = ["the cat and the hat"] * 12
    ended, answers = chat(model, *questions, options=("--max-seq-len", 96))
    assert ended.code == 0, ended.stderr
    assert len(answers) == len(questions)
    assert all(len(answer["token_ids"]) == 4 for answer in answers)
    assert max(prompt_tokens(answers)) <= 96 - 4
    assert "[the context is full: forgot the oldest turn]" in ended.stderr


def test_what_is_forgotten_is_the_oldest_and_never_the_system_message(model):
    with LLM(model, max_seq_len=64) as llm:
        conversation = Conversation(llm, "be brief")
        for number in range(5):
            conversation.ask(f"question {number}")
            conversation.answer("an answer")
        conversation.ask("the last")
        dropped = conversation.fit(max_tokens=8)
        assert dropped > 0
        assert conversation.messages[0] == {"role": "system", "content": "be brief"}
        assert conversation.messages[1]["content"] == f"question {dropped}"
        assert conversation.messages[-1]["content"] == "the last"
        assert len(llm.chat_tokens(conversation.messages)) <= 64 - 8
        # One turn less forgotten would not have fitted.
        more = [{"role": "user", "content": f"question {dropped - 1}"}]
        more += [{"role": "assistant", "content": "an answer"}]
        longer = [conversation.messages[0], *more, *conversation.messages[1:]]
        assert len(llm.chat_tokens(longer)) > 64 - 8


def test_a_message_that_is_too_long_is_refused_and_the_rest_goes_on(model):
    ended, answers = chat(model, "the", "x" * 200, "the", options=("--max-seq-len", 64))
    assert ended.code == 2 and "the context holds 64" in ended.stderr
    assert len(answers) == 3 and "error" in answers[2]
    first, second = prompt_tokens(answers[:2])
    assert second > first  # the conversation before it is still there


def test_commands(model, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["the cat", f"/save {file}", "/clear", "the cat", f"/load {file}", "/regen"]
    lines += ["/system be brief", "/regen", "/system", "/regen", "/exit", "never"]
    ended, answers = chat(model, *lines)
    assert ended.code == 0, ended.stderr
    first, cleared, again, with_system, without = answers
    texts = [answer["token_ids"] for answer in answers]
    assert texts[0] == texts[1] == texts[2] == texts[4] != []
    sizes = prompt_tokens(answers)
    assert sizes[0] == sizes[1] == sizes[2] == sizes[4] < sizes[3]
    saved = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"]
    assert saved[1]["content"] == first["text"]


def test_commands_that_go_wrong_end_nothing(model, tmp_path):
    (tmp_path / "broken.json").write_text('{"messages": [{"role": "user"}]}')
    lines = ["/help", "/regen", "/load", "/sing", f"/load {tmp_path}/broken.json"]
    lines += ["/load /nowhere/x.json", "/save /nowhere/x.json", " /sing"]
    ended, answers = chat(model, *lines, options=("-q",))
    assert ended.code != 0  # of the last that failed
    assert [answer["finish_reason"] for answer in answers if "text" in answer] == ["length"]
    for words in ("/system TEXT", "no question yet", "wants a file", "/sing is no command"):
        assert words in ended.stderr
    for words in ("messages[0].content", "/nowhere/x.json"):
        assert words in ended.stderr


def test_loading_leaves_the_conversation_when_it_fails(model, tmp_path):
    with LLM(model) as llm:
        conversation = Conversation(llm, None)
        conversation.ask("the")
        (tmp_path / "text").write_text("not json")
        with pytest.raises(_core.FormatError, match="JSON of a conversation"):
            conversation.load(tmp_path / "text")
        assert conversation.messages == [{"role": "user", "content": "the"}]
