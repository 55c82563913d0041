"""The server's API through starlette's test client: answers, streams, voices, and every kind of bad request."""

import base64
import json

import numpy as np
import pytest

from mlx_cosyh3 import load
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.pool import Pool
from mlx_cosyh3.runtime import Policy
from tests.server_tools import HERE, recording, samples  # first: it skips where the extra is missing
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model

from starlette.testclient import TestClient  # noqa: E402 isort: skip
from mlx_cosyh3.server.app import create_app  # noqa: E402 isort: skip

SPEECH, COMPLETIONS, VOICES = "/v1/audio/speech", "/v1/completions", "/v1/voices"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"small": load(write_voice_model(folder / "speech")), "words": load(write_model(folder / "text"))}


@pytest.fixture(scope="module")
def client(models):
    with TestClient(create_app(models, max_text=500, max_upload=1 << 20, max_audio=5), base_url=HERE) as client:
        yield client


def say(client, **fields):
    return client.post(SPEECH, json={"model": "small", "input": "hello there", "voice": "anna", "seed": 1} | fields)


def is_error(answer, status, *words, param=None):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words), error
    assert param is None or error["param"] == param
    assert answer.headers["x-request-id"].startswith("req_")


# ---------------------------------------------------------------- speech


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "opus", "pcm"])
def test_speech_at_once_is_what_generate_makes(client, models, kind):
    expected = models["small"].generate("hello there", voice="anna", seed=1).audio
    answer = say(client, response_format=kind)
    assert answer.status_code == 200 and int(answer.headers["content-length"]) == len(answer.content)
    audio, rate = samples(answer.content, kind)
    assert rate == 24000
    if kind in ("wav", "flac", "pcm"):
        np.testing.assert_allclose(audio, expected, atol=1e-4)
    else:
        assert (
            len(expected) <= len(audio) < len(expected) + 4000
        )  # an mp3 begins with a delay and ends with a whole frame
    assert "llm;dur=" in answer.headers["server-timing"]


def test_mp3_is_the_default(client):
    assert say(client).headers["content-type"] == "audio/mpeg"


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "opus", "pcm"])
def test_streamed_speech(client, models, kind):
    expected = np.concatenate(list(models["small"].stream_generate("hello there", voice="anna", seed=1)))
    answer = say(client, response_format=kind, stream=True)
    assert answer.status_code == 200 and "content-length" not in answer.headers
    audio, rate = samples(answer.content, kind, len(expected))
    assert rate == 24000
    if kind in ("wav", "flac", "pcm"):
        np.testing.assert_allclose(audio, expected, atol=1e-4)
    else:
        assert abs(len(audio) - len(expected)) < 4000


def test_events_carry_the_audio_and_then_what_it_took(client, models):
    answer = say(client, response_format="pcm", stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in answer.text.strip().split("\n\n")]
    assert {d["type"] for d in deltas} == {"speech.audio.delta"} and done["type"] == "speech.audio.done"
    audio = b"".join(base64.b64decode(d["audio"]) for d in deltas)
    assert audio == say(client, response_format="pcm", stream=True).content
    assert done["duration"] == pytest.approx(len(audio) / 48000) and {"llm", "flow", "vocoder"} <= set(done["seconds"])
    expected = models["small"].generate("hello there", voice="anna", seed=1)
    read = sum(len(models["small"].tokenizer.encode(s)) for s in expected.segments)
    assert read > 0 and done["usage"]["input_tokens"] == read
    assert done["usage"]["total_tokens"] == read + done["usage"]["output_tokens"] > read


def test_instructions_and_speed_reach_the_model(client, models):
    plain = samples(say(client, response_format="wav").content)[0]
    assert len(plain) > len(samples(say(client, response_format="wav", speed=2).content)[0])
    told = models["small"].generate("hello there", voice="clara", instruct="Speak softly.", seed=1).audio
    answer = say(client, response_format="wav", voice="clara", instructions="Speak softly.")
    np.testing.assert_allclose(samples(answer.content)[0], told, atol=1e-4)


