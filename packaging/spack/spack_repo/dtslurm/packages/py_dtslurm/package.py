"""The Spack package of dtslurm."""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyDtslurm(PythonPackage):
    """From a training script to a correct, fast, fault-tolerant run on any Slurm cluster."""

    pypi = "dtslurm/dtslurm-0.2.0.tar.gz"

    license("MIT")

    # Replace the checksum after the release.
    version("0.2.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("py-hatchling@1.26:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-click@8.1:")
        depends_on("py-clustershell@1.9.3:")
        depends_on("py-jinja2@3.1.6:")
        depends_on("py-paramiko@5.0:")
        depends_on("py-pathspec@0.12.1:")
        depends_on("py-pydantic-core@2.18:")
        depends_on("py-pyyaml@6.0:")
        depends_on("py-rich@14.1:")
        depends_on("py-textual@8.2:8")
