"""Makes the site of the documents, see scripts/site. The documents stay where they are: the source is the checkout.

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/site"))
import docstrings  # noqa: E402

MANUALS = " ".join(f"docs/man/{path.stem}" for path in sorted((ROOT / "docs/man").glob("*.scd")))
PAGES = (
    ("Start", "docs/start docs/concepts docs/limits docs/comparison docs/benchmarks"),
    ("For jobs", "docs/python docs/frameworks docs/cpp docs/preload docs/vllm docs/sglang"),
    ("For operators", "docs/operations docs/monitoring integrations/grafana/README docs/containers SECURITY"),
    ("For clusters", "docs/kubernetes docs/slurm docs/ray"),
    ("Reference", f"{MANUALS} docs/site/bfcclient docs/site/bfcd"),
    ("For developers", "CONTRIBUTING docs/first-change docs/architecture docs/protocol docs/allocator docs/cuda"),
    ("The project", "CHANGELOG ROADMAP SUPPORT GOVERNANCE MAINTAINERS CODE_OF_CONDUCT THIRD-PARTY"),
)

project = "bfcd"
copyright = "the authors of bfcd"
extensions = ["myst_parser", "scdoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "integrations/grafana/README.md"]
html_theme = "furo"
html_title = "bfcd"
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_permalinks = False
highlight_language = "none"
myst_heading_anchors = 4
nitpicky = True
suppress_warnings = ["myst.header"]
smartquotes = False  # they change --options
html_domain_indices = html_use_index = False


def add_pages(app, docname, source):
    """The first page has the list of all, and two pages have what is made from sources. They are not in the files, which are
    also read where they would be shown as text."""
    if docname == root_doc:
        for title, pages in PAGES:
            rows = "\n".join("/" + page for page in pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{rows}\n```\n"
    if docname == "docs/site/bfcd":
        source[0] += "\n" + docstrings.reference(ROOT / "python/bfcd")
    if docname == "docs/site/bfcclient":
        for name, language in (("bfcclient.h", "c"), ("bfcclient.hpp", "cpp")):
            source[0] += f"\n## {name}\n\n```{language}\n{(ROOT / 'include' / name).read_text(encoding='utf-8')}```\n"


def make_index(app, exception):
    if exception is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app):
    app.connect("source-read", add_pages)
    app.connect("build-finished", make_index)
