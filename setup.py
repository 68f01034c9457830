"""The packages of hpcrl: all below hpcrl/, and conf/, which stays at the top of the checkout for people to edit."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["hpcrl", "hpcrl.*"]), "hpcrl.conf"], package_dir={"hpcrl.conf": "conf"})
