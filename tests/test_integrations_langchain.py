"""H3 as an LLM of LangChain, CosyVoice as a tool: through the real langchain-core. Needs langchain-core.

Run: python -m pytest -q tests/test_integrations_langchain.py
"""

import asyncio
import gc
import threading

import numpy as np
import pytest
import soundfile

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache  # noqa: E402
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler  # noqa: E402
from langchain_core.messages import ToolCall, ToolMessage  # noqa: E402
from langchain_core.output_parsers import StrOutputParser  # noqa: E402
from langchain_core.prompts import PromptTemplate  # noqa: E402
from langchain_core.tools import ToolException  # noqa: E402
from langchain_core.utils.function_calling import convert_to_openai_tool  # noqa: E402

from mlx_cosyh3 import batch_generate, generate  # noqa: E402
from mlx_cosyh3.errors import CosyH3Error  # noqa: E402
from mlx_cosyh3.integrations.langchain import H3LLM, SpeakTool  # noqa: E402
from tests.small_voice_model import small_voice  # noqa: E402

OPTIONS = {"max_tokens": 12, "seed": 3, "temperature": 1.0}


@pytest.fixture(scope="module")
def llm(model):
    return H3LLM(model, **OPTIONS)


# ---------------------------------------------------------------- text


def test_invoke(model, llm):
    assert llm.invoke("the cat") == generate(model, "the cat", **OPTIONS).text


def test_stream(model, llm):
    pieces = list(llm.stream("the cat"))
    assert "".join(pieces) == generate(model, "the cat", **OPTIONS).text and len(pieces) > 2


def test_batch_is_one_batch(model, llm):
    prompts = ["the cat", "the", "a dog"]
    assert llm.batch(prompts) == [r.text for r in batch_generate(model, prompts, **OPTIONS)]


def test_generation_info(model, llm):
    want = generate(model, "the cat", logprobs=True, **OPTIONS)
    result = llm.generate(["the cat"], logprobs=True)
    assert result.generations[0][0].generation_info == {
        "finish_reason": "length", "prompt_tokens": want.prompt_tokens, "completion_tokens": 12,
        "logprobs": want.logprobs,
    }  # fmt: skip
    usage = {"prompt_tokens": want.prompt_tokens, "completion_tokens": 12, "total_tokens": want.prompt_tokens + 12}
    assert result.llm_output["token_usage"] == usage


def test_async(model, llm):
    want = generate(model, "the cat", **OPTIONS).text

    async def all_forms():
        pieces = [piece async for piece in llm.astream("the cat")]
        one = await llm.ainvoke("the cat")
        several = await llm.abatch(["the cat", "the dog"])
        beside = await asyncio.gather(*(llm.ainvoke("the cat") for _ in range(4)))
        return pieces, one, several, beside

    pieces, one, several, beside = asyncio.run(all_forms())
    assert "".join(pieces) == one == several[0] == want and len(pieces) > 2
    assert beside == [want] * 4


def test_stop(model, llm):
    """In a call, bound, and of the model, where that of a call counts; streamed, too."""
    text = generate(model, "the cat", **OPTIONS).text
    first, second = text[3:5], text[6:8]
    assert llm.invoke("the cat", stop=[first]) == text[: text.index(first)]
    assert llm.bind(stop=[second]).invoke("the cat") == text[: text.index(second)]
    stopped = H3LLM(model, stop=first, **OPTIONS)
    assert stopped.invoke("the cat") == "".join(stopped.stream("the cat")) == text[: text.index(first)]
    assert stopped.invoke("the cat", stop=[second]) == text[: text.index(second)]
    result = stopped.generate(["the cat"])
    assert result.generations[0][0].generation_info["finish_reason"] == "stop"


def test_options_of_a_call(model, llm):
    want = generate(model, "the cat", max_tokens=5, seed=9, temperature=1.0).text
    assert llm.invoke("the cat", max_tokens=5, seed=9) == want
    assert "".join(llm.bind(max_tokens=5, seed=9).stream("the cat")) == want
    assert llm.invoke("the cat") == generate(model, "the cat", **OPTIONS).text  # of that call alone


