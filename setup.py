"""What pyproject.toml cannot say: clusters/ and search_spaces/, at the top of the tree, go into the wheel's package."""

from setuptools import find_packages, setup

SHIPPED = {"echo_explore._shipped.clusters": "clusters", "echo_explore._shipped.search_spaces": "search_spaces"}

setup(packages=[*find_packages(include=["echo_explore", "echo_explore.*"]), *SHIPPED], package_dir=SHIPPED)
