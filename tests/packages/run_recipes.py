"""Check the recipes in packaging/ with their own tools, and against the wheel in dist/.

    python tests/packages/run_recipes.py

rattler-build renders the conda recipe. EasyBuild parses its file and checks its style. spython
parses Apptainer's file, and the shell its sections. Spack is not in a package registry, so only the
requirements of its package are read. All must have the wheel's version and requirements.
``make test-packages`` installs the tools and runs this script.
"""

from __future__ import annotations

import contextlib
import email.parser
import io
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGING = ROOT / "packaging"

Requirements = dict[str, tuple[int, ...]]


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, (4, 1) for "4.1", ">=4.1" and "4.1:"."""
    return tuple(map(int, re.findall(r"\d+", text)))


def wheel() -> tuple[str, Requirements]:
    """Return the version of the wheel, and the minimum versions of its requirements."""
    (path,) = (ROOT / "dist").glob(f"*{platform.machine()}.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        fields = email.parser.Parser().parsestr(archive.read(name).decode())
    lines = [each for each in fields.get_all("Requires-Dist", []) if ";" not in each]
    pairs = [re.split(r"(?=>=)", each) for each in lines]
    needs = {name.strip(): numbers(oldest) for name, oldest in pairs}
    return fields["Version"], needs | {"python": numbers(fields["Requires-Python"])}


def expect(name: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{name}: expected {expected}, got {found}")


def check_source(version: str, _: Requirements) -> str:
    """Check that the source distribution has exactly the files that git tracks."""
    (path,) = (ROOT / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {each.name.partition("/")[2] for each in archive if each.isfile()}
    command = ["git", "ls-files"]
    tracked = set(subprocess.check_output(command, cwd=ROOT, text=True).splitlines())
    tracked = {each for each in tracked if not each.startswith(".")}
    made = {"PKG-INFO", "setup.cfg"}
    extra = {each for each in names if each not in made and ".egg-info/" not in each} - tracked
    expect("files that git tracks are missing", sorted(tracked - names), [])
    expect("files that git does not track", sorted(extra), [])
    return f"{len(tracked)} files of {path.name}"


def check_conda(version: str, needs: Requirements) -> str:
    """Check that the recipe renders to one package for each architecture."""
    import rattler_build

    folder = PACKAGING / "conda"
    recipe = rattler_build.Stage0Recipe.from_file(folder / "recipe.yaml")
    variants = rattler_build.VariantConfig.from_file(folder / "variants.yaml")
    packages = []
    for system in ("linux-64", "linux-aarch64"):
        target = rattler_build.PlatformConfig(target_platform=system)
        (rendered,) = recipe.render(variants, rattler_build.RenderConfig(platform=target))
        found = rendered.recipe.to_dict()
        expect("version", found["package"]["version"], version)
        pairs = (each.split(" ", 1) for each in found["requirements"]["run"])
        expect("run", {name: numbers(oldest) for name, oldest in pairs}, needs)
        packages.append(f"{found['package']['name']} {found['build']['string']} for {system}")
    return f"py-rattler-build {metadata.version('py-rattler-build')} renders {', '.join(packages)}"


def check_easybuild(version: str, needs: Requirements) -> str:
    """Check the style and the versions of the easyconfig."""
    from easybuild.framework.easyconfig.easyconfig import process_easyconfig
    from easybuild.framework.easyconfig.style import check_easyconfigs_style
    from easybuild.tools import modules
    from easybuild.tools.options import set_up_configuration

    (path,) = (PACKAGING / "easybuild").glob("*.eb")
    # This machine has no environment modules.
    modules.avail_modules_tools = lambda: {"EnvironmentModules": modules.NoModulesTool}
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as prefix,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        set_up_configuration(
            ["--modules-tool=EnvironmentModules", "--module-syntax=Tcl", f"--prefix={prefix}",
             f"--sourcepath={ROOT / 'dist'}", "--allow-use-as-root-and-accept-consequences"],
            silent=True,
        )  # fmt: skip
        faults = check_easyconfigs_style([str(path)])
        expect(f"style: {output.getvalue()}", faults, 0)
        found = process_easyconfig(str(path), validate=False)[0]["ec"]
    toolchain = f"{found['toolchain']['name']}-{found['toolchain']['version']}"
    expect("version", found["version"], version)
    expect("name of the file", path.name, f"mpicoll-{version}-{toolchain}.eb")
    expect("sources", found["sources"], [f"mpicoll-{version}.tar.gz"])
    # SciPy-bundle includes NumPy.
    has = {each["name"].lower(): numbers(each["version"]) for each in found.dependencies()}
    for name, oldest in needs.items():
        if name != "numpy" and not has.get(name, ()) >= oldest:
            raise ValueError(f"dependencies: expected {name} >= {oldest}, got {has.get(name)}")
    framework = metadata.version("easybuild-framework")
    return f"EasyBuild {framework} parses the easyconfig of {toolchain}"


def check_apptainer(version: str, _: Requirements) -> str:
    """Check the header, and the sections with the shell."""
    from spython.main.parse.parsers import SingularityParser

    path = PACKAGING / "apptainer" / "mpicoll.def"
    image = SingularityParser(str(path)).parse()["spython-base"]
    expect("From", image.fromHeader, "python:3.12-slim")
    expect("%files", set(image.files), {"dist/mpicoll-*.whl /opt/wheels/"})
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", path.read_text(), re.M | re.S))
    known = {"arguments", "files", "post", "environment", "runscript", "test", "labels", "help"}
    expect("sections", set(sections), known)
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n"], input=sections[name], text=True, check=True)
    arguments = set(re.findall(r"^\s*(\w+)=", sections["arguments"], re.M))
    expect("%arguments", arguments, set(re.findall(r"{{ (\w+) }}", sections["post"])))
    return f"parsed by spython {metadata.version('spython')} and the shell, not built by apptainer"


def check_spack(version: str, needs: Requirements) -> str:
    """Check the requirements that the package always has. Spack itself is not installed."""
    path = next((PACKAGING / "spack").rglob("py_mpicoll/package.py"))
    always = re.findall(r'depends_on\("([\w-]+)(?:@([\d.]+):)?"(?![^)]*when=)', path.read_text())
    has = {name.removeprefix("py-").replace("-", "_"): numbers(oldest) for name, oldest in always}
    expect("depends_on", {name: has.get(name) for name in needs}, needs)
    expect("others", set(has) - set(needs), {"c", "setuptools", "mpi"})
    return "parsed, not executed by Spack"


CHECKS = {
    "source": check_source,
    "conda": check_conda,
    "easybuild": check_easybuild,
    "apptainer": check_apptainer,
    "spack": check_spack,
}


def main() -> int:
    failed = 0
    for name, check in CHECKS.items():
        try:
            result = check(*wheel())
        except Exception as error:
            failed += 1
            result = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name:10} {result}", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