def test_in_a_chain(model, llm):
    chain = PromptTemplate.from_template("the {animal}") | llm | StrOutputParser()
    want = generate(model, "the cat", **OPTIONS).text
    assert chain.invoke({"animal": "cat"}) == "".join(chain.stream({"animal": "cat"})) == want


class Heard(BaseCallbackHandler):
    def __init__(self):
        self.tokens, self.ends, self.errors = [], [], []

    def on_llm_new_token(self, token, **rest):
        self.tokens.append(token)

    def on_llm_end(self, response, **rest):
        self.ends.append(response)

    def on_llm_error(self, error, **rest):
        self.errors.append(error)


class HeardLater(AsyncCallbackHandler):
    def __init__(self):
        self.tokens = []

    async def on_llm_new_token(self, token, **rest):
        self.tokens.append(token)


def test_callbacks(model, llm):
    want, heard, later = generate(model, "the cat", **OPTIONS), Heard(), HeardLater()
    text = "".join(llm.stream("the cat", config={"callbacks": [heard]}))
    assert "".join(heard.tokens) == text == want.text
    end = heard.ends[0].generations[0][0]
    assert end.text == text and end.generation_info["finish_reason"] == "length"

    async def run():
        return [piece async for piece in llm.astream("the cat", config={"callbacks": [later]})]

    assert "".join(asyncio.run(run())) == "".join(later.tokens) == want.text


def test_errors_of_a_call(llm):
    """One line, also told to the callbacks, also from async forms."""
    for call in (llm.invoke, lambda p, **o: list(llm.stream(p, **o))):
        heard = Heard()
        with pytest.raises(CosyH3Error, match="top_p must be more than 0"):
            call("the", config={"callbacks": [heard]}, top_p=7)
        assert len(heard.errors) == 1
    with pytest.raises(TypeError, match="nearest known: 'top_p'"):
        llm.invoke("the", topp=0.5)
    with pytest.raises(CosyH3Error, match="not Unicode"):
        asyncio.run(llm.ainvoke("\ud800"))


def test_an_error_in_the_middle(model, llm, monkeypatch):
    """Raised to whoever waits, in all forms."""
    steps = type(model).step

    def step(self, ids, cache):
        if len(calls) == 4:
            raise CosyH3Error("the model gave a non-finite value")
        calls.append(1)
        return steps(self, ids, cache)

    monkeypatch.setattr(type(model), "step", step)

    async def streamed():
        return [piece async for piece in llm.astream("the cat")]

    for call in (
        lambda: list(llm.stream("the cat")), lambda: llm.invoke("the cat"),
        lambda: asyncio.run(streamed()), lambda: asyncio.run(llm.ainvoke("the cat")),
    ):  # fmt: skip
        calls = []
        with pytest.raises(CosyH3Error, match="non-finite"):
            call()


@pytest.fixture
def steps(model, monkeypatch):
    """How many steps the model makes, told while it works."""
    original, made = type(model).step, []

    def step(self, ids, cache):
        made.append(1)
        return original(self, ids, cache)

    monkeypatch.setattr(type(model), "step", step)
    return made


def still(steps, done):
    """Wait until `done` says so, then see that no more steps are made."""
    waited = threading.Event()
    for _ in range(500):
        if done():
            break
        waited.wait(0.02)
    else:
        pytest.fail("the work goes on")
    before = len(steps)
    waited.wait(0.1)
    assert len(steps) == before


def no_readers():
    """Whether nothing of asyncio's threads is at work on a stream. asyncio.run has waited for them."""
    return not [t for t in threading.enumerate() if t.name.startswith("asyncio")]


def test_a_stream_left_early(model, steps):
    stream = H3LLM(model, max_tokens=3000, seed=3).stream("the cat")
    next(stream)
    stream.close()
    gc.collect()
    still(steps, lambda: True)
    assert len(steps) < 2000


