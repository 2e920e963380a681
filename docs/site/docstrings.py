"""The reference of the Python package, from its sources: signatures and docstrings of what is public. Nothing is imported.

SPDX-License-Identifier: Apache-2.0
"""

import ast
import re

WIDTH = 80
# Those of engines are called by the engines.
MODULES = ("torch", "cupy", "numba", "rmm", "ray")


def is_public(node):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return not node.name.startswith("_") and bool(ast.get_docstring(node))
    return False


def paragraph(node):
    return (ast.get_docstring(node) or "").partition("\n\nSPDX")[0] + "\n\n"


def signature(node, name):
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return f"{name}: {ast.unparse(node.returns)}" if node.returns else name
    node.args.args = [a for a in node.args.args if a.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({ast.unparse(node.args)}){returns}"
    return line if len(line) <= WIDTH else ",\n        ".join(re.split(r", (?![^\[]*\])", line))


def describe(node, owner):
    if isinstance(node, ast.FunctionDef):
        return f"### {owner}.{node.name}\n\n```python\n{signature(node, node.name)}\n```\n\n{paragraph(node)}"
    bases = [ast.unparse(base) for base in node.bases if not ast.unparse(base).rpartition(".")[2].startswith(("_", "Unique"))]
    text = f"### {owner}.{node.name}\n\n" + (f"A subclass of {', '.join(f'`{b}`' for b in bases)}. " if bases else "")
    text += paragraph(node)
    for member in filter(is_public, node.body):
        text += f"#### {node.name}.{member.name}\n\n```python\n{signature(member, member.name)}\n```\n\n{paragraph(member)}"
    return text


def read(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def names_of_package(package, tree):
    """The nodes of what `bfcd` has, which is in other files: the sources say in which, for type checkers."""
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and imported.level == 1:
            names = {name.name for name in imported.names}
            for node in read(package / f"{imported.module}.py").body:
                if getattr(node, "name", None) in names:
                    names.discard(node.name)
                    yield node
            if names:
                raise ValueError(f"{imported.module}.py has no {', '.join(sorted(names))}")


def reference(package):
    """Markdown."""
    tree = read(package / "__init__.py")
    nodes = sorted(names_of_package(package, tree), key=lambda node: (isinstance(node, ast.ClassDef), node.name))
    text = "## bfcd\n\n" + paragraph(tree) + "".join(describe(node, "bfcd") for node in nodes)
    for module in MODULES:
        tree = read(package / f"{module}.py")
        text += f"## bfcd.{module}\n\n" + paragraph(tree)
        text += "".join(describe(node, f"bfcd.{module}") for node in filter(is_public, tree.body))
    return text
