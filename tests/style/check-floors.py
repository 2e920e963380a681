#!/usr/bin/env python3
# Includes go down only. The floors are in floors.txt beside this file, and
# docs/architecture.md shows the same table.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-floors.py ROOT          prints TAP, one case per rule
#        check-floors.py --self-test   shows that each rule can fail
import fnmatch
import os
import re
import sys

FLOORS = "tests/style/floors.txt"
STORY = "docs/architecture.md"
FOLDERS = ("bfc", "client", "ctl", "daemon", "device", "include", "proto")
# Generated from proto/bfcd.proto, so no file of the tree.
GENERATED = {"proto/bfcd.pb-c.h"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.M)
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\\n])*")', re.S)

# (name, files that the rule is about, files that it spares, what may not stand there)
NEVER = (
    ("libuv is named on the daemon's floors server and connection only",
     "*", ("daemon/server.c", "daemon/connection.c", "daemon/connection.h", "daemon/events.c", "daemon/events.h"),
     re.compile(r"\buv_\w+|\bUV_[A-Z]\w+|<uv\.h>")),
    ("bfc, device, proto and the library never log or print",
     # PyTorch's and CuPy's functions cannot return an error.
     ("bfc/*", "device/*", "proto/*", "client/*"), ("client/frameworks.c",),
     re.compile(r"\blog_(?:write|limited|open|error|warning|notice|info|debug)\b|\bv?f?printf\s*\(|\bperror\s*\(|"
                r"\bsyslog\s*\(|\bsd_journal_\w+|\bputs\s*\(|\bstderr\b")),
    ("bfc does no I/O and knows no clock, lock or thread",
     "bfc/*", (),
     re.compile(r"<(?:stdio|unistd|fcntl|time|pthread|signal|poll|threads|sys/(?!mman)\w+)\.h>|"
                r"\b(?:clock_gettime|pthread_\w+|open|read|write)\s*\(")),
    ("low floors of the daemon do not log",
     ("daemon/tenant.*", "daemon/partition.*", "daemon/quota.*", "daemon/arena.*", "daemon/worker.*",
      "daemon/ledger.*", "daemon/config*", "daemon/account.*"), (),
     re.compile(r"\blog_(?:write|limited|open|error|warning|notice|info|debug)\b")),
)


def read_tree(root):
    files = {}
    for folder in FOLDERS:
        for where, _, names in os.walk(os.path.join(root, folder)):
            for name in names:
                path = os.path.join(where, name)
                if name.endswith((".c", ".h")):
                    with open(path, encoding="utf-8") as f:
                        files[os.path.relpath(path, root)] = f.read()
    return files


def code_of(text):
    """The text without comments, lines kept; strings stay."""
    return COMMENT.sub(lambda m: m.group(1) or "\n" * m.group(0).count("\n"), text)


def read_floors(text):
    floors = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        floors[words[0]] = (words[1], [w for w in words[2:] if w != "-"])
    for name, (_, below) in floors.items():
        for other in below:
            if other not in floors:
                raise ValueError(f"{name} stands on {other}, which is no floor")
    return floors


def reach(floors, name, path=()):
    """The floors under `name`; a circle is an error."""
    if name in path:
        raise ValueError("floors in a circle: " + " -> ".join(path + (name,)))
    below = set()
    for other in floors[name][1]:
        below |= {other} | reach(floors, other, path + (name,))
    return below


def floor_of(floors, file):
    for name, (pattern, _) in floors.items():
        if any(fnmatch.fnmatchcase(file, p) for p in pattern.split(",")):
            return name
    return None


def check_includes(files, floors):
    for file, text in sorted(files.items()):
        here = floor_of(floors, file)
        if here is None:
            yield f"{file}: lives on no floor; add it to {FLOORS}"
            continue
        allowed = reach(floors, here) | {here}
        for match in INCLUDE.finditer(code_of(text)):
            quoted, angled = match.groups()
            if angled is not None and angled != "bfcclient.h":
                continue
            target = "include/bfcclient.h" if angled else quoted
            if target not in files and target not in GENERATED:
                yield f'{file}: includes "{target}", which is not a path from the root'
                continue
            there = floor_of(floors, target)
            if there is not None and there not in allowed:
                yield f"{file}: {here} includes {target}, which is on {there}: not below {here}"


