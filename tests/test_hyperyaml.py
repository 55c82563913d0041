"""The reader of HyperPyYAML: what it makes of tags and references, and that hostile files are one-line errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.convert.hyperyaml import parse, read_hyperyaml
from mlx_cosyh3.errors import CheckpointError
from tests.golden_data import large


def test_tags_are_data():
    assert parse("a: !new:x.y.Z\n  b: 1\n  c: !name:f.g\n    d: [2]\n") == {
        "a": {"__new__": "x.y.Z", "b": 1, "c": {"__name__": "f.g", "d": [2]}}
    }
    assert parse("a: !apply:random.seed [1986]\nb: !name:f\nc: !name:f text\n") == {
        "a": {"__apply__": "random.seed", "args": [1986]},
        "b": {"__name__": "f"},
        "c": {"__name__": "f", "args": ["text"]},
    }


def test_nothing_is_executed(tmp_path):
    made = tmp_path / "made"
    parse(f"a: !apply:os.mkdir ['{made}']\nb: !new:os.system ['touch {made}']\n")
    assert not made.exists()


def test_references():
    told = parse(
        "size: 25\nratio: 2\nboth: !ref <size> * <ratio>\nchain: !ref <both>\nm: {a: {b: 7}}\nn: !ref <m[a][b]>\n"
    )
    assert (told["both"], told["chain"], told["n"]) == (50, 50, 7)
    told = parse("a: 7\nb: 2\nc: !ref (<a> + 1) // <b> - -3\nd: !ref <a> / <b>\ne: !ref <a> % <b>\nf: !copy <a>\n")
    assert (told["c"], told["d"], told["e"], told["f"]) == (7, 3.5, 1, 7)
    assert parse("a: x\nb: !ref <a>/y\n")["b"] == "x/y"


def test_a_reference_to_a_mapping_is_a_copy():
    told = parse("m: {a: 1}\nn: !ref <m>\n")
    assert told["n"] == told["m"] and told["n"] is not told["m"]


def test_scalars_are_those_of_yaml_1_2():
    told = parse("a: 1e-06\nb: 1E5\nc: -2e3\nd: 1.5e-3\ne: e5\nf: 0x1f\ng: 010\nh: +.5\ni: true\nj:\nk: ~\n")
    assert told == {
        "a": 1e-6, "b": 1e5, "c": -2e3, "d": 1.5e-3, "e": "e5", "f": 31, "g": 10, "h": 0.5,
        "i": True, "j": None, "k": None,
    }  # fmt: skip
    assert [type(told[k]) for k in "abfg"] == [float, float, int, int]
    text = "a: 2001-01-01\nb: 1:30\nc: yes\nd: .nan\ne: 1_000\n<<: x\n"
    assert parse(text) == {"a": "2001-01-01", "b": "1:30", "c": "yes", "d": ".nan", "e": "1_000", "<<": "x"}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)
REFERENCE_BOMB = "a0: [x]\n" + "".join(f"a{i + 1}: [{', '.join([f'!ref <a{i}>'] * 9)}]\n" for i in range(9))


@pytest.mark.parametrize(
    "text, said",
    [
        (BOMB, "aliases"),
        (REFERENCE_BOMB, "values"),
        ("a: &a [*a]\n", "aliases"),
        ("a: !!python/object/apply:os.system ['true']\n", "tag"),
        ("a: !!python/name:os.system\n", "tag"),
        ("a: !include:other.yaml\n", "tag"),
        ("a: !ref <a>\n", "itself"),
        ("a: !ref <b>\nb: !ref <a>\n", "itself"),
        ("a: !ref <b> * 2\nb: [!ref <a>]\n", "itself"),
        ("a: !ref <nothing>\n", "'nothing'"),
        ("m: {a: 1}\na: !ref <m[b]>\n", "'b'"),
        ("a: !ref none\n", "no <name>"),
        ("z: 0\na: !ref 1 / <z>\n", "zero"),
        ("[" * 3000, "deep"),
        ("a: " + "[" * 60 + "]" * 60, "deep"),
        ("a: {" * 30, "valid YAML"),
        ("- 1\n", "no entries"),
        ("", "no entries"),
        ("a: [1\n", "valid YAML"),
        ("? [a]\n: 1\n", "valid YAML"),
        ("a: " + "9" * 5000, "too large"),
        ("a: 0x" + "f" * 5000, "too large"),
        ("a: 1e999", "too large or none"),
        ("a: 99999999999999999999", "too large or none"),
        ("a: 9\nb: !ref <a>" + "*999999999" * 3, "too large a number"),
        ("a: 9\nb: !ref <a>*" + "9" * 1000, "too large"),
        ("a: !!float nan", "too large or none"),
        ("a: !!bool x", "valid YAML"),
        ("a: !!int x", "valid YAML"),
        ("a: !!binary aGk=", "tag"),
        ("a: !!timestamp 2001-01-01", "tag"),
        ("a: !!set {x}", "tag"),
        ('a: "\\ud800"', "Unicode"),
        ("a: {1: 2}", "as a name"),
        ("null: 2", "as a name"),
        ("a: !ref " + "<" * 5000, "no <name>"),
        ("a: \x00", "valid YAML"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_files_are_errors(text, said):
    with pytest.raises(CheckpointError, match=said) as e:
        parse(text)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_files(tmp_path):
    path = tmp_path / "x.yaml"
    for content, said in (
        (b"\xff\xfe", "UTF-8"),
        (b"a: 1\n" * 300_000, "larger"),
        (b"- 1", "x.yaml: it holds no entries"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            read_hyperyaml(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_hyperyaml(tmp_path / "none.yaml")
    path.write_text("a: 1\n")
    assert read_hyperyaml(path) == {"a": 1}


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab<>!:{}[]-&*#'\"\n ,?|123refnw%@`", max_size=60))
def test_any_text_gives_a_mapping_or_an_error(text):
    try:
        assert isinstance(parse(text), dict)
    except CheckpointError:
        pass


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1000), st.integers(1, 1000), st.sampled_from("+-*"))
def test_arithmetic_is_pythons(a, b, sign):
    assert parse(f"a: {a}\nb: {b}\nc: !ref <a> {sign} <b>\n")["c"] == eval(f"{a} {sign} {b}")  # noqa: S307


def test_the_trained_folders_yaml():
    told = read_hyperyaml(large("checkpoints", "cosyvoice3-tiny") / "cosyvoice3.yaml")
    assert told["llm"]["__new__"] == "cosyvoice.llm.llm.CosyVoice3LM"
    assert told["flow"]["decoder"]["estimator"]["static_chunk_size"] == 50
    assert told["flow"]["decoder"]["cfm_params"]["content"]["sigma_min"] == 1e-6
    assert told["hift"]["sampling_rate"] == 24000 and told["feat_extractor"]["fmax"] is None
