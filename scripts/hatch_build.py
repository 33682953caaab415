# SPDX-License-Identifier: Apache-2.0
"""Compiles the modules that loop over flows: each `.py` with a `.pxd` beside it that types it.

They are plain Python, and run without being compiled: slower, with the same results.
"""

import multiprocessing
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

sys.path.append(str(Path(__file__).parent))  # this file is run by its path
from rooms import packages

# Indices stay checked: what goes through here comes from other processes.
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
DIRECTIVES = {"language_level": 3, "annotation_typing": False, "wraparound": False}


class CompileLoops(BuildHookInterface):
    """Puts an extension module beside each of its sources, for wheels and for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build; `build_data` is told that the wheel is for this platform only."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        found = packages(root)
        self.build_config.target_config["packages"] = [str(package) for package in found]
        typed = (
            path.with_suffix(".py") for package in found for path in (root / package).rglob("*.pxd")
        )
        sources = sorted({path for path in typed if path.exists()})
        built = self._compile_all(root, sources)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [f"/{path.relative_to(root)}" for path in built]

    def _compile_all(self, root: Path, sources: list[Path]) -> list[Path]:
        """One process for each processor: most of the time goes into the C compiler."""
        many = os.cpu_count() or 1
        fork = multiprocessing.get_context("fork")  # hatch runs this file as no module
        started = []
        for k in range(many):
            started.append(fork.Process(target=self._compile_each, args=(root, sources[k::many])))
            started[-1].start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise RuntimeError("a loop does not compile: see above")
        return [source.with_suffix(EXT_SUFFIX) for source in sources]

    def _compile_each(self, root: Path, sources: list[Path]) -> None:
        for source in sources:
            self._compile(root, source)

    def _compile(self, root: Path, source: Path) -> None:
        # The package is the folder and those above it that are packages too.
        parts = [source.stem]
        folder = source.parent
        while (folder / "__init__.py").exists():
            parts.insert(0, folder.name)
            folder = folder.parent
        name = ".".join(parts)
        scratch = root / "build" / "loops"
        here = Path.cwd()
        os.chdir(root)
        try:
            extension = Extension(
                name,
                [str(source.relative_to(root))],
                extra_compile_args=["-O2"],
            )
            extensions = cythonize(
                [extension],
                build_dir=str(scratch),
                include_path=[str(folder)],
                compiler_directives=DIRECTIVES,
                force=True,
                quiet=True,
            )
            command = build_ext(Distribution({"name": name, "ext_modules": extensions}))
            command.build_lib, command.build_temp = str(folder), str(scratch / "objects")
            command.finalize_options()
            command.run()
        finally:
            os.chdir(here)
