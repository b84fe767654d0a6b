"""What pyproject.toml cannot say: found packages plus folders of shipped files, mapped into the wheel.

`configs`, `data` and `models` stay at the top of a checkout, where people look for them, and land in
`rlpipe/_data/` of a wheel; `rlpipe.config.paths.shipped` finds them in either place. This wheel has
only the default model; models/pyproject.toml makes `rlpipe-models`, which adds the others to the same folder.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

SHIPPED = ("configs", "data", "models/tiny", "sglang_env")
CODE = find_namespace_packages(include=["rlpipe", "rlpipe.*"], exclude=["*.__pycache__"])
# setuptools wants each folder named as a package, also one that only holds files.
# A dot cannot stand in such a name: the metadata of SGLang's plugin are files of the folder above them.
FOLDERS = [
    f for top in SHIPPED for f in (Path(top), *Path(top).rglob("*")) if f.is_dir() and "." not in f.name
]
DATA = [".".join(("rlpipe._data", *folder.parts)) for folder in FOLDERS]
FILES = {
    "rlpipe": ["py.typed"],
    "rlpipe.metrics": ["catalogue.toml"],
    "rlpipe.report": ["page.*", "live.js", "plots.toml"],
    "rlpipe.rollout.embedded": ["cpu_kernels.c"],
}

setup(
    packages=CODE + DATA,
    package_dir={".".join(("rlpipe._data", *Path(top).parts)): top for top in SHIPPED},
    package_data={folder: ["*", "*.dist-info/*"] for folder in DATA} | FILES,
)
