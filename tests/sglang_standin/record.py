"""Write signatures.txt from the source of SGLang, which need not be installed:

    python tests/sglang_standin/record.py FOLDER

FOLDER has SGLang's wheel unpacked. Recorded, as Python, are the signatures of the calls that hpcrl makes and the fields
of the classes that it fills or reads, without defaults but for `...` where there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CALLS = {
    "sglang/srt/entrypoints/engine.py": (
        "Engine",
        "begin_weight_update",
        "end_weight_update",
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "shutdown",
        "update_weights_from_tensor",
    ),
    "sglang/srt/managers/tokenizer_manager.py": ("TokenizerManager", "generate_request"),
}
FIELDS = {
    "ServerArgs": "sglang/srt/arg_groups/fields/*.py",  # divided among the classes of these files
    "GenerateReqInput": "sglang/srt/managers/io_struct.py",
    "SamplingParams": "sglang/srt/sampling/sampling_params.py",
    "FlushCacheReqOutput": "sglang/srt/managers/io_struct.py",
}
ELLIPSIS = ast.Constant(...)


def main() -> None:
    source, lines = Path(sys.argv[1]), []
    (about,) = source.glob("sglang-*.dist-info")
    for path, (owner, *names) in CALLS.items():
        methods = {
            node.name: node
            for node in ast.walk(classes(source / path)[owner])
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        lines += [f"class {owner}:", *(f"    def {name}({signature(methods[name].args)}): ..." for name in names)]
    for owner, pattern in FIELDS.items():
        found = {name: node for path in sorted(source.glob(pattern)) for name, node in classes(path).items()}
        nodes = found.values() if owner == "ServerArgs" else [found[owner]]
        lines += [f"class {owner}:", *(f"    {field}" for node in nodes for field in fields(node))]
    version = about.name.removeprefix("sglang-").removesuffix(".dist-info")
    Path(__file__).with_name("signatures.txt").write_text("\n".join([f"# SGLang {version}", *lines, ""]))


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """The classes of a file."""
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def signature(arguments: ast.arguments) -> str:
    """The parameters of a function."""
    arguments.defaults = [ELLIPSIS for _ in arguments.defaults]
    arguments.kw_defaults = [default and ELLIPSIS for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a class, each with its type."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            yield f"{ast.unparse(item.target)}: {ast.unparse(plain(item.annotation))}{' = ...' if item.value else ''}"


def plain(annotation: ast.expr) -> ast.expr:
    """A type without the help text that SGLang's A[type, help] adds."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        return plain(annotation.slice.elts[0])
    return annotation


if __name__ == "__main__":
    main()
