"""Reads manual pages in scdoc's format, see scdoc(5), as documents of Sphinx.

A paragraph and the indented lines below it are a term and its definition. A name such as *bfcd*(8) is a link if that page
is there.

SPDX-License-Identifier: Apache-2.0
"""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.parsers import Parser

FENCE = "```"
INLINE = re.compile(r"\\(?P<escaped>.)|\*(?P<strong>(?:\\.|[^*\\])+)\*|(?<![A-Za-z0-9])_(?P<emphasis>(?:\\.|[^_\\]|_(?=[A-Za-z0-9]))+)_")
PAGE = re.compile(r"\((\d)\)")


def plain(text):
    return re.sub(r"\\(.)", r"\1", text)


class ScdocParser(Parser):
    """Sections are those of the page; its title is NAME(SECTION)."""

    supported = ("scdoc",)

    def parse(self, inputstring, document):
        self.from_page = document.settings.env.current_document.docname
        self.pages = document.settings.env.found_docs
        self.anchors = set()
        lines = [line for line in inputstring.split("\n") if not line.startswith("; ")]
        title = lines.pop(0).split(" ")[0]
        page = nodes.section("", nodes.title(title, title), ids=[self.anchor(title)])
        document += page
        at = [(0, page)]
        block = []
        in_literal = False
        for line in [*lines, "# "]:
            in_literal ^= line.strip() == FENCE
            heading = None if in_literal else re.match(r"(#+) (.*)", line)
            if heading is None:
                block.append(line)
                continue
            at[-1][1].extend(self.blocks(block))
            block = []
            if heading[2]:
                at = [one for one in at if one[0] < len(heading[1])]
                text = plain(heading[2])
                section = nodes.section("", nodes.title(text, text), ids=[self.anchor(text)])
                at[-1][1].append(section)
                at.append((len(heading[1]), section))

    def anchor(self, text):
        """As for headings in Markdown. Of two that are equal the second gets a number."""
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchor, n = name, 0
        while anchor in self.anchors:
            n += 1
            anchor = f"{name}-{n}"
        self.anchors.add(anchor)
        return anchor

    def blocks(self, lines):
        """Nodes of lines that have no indentation in common."""
        found, i = [], 0
        while i < len(lines):
            line = lines[i]
            if not line.strip():
                i += 1
            elif line.startswith("\t"):
                end = self.end_of_indented(lines, i)
                inner = self.blocks([line.removeprefix("\t") for line in lines[i:end]])
                self.define(found, inner)
                i = end
            elif line == FENCE:
                end = lines.index(FENCE, i + 1)
                text = "\n".join(lines[i + 1 : end])
                found.append(nodes.literal_block(text, text, language="none"))
                i = end + 1
            elif line[0] in "[|]" and re.match(r"[\[|\]][\[\-\] ]? ", line):
                end = i
                while end < len(lines) and re.match(r"[\[|\]:]", lines[end]):
                    end += 1
                found.append(self.table(lines[i:end]))
                i = end
            elif line[:2] in ("- ", ". "):
                end = self.end_of_list(lines, i)
                found.append(self.list(lines[i:end]))
                i = end
            else:
                end = i
                while end < len(lines) and lines[end].strip() and not lines[end].startswith("\t") and lines[end] != FENCE:
                    end += 1
                found.append(nodes.paragraph("", "", *self.inline("\n".join(lines[i:end]))))
                i = end
        return found

    @staticmethod
    def end_of_indented(lines, i):
        end = i
        for j in range(i, len(lines)):
            if lines[j].startswith("\t"):
                end = j + 1
            elif lines[j].strip():
                break
        return end

    @staticmethod
    def end_of_list(lines, i):
        while i < len(lines) and (lines[i][:2] in ("- ", ". ", "  ") or lines[i].startswith("\t")):
            i += 1
        return i

    @staticmethod
    def define(found, inner):
        """The last paragraph becomes the term of a definition."""
        if not found or not isinstance(found[-1], nodes.paragraph):
            found.append(nodes.block_quote("", *inner))
            return
        term = found.pop()
        item = nodes.definition_list_item("", nodes.term("", "", *term.children), nodes.definition("", *inner))
        if found and isinstance(found[-1], nodes.definition_list):
            found[-1].append(item)
        else:
            found.append(nodes.definition_list("", item))

    def list(self, lines):
        kind = nodes.bullet_list("", bullet="-") if lines[0][0] == "-" else nodes.enumerated_list("", enumtype="arabic")
        items = []
        for line in lines:
            if line[:2] in ("- ", ". "):
                items.append([])
            items[-1].append(line[2:] if not line.startswith("\t") else line[1:])
        for item in items:
            kind.append(nodes.list_item("", *self.blocks(item)))
        return kind

    def table(self, lines):
        """The first row is its head."""
        rows = []
        for line in lines:
            if line[0] != ":":
                rows.append([])
            if line[0] == ":" or line[1:].strip():
                rows[-1].append(re.sub(r"^[\[|\]:][\[\-\]]? *", "", line))
        n_columns = max(map(len, rows))
        group = nodes.tgroup("", cols=n_columns)
        group.extend(nodes.colspec("", colwidth=1) for _ in range(n_columns))
        for kind, part in ((nodes.thead, rows[:1]), (nodes.tbody, rows[1:])):
            body = kind("")
            for row in part:
                cells = [nodes.entry("", nodes.paragraph("", "", *self.inline(cell))) for cell in row]
                body.append(nodes.row("", *cells))
            group.append(body)
        return nodes.table("", group)

    def inline(self, text):
        found, at = [], 0

        def add(text):
            for i, part in enumerate(re.split(r"\+\+\n", text)):
                if i:
                    found.append(nodes.raw("", "<br>", format="html"))
                if part:
                    found.append(nodes.Text(part))

        while match := INLINE.search(text, at):
            add(text[at : match.start()])
            at = match.end()
            if match["escaped"]:
                add(match["escaped"])
            elif match["emphasis"]:
                found.append(nodes.emphasis("", plain(match["emphasis"])))
            else:
                name = plain(match["strong"])
                section = PAGE.match(text, at)
                page = f"docs/man/{name}.{section[1]}" if section else ""
                if page in self.pages:
                    at = section.end()
                    label = nodes.inline("", f"{name}({section[1]})")
                    found.append(addnodes.pending_xref("", label, refdomain="std", reftype="doc", reftarget="/" + page,
                                                       refexplicit=True, refwarn=True, refdoc=self.from_page))
                else:
                    found.append(nodes.strong("", name))
        add(text[at:])
        return found


def setup(app):
    app.add_source_suffix(".scd", "scdoc")
    app.add_source_parser(ScdocParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
