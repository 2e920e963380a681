#!/usr/bin/env python3
# A folder is a layer, and includes go down only. layers.txt beside this file lists the folders.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-layers.py ROOT          prints TAP, one case per rule
#        check-layers.py --self-test   shows that each rule can fail
import fnmatch
import os
import re
import sys
import types

import figures

LAYERS = "tests/style/layers.txt"
FOLDERS = ("bfc", "client", "ctl", "daemon", "device", "include", "integrations/preload", "keeper", "proto")
MAX_CIRCLE = 8  # files that include each other, in CIRCLES; a .c file and its header count as two
CIRCLES = ("client/", "daemon/")
# Generated from .proto files, so no files of the tree.
GENERATED = {"proto/bfcd.pb-c.h"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.M)
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\\n])*")', re.S)

# (name, files that the rule is about, files that it spares, what may not stand there)
NEVER = (
    ("libuv is named in the daemon's server, listener, connection, stream and events only",
     "*", ("daemon/net/server.c", "daemon/net/listener.c", "daemon/net/listener.h", "daemon/net/connection.c", "daemon/net/connection.h", "daemon/net/stream.c", "daemon/net/stream.h", "daemon/net/events.c", "daemon/net/events.h"),
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
    ("low layers of the daemon do not log",
     ("daemon/memory/tenant.*", "daemon/memory/partition.*", "daemon/memory/quota*", "daemon/memory/queue.*", "daemon/memory/arena*", "daemon/memory/extent*", 
      "daemon/memory/worker.*",
      "daemon/ledger/ledger.*", "daemon/config*", "daemon/memory/account.*"), (),
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


def read_layers(text):
    """{folder: the folders that it includes}, from the bottom up."""
    layers = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words:
            layers[words[0]] = [w for w in words[1:] if w != "-"]
    order = list(layers)
    for folder, below in layers.items():
        for other in below:
            if other not in layers:
                raise ValueError(f"{folder} includes {other}, which is not in {LAYERS}")
            if order.index(other) >= order.index(folder):
                raise ValueError(f"{folder} includes {other}, which does not stand before it in {LAYERS}")
    return layers


def includes(files):
    """(file, the file that it includes)"""
    for file, text in sorted(files.items()):
        for quoted, angled in INCLUDE.findall(code_of(text)):
            if quoted or angled == "bfcclient.h":
                yield file, quoted or "include/bfcclient.h"


def check_includes(files, layers):
    used = set()
    for folder in sorted({os.path.dirname(file) for file in files} - set(layers)):
        yield f"{folder}: is not in {LAYERS}"
    for file, target in includes(files):
        here, there = os.path.dirname(file), os.path.dirname(target)
        used.add((here, there))
        if target not in files and target not in GENERATED:
            yield f'{file}: includes "{target}", which is not a path from the root'
        elif there != here and there not in layers.get(here, []):
            yield f"{file}: includes {target}, and {LAYERS} does not list {there} for {here}"
    for folder, below in layers.items():
        for other in below:
            if (folder, other) not in used:
                yield f"{LAYERS}: no file of {folder} includes a header of {other} any more"


def check_circles(files):
    sources = types.SimpleNamespace(texts=files)
    for circle in figures.circles(sources):
        n = len(figures.files_of(sources, circle))
        if n > MAX_CIRCLE and circle[0].startswith(CIRCLES):
            yield f"{n} files in {circle[0].rpartition('/')[0]} include each other: {figures.edges_of(sources, circle)}"


def check_never(files, about, spared, pattern):
    abouts = (about,) if isinstance(about, str) else about
    for file, text in sorted(files.items()):
        if file in spared or not any(fnmatch.fnmatchcase(file, a) for a in abouts):
            continue
        for number, line in enumerate(code_of(text).splitlines(), 1):
            match = pattern.search(line)
            if match:
                yield f"{file}:{number}: {match.group(0).strip()}"


def run(files, layers_text):
    """[(rule, [what is wrong])]"""
    results = []
    try:
        layers = read_layers(layers_text)
        wrong = list(check_includes(files, layers))
    except ValueError as e:
        wrong = [str(e)]
    results.append(("includes go down only", wrong))
    results.append((f"at most {MAX_CIRCLE} files include each other", list(check_circles(files))))
    for name, about, spared, pattern in NEVER:
        results.append((name, list(check_never(files, about, spared, pattern))))
    return results


def self_test():
    table = "b -\na b\n"
    good = {"a/x.c": '#include "b/y.h"\n#include "a/x.h"\n#include <stdio.h>\n', "a/x.h": "", "b/y.h": ""}
    bad = (
        ("upward", {"b/y.h": '#include "a/x.h"\n'}, table, 0),
        ("not from the root", {"a/x.c": '#include "x.h"\n'}, table, 0),
        ("no layer", {"c/z.c": ""}, table, 0),
        ("not listed", {}, "b -\na -\n", 0),
        ("listed upward", {}, "a b\nb -\n", 0),
        ("listed and not used", {}, "c -\nb -\na b c\n", 0),
        ("circle", {f"client/{i}.{e}": f'#include "client/{(i + 1) % 5}.h"\n' for i in range(5) for e in "ch"}, table + "client -\n", 1),
        ("libuv", {"daemon/memory/arena.c": "int r = uv_run(l);\n"}, table + "daemon/memory -\n", 2),
        ("log", {"proto/x.c": 'log_info("x");\n'}, table + "proto -\n", 3),
        ("print", {"bfc/x.c": 'printf("x");\n'}, table + "bfc -\n", 3),
        ("clock", {"bfc/x.c": "#include <time.h>\n"}, table + "bfc -\n", 4),
        ("low log", {"daemon/memory/arena.c": 'log_info("x");\n'}, table + "daemon/memory -\n", 5),
    )
    failed = 0
    results = run(dict(good, **{"a/c.c": "/* uv_run(), printf( */\n"}), table)
    cases = [("nothing wrong", all(not wrong for _, wrong in results))]
    for name, extra, layers_text, rule in bad:
        cases.append((name, bool(run(dict(good, **extra), layers_text)[rule][1])))
    print(f"1..{len(cases)}")
    for number, (name, caught) in enumerate(cases, 1):
        print(f"{'ok' if caught else 'not ok'} {number} - {name}")
        failed += not caught
    return 1 if failed else 0


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: check-layers.py ROOT | --self-test")
    if sys.argv[1] == "--self-test":
        return self_test()
    root = sys.argv[1]
    with open(os.path.join(root, LAYERS), encoding="utf-8") as f:
        layers_text = f.read()
    results = run(read_tree(root), layers_text)
    print(f"1..{len(results)}")
    for number, (name, wrong) in enumerate(results, 1):
        print(f"{'not ok' if wrong else 'ok'} {number} - {name}")
        for one in wrong:
            print(f"# {one}")
            print(f"{name}: {one}", file=sys.stderr)
    return 1 if any(wrong for _, wrong in results) else 0


sys.exit(main())
