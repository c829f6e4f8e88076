"""What pyproject.toml cannot state: a compiled library, and recipes outside the package's folder."""

from setuptools import Extension, find_packages, setup

setup(
    # configs/ is the one place of the recipes; in an installation it is the folder sa_zoo/recipes
    packages=[*find_packages(include=["sa_zoo*"]), "sa_zoo.recipes"],
    package_dir={"sa_zoo.recipes": "configs"},
    package_data={"sa_zoo": ["publishing/*.jinja", "analysis/explorer_page/*"], "sa_zoo.recipes": ["*.toml"]},
    ext_modules=[
        # A library that does not use Python's headers, built if there is a compiler. It is not linked with OpenMP: it
        # finds those functions in torch, whose threads it shares.
        Extension(
            name="sa_zoo.kernels._fused",
            sources=["sa_zoo/kernels/fused.cpp"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-mavx512f", "-fopenmp"],
            py_limited_api=True,  # one file for all versions of Python
            optional=True,
        )
    ],
)
