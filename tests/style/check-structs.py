#!/usr/bin/env python3
"""Checks that a struct of more than 40 fields says why it has so many.

SPDX-License-Identifier: Apache-2.0

usage: check-structs.py ROOT

Fields are counted as figures.py does: those of a struct inside count as well. The reason stands in the comment directly above the
struct, after "Many fields:". A struct of few fields has no such reason.
"""

import pathlib
import re
import sys

import figures

MAX_FIELDS = 40
REASON = re.compile(r"Many fields: \S+")


def comment_above(text, begin):
    """The comment that ends on the line before, or nothing."""
    before = text[:begin].rstrip("\n")
    return before[before.rindex("/*") :] if before.endswith("*/") and text[len(before) : begin].count("\n") == 1 else ""


def findings(sources):
    structs = dict(figures.bodies(sources))
    for name, text in sources.texts.items():
        for m in re.finditer(r"^(?:typedef |static )?struct (\w+) \{ *\n(.*?)^\}", sources.codes[name], re.S | re.M):
            n = figures.count_fields(m[2], structs)
            has_reason = REASON.search(comment_above(text, m.start())) is not None
            place = f"{name}:{text.count(chr(10), 0, m.start()) + 1}: struct {m[1]}"
            if n > MAX_FIELDS and not has_reason:
                yield f'{place}: {n} fields, more than {MAX_FIELDS}: needs less, or a comment above it with "Many fields: " and why'
            elif n <= MAX_FIELDS and has_reason:
                yield f"{place}: {n} fields, at most {MAX_FIELDS}: its reason for many fields is no longer needed"


def main():
    sources = figures.Sources(pathlib.Path(sys.argv[1]))
    if not sources.texts:
        sys.exit(f"{sys.argv[1]}: no C files in {' '.join(figures.FOLDERS)}")
    found = list(findings(sources))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
