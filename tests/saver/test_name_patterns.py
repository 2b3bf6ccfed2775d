import re

from hypothesis import given, settings
from hypothesis import strategies as st

from msmodelslim.saver.name_patterns import name_patterns

PART = st.sampled_from(["a", "b1", "experts"])
NAME = st.tuples(PART, st.integers(0, 12), PART, st.integers(0, 12), PART).map(lambda parts: ".".join(map(str, parts)))
SHORT = st.tuples(PART, st.integers(0, 12)).map(lambda parts: ".".join(map(str, parts)))


@settings(deadline=None, max_examples=100)
@given(st.sets(NAME | SHORT, max_size=40), st.sets(NAME | SHORT, max_size=40))
def test_patterns_match_exactly_the_given_names(names: set[str], others: set[str]) -> None:
    patterns = [re.compile(pattern) for pattern in name_patterns(names)]
    for name in names | others:
        assert any(pattern.match(name) for pattern in patterns) == (name in names)


def test_layers_and_experts_become_alternatives() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in (0, 1, 10) for expert in range(3)]
    assert name_patterns([*names, "model.layers.3.mlp.experts.0.up_proj"]) == [
        r"^model\.layers\.(?:0|1|10)\.mlp\.experts\.(?:0|1|2)\.up_proj$",
        r"^model\.layers\.3\.mlp\.experts\.0\.up_proj$",
    ]


def test_a_thousand_experts_in_sixty_layers_are_one_pattern() -> None:
    names = [f"m.{layer}.experts.{expert}.w1" for layer in range(60) for expert in range(1000)]
    assert len(name_patterns(names)) == 1
