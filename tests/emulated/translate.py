"""Copies C++ headers with their inline PTX replaced by calls of `emulated::run_ptx`, for the host.

    python translate.py TARGET ROOT FOLDER...

Headers of ROOT/FOLDER come to lie in TARGET/FOLDER: those that hold PTX, or code that CUTLASS
compiles for devices alone, translated, and links to the others.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ARCH = re.compile("__CUDA_ARCH__|__NVCC__|(?<=#ifdef )__CUDACC__")
ASM = re.compile(r"\basm\s*(?:volatile|__volatile__)?\s*\(")
# What these do for devices they do for hosts too.
LEFT = re.compile(
    r"cute/config\.hpp|cutlass/(detail/.*|arch/w?mma.*|(?!cutlass|device_kernel)\w*\.h)"
)
SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
MARKS = (ARCH, ASM, SHARED)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text: str) -> str:
    return COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)


def split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators outside of parentheses and strings."""
    parts, depth, at, start = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            found = STRING.match(text, at)
            assert found is not None
            at = found.end()
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if text[at] == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]


def end_of_parentheses(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one before `start`."""
    depth, at = 1, start
    while depth > 0:
        found = STRING.match(text, at)
        if found is not None:
            at = found.end()
            continue
        depth += (text[at] == "(") - (text[at] == ")")
        at += 1
    return at


def operands(section: str, function: str) -> Iterator[str]:
    for part in split(section, ","):
        found = re.fullmatch(r'\s*"[=+]?&?\w"\s*(\(.*\))\s*', part, re.DOTALL)
        if found is not None:
            yield f"::emulated::{function}{found[1]}"
        else:
            assert not part.strip(), part


def call(inside: str) -> str:
    """What takes the place of `asm(inside)`."""
    if "#" in inside:
        return "std::abort()"  # half of it is for other compilers
    template, *sections = split(inside, ":")
    if template.strip() == '""':
        return "(void)0"
    written = list(operands(sections[0], "written")) if sections else []
    read = list(operands(sections[1], "read")) if len(sections) > 1 else []
    arguments = ", ".join([*written, *read])
    return (
        "do { static const ::emulated::Ptx ptx(" + template + ");"
        f" ::emulated::run_ptx(ptx, {{{arguments}}}); }} while (false)"
    )


def translated(text: str) -> str:
    text = ARCH.sub("CUTFUSE_EMULATED_ARCH", without_comments(text))
    text = SHARED.sub(r"auto* const \2 = reinterpret_cast<\1*>(::emulated::here->shared);", text)
    parts, at = [], 0
    while (found := ASM.search(text, at)) is not None:
        end = end_of_parentheses(text, found.end())
        parts += [text[at : found.start()], call(text[found.end() : end - 1])]
        at = end
    return "".join([*parts, text[at:]])


def main(target: str, root: str, *folders: str) -> None:
    for path in (path for folder in folders for path in Path(root, folder).rglob("*")):
        inner = path.relative_to(root)
        if path.is_dir():
            continue
        made = Path(target, inner)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.unlink(missing_ok=True)
        text = path.read_text()
        if LEFT.fullmatch(str(inner)) or not any(mark.search(text) for mark in MARKS):
            made.symlink_to(path.absolute())
        else:
            made.write_text(translated(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
