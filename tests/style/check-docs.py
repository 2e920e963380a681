#!/usr/bin/env python3
# What the documents promise about the tree, as far as a program can tell.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-docs.py ROOT     prints TAP, one case per rule
import os
import re
import sys

SKIP = {".git", "corpus"}
LICENSED = (".c", ".h", ".py", ".sh")


def files_of(root, endings):
    for where, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIP and not f.startswith("build")]
        for name in names:
            if name.endswith(endings):
                yield os.path.relpath(os.path.join(where, name), root)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        return f.read()


def check_links(root):
    """Relative links lead to files, and #anchors to headings of the same file."""
    for path in files_of(root, (".md",)):
        text = read(root, path)
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        anchors = {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-")
                   for h in re.findall(r"^#+ (.*)$", text, re.M)}
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            if file and not os.path.exists(os.path.join(root, os.path.dirname(path), file)):
                yield f"{path}: {target} leads nowhere"
            if not file and anchor not in anchors:
                yield f"{path}: no heading #{anchor}"


def check_program(root):
    """The program in the README is the one that the tests compile."""
    blocks = re.findall(r"```c\n(.*?)```", read(root, "README.md"), re.S)
    if not os.path.exists(os.path.join(root, "examples/hello.c")):
        yield "examples/hello.c is missing"
    elif read(root, "examples/hello.c") not in blocks:
        yield "README.md: its program is not examples/hello.c"


def check_examples(root):
    """The programs in libbfcclient(3) are those in examples/, which the tests compile and run."""
    page = read(root, "man/libbfcclient.3.scd")
    shown = [b for b in re.findall(r"^```\n(.*?)^```", page, re.S | re.M) if "int main(" in b]
    have = {p: read(root, p) for p in files_of(root, (".c",)) if p.startswith("examples/")}
    for path, text in sorted(have.items()):
        if text not in shown:
            yield f"man/libbfcclient.3.scd: {path} is not there, word for word"
    for text in shown:
        if text not in have.values():
            yield f"man/libbfcclient.3.scd: a program that is none of examples/: {text.splitlines()[0]}"


def check_pages(root):
    """Every program has a manual page, and every page that is named exists."""
    have = {p[len("man/"):-len(".scd")] for p in files_of(root, (".scd",)) if p.startswith("man/")}
    for page in ("bfcd.8", "bfcd.yaml.5", "bfcctl.1", "bfc-replay.1", "libbfcclient.3"):
        if page not in have:
            yield f"man/{page}.scd is missing"
    for page in sorted(have):
        for name, section in re.findall(r"\*([\w.-]+)\*\((\d)\)", read(root, f"man/{page}.scd")):
            if name.startswith(("bfc", "libbfc")) and f"{name}.{section}" not in have:
                yield f"man/{page}.scd: names {name}({section}), which is not there"


def check_licence(root):
    for path in files_of(root, LICENSED):
        if "SPDX-License-Identifier: Apache-2.0" not in read(root, path)[:4000]:
            yield f"{path}: no SPDX line"


RULES = (
    ("links in documents lead somewhere", check_links),
    ("the README's program is examples/hello.c", check_program),
    ("libbfcclient(3)'s programs are those in examples/", check_examples),
    ("manual pages are complete", check_pages),
    ("every source names its licence", check_licence),
)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: check-docs.py ROOT")
    failed = False
    print(f"1..{len(RULES)}")
    for number, (name, rule) in enumerate(RULES, 1):
        wrong = list(rule(sys.argv[1]))
        failed = failed or bool(wrong)
        print(f"{'not ok' if wrong else 'ok'} {number} - {name}")
        for one in wrong:
            print(f"# {one}")
            print(f"{name}: {one}", file=sys.stderr)
    return 1 if failed else 0


sys.exit(main())