def check_never(files, about, spared, pattern):
    abouts = (about,) if isinstance(about, str) else about
    for file, text in sorted(files.items()):
        if file in spared or not any(fnmatch.fnmatchcase(file, a) for a in abouts):
            continue
        for number, line in enumerate(code_of(text).splitlines(), 1):
            match = pattern.search(line)
            if match:
                yield f"{file}:{number}: {match.group(0).strip()}"


def table_of(text):
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def check_story(floors_text, story):
    block = re.search(r"```floors\n(.*?)```", story, re.S)
    if not block:
        yield f"{STORY}: has no ```floors table"
    elif table_of(block.group(1)) != table_of(floors_text):
        yield f"{STORY}: its ```floors table is not that of {FLOORS}"


def run(files, floors_text, story):
    """[(rule, [what is wrong])]"""
    results = []
    try:
        floors = read_floors(floors_text)
        wrong = list(check_includes(files, floors))
    except ValueError as e:
        wrong = [str(e)]
    results.append(("includes go down only", wrong))
    for name, about, spared, pattern in NEVER:
        results.append((name, list(check_never(files, about, spared, pattern))))
    results.append(("docs/architecture.md shows the same floors", list(check_story(floors_text, story))))
    return results


def self_test():
    table = "up a/* down\ndown b/* -\n"
    story = "```floors\nup a/* down\ndown  b/*  -\n```"
    good = {"a/x.c": '#include "b/y.h"\n#include "a/x.h"\n#include <stdio.h>\n', "a/x.h": "", "b/y.h": ""}
    bad = (
        ("upward", {"b/y.h": '#include "a/x.h"\n'}, table, story, 0),
        ("not from the root", {"a/x.c": '#include "x.h"\n'}, table, story, 0),
        ("no floor", {"c/z.c": ""}, table, story, 0),
        ("circle", {}, "up a/* down\ndown b/* up\n", story, 0),
        ("libuv", {"daemon/arena.c": "int r = uv_run(l);\n"}, table + "d daemon/* -\n", story, 1),
        ("log", {"proto/x.c": 'log_info("x");\n'}, table + "p proto/* -\n", story, 2),
        ("print", {"bfc/x.c": 'printf("x");\n'}, table + "p bfc/* -\n", story, 2),
        ("clock", {"bfc/x.c": "#include <time.h>\n"}, table + "p bfc/* -\n", story, 3),
        ("low log", {"daemon/arena.c": 'log_info("x");\n'}, table + "d daemon/* -\n", story, 4),
        ("story", {}, table, "```floors\nup a/* -\n```", 5),
    )
    failed = 0
    results = run(dict(good, **{"a/c.c": "/* uv_run(), printf( */\n"}), table, story)
    cases = [("nothing wrong", all(not wrong for _, wrong in results))]
    for name, extra, floors_text, text, rule in bad:
        cases.append((name, bool(run(dict(good, **extra), floors_text, text)[rule][1])))
    print(f"1..{len(cases)}")
    for number, (name, caught) in enumerate(cases, 1):
        print(f"{'ok' if caught else 'not ok'} {number} - {name}")
        failed += not caught
    return 1 if failed else 0


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: check-floors.py ROOT | --self-test")
    if sys.argv[1] == "--self-test":
        return self_test()
    root = sys.argv[1]
    with open(os.path.join(root, FLOORS), encoding="utf-8") as f:
        floors_text = f.read()
    with open(os.path.join(root, STORY), encoding="utf-8") as f:
        story = f.read()
    results = run(read_tree(root), floors_text, story)
    print(f"1..{len(results)}")
    for number, (name, wrong) in enumerate(results, 1):
        print(f"{'not ok' if wrong else 'ok'} {number} - {name}")
        for one in wrong:
            print(f"# {one}")
            print(f"{name}: {one}", file=sys.stderr)
    return 1 if any(wrong for _, wrong in results) else 0


sys.exit(main())
