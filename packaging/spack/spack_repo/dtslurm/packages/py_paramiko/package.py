"""A later paramiko than Spack's own package has, for dtslurm."""

from spack_repo.builtin.packages.py_paramiko.package import PyParamiko as BuiltinPyParamiko

from spack.package import *


class PyParamiko(BuiltinPyParamiko):
    """Paramiko is an implementation of SSH version 2."""

    version("5.1.0", sha256="239b5f9b2a53006cd54f83cf8495ee742083708ead947882c8dd2786de79f39b")

    with default_args(type=("build", "run"), when="@5:"):
        depends_on("python@3.9:")
        depends_on("py-invoke@2:")
