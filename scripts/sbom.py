#!/usr/bin/env python3
"""Writes the list of what a release's files are made of, and of their checksums: SPDX 2.3, in JSON.

usage: sbom.py FOLDER VERSION      the files of FOLDER; the list is FOLDER/bfcd-VERSION.spdx.json

What is linked statically into the programs of the wheel is asked of dpkg, so it runs on the system that built them. What is in
the image is in the image: the status of its Debian packages, and the modules that Go wrote into bfcd-dra.

SPDX-License-Identifier: Apache-2.0
"""

import datetime
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

from spdx_tools.spdx.model import (Actor, ActorType, Checksum, ChecksumAlgorithm, CreationInfo, Document,
                                   ExternalPackageRef, ExternalPackageRefCategory, File, Package, PackagePurpose,
                                   Relationship, RelationshipType, SpdxNoAssertion)
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.write_anything import write_file

Component = tuple[str, str, str]  # name, version, package URL


def debian(name: str, version: str) -> Component:
    return name, version, f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}"


def static_libraries(wheel: pathlib.Path) -> list[Component]:
    """The packages whose licences the wheel has."""
    with zipfile.ZipFile(wheel) as z:
        packages = re.findall(r"/LICENSE\.(\S+)$", "\n".join(z.namelist()), re.MULTILINE)
    if not packages:
        sys.exit(f"{wheel} has no licences of what is linked statically")
    said = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *packages], check=True, text=True,
                          stdout=subprocess.PIPE).stdout
    return [debian(*line.split()) for line in said.splitlines()]


def layer_of(image: pathlib.Path) -> tarfile.TarFile:
    """The file system of an OCI layout with one layer."""
    with tarfile.open(image) as layout:
        def blob(digest: str) -> bytes:
            return layout.extractfile("./blobs/" + digest.replace(":", "/")).read()

        index = json.load(layout.extractfile("./index.json"))
        manifest = json.loads(blob(index["manifests"][0]["digest"]))
        [layer] = manifest["layers"]
        return tarfile.open(fileobj=io.BytesIO(blob(layer["digest"])))


def parts_of_image(image: pathlib.Path) -> list[Component]:
    parts = []
    with layer_of(image) as layer:
        for member in layer.getmembers():
            if member.name.startswith("./var/lib/dpkg/status.d/") and member.isfile():
                status = layer.extractfile(member).read().decode()
                parts.append(debian(*(re.search(f"^{key}: (.*)$", status, re.MULTILINE)[1] for key in ("Package", "Version"))))
        if not parts:
            sys.exit(f"{image} does not say which packages it has (/var/lib/dpkg/status.d)")
        with tempfile.NamedTemporaryFile(suffix="-bfcd-dra") as program:
            program.write(layer.extractfile("./usr/bin/bfcd-dra").read())
            program.flush()
            said = subprocess.run(["go", "version", "-m", program.name], check=True, text=True, stdout=subprocess.PIPE).stdout
    for line in said.splitlines():
        match line.split("\t"):
            case ["", "dep", module, version, *_]:
                parts.append((module, version, f"pkg:golang/{module}@{version.replace('+', '%2B')}"))
    parts.append(("go", version := re.search(r": go(\S+)", said)[1], f"pkg:golang/std@{version}"))
    return parts


def id_of(kind: str, name: str) -> str:
    return f"SPDXRef-{kind}-" + re.sub("[^A-Za-z0-9.]", "-", name)


def main(folder: pathlib.Path, version: str) -> None:
    into = folder / f"bfcd-{version}.spdx.json"
    created = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC).replace(tzinfo=None)
    product = Package(spdx_id="SPDXRef-Package-bfcd", name="bfcd", version=version, download_location=SpdxNoAssertion(),
                      primary_package_purpose=PackagePurpose.APPLICATION, files_analyzed=False)
    relationships = [Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, product.spdx_id)]
    files, packages = [], {}
    for path in sorted(folder.iterdir()):
        if path == into or path.name == "SHA256SUMS":
            continue
        content = path.read_bytes()
        of = File(spdx_id=id_of("File", path.name), name="./" + path.name, checksums=[
            Checksum(ChecksumAlgorithm.SHA1, hashlib.sha1(content, usedforsecurity=False).hexdigest()),
            Checksum(ChecksumAlgorithm.SHA256, hashlib.sha256(content).hexdigest())])
        files.append(of)
        relationships.append(Relationship(of.spdx_id, RelationshipType.GENERATED_FROM, product.spdx_id))
        parts, how = [], RelationshipType.CONTAINS
        if path.suffix == ".whl":
            parts, how = static_libraries(path), RelationshipType.STATIC_LINK
        elif path.name.endswith(".oci.tar"):
            parts = parts_of_image(path)
        for name, of_version, url in parts:
            part = packages.setdefault(url, Package(
                spdx_id=id_of("Package", f"{name}-{of_version}"), name=name, version=of_version,
                download_location=SpdxNoAssertion(), files_analyzed=False, external_references=[
                    ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", url)]))
            relationships.append(Relationship(of.spdx_id, how, part.spdx_id))
    names = hashlib.sha256("".join(str(f.checksums) for f in files).encode()).hexdigest()
    document = Document(
        CreationInfo(spdx_version="SPDX-2.3", spdx_id="SPDXRef-DOCUMENT", name=f"bfcd-{version}",
                     document_namespace=f"https://bfcd.example.org/spdx/bfcd-{version}-{names}",
                     creators=[Actor(ActorType.TOOL, "bfcd-scripts-release")], created=created),
        packages=[product, *packages.values()], files=files, relationships=relationships)
    if problems := validate_full_spdx_document(document):
        sys.exit("\n".join(problem.validation_message for problem in problems))
    write_file(document, str(into), validate=False)
    parse_file(str(into))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
