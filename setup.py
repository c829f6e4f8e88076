"""What pyproject.toml has no stable word for: code to be compiled, where there is a compiler for it."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # A library that knows nothing of Python. It is not linked with OpenMP: what it needs of it, it finds in torch,
        # whose threads it shares.
        Extension(
            name="sa_zoo.kernels._fused",
            sources=["sa_zoo/kernels/fused.cpp"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-mavx512f", "-fopenmp"],
            py_limited_api=True,  # one file for all versions of Python
            optional=True,
        )
    ]
)