@pytest.mark.parametrize(
    "fields, status, word, param",
    [
        ({"input": ""}, 400, "input", "input"),
        ({"input": " \n"}, 400, "input", "input"),
        ({"input": "a" * 501}, 400, "500", "input"),
        ({"input": 5}, 400, "a string", "input"),
        ({"input": "..."}, 400, "", None),
        ({"model": "nobody"}, 404, "nobody", "model"),
        ({"model": "words"}, 404, "speaks", "model"),
        ({"model": "../../etc"}, 404, "no model", "model"),
        ({"voice": "nobody"}, 400, "nobody", "voice"),
        ({"voice": {"id": 3}}, 400, "name", "voice"),
        ({"response_format": "aac"}, 400, "aac", "response_format"),
        ({"stream_format": "carrier pigeon"}, 400, "sse", "stream_format"),
        ({"stream": False, "stream_format": "sse"}, 400, "sse", "stream"),
        ({"speed": 9}, 400, "speed", None),
        ({"speed": True}, 400, "a number", "speed"),
        ({"steps": 500}, 400, "100", "steps"),
        ({"instructions": " "}, 400, "instructions", None),
        ({"seed": -1}, 400, "seed", None),
        ({"inptu": "x"}, 400, "nearest known: 'input'", "inptu"),
        ({"causal": True, "stream": True}, 400, "causal", "causal"),
    ],
)
def test_bad_speech_requests(client, fields, status, word, param):
    is_error(say(client, **fields), status, word, param=param)


def test_half_a_surrogate_pair_is_no_text(client):
    body = '{"input": "\\ud800"}'
    is_error(client.post(SPEECH, content=body, headers={"content-type": "application/json"}), 400, "surrogate")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"input": NaN}', b"[" * 5000, b'{"seed":' + b"9" * 6000 + b"}"]
)
def test_bodies_that_are_no_json_object(client, body):
    is_error(client.post(SPEECH, content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_foreign_page_may_send_without_asking_is_refused(client, kind):
    is_error(client.post(SPEECH, content=b'{"input": "x"}', headers={"content-type": kind}), 415, "application/json")


def test_too_large_a_body(client):
    is_error(say(client, input="a" * 100_000), 413, "larger")


def test_an_error_of_the_model_is_an_error_and_no_empty_answer(client, models, monkeypatch):
    def broken(*args, **keywords):
        raise RuntimeError("no more memory at /secret/place")

    monkeypatch.setattr(type(models["small"]), "wave", broken)
    answer = say(client, response_format="wav")
    is_error(answer, 500)
    assert "secret" not in answer.text
    monkeypatch.undo()
    assert say(client, response_format="wav").status_code == 200


# ---------------------------------------------------------------- completions


def complete(client, **fields):
    return client.post(COMPLETIONS, json={"model": "words", "prompt": "the cat", "seed": 1, "max_tokens": 8} | fields)


def test_completion_is_what_generate_makes(client, models):
    expected = models["words"].generate("the cat", seed=1, max_tokens=8)
    answer = complete(client).json()
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)


def test_several_choices_draw_with_seeds_that_follow(client, models):
    answer = complete(client, prompt=["the cat", "a dog"], n=2, echo=True).json()
    prompts = ["the cat", "the cat", "a dog", "a dog"]
    expected = [p + models["words"].generate(p, seed=1 + r, max_tokens=8).text for r, p in enumerate(prompts)]
    assert answer["usage"]["prompt_tokens"] > 0
    assert [c["text"] for c in answer["choices"]] == expected and [c["index"] for c in answer["choices"]] == [
        0,
        1,
        2,
        3,
    ]


def test_streamed_completion_equals_the_whole(client):
    whole = complete(client, n=2).json()
    answer = complete(client, n=2, stream=True, stream_options={"include_usage": True})
    *lines, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
    assert last["choices"] == [] and last["usage"] == whole["usage"]


def test_logprobs_of_the_drawn_tokens(client, models):
    got = complete(client, logprobs=0).json()["choices"][0]["logprobs"]
    expected = models["words"].generate("the cat", seed=1, max_tokens=8, logprobs=True)
    np.testing.assert_allclose(got["token_logprobs"], expected.logprobs, atol=1e-5)
    assert len(got["tokens"]) == len(expected.tokens)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": "a" * 501}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": 0, "stream": True}, "logprobs"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 0}, None),
        ({"temperature": -1}, None),
        ({"top_p": 0}, None),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, None),
        ({"stop": [3]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": [99999]}, None),
    ],
)
def test_bad_completions(client, fields, param):
    is_error(complete(client, **fields), 400, param=param)


def test_neutral_values_that_some_clients_always_send(client):
    assert (
        complete(client, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, best_of=1, suffix=None).status_code
        == 200
    )


