"""docs/formats.md names what the code knows, in the words of the code."""

from pathlib import Path

from msmodelslim.saver import ascendv1, compressed_tensors
from msmodelslim.saver.ascendv1_kinds import LAYOUTS, OLD_FP8_KIND
from msmodelslim.saver.ascendv1_reader import PARTS

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()


def rows(first: str) -> list[list[str]]:
    """Cells of each table row whose first cell begins so."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")
    ]
    return [row for row in cells if row[0].startswith(first)]


def test_every_kind_of_ascendv1_has_a_row_that_names_its_tensors() -> None:
    for kind in LAYOUTS:
        (row,) = rows(f"`{kind}`")
        like = row[2].startswith("as `") and rows(row[2].split(",")[0].removeprefix("as "))[0][2]
        text = f"{row[2]} {like or ''}"
        assert all(f"`{suffix}`" in text for suffix in PARTS[kind]), kind
    assert f"`{OLD_FP8_KIND}`" in PAGE


def test_every_target_has_a_row_with_its_kinds() -> None:
    (row,) = rows("`vllm-ascend-0.27`")
    for layer, cell in zip(("linear", "moe"), row[1:], strict=True):
        assert {word.split(" ")[0] for word in cell.split(", ")} == set(ascendv1.TARGETS["vllm-ascend-0.27"][layer])
    assert all(f"`{target}`" in PAGE for target in (*ascendv1.TARGETS, *compressed_tensors.TARGETS))


def test_the_columns_of_compressed_tensors_are_the_targets() -> None:
    table = [row for row in rows("") if len(row) == 5 and row[1].endswith("-quantized")]
    for column, target in ((3, "transformers-5.24"), (4, "vllm-0.32")):
        said = {kind for row in table if row[column].startswith("yes") for kind in kinds_of(row[0])}
        assert said == compressed_tensors.TARGETS[target]


def kinds_of(cell: str) -> list[str]:
    """A cell lists kinds; one without a capital letter at its start continues the first."""
    first, *rest = cell.split(", ")
    return [first, *(word if word[0].isupper() else f"{first.split(' ')[0]} {word}" for word in rest)]
