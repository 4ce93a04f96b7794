"""Builds the native programs with the package and ships them in a platform wheel.

Everything else about the package is in pyproject.toml. The programs are static and speak no Python ABI, so
one wheel serves every Python 3 of its architecture: ``py3-none-linux_ARCH``.
"""

from __future__ import annotations

import os
import platform
import subprocess

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = os.path.dirname(os.path.abspath(__file__))


class BuildWithNative(build_py):
    """``build_py`` (and with it the editable install), after `make -C native`."""

    def run(self) -> None:
        """Build into the source tree; package data then carries the programs into the wheel.

        Raises:
            SystemExit: make failed or is missing; says what to install.
        """
        out = os.path.join(HERE, "src", "ringfence", "_native")
        try:
            subprocess.run(
                ["make", "--no-print-directory", "-C", os.path.join(HERE, "native"), f"OUT={out}"], check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"ringfence: the native programs could not be built ({error}); "
                "install a C compiler and make (Debian: apt-get install gcc make musl-tools)"
            ) from error
        super().run()


class PlatformWheel(bdist_wheel):
    """Tagged for the machine's architecture but for every Python 3."""

    def finalize_options(self) -> None:
        """Mark the wheel as not pure: it holds machine code."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-linux_x86_64`` and the like."""
        return "py3", "none", f"linux_{platform.machine()}"


class WithPrograms(Distribution):
    """A distribution that has machine code, so that it is installed into platlib."""

    def has_ext_modules(self) -> bool:
        """Always: the native programs."""
        return True


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel}, distclass=WithPrograms)
