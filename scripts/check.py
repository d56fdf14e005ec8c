#!/usr/bin/env python3
"""Rules that rustc does not check.

check.py boundaries   the arrows between the crates (ARCHITECTURE.md), and what no source file may hold
check.py deny         licences, bans and sources of deny.toml, where cargo-deny is not installed

Prints one line for each breach and exits 1 if there is any.
"""
import json
import pathlib
import re
import subprocess
import sys

ARROWS = {
    "config": set(),
    "kernels": set(),
    "model": {"kernels", "config"},
    "tiers": {"kernels", "config"},
    "runtime": {"config", "kernels", "model", "tiers"},
    "tests": {"config", "kernels", "model", "tiers", "runtime"},
}
RUNTIME_ONLY = {"actix", "actix-web", "actix-rt", "tokio"}

# What, in which files, and which of these are excused.
FORBIDDEN = [
    (r"\bbincode::", r"\.rs$", r"/codec\.rs$", "bincode belongs to codec.rs alone"),
    (r"\b(TODO|FIXME|XXX)\b", r"\.(rs|py|toml|md)$|^Makefile$", r"^scripts/check\.py$", "unfinished work"),
    (r"(?<![\w.~$}])/(work|root|home|tmp)/", r".", r"^scripts/check\.py$|^Cargo\.lock$|/fixtures/", "a path of one machine"),
]
UNWRAP_EXCUSED = re.compile(r"(^|/)(tests|benches|examples)(/|\.rs$)|_tests?\.rs$|/conformance(\.rs$|/)")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def boundaries() -> list[str]:
    return arrows() + forbidden()


def arrows() -> list[str]:
    breaches = []
    for crate, allowed in ARROWS.items():
        package = f"keepsake-{crate}"
        direct = tree(package, "--depth", "1", "--edges", "normal,build,dev")
        members = {name.removeprefix("keepsake-") for name in direct if name.startswith("keepsake-")} - {crate}
        breaches += [f"{package} depends on keepsake-{name}" for name in sorted(members - allowed)]
        if crate not in ("runtime", "tests"):
            everything = tree(package, "--edges", "normal,build,dev")
            breaches += [f"{package} reaches {name}" for name in sorted(everything & RUNTIME_ONLY)]
        elif crate == "tests":
            breaches += [f"{package} depends on {name}" for name in sorted(direct & RUNTIME_ONLY)]
    return breaches


def tree(package: str, *options: str) -> set[str]:
    lines = run("cargo", "tree", "--locked", "--package", package, "--prefix", "none", "--format", "{p}", *options)
    return {line.split()[0] for line in lines.splitlines() if line.strip()}


def forbidden() -> list[str]:
    breaches = []
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        path = pathlib.Path(name)
        if not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for pattern, files, excused, why in FORBIDDEN:
            if re.search(files, name) and not re.search(excused, name):
                breaches += [f"{name}:{line_of(text, match)}: {why}" for match in re.finditer(pattern, text)]
        if name.endswith(".rs") and not UNWRAP_EXCUSED.search(name):
            breaches += unwraps(name, text)
    return breaches


def line_of(text: str, match: re.Match) -> int:
    return text.count("\n", 0, match.start()) + 1


def unwraps(name: str, text: str) -> list[str]:
    """Test modules come last in a file: what follows them is not looked at."""
    breaches = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("#[cfg(test)]") and lines[number : number + 1] and lines[number].rstrip().endswith("{"):
            break
        code = line.split("//")[0]
        if re.search(r"\.unwrap(_err)?\(\)", code):
            breaches.append(f"{name}:{number}: unwrap outside tests, use expect(\"why it holds\")")
    return breaches


def deny() -> list[str]:
    import tomllib  # Python 3.11: asked for by this command only

    rules = tomllib.loads(pathlib.Path("deny.toml").read_text())
    host = re.search(r"host: (\S+)", run("rustc", "-vV")).group(1)
    metadata = json.loads(run("cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", host))
    packages = {package["id"]: package for package in metadata["packages"]}
    allowed = set(rules["licenses"]["allow"])
    breaches = []
    for package in packages.values():
        label = f"{package['name']} {package['version']}"
        if not licence_allowed(package["license"] or "", allowed):
            breaches.append(f"{label}: licence {package['license']!r} is not in deny.toml")
        if package["source"] is None and package["id"] not in metadata["workspace_members"]:
            breaches.append(f"{label}: from a path outside the workspace")
        if (package["source"] or "registry+").startswith("git+"):
            breaches.append(f"{label}: from {package['source']}")
    registries = {package["source"] for package in packages.values()} - {None}
    if len(registries) > 1:
        breaches.append(f"more than one source of packages: {sorted(registries)}")
    users = {}
    for node in metadata["resolve"]["nodes"]:
        for dependency in node["dependencies"]:
            users.setdefault(packages[dependency]["name"], set()).add(packages[node["id"]]["name"])
    for ban in rules["bans"]["deny"]:
        unexpected = users.get(ban["crate"], set()) - set(ban.get("wrappers", []))
        breaches += [f"{user} uses {ban['crate']}: {ban['reason']}" for user in sorted(unexpected)]
    return breaches


def licence_allowed(expression: str, allowed: set[str]) -> bool:
    """SPDX: OR, AND, parentheses; the old "/" means OR. AND binds tighter than OR."""
    tokens = re.findall(r"[()]|[^()\s/]+(?:\s+WITH\s+[^()\s/]+)?|/", expression)
    tokens = ["OR" if token == "/" else token for token in tokens]

    def alternatives() -> bool:
        result = conjunction()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            result = conjunction() or result
        return result

    def conjunction() -> bool:
        result = licence()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            result = licence() and result
        return result

    def licence() -> bool:
        token = tokens.pop(0)
        if token != "(":
            return token in allowed
        result = alternatives()
        tokens.pop(0)
        return result

    return bool(tokens) and alternatives() and not tokens


def main() -> None:
    checks = {"boundaries": boundaries, "deny": deny}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        sys.exit(__doc__)
    breaches = checks[sys.argv[1]]()
    for breach in breaches:
        print(f"check: {breach}", file=sys.stderr)
    if breaches:
        sys.exit(1)
    print(f"{sys.argv[1]}: ok")


main()
