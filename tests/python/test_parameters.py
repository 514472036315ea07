"""Parameters of a call: objects, keywords, other libraries' names, what a model's makers say."""

import asyncio
import json

import pytest

from effinfer import LLM, AsyncLLM, SamplingParams, _core, quantize
from effinfer.hub import local_path
from effinfer.hub.catalog import CATALOG
from tests.model_files import smollm2_path
from tests.reference import tiny

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return tiny.write_gguf(tiny.FAMILIES["llama"], file, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path) as model:
        yield model


def test_keywords_are_fields(llm):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=9, ignore_eos=True)
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 9, "ignore_eos": True}
    (expected,) = llm.generate("the", params)
    assert llm.generate("the", **fields)[0].token_ids == expected.token_ids
    assert "".join(llm.stream("the", **fields)) == expected.text
    # They replace those of an object.
    assert llm.generate("the", params, max_tokens=4)[0].token_ids == expected.token_ids[:4]
    two = llm.generate(["the", "the"], [params, SamplingParams()], **fields)
    assert [out.token_ids for out in two] == [expected.token_ids] * 2


def test_keywords_of_chat_go_where_they_belong(path):
    template = "{% if shout %}THE{% else %}the{% endif %}"
    with LLM(path, chat_template=template) as llm:
        messages = [{"role": "user", "content": "hi"}]
        fields = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
        plain, loud = (llm.chat(messages, shout=shout, **fields) for shout in (False, True))
        assert len(plain.token_ids) == len(loud.token_ids) == 3
        assert plain.metrics.prompt_tokens != loud.metrics.prompt_tokens
        assert "".join(llm.stream_chat(messages, shout=True, **fields)) == loud.text
        with pytest.raises(_core.InvalidArgumentError, match="max_new_tokens.*mean max_tokens"):
            llm.chat(messages, max_new_tokens=3)


def test_keywords_of_the_async_api(path, llm):
    fields = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    (expected,) = llm.generate("the", **fields)

    async def all_texts() -> list[str]:
        async with AsyncLLM(path) as model:
            (out,) = await model.generate("the", **fields)
            pieces = [piece async for piece in model.stream("the", **fields)]
            answer = await model.chat([{"role": "user", "content": "the"}], **fields)
            stream = await model.stream_chat([{"role": "user", "content": "the"}], **fields)
            return [out.text, "".join(pieces), answer.text, "".join([p async for p in stream])]

    assert asyncio.run(all_texts()) == [expected.text] * 4


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n_predict", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("temp", "temperature"),
        ("do_sample", "temperature=0"),
        ("stop_strings", "stop"),
        ("colour", "expected one of temperature, top_k"),
    ],
)
def test_names_of_others_are_explained(llm, name, meant):
    with pytest.raises(_core.InvalidArgumentError, match=f"{name}: no such parameter.*{meant}"):
        llm.generate("the", **{name: 1})
    with pytest.raises(_core.InvalidArgumentError, match=f"{name}: no such parameter.*{meant}"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n_ctx", "max_seq_len"),
        ("n_gpu_layers", "device"),
        ("torch_dtype", "precision"),
        ("colour", "expected one of device"),
    ],
)
def test_names_of_options_of_others_are_explained(path, name, meant):
    with pytest.raises(_core.InvalidArgumentError, match=f"{name}: unknown option.*{meant}"):
        LLM(path, **{name: 1})


@pytest.mark.parametrize(
    "prompt", [None, 3, b"text", "\ud800", [None], [b"text"], "x" * 5000 + "\ud800"]
)
def test_what_is_no_prompt_is_a_typed_error(llm, prompt):
    with pytest.raises(_core.InvalidArgumentError, match="expected a"):
        llm.generate(prompt)


def test_params_of_another_type(llm):
    with pytest.raises(_core.InvalidArgumentError, match="expected SamplingParams, got float"):
        llm.generate("the", 0.5)


def test_a_model_that_says_nothing_has_the_defaults(llm):
    assert llm.default_params == SamplingParams()


def test_a_folder_says_in_generation_config(tmp_path):
    pytest.importorskip("safetensors")
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path)
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with LLM(folder) as llm:
        assert llm.default_params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
        seeded = {"seed": 5, "max_tokens": 12, "ignore_eos": True}
        (out,) = llm.generate("the", **seeded)
        explicit = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, **seeded)
        assert out.token_ids == llm.generate("the", explicit)[0].token_ids
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    with LLM(folder) as llm:
        assert llm.default_params == SamplingParams(temperature=0)
    for wrong in ('{"temperature": "hot"}', '{"top_p": 7}'):
        (folder / "generation_config.json").write_text(wrong)
        with LLM(folder) as llm:
            assert llm.generate("the", SamplingParams(max_tokens=1))  # nobody asks the file
            with pytest.raises(_core.FormatError, match="recommended sampling"):
                llm.generate("the")


def test_a_gguf_file_says_in_its_metadata(path, tmp_path):
    writer = _core.GgufWriter(str(tmp_path / "said.gguf"))
    source = _core.GgufFile(str(path))
    writer.copy_metadata(source)
    values = {"temp": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.1}
    for key, value in values.items():
        writer.set(f"general.sampling.{key}", value)
    for tensor in source.tensors():
        writer.add_tensor(tensor.name, tensor.dtype, tensor.shape)
    for tensor in source.tensors():
        writer.write(source.tensor_bytes(tensor.name))
    writer.commit()
    with LLM(tmp_path / "said.gguf") as llm:
        said = llm.default_params
    assert said.top_k == 40
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    found = [getattr(said, name) for name in names]
    assert found == pytest.approx([0.7, 0.8, 0.05, 1.1])


def test_a_file_made_of_a_folder_says_the_same(tmp_path):
    pytest.importorskip("safetensors")
    folder = tiny.write_folder(tiny.FAMILIES["llama"], tmp_path)
    config = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25}
    (folder / "generation_config.json").write_text(json.dumps(config))
    first = quantize(folder, tmp_path / "first.gguf", "q8_0").path
    second = quantize(first, tmp_path / "second.gguf", "q4_0").path
    for path in (folder, first, second):
        with LLM(path) as llm:
            assert llm.default_params == SamplingParams(**config)


def test_the_catalog_says_for_its_models():
    path = smollm2_path()
    assert path == local_path(CATALOG["smollm2-135m"])
    with LLM(path) as llm:  # by path as by name
        assert llm.default_params == SamplingParams(temperature=0.2, top_p=0.9)
        assert llm.has_chat_template