# ---------------------------------------------------------------- voices


def upload(client, data, file="../../x.wav", **fields):
    return client.post(VOICES, files={"file": (file, data)}, data=fields)


def test_a_voice_comes_speaks_and_goes(client):
    made = upload(client, recording(), file="/etc/passwd", text="hello", name="me\n\x1b[1m")
    assert made.status_code == 201
    voice = made.json()
    assert (
        voice["id"].startswith("voice_") and voice["name"] == "me [1m" and voice["seconds"] == pytest.approx(3, abs=0.1)
    )
    listed = client.get(VOICES).json()["data"]
    assert [v["id"] for v in listed] == ["anna", "bert", "clara", voice["id"]]
    for given in (voice["id"], {"id": voice["id"]}):
        assert say(client, voice=given, response_format="wav").status_code == 200
    assert client.delete(f"{VOICES}/{voice['id']}").json()["deleted"]
    is_error(client.delete(f"{VOICES}/{voice['id']}"), 404)
    is_error(say(client, voice=voice["id"]), 400, param="voice")


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3", "AIFF"])
def test_recordings_in_other_formats(client, kind):
    made = upload(client, recording(kind=kind))
    assert made.status_code == 201
    client.delete(f"{VOICES}/{made.json()['id']}")


@pytest.mark.parametrize(
    "data, word",
    [
        (b"", "empty"),
        (b"not audio", "wav, flac"),
        (b"RIFF\x00\x00\x00\x00WAVEjunk", "cannot be read"),
        (recording(0.1), "too short"),
        (recording(3, rate=8000), "8000"),
        (recording(61, rate=16000, kind="OGG"), "longer than 60"),
    ],
)
def test_bad_recordings(client, data, word):
    before = client.get(VOICES).json()
    is_error(upload(client, data), 400, word, param="file")
    assert client.get(VOICES).json() == before


def test_a_voice_is_made_under_the_servers_policy(models, monkeypatch):
    own, asked, plain = Policy(device="cpu"), [], Voice.from_audio
    monkeypatch.setattr(Voice, "from_audio", lambda *args, policy, **how: asked.append(policy) or plain(*args, **how))
    with TestClient(create_app(models["small"], policy=own), base_url=HERE) as client:
        assert upload(client, recording()).status_code == 201 and asked == [own]


def test_a_machine_that_fails_is_no_bad_recording(client, models, monkeypatch):
    def speaker(self, samples, rate):
        raise RuntimeError("[METAL] Insufficient Memory")

    monkeypatch.setattr(type(models["small"]), "speaker", speaker)
    answer = upload(client, recording())
    is_error(answer, 500, "a stage of the model failed")
    assert "METAL" not in answer.text


def test_bad_forms(client):
    head = {"content-type": "multipart/form-data; boundary=x"}
    is_error(client.post(VOICES, json={}), 415)
    is_error(client.post(VOICES, content=b"junk", headers=head), 400, "damaged")
    is_error(
        client.post(VOICES, content=b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--", headers=head),
        400,
        "name",
    )
    is_error(client.post(VOICES, content=b"--x\r\n\r\na\r\n" * 30 + b"--x--", headers=head), 400, "parts")
    is_error(client.post(VOICES, data={"name": "x"}, files={"fiel": b"x"}), 400, param="file")
    is_error(upload(client, recording(), naem="x"), 400, "naem")
    is_error(upload(client, bytes(2 << 20)), 413)


def test_voices_of_the_model_cannot_be_deleted(client):
    is_error(client.delete(f"{VOICES}/anna"), 404, "client")
    is_error(client.delete(f"{VOICES}/..%2f..%2fetc"), 404)


def test_voices_are_bounded_and_kept_under_our_names(models, tmp_path):
    folder = tmp_path / "voices"
    with TestClient(create_app(models, voices_folder=folder, max_voices=1), base_url=HERE) as client:
        made = upload(client, recording(), name="../evil.safetensors").json()["id"]
        assert [p.name for p in folder.iterdir()] == [f"{made}.safetensors"]
        is_error(upload(client, recording()), 409, "1 voices")
    (folder / "voice_000000000000000000000000.safetensors").write_bytes(b"damaged")
    with TestClient(create_app(models, voices_folder=folder), base_url=HERE) as client:  # the next run
        assert [v["id"] for v in client.get(VOICES).json()["data"] if v["owned_by"] == "client"] == [made]
        assert say(client, voice=made, response_format="wav").status_code == 200
        client.delete(f"{VOICES}/{made}")
        assert not (folder / f"{made}.safetensors").exists()


def test_a_model_without_front_ends_takes_no_recording(tmp_path):
    model = load(write_voice_model(tmp_path / "m", campplus=None, speech_tokenizer=None))
    with TestClient(create_app(model), base_url=HERE) as client:
        is_error(upload(client, recording()), 400, "recording", param="model")


# ---------------------------------------------------------------- who may ask


def test_token(models):
    with TestClient(create_app(models, token="correct-horse"), base_url=HERE) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "correct-horse"},
            {"authorization": "Bearer correct-horse2"},
        ):
            for path in ("/v1/models", "/metrics", "/v1/voices", "/nothing"):
                is_error(client.get(path, headers=headers), 401, "token")
        assert client.get("/v1/models", headers={"authorization": "Bearer correct-horse"}).status_code == 200
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_other_names_and_other_pages_are_refused(client):
    is_error(client.get("/v1/models", headers={"host": "evil.example"}), 403, "evil.example")
    for origin in ("https://evil.example", "null", "http://localhost:9999"):
        is_error(client.post(SPEECH, json={"input": "x"}, headers={"origin": origin}), 403)
        answer = client.options(SPEECH, headers={"origin": origin, "access-control-request-method": "POST"})
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert client.get("/v1/models", headers={"origin": "http://localhost"}).status_code == 200  # the server's own page


