"""Parts of the server without a server: audio formats, forms, fields, metrics, what a voice may be called."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.server_tools import samples  # skips where the extra is missing

from mlx_cosyh3.cosyvoice.audio import resample  # noqa: E402 isort: skip
from mlx_cosyh3.server import body, cli, voices  # noqa: E402 isort: skip
from mlx_cosyh3.server.encode import FORMATS, Encoder, Resampler, encode  # noqa: E402 isort: skip
from mlx_cosyh3.server.errors import ApiError  # noqa: E402 isort: skip
from mlx_cosyh3.server.metrics import Metrics  # noqa: E402 isort: skip


def tone(n, rate):
    """A tone that rises, so that it is like itself at one place alone."""
    t = np.arange(n) / rate
    return (0.3 * np.sin(2 * np.pi * (300 * t + 400 * t**2))).astype(np.float32)


def in_pieces(audio, rate, kind, size):
    encoder = Encoder(rate, kind)
    pieces = [encoder.add(audio[i : i + size]) for i in range(0, len(audio), size)]
    return b"".join(pieces) + encoder.finish()


@pytest.mark.parametrize("rate", [22050, 24000])
@pytest.mark.parametrize("kind", FORMATS)
def test_pieces_are_the_whole(kind, rate):
    audio = tone(2 * rate, rate)
    whole, made = samples(encode(audio, rate, kind), kind)
    length = len(whole) if kind == "flac" else None
    pieces, streamed = samples(in_pieces(audio, rate, kind, 4801), kind, length)
    assert made == streamed and made in (rate, 24000)
    if kind == "mp3":  # its delay and its end are told only where the header can be mended
        assert len(whole) == len(audio) and 0 <= len(pieces) - len(whole) < 3000
        at = np.argmax([np.dot(pieces[d : d + 20000], whole[:20000]) for d in range(3000)])
        np.testing.assert_allclose(pieces[at : at + 20000], whole[:20000], atol=0.02)
    else:
        np.testing.assert_array_equal(pieces, whole)
    if kind in ("wav", "flac", "pcm"):
        expected = audio if made == rate else resample(audio, rate, made)
        np.testing.assert_allclose(whole, expected, atol=1e-4)


def test_the_header_of_a_wav():
    whole, streamed = encode(tone(100, 24000), 24000, "wav"), in_pieces(tone(100, 24000), 24000, "wav", 30)
    assert int.from_bytes(whole[4:8], "little") == len(whole) - 8 and int.from_bytes(whole[40:44], "little") == 200
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4 and streamed[44:] == whole[44:]


def test_loud_samples_are_limited():
    assert np.frombuffer(encode(np.array([2.0, -2.0], np.float32), 24000, "pcm"), "<i2").tolist() == [32767, -32767]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    st.sampled_from([(22050, 24000), (24000, 16000), (16000, 24000)]),
)
def test_resampling_in_pieces(lengths, rates):
    audio = np.random.default_rng(0).standard_normal(sum(lengths)).astype(np.float32)
    resampler, at, out = Resampler(*rates), 0, []
    for n in lengths:
        out.append(resampler.add(audio[at : at + n]))
        at += n
    out.append(resampler.add(audio[:0], last=True))
    np.testing.assert_allclose(np.concatenate(out), resample(audio, *rates), atol=1e-6)


# ---------------------------------------------------------------- forms and fields


def form(*parts, boundary=b"x"):
    return b"".join(b"--" + boundary + b"\r\n" + p + b"\r\n" for p in parts) + b"--" + boundary + b"--\r\n"


@given(st.binary(max_size=300), st.text(max_size=50))
def test_forms_bring_their_bytes(data, text):
    head = b'Content-Disposition: form-data; name="file"; filename="../x"\r\nContent-Type: audio/wav\r\n\r\n'
    boundary = b"a-boundary-that-no-file-holds"
    made = form(head + data, b'Content-Disposition: form-data; name="text"\r\n\r\n' + text.encode(), boundary=boundary)
    assert body.parse_form(made, boundary) == ({"text": text}, {"file": data})


@given(st.binary(max_size=400))
def test_damaged_forms_are_told(data):
    for made in (data, b"--x" + data, b"--x\r\n" + data + b"\r\n--x--"):
        try:
            fields, files = body.parse_form(made, b"x")
        except ApiError as e:
            assert e.status == 400
        else:
            assert isinstance(fields, dict) and isinstance(files, dict)


@pytest.mark.parametrize(
    "part, word",
    [
        (b"Content-Disposition: form-data\r\n\r\na", "name"),
        (b"no headers", "headers"),
        (b'Content-Disposition: form-data; name="a"\r\nX: ' + b"x" * 5000 + b"\r\n\r\na", "headers"),
        (b'Content-Disposition: form-data; name="a"\r\n\r\n\xff', "UTF-8"),
    ],
)
def test_bad_parts(part, word):
    with pytest.raises(ApiError, match=word):
        body.parse_form(form(part), b"x")


def test_a_field_twice():
    part = b'Content-Disposition: form-data; name="a"\r\n\r\nb'
    with pytest.raises(ApiError, match="twice"):
        body.parse_form(form(part, part), b"x")


def test_fields():
    fields = {"a": str, "b": (int, list), "c": float, "d": bool}
    assert body.take({"a": "x", "b": [1], "c": 2, "d": None}, fields) == {"a": "x", "b": [1], "c": 2}
    for bad in ({"a": 1}, {"b": "x"}, {"b": True}, {"c": True}, {"d": 1}, {"e": 1}):
        with pytest.raises(ApiError) as caught:
            body.take(bad, fields)
        assert caught.value.status == 400 and caught.value.param == next(iter(bad))


# ---------------------------------------------------------------- the rest


@given(st.text(max_size=200))
def test_what_a_voice_is_called(text):
    label = voices.label(text)
    assert len(label) <= voices.LABEL and all(c.isprintable() for c in label)


def test_no_more_than_the_bound_is_decoded(monkeypatch):
    data = encode(tone(40 * 24000, 24000), 24000, "flac")
    assert len(voices.read_recording(data, 60)[0]) == 40 * 24000
    read, seen = voices.soundfile.SoundFile.read, []
    monkeypatch.setattr(voices.soundfile.SoundFile, "read", lambda self, n, **k: seen.append(n) or read(self, n, **k))
    with pytest.raises(ApiError, match="longer than 5 s"):
        voices.read_recording(data, 5)
    assert sum(seen) <= 5 * 24000 + voices.BLOCK


def test_metrics_text():
    metrics = Metrics()
    metrics.add("requests_total", route='a"b\\\n', status=200)
    metrics.add("requests_total", 2, route='a"b\\\n', status=200)
    metrics.observe("request_seconds", 0.2, route="/")
    metrics.observe("request_seconds", 100, route="/")
    lines = metrics.text([("active", {}, 3)]).splitlines()
    assert r'mlx_cosyh3_requests_total{route="a\"b\\\n",status="200"} 3' in lines
    assert 'mlx_cosyh3_request_seconds_bucket{route="/",le="0.1"} 0' in lines
    assert 'mlx_cosyh3_request_seconds_bucket{route="/",le="60"} 1' in lines
    assert 'mlx_cosyh3_request_seconds_bucket{route="/",le="+Inf"} 2' in lines
    assert "mlx_cosyh3_active 3" in lines and "# TYPE mlx_cosyh3_request_seconds histogram" in lines
    assert len(set(lines)) == len(lines)


def test_names_of_models():
    assert cli.named(["h3-tiny", "/a/b", "owner/name", "x=/c=d"]) == {
        "h3-tiny": "h3-tiny", "b": "/a/b", "owner/name": "owner/name", "x": "/c=d",
    }  # fmt: skip
