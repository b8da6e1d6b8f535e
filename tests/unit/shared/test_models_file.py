"""models.yaml: what it may say, and that all its errors are told with their lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import SparseAttention
from shared.messages.registry import ModelSettings, ModelSpec
from shared.models_file import MAX_BYTES, MAX_TOLD, ModelsFileError, read_models_file, to_yaml
from shared.registry import DeclaredAdapter, check_all

BAD = """\
models:
  - name: chat
    source: org/name:Q4_K_M
    least: two
    pined: true
    settings:
      tp: 100
      kv_dtype: int9
      tpp: 2
  - name: on
    idle: 10m
  - source: x
  - name: b
    least: 3
    most: 2
    aliases: [b, c]
  - name: b
  - just text
  - name: c
    revision: 123
    name: d
    idle: 2099-99-99
  - name: e
    sparse_attention: {kind: most, bugdet: 3}
  - name: f
    sparse_attention:
      recent: 64
      budget: 0
  - name: g
    sparse_attention: pages
other: 1
"""
TOLD = [
    (4, "`least` is a whole number, not 'two'"),
    (5, "`pined`; pinned may be meant"),
    (7, "tp cannot be 100"),
    (8, "one of auto, bf16, fp8, int8, not 'int9'"),
    (9, "no `settings.tpp`; tp may be meant"),
    (10, "`name` is text, not true (text stands in quotes)"),
    (12, "A model has a `name`"),
    (14, "3 replicas at least and 2 at most"),
    (16, "alias 'b' of 'b' is its own name"),
    (17, "'b' stands in line 13 already"),
    (18, "A model is a mapping"),
    (19, "'c' is taken by an alias of the model b"),
    (20, "`revision` is text, not 123"),
    (21, "`name` stands in line 19 already"),
    (22, "`idle` is a number of seconds"),
    (24, "no 'bugdet'; there are: kind, threshold"),
    (28, "Invalid `sparse_attention.budget`: it is 0, below one token"),
    (30, "Invalid `sparse_attention`: it must be true, false, or a mapping of kind"),
    (31, "There is no `other`; there are: models"),
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "It is empty"),
        ("[", "line 1: It is not YAML"),
        ("- a", "is a mapping with the key `models`"),
        ("models: 3", "`models` is a list"),
        ("model: []", "`models` is missing"),
        ("a: &x [*x]", "`models` is missing"),
        ("[" * 20_000, "nested too deeply"),
        ("models: []\n---\nmodels: []", "line 2: It is not YAML"),
        (b"\xff\xfe\x00", "It is not YAML"),
        ("\x00", "It is not YAML"),
        ("models: [{name: {a: b}}]", "`name` is text, not a mapping"),
        ("models: [{name: a, aliases: &a [*a]}]", "`aliases` is a list of texts"),
        ("models: [{name: a, aliases: [{}]}]", "`aliases` is a list of texts"),
        ("models: [{[a]: b, name: a}]", "There is no `?`"),
        ("models: [{name: a, settings: 3}]", "`settings` is a mapping"),
        (" " * (MAX_BYTES + 1), "more than 4 MB"),
        ("models: [" + "{name: a}, " * 1030 + "]", f"and {1024 - MAX_TOLD} more"),
    ],
)
def test_what_is_no_models_file_is_said_to_be_none(text: str | bytes, words: str) -> None:
    with pytest.raises(ModelsFileError) as caught:
        read_models_file(text)
    assert words in str(caught.value)


def test_a_tag_of_another_program_makes_no_object() -> None:
    ((spec,), _) = read_models_file("models: [{name: !!python/name:os.system x}]")
    assert spec.name == "x"


_NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)


BAD_ADAPTERS = """\
models:
  - name: a
    aliases: [short]
    adapters:
      one: [x]
      short: o/x
      b: /y
      b: o/z
      two: {sauce: o/x}
      three: 7
      four: {source: /local, revision: v1}
      " five": o/f
      six: ""
  - name: b
    settings: {max_adapters: 0}
    adapters:
      seven: o/s
      four: o/f
  - name: c
    adapters: [x]
  - adapters: {eight: o/e}
"""
TOLD_ADAPTERS = [
    (5, "The adapter 'one' is a source, or a mapping"),
    (6, "The name 'short' is taken by an alias of the model a"),
    (7, "The name 'b' is taken by the model b"),
    (8, "`adapters.b` stands in line 7 already"),
    (9, "The source of 'two' is a directory or a hub name"),
    (9, "There is no `adapters.two.sauce`; source may be meant"),
    (10, "The adapter 'three' is a source, or a mapping"),
    (11, "A revision goes with a hub name (ORGANISATION/NAME), and the source of 'four'"),
    (12, "An adapter cannot be called ' five'"),
    (13, "The source of 'six' is a directory or a hub name"),
    (17, "The model b takes no adapters"),
    (18, "The adapter 'four' stands in line 11 already"),
    (18, "The model b takes no adapters"),
    (20, "`adapters` is a mapping of names and sources"),
    (21, "A model has a `name`"),
]


@pytest.mark.parametrize(("text", "told"), [(BAD, TOLD), (BAD_ADAPTERS, TOLD_ADAPTERS)], ids=["models", "adapters"])
def test_every_error_is_told_with_its_line(text: str, told: list[tuple[int, str]]) -> None:
    with pytest.raises(ModelsFileError) as caught:
        read_models_file(text, "here.yaml")
    found, first = caught.value.problems, told[0][0]
    assert len(found) == len(told), "\n".join(found)
    for (line, words), problem in zip(told, found, strict=True):
        assert problem.startswith(f"line {line}: ")
        assert words in problem
    assert str(caught.value).startswith(f"here.yaml has {len(told)} errors; nothing was applied:\n  line {first}: ")


def test_adapters_are_read_and_written_again() -> None:
    text = """\
models:
- name: a
  source: org/a
  most: 1
  adapters:
    sql: /adapters/sql
    legal:
      source: org/legal
      revision: v2
"""
    models, adapters = read_models_file(text)
    assert adapters == [DeclaredAdapter("sql", "a", "/adapters/sql"), DeclaredAdapter("legal", "a", "org/legal", "v2")]
    assert to_yaml(models, adapters) == text


@given(
    st.lists(
        st.builds(
            ModelSpec,
            name=_NAMES,
            source=_NAMES,
            settings=st.builds(ModelSettings, tp=st.none() | st.integers(1, 64)),
            least=st.integers(0, 3),
            most=st.integers(1, 3),
            pinned=st.booleans(),
            idle=st.floats(0, 1e6),
            aliases=st.lists(_NAMES, max_size=3),
            sparse_attention=st.sampled_from(
                [None, True, False, SparseAttention("window"), SparseAttention(budget=16, share=0.5)]
            ),
        ),
        max_size=4,
    )
)
def test_what_is_written_is_read_again(specs: list[ModelSpec]) -> None:
    if not check_all(specs):
        assert read_models_file(to_yaml(specs)) == (specs, [])
