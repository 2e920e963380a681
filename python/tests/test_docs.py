# The examples of docs/python.md.
#
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import pathlib
import re

import pytest
from conftest import host_only

pytest.importorskip("numpy")


@host_only
def test_the_examples_print_what_the_page_says(daemon, tmp_path):
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
    if importlib.util.find_spec("safetensors") is None:
        text = re.sub(r"^## Weights.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    page = tmp_path / "python.md"
    page.write_text(text)
    r = daemon.run(f"import doctest\nprint(doctest.testfile({str(page)!r}, module_relative=False))")
    assert r.returncode == 0 and "failed=0" in r.stdout and "attempted=0" not in r.stdout, r.stdout + r.stderr