@pytest.mark.parametrize("form", ["ainvoke", "astream"])
def test_a_cancelled_task(model, steps, form):
    """No more is computed once the task is gone, and the loop can end."""
    llm = H3LLM(model, max_tokens=3000, seed=3)

    async def streamed():
        return [piece async for piece in llm.astream("the cat")]

    async def run():
        task = asyncio.create_task(llm.ainvoke("the cat") if form == "ainvoke" else streamed())
        while len(steps) < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    still(steps, no_readers)
    assert len(steps) < 2000


def test_a_loop_that_goes_on_meanwhile(model):
    """Other tasks run while the model works."""
    llm = H3LLM(model, max_tokens=60, seed=3)

    async def run():
        ticks, task = 0, asyncio.create_task(llm.ainvoke("the cat"))
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 60


def test_tokens_are_counted_by_the_model(model, llm):
    assert llm.get_num_tokens("the cat sat") == len(model.tokenizer.encode("the cat sat"))


def test_a_cache_of_langchain(model, steps):
    """Same model and options: taken from the cache. Other options: not."""
    cache = InMemoryCache()
    llm = H3LLM(model, cache=cache, **OPTIONS)
    first = llm.invoke("the cat")
    made = len(steps)
    assert llm.invoke("the cat") == first and len(steps) == made
    H3LLM(model, cache=cache, **(OPTIONS | {"seed": 4})).invoke("the cat")
    assert len(steps) > made


def test_loads_by_name(folder, model):
    for name in (folder, str(folder)):
        assert H3LLM(name, **OPTIONS).invoke("the cat") == generate(model, "the cat", **OPTIONS).text


def test_what_cannot_be_made(model, speaker, tmp_path):
    for arguments, options, message in (
        ((model,), {"top_p": 2.0}, "top_p must be"),
        ((model,), {"seed": -1}, "seed must be"),
        ((model,), {"stop": [""]}, "stop"),
        ((speaker,), {}, "use SpeakTool"),
        ((3,), {}, "not int"),
        ((str(tmp_path / "nothing"),), {}, "no such model"),
    ):
        with pytest.raises(CosyH3Error, match=message) as e:
            H3LLM(*arguments, **options)
        assert "\n" not in str(e.value)
    with pytest.raises(TypeError, match="nearest known: 'max_tokens'"):
        H3LLM(model, max_token=3)


def test_it_can_be_shown(llm):
    assert "max_tokens" in str(llm)
    assert "model" not in llm.model_dump()


# ---------------------------------------------------------------- speech


@pytest.fixture
def tool(speaker, tmp_path):
    return SpeakTool(speaker, tmp_path, seed=1)


def call(tool, **arguments):
    return tool.invoke(ToolCall(name="speak", args=arguments, id="1", type="tool_call"))


def test_speak(speaker, tool, tmp_path):
    message = call(tool, text="Hello there.", voice="bert")
    want = generate(speaker, "Hello there.", voice="bert", seed=1)
    assert isinstance(message, ToolMessage) and message.status == "success"
    files = list(tmp_path.iterdir())
    assert [str(f) for f in files] == [message.artifact["path"]] and message.content.endswith(str(files[0]))
    samples, rate = soundfile.read(files[0], dtype="float32")
    np.testing.assert_allclose(samples, np.clip(want.audio, -1, 1), atol=1e-4)
    assert rate == want.sample_rate == message.artifact["sample_rate"]
    assert message.artifact["seconds"] == pytest.approx(want.duration, abs=1e-3)
    assert (message.artifact["voice"], message.artifact["finish_reason"]) == ("bert", "stop")


def test_each_call_has_its_own_file(tool, tmp_path):
    assert isinstance(tool.invoke({"text": "Yes."}), str)
    tool.invoke({"text": "Yes."})
    one, two = tmp_path.iterdir()
    assert one.read_bytes() == two.read_bytes()


def test_speak_async(speaker, tool):
    async def run():
        calls = [ToolCall(name="speak", args={"text": t}, id=t, type="tool_call") for t in ("Yes.", "No.", "Yes.")]
        return await asyncio.gather(*(tool.ainvoke(c) for c in calls))

    messages = asyncio.run(run())
    audio = [soundfile.read(m.artifact["path"])[0] for m in messages]
    assert [m.tool_call_id for m in messages] == ["Yes.", "No.", "Yes."]
    np.testing.assert_array_equal(audio[0], audio[2])
    np.testing.assert_allclose(audio[1], generate(speaker, "No.", seed=1).audio.clip(-1, 1), atol=1e-4)


