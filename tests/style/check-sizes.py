#!/usr/bin/env python3
"""Checks the sizes of product code: functions of at most 80 lines, structs of at most 30 fields.

SPDX-License-Identifier: Apache-2.0

usage: check-sizes.py ROOT

A function begins with a { in the first column and ends with a } there, as clang-format writes it. A nested struct is
one field.
"""

import pathlib
import re
import sys

FOLDERS = "include bfc device keeper proto daemon client ctl integrations".split()
MAX_FUNCTION_LINES, MAX_FIELDS = 80, 30


def without_comments(text):
    """The text with comments and strings replaced by blanks, line breaks kept."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


def count_fields(body):
    while (inner := re.sub(r"\{[^{}]*\}", " ", body)) != body:
        body = inner
    return sum(part.count(",") + 1 if "(" not in part else 1 for part in body.split(";")[:-1] if part.strip(" \n}"))


def findings(name, text):
    code = without_comments(text)
    begin = title = None
    for number, line in enumerate(code.splitlines(), 1):
        if line and line[0].isalpha():
            title = line
        if line.startswith("{"):
            begin = number
        elif line.startswith("}") and begin:
            if number - begin + 1 > MAX_FUNCTION_LINES + 2:
                yield f"{name}:{begin}: {title}: {number - begin - 1} lines; a function has at most {MAX_FUNCTION_LINES}"
            begin = None
    for m in re.finditer(r"^(?:typedef )?struct (\w*) ?\{\n(.*?)^\}", code, re.S | re.M):
        n_fields = count_fields(m.group(2))
        if n_fields > MAX_FIELDS:
            yield f"{name}: struct {m.group(1)}: {n_fields} fields; at most {MAX_FIELDS}"


def main():
    root = pathlib.Path(sys.argv[1])
    files = [f for d in FOLDERS for f in sorted((root / d).rglob("*.[ch]"))]
    if not files:
        sys.exit(f"{root}: no C files in {' '.join(FOLDERS)}")
    found = [line for f in files for line in findings(f.relative_to(root), f.read_text())]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
