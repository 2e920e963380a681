#!/usr/bin/env python3
# What the documents promise about the tree, as far as a program can tell.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-docs.py ROOT                 prints TAP, one case per rule
#        check-docs.py --installed FOLDER   checks the links of FOLDER/README.md
import glob
import os
import re
import subprocess
import sys

SKIP = {".git", "corpus"}
LICENSED = (".c", ".h", ".cpp", ".hpp", ".py", ".sh")


def files_of(root, endings):
    for where, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIP and not f.startswith("build")]
        for name in names:
            if name.endswith(endings):
                yield os.path.relpath(os.path.join(where, name), root)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        return f.read()


def relative_links(text):
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    return sorted({link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)})


def anchors_of(text):
    """As GitHub makes them: a heading that is there twice gets a number."""
    anchors, seen = set(), {}
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        anchors.add(anchor + (f"-{seen[anchor]}" if anchor in seen else ""))
        seen[anchor] = seen.get(anchor, 0) + 1
    return anchors


def check_links(root):
    """Relative links lead to files, and #anchors to headings of these files."""
    for path in files_of(root, (".md",)):
        prose = re.sub(r"```.*?```", "", read(root, path), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            to = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
            if not os.path.exists(os.path.join(root, to)):
                yield f"{path}: {target} leads nowhere"
            elif anchor and to.endswith(".md") and anchor not in anchors_of(read(root, to)):
                yield f"{path}: {to} has no heading #{anchor}"


def check_decisions(root):
    """Other documents name decisions and sections of docs/architecture.md by title, because numbers change."""
    text = read(root, "docs/architecture.md")
    titles = set(re.findall(r"^\*\*\d+\. (.+?)\.\*\*|^## (.+)$", text, re.M))
    titles = {decision or section for decision, section in titles}
    for path in files_of(root, (".md",)):
        for number, title in re.findall(r'architecture\.md[`)\]]*,\s+(?:(decision \d+|\d+)|"([^"]+)")', read(root, path)):
            if number:
                yield f"{path}: names '{number}' of docs/architecture.md, not its title"
            elif " ".join(title.split()) not in titles:
                yield f"{path}: docs/architecture.md has no '{title}'"


def packaged(root):
    """Paths below /usr/share/doc/bfcd that the Debian package puts there."""
    for line in read(root, "packaging/debian/bfcd.docs").split():
        yield os.path.basename(line)
    for pattern, where in re.findall(r"^(\S+) usr/share/doc/bfcd(\S*)$", read(root, "packaging/debian/bfcd.install"), re.M):
        for path in glob.glob(os.path.join(root, pattern)):
            to = os.path.join(where.lstrip("/"), os.path.basename(path))
            yield to
            yield from (os.path.join(to, name) for name in (os.listdir(path) if os.path.isdir(path) else ()))
    yield from re.findall(r"\S+ usr/share/doc/bfcd/(\S+)$", read(root, "packaging/debian/bfcd.links"), re.M)


def check_packaged(root):
    """The README in the package finds the documents that it links to."""
    have = set(packaged(root))
    for target in relative_links(read(root, "README.md")):
        if target not in have:
            yield f"README.md: {target} is not in the package bfcd"


def check_installed(folder):
    for target in relative_links(read(folder, "README.md")):
        if not os.path.exists(os.path.join(folder, target)):
            yield f"{folder}/README.md: {target} leads nowhere"


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def check_benchmarks(root):
    """The table of docs/benchmarks.md is what its raw results say, and the README's figures are some of them."""
    path = os.path.join(root, "docs/benchmarks/host.json")
    made = subprocess.run([sys.executable, os.path.join(root, "scripts/bench"), "--table", path], capture_output=True, text=True)
    if made.returncode != 0 or made.stdout not in read(root, "docs/benchmarks.md"):
        yield f"docs/benchmarks.md: its table is not that of scripts/bench --table docs/benchmarks/host.json {made.stderr}"
    shown = rows(read(root, "README.md").partition("\n## Measured\n")[2].partition("\n## ")[0])
    if len(shown) < 4:
        yield "README.md: there is no table of what was measured"
    for line in shown:
        if line not in made.stdout.splitlines():
            yield f"README.md: not in docs/benchmarks.md: {line}"


def check_readme(root):
    n_lines = len(read(root, "README.md").splitlines())
    if n_lines > 120:
        yield f"README.md: it has {n_lines} lines, more than 120"


def check_third_party(root):
    """THIRD-PARTY.md lists what the build files name: libraries, what the wheel carries, and Go's modules."""
    text = read(root, "THIRD-PARTY.md")
    libraries = [row for row in rows(text.partition("\n## Programs and libraries\n")[2].partition("\n## ")[0])][2:]
    listed = {name for row in libraries for name in re.findall(r"^\| `([^`]+)`", row)}
    used = set(re.findall(r"\bdependency\('([^']+)'", read(root, "meson.build"))) - {"check", "threads"}
    for name in sorted(listed ^ used):
        yield f"THIRD-PARTY.md: '{name}' is not both there and in meson.build"
    carried = set(re.search(r"for package in ([^;]+); do\n.*/copyright", read(root, "scripts/wheel"))[1].split())
    for name in sorted(carried ^ {row.strip("| ").split("|")[-1].strip() for row in libraries} - {"no"}):
        yield f"THIRD-PARTY.md: '{name}' is not both there and in scripts/wheel"
    needs = re.findall(r"^dependencies\b.*", read(root, "python/pyproject.toml"), re.M)
    if needs:
        yield f"THIRD-PARTY.md: says that the Python package installs nothing else, and pyproject.toml has {needs[0]}"
    modules = set(re.findall(r"`([^`]+)`", "".join(rows(text.partition("\n## bfcd-dra\n")[2].partition("\n## ")[0]))))
    required = re.findall(r"^\t(\S+) v\S+( // indirect)?", read(root, "integrations/kubernetes/go.mod"), re.M)
    for name in sorted(modules - {module for module, _ in required}):
        yield f"THIRD-PARTY.md: '{name}' is not in go.mod"
    for name in sorted({module for module, indirect in required if not indirect} - modules):
        yield f"THIRD-PARTY.md: '{name}' of go.mod is missing"


def check_examples(root):
    """The programs in libbfcclient(3) are those in examples/, which the tests compile and run."""
    page = read(root, "docs/man/libbfcclient.3.scd")
    shown = [b for b in re.findall(r"^```\n(.*?)^```", page, re.S | re.M) if "int main(" in b]
    have = {p: read(root, p) for p in files_of(root, (".c",)) if p.startswith("examples/")}
    for path, text in sorted(have.items()):
        if text not in shown:
            yield f"docs/man/libbfcclient.3.scd: {path} is not there, word for word"
    for text in shown:
        if text not in have.values():
            yield f"docs/man/libbfcclient.3.scd: a program that is none of examples/: {text.splitlines()[0]}"


def check_examples_cpp(root):
    """The programs in docs/cpp.md are those in examples/."""
    shown = re.findall(r"^```cpp\n(.*?)^```", read(root, "docs/cpp.md"), re.S | re.M)
    have = {p: read(root, p) for p in files_of(root, (".cpp",)) if p.startswith("examples/")}
    for path, text in sorted(have.items()):
        if text not in shown:
            yield f"docs/cpp.md: {path} is not there, word for word"
    for text in shown:
        if text not in have.values():
            yield f"docs/cpp.md: a program that is none of examples/: {text.splitlines()[0]}"


def check_pages(root):
    """Every program has a manual page, and every page that is named exists."""
    have = {p[len("docs/man/"):-len(".scd")] for p in files_of(root, (".scd",)) if p.startswith("docs/man/")}
    for page in ("bfcd.8", "bfcd.yaml.5", "bfcctl.1", "bfc-replay.1", "libbfcclient.3"):
        if page not in have:
            yield f"docs/man/{page}.scd is missing"
    for page in sorted(have):
        for name, section in re.findall(r"\*([\w.-]+)\*\((\d)\)", read(root, f"docs/man/{page}.scd")):
            if name.startswith(("bfc", "libbfc")) and f"{name}.{section}" not in have:
                yield f"docs/man/{page}.scd: names {name}({section}), which is not there"


def check_licence(root):
    for path in files_of(root, LICENSED):
        if "SPDX-License-Identifier: Apache-2.0" not in read(root, path)[:4000]:
            yield f"{path}: no SPDX line"


def check_bounds(root):
    """Each row of SECURITY.md's table of bounds names tests that exist."""
    section = read(root, "SECURITY.md").partition("\n### What is bounded\n")[2].partition("\n### ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    if not rows:
        yield "SECURITY.md: there is no table of bounds"
    for row in rows:
        tests = re.findall(r"`(test_\w+\.c): (\w+)`", row[-1])
        if not tests:
            yield f"SECURITY.md: no test in the row of '{row[0].strip()}'"
        for file, case in tests:
            sources = glob.glob(os.path.join(root, "tests", "*", file))
            pattern = rf"TEST(_OF)?\((\w+, )?{case}\b"
            if not any(re.search(pattern, open(source, encoding="utf-8").read()) for source in sources):
                yield f"SECURITY.md: there is no test {case} in {file}"


RULES = (
    ("links in documents lead somewhere", check_links),
    ("decisions are named by their titles", check_decisions),
    ("the README's links lead somewhere in the package", check_packaged),
    ("the README is short", check_readme),
    ("figures are those of the raw results", check_benchmarks),
    ("third-party software is listed", check_third_party),
    ("libbfcclient(3)'s programs are those in examples/", check_examples),
    ("the programs of docs/cpp.md are those in examples/", check_examples_cpp),
    ("manual pages are complete", check_pages),
    ("every source names its licence", check_licence),
    ("every bound in SECURITY.md has a test", check_bounds),
)


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--installed":
        return "\n".join(check_installed(sys.argv[2])) or 0
    if len(sys.argv) != 2:
        sys.exit("usage: check-docs.py ROOT | --installed FOLDER")
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