def test_a_cancelled_call_leaves_no_file(speaker, tool, tmp_path, monkeypatch):
    heard = []
    start = type(speaker).start
    monkeypatch.setattr(
        type(speaker), "start",
        lambda self, *args, **options: start(self, *args, progress=lambda *p: heard.append(p), **options),
    )  # fmt: skip

    async def run():
        task = asyncio.create_task(tool.ainvoke({"text": "A long sentence, to be broken off. " * 20}))
        while len(heard) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    still(heard, no_readers)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, message", [
    ({"text": "..."}, "nothing to speak"),
    ({"text": "Yes.", "voice": "bret"}, "no voice 'bret'"),
    ({"text": "Yes.", "voice": "/etc/passwd"}, "no voice '/etc/passwd'"),
])  # fmt: skip
def test_what_an_agent_gets_to_read(tool, tmp_path, arguments, message):
    """An error is an answer of one line, not the end of the agent."""
    later = ToolCall(name="speak", args=arguments, id="1", type="tool_call")
    for answer in (call(tool, **arguments), asyncio.run(tool.ainvoke(later))):
        assert answer.status == "error" and message in answer.content and "\n" not in answer.content
    assert not list(tmp_path.iterdir())
    strict = SpeakTool(tool.model, tmp_path, handle_tool_error=False)
    with pytest.raises(ToolException, match=message):
        strict.invoke(arguments)


def test_its_schema(speaker, tool, tmp_path):
    """What a model that calls tools is told: the voices by name, unless there is nothing to choose."""
    schema = convert_to_openai_tool(tool)["function"]
    assert schema["name"] == "speak" and schema["parameters"]["required"] == ["text"]
    assert "anna, bert, clara" in schema["parameters"]["properties"]["voice"]["description"]
    fixed = SpeakTool(speaker, tmp_path, voice="clara", name="say", description="Say it.", seed=1)
    schema = convert_to_openai_tool(fixed)["function"]
    assert set(schema["parameters"]["properties"]) == {"text", "instruct"}
    assert (schema["name"], schema["description"]) == ("say", "Say it.")
    assert call(fixed, text="Yes.", voice="bert").artifact["voice"] == "clara"


def test_a_voice_of_ones_own_and_options(speaker, tmp_path):
    voice = small_voice("me")
    message = call(SpeakTool(speaker, tmp_path, voice=voice, seed=1, max_seconds=0.2), text="Hello there.")
    want = generate(speaker, "Hello there.", voice=voice, seed=1, max_seconds=0.2)
    assert message.artifact["seconds"] == pytest.approx(want.duration, abs=1e-3)
    assert message.artifact["voice"] == "me" and message.artifact["finish_reason"] == "length"
    assert "cut off by a limit" in message.content


def test_instruct(speaker, tmp_path):
    message = call(SpeakTool(speaker, tmp_path, seed=1), text="Hello there.", voice="clara", instruct="Softly.")
    want = generate(speaker, "Hello there.", voice="clara", instruct="Softly.", seed=1)
    np.testing.assert_allclose(soundfile.read(message.artifact["path"])[0], want.audio.clip(-1, 1), atol=1e-4)


def test_tools_that_cannot_be_made(model, speaker, tmp_path):
    for arguments, options, message in (
        ((model, tmp_path), {}, "use H3LLM"),
        ((speaker, tmp_path / "nowhere"), {}, "there is no folder"),
        ((speaker, tmp_path), {"voice": "bret"}, "no voice 'bret'"),
        ((speaker, tmp_path), {"speed": 9}, "speed must be"),
    ):
        with pytest.raises(CosyH3Error, match=message) as e:
            SpeakTool(*arguments, **options)
        assert "\n" not in str(e.value)
    with pytest.raises(TypeError, match="nearest known: 'speed'"):
        SpeakTool(speaker, tmp_path, sped=1.0)
