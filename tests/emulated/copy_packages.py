"""Copies installed distributions, and those they need, to a folder: copy_packages.py FOLDER NAME ..."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

folder, wanted = Path(sys.argv[1]), sys.argv[2:]
names, done = list(wanted), set[str]()
while names:
    name = names.pop()
    if name in done:
        continue
    done.add(name)
    try:
        found = distribution(name)
    except PackageNotFoundError:
        if name in wanted:
            sys.exit(f"{name} is not installed: install the project with its tests' packages")
        continue  # one that is not needed on this machine
    needed = [Requirement(text) for text in found.requires or ()]
    names += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    for file in found.files or ():
        if ".." not in file.parts and file.parts[:2] not in (("torch", "include"), ("torch", "test")):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), folder / file)
