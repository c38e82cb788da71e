"""README's table of mechanisms is what the library selects, and one command writes it."""

from pathlib import Path

import pytest

from pycutfuse import support
from pycutfuse._loader import Native, native
from pycutfuse.bench import mechanisms
from pycutfuse.bench.mechanisms import FASTER, KINDS, NOT_TAKEN, SHAPES, problem, selected

README = Path(__file__).parents[2] / "README.md"
EMPTY = "before\n<!-- results:begin mechanisms -->\n<!-- results:end mechanisms -->\nafter\n"

planned = pytest.mark.skipif(
    native().binding is None or bool(support.conv_missing()),
    reason="no native library with convolutions",
)


@planned
def test_readme_says_what_is_selected() -> None:
    command = "python -m pycutfuse.bench.mechanisms README.md"
    assert mechanisms.main(["--check", str(README)]) == 0, f"{command} writes it anew"


@planned
def test_the_command_writes_the_table_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "README.md"
    path.write_text(EMPTY)
    assert mechanisms.main(["--check", str(path)]) == 1
    assert "without --check it is written" in capsys.readouterr().err
    assert path.read_text() == EMPTY
    assert mechanisms.main([str(path)]) == 0
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert all(f"| {name} |" in text for name in SHAPES)
    assert mechanisms.main([str(path)]) == mechanisms.main(["--check", str(path)]) == 0
    assert path.read_text() == text


@planned
def test_words_are_those_of_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, kind = SHAPES["3x3, few channels"], KINDS[0]
    device = native().binding.DeviceProps()
    plan = native().binding.make_conv_plan(support.conv_problem(problem(shape, kind)), device, None)
    words = selected(shape, kind)
    assert words in plan.describe()
    assert words not in (FASTER, NOT_TAKEN)
    for name, reason in (("conv_why_slower", FASTER), ("conv_why_not", NOT_TAKEN)):
        monkeypatch.setattr(native().binding, name, lambda *_: "for a reason")
        assert selected(shape, kind) == reason


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)
def test_problems_are_those_of_calls(kind: mechanisms.Kind) -> None:
    for shape in SHAPES.values():
        made = problem(shape, kind)
        sizes = (made.batch, made.channels, made.height, made.width)
        assert sizes == shape.input_size
        assert (made.batch, made.out_channels, made.out_h, made.out_w) == shape.output_size
        assert (made.groups, made.transposed) == (shape.groups, shape.transposed)
        assert made.channels_last == kind.channels_last
        assert made.dtype is kind.dtype
        # 16-bit pixels are read as a matrix where they start at whole vectors, planes of float32.
        wide = made.dtype.itemsize == 4
        readable = shape.channels if shape.channels % 8 == 0 or wide else 0
        assert made.pixel_stride == (readable if kind.channels_last else int(wide))


def test_without_the_library_or_a_place_for_it_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if native().binding is not None:
        path = tmp_path / "README.md"
        path.write_text("no markers")
        assert mechanisms.main([str(path)]) == 2
        assert "results:begin mechanisms" in capsys.readouterr().err
    monkeypatch.setattr(mechanisms, "native", lambda: Native(None, "no library"))
    assert mechanisms.main([str(README)]) == 2
    assert "no library" in capsys.readouterr().err