def test_cors_where_it_was_asked_for(models):
    with TestClient(create_app(models, token="correct-horse", cors=("https://good.example",)), base_url=HERE) as client:
        asked = {"origin": "https://good.example", "access-control-request-method": "POST"}
        answer = client.options(SPEECH, headers=asked)
        assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == "https://good.example"
        is_error(client.get("/v1/models", headers={"origin": "https://good.example"}), 401)
        is_error(client.get("/v1/models", headers={"origin": "https://evil.example"}), 403)


# ---------------------------------------------------------------- the rest


def test_a_full_server_says_when_to_come_back(models):
    app = create_app(models, max_queue=1)
    with TestClient(app, base_url=HERE) as client, app.state.service.slot():
        for answer in (say(client), complete(client), upload(client, recording())):
            is_error(answer, 429, "waiting")
            assert int(answer.headers["retry-after"]) >= 1
    with TestClient(create_app(models, max_queue=1), base_url=HERE) as client:
        assert say(client).status_code == 200


def test_models_are_listed_without_being_loaded(models, tmp_path):
    pool = Pool(load=lambda folder: models["small"], size=lambda folder: 1)
    app = create_app({"a": write_voice_model(tmp_path / "a"), "b": write_model(tmp_path / "b")}, pool=pool)
    with TestClient(app, base_url=HERE) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(m["id"], m["kind"], m["object"]) for m in listed] == [("a", "speech", "model"), ("b", "text", "model")]
        assert app.state.service.models.stats() == {}
        assert say(client, model="a").status_code == 200
        assert list(app.state.service.models.stats()) == ["a"]


def test_a_model_folder_that_vanished(tmp_path):
    folder = write_model(tmp_path / "words")
    with TestClient(create_app({"words": folder}), base_url=HERE) as client:
        for file in folder.iterdir():
            file.unlink()
        answer = complete(client)
        is_error(answer, 500, "cannot be loaded")
        assert str(tmp_path) not in answer.text


def test_errors_of_the_router_are_json(client):
    is_error(client.get("/nothing"), 404, "/nothing")
    is_error(client.get(SPEECH), 405, "GET")
    is_error(client.put("/v1/voices"), 405)
    is_error(client.post("/v1/audio/speech/", json={}), 404)


def test_metrics(client):
    say(client)
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['mlx_cosyh3_requests_total{route="/v1/audio/speech",method="POST",status="200"}']) >= 1
    assert float(values['mlx_cosyh3_ended_total{model="small",state="done"}']) >= 1
    assert float(values["mlx_cosyh3_audio_seconds_total"]) > 0 and values["mlx_cosyh3_active"] == "0"
    client.get("/" + "x" * 50)
    client.request("BREW", "/v1/models")
    text = client.get("/metrics").text
    assert "xxx" not in text and "BREW" not in text  # what clients make up is no label


def test_page_has_a_policy_that_lets_in_nothing_else(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "http://" not in answer.text and "https://" not in answer.text
