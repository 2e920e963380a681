#!/usr/bin/env python3
"""Figures of the structure of the product's C, to compare before and after a change. It checks nothing.

SPDX-License-Identifier: Apache-2.0

usage: figures.py [--weak] [ROOT]

--weak: lists only the comments that begin with words that refer to what stands before.

Fields are flattened: those of a struct that is inside another one count as well, a pointer is one. A unit is a .c file with its
header. A circle is a set of units each of which includes all others, also indirectly. The path of a request is each file with a
function that its handler reaches by direct calls. A call is that of the function in the same file; else in a folder whose headers
the caller's folder includes, as programs have functions of the same name; else, of an upcall, in any.
"""

import collections
import pathlib
import re
import sys

FOLDERS = "include bfc device keeper proto daemon client ctl integrations".split()
HANDLERS = {"malloc": "handle_malloc", "free": "handle_free", "reload": "reload_handle", "park": "park_handle",
            "the client's malloc": "bfc_malloc", "the client's free": "bfc_free"}
STRUCTS = "quota bfc_client session partition broker bfc".split()
VERBS = "release retire reclaim recall trim forget drop end free close give clear".split()
WEAK = ("The same", "And:", "The rest")


def without_comments(text):
    """Comments and strings are blanks, line breaks stay."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


class Sources:
    def __init__(self, root):
        self.texts = {str(f.relative_to(root)): f.read_text() for d in FOLDERS for f in sorted((root / d).rglob("*.[ch]"))}
        self.codes = {name: without_comments(text) for name, text in self.texts.items()}


# ---- structs -----------------------------------------------------------------------------


def split_members(body):
    """What stands between the semicolons of this level."""
    depth, begin = 0, 0
    for i, c in enumerate(body):
        depth += (c in "{(") - (c in "})")
        if c == ";" and depth == 0:
            yield body[begin:i].strip()
            begin = i + 1


def bodies(sources):
    for code in sources.codes.values():
        for m in re.finditer(r"^(?:typedef |static )?struct (\w+) \{ *\n(.*?)^\}", code, re.S | re.M):
            yield m[1], m[2]


def count_fields(body, structs, seen=()):
    n = 0
    for member in split_members(body):
        if not member:
            continue
        head, brace, rest = member.partition("{")
        if brace:  # an anonymous struct or union
            n += count_fields(rest[: rest.rindex("}")], structs, seen)
            continue
        is_list_entry = member.startswith("TAILQ_ENTRY(")
        names = 1 if "(" in member and not is_list_entry else member.count(",") + 1
        inner = re.fullmatch(r"(?:const )?struct (\w+) (\w+)((?:\[[^\]]*\])*)((?:, \w+)*)", member, re.S)
        if inner and inner[1] in structs and inner[1] not in seen:
            n += names * count_fields(structs[inner[1]], structs, (*seen, inner[1]))
        else:
            n += names
    return n


# ---- includes ------------------------------------------------------------------------------


def folder_of(name):
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "daemon" and len(parts) > 2 else parts[0]


def includes(sources):
    for name, text in sources.texts.items():
        for other in re.findall(r'^#include "([^"]+)"', text, re.M):
            if other in sources.texts:
                yield name, other


def pairs_both_ways(sources):
    pairs = collections.Counter((folder_of(a), folder_of(b)) for a, b in includes(sources))
    return {(a, b): (n, pairs[b, a]) for (a, b), n in pairs.items() if a < b and (b, a) in pairs}


def unit_of(name):
    return name.rpartition(".")[0]


def circles(sources):
    """Strongly connected components (Tarjan), the largest first."""
    graph = collections.defaultdict(set)
    for a, b in includes(sources):
        if unit_of(a) != unit_of(b):
            graph[unit_of(a)].add(unit_of(b))
    index, low, stack, found = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in graph[v]:
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            at = stack.index(v)
            found.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10000)
    for v in sorted(graph):
        if v not in index:
            visit(v)
    return sorted((c for c in found if len(c) > 1), key=len, reverse=True)


def files_of(sources, circle):
    return sorted(name for name in sources.texts if unit_of(name) in circle)


def edges_of(sources, circle):
    """The includes that make the circle, as text."""
    graph = collections.defaultdict(set)
    for a, b in includes(sources):
        if unit_of(a) != unit_of(b) and unit_of(a) in circle and unit_of(b) in circle:
            graph[unit_of(a)].add(unit_of(b).rpartition("/")[2])
    return "; ".join(f"{a.rpartition('/')[2]} -> {', '.join(sorted(graph[a]))}" for a in sorted(graph))


# ---- functions -----------------------------------------------------------------------------


class Function:
    def __init__(self, file, name, is_static, code, text):
        self.file, self.name, self.is_static, self.code, self.text = file, name, is_static, code, text


def functions(sources):
    for file, code in sources.codes.items():
        lines, texts = code.splitlines(), sources.texts[file].splitlines()
        begin = None
        for i, line in enumerate(lines):
            if line.startswith("{"):
                begin = i
            elif line.startswith("}") and begin is not None:
                first = begin - 1
                while first > 0 and lines[first] and lines[first][0] in " \t":
                    first -= 1
                head = " ".join(lines[first:begin])
                if m := re.search(r"(\w+)\s*\(", re.sub(r"__attribute__\s*\(\(.*?\)\)", "", head)):
                    is_static = "static" in head
                    yield Function(file, m[1], is_static, "\n".join(lines[begin:i]), texts[begin + 1 : i])
                begin = None


def path_of(handler, all_functions, sources):
    own, public = {}, collections.defaultdict(list)
    for f in all_functions:
        own[f.file, f.name] = f
        if not f.is_static or f.file.endswith(".h"):
            public[f.name].append(f)
    below = collections.defaultdict(set)
    for a, b in includes(sources):
        below[folder_of(a)].add(folder_of(b))

    def called(f, name):
        if g := own.get((f.file, name)):
            return g
        folder = folder_of(f.file)
        near = [g for g in public[name] if folder_of(g.file) in below[folder] | {folder}]
        return next(iter(near + public[name]), None)

    first = [f for f in all_functions if f.name == handler]
    seen, todo = set(), list(first)
    while todo:
        f = todo.pop()
        if f in seen:
            continue
        seen.add(f)
        for word in set(re.findall(r"(?<![\w.>])([a-z_]\w+)\(", f.code)):
            if g := called(f, word):
                todo.append(g)
    return sorted({f.file for f in seen})


def weak_comments(sources):
    for name, text in sources.texts.items():
        for m in re.finditer(r"/\* (.*?)\*/", text, re.S):
            if m[1].startswith(WEAK):
                yield f"{name}:{text.count(chr(10), 0, m.start()) + 1}: {' '.join(m[1].split())}"


def main():
    arguments = [a for a in sys.argv[1:] if a != "--weak"]
    root = pathlib.Path(arguments[0] if arguments else ".")
    sources = Sources(root)
    if "--weak" in sys.argv:
        print("\n".join(weak_comments(sources)))
        return
    n_tests = sum(f.read_bytes().count(b"\n") for f in (root / "tests").rglob("*") if f.is_file() and f.suffix != ".pyc")
    print(f"lines of C of the product: {sum(t.count(chr(10)) for t in sources.texts.values())}")
    print(f"lines below tests/: {n_tests}")
    structs = dict(bodies(sources))
    sizes = {name: count_fields(body, structs) for name, body in structs.items()}
    print("\nfields, flattened:", ", ".join(f"{name} {sizes[name]}" for name in STRUCTS if name in sizes))
    most = sorted(sizes, key=sizes.get, reverse=True)[:12]
    print("the most:", ", ".join(f"{name} {sizes[name]}" for name in most))
    print("\nincludes both ways between folders:")
    for (a, b), (n, back) in sorted(pairs_both_ways(sources).items()):
        print(f"  {a} -> {b}: {n}, back: {back}")
    print("circles of units:")
    for c in circles(sources):
        print(f"  {len(c)} units, {len(files_of(sources, c))} files in {folder_of(c[0])}: {edges_of(sources, c)}")
    found = list(functions(sources))
    print("\nfiles on the path:", ", ".join(f"{name} {len(path_of(of, found, sources))}" for name, of in HANDLERS.items()))
    print(f"functions: {len(found)}")
    words = collections.Counter(verb for f in found for verb in VERBS if verb in f.name.split("_"))
    print("with these verbs:", ", ".join(f"{verb} {n}" for verb, n in words.most_common()))
    n_lines = sum(len(f.text) for f in found)
    n_comments = sum(line.lstrip().startswith(("/*", "*", "//")) for f in found for line in f.text)
    print(f"comments inside bodies: {n_comments} of {n_lines} lines, {100 * n_comments / n_lines:.1f} %")
    print(f"comments that begin with {', '.join(WEAK)}: {len(list(weak_comments(sources)))}")


if __name__ == "__main__":
    main()
