"""Does a run that exists have the flags that are asked for?

Run:  python benchmark/have.py FILE SCRIPT FLAGS...
      FILE: a results file, or the config.json of a run that may be resumed
      exit code 0: yes; 1: no, and what differs is printed; of a run also if its script has changed
      python benchmark/have.py --free SCRIPT FLAGS...
      exit code 0: none of the flags changes what is learned; 1: those that do are printed

A results file holds the arguments of its run (`# args: {...}`). An older one holds the command,
which is parsed with the defaults that the script has today. Flags and defaults are read from the
script's text: nothing is imported, so that a suite can ask this for each of its runs.
"""

import argparse
import ast
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

# What may differ: none of it changes what is learned.
FREE = set("exp_name resume evaluate cuda compile env_threads micro_batch capture_video".split())
FREE |= set("track wandb_project_name wandb_entity checkpoint_every checkpoint_seconds".split())
FREE |= set("eval_episodes eval_deterministic eval_levels".split())
# Removed flags, each with the value that gave today's behaviour.
GONE = {"checkpoint_every": 50, "env_threads": 0, "recompute_advantages": False}
GONE |= {"init": "torch", "layer_norm": False, "norm_reward_rollout": False, "reward_gamma": None}


@cache
def fields_of(script: Path) -> dict[str, tuple[type, object]]:
    """Type and default of the fields of the script's Args; `...` is a default that is computed."""
    tree = ast.parse(script.read_text())
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    fields = {}
    for field in args.body:
        if isinstance(field, ast.AnnAssign):
            kind = ast.unparse(field.annotation).removesuffix(" | None")
            try:
                default = ast.literal_eval(field.value)
            except ValueError:
                default = ...
            kinds = {"bool": bool, "int": int, "float": float}
            fields[field.target.id] = (kinds.get(kind, str), default)
    return fields


def parse(flags: list[str], fields: dict) -> dict:
    """The arguments that the flags stand for; flags of no field are an argument of their own."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name, (kind, default) in fields.items():
        spellings = {f"--{name.replace('_', '-')}", f"--{name}"}
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(*spellings, default=default, **how)
    joined = re.sub(r" (-[\d.])", r"=\1", shlex.join(flags))  # -1e-3 would be taken for a flag
    args, others = parser.parse_known_args(shlex.split(joined))
    return vars(args) | ({"other flags": shlex.join(others)} if others else {})


def patch_in(script: Path) -> dict:
    """{"patch": digest} of a script that patches.py made, which says so in its last line."""
    text = script.read_text() if script.exists() else ""
    found = re.search(r"\n# changed by .*, digest (\w+)\n$", text)
    return {"patch": found[1]} if found else {}


def copy_of_script(file: Path) -> Path:
    """The script that made the run with this config.json, as it was then."""
    command = json.loads(file.read_text())["command"]
    return file.parent / Path(shlex.split(command)[0]).name


def stored_args(file: Path, fields: dict) -> dict:
    """The arguments of a run, the name of its script, and the digest of its patch."""
    if file.suffix == ".json":
        script = copy_of_script(file)
        return json.loads(file.read_text())["args"] | {"script": script.stem} | patch_in(script)
    comments = [line[2:] for line in file.read_text().splitlines() if line.startswith("# ")]
    facts = dict(comment.split(": ", 1) for comment in comments)
    kinds = {name: float if value is None else type(value) for name, value in GONE.items()}
    gone = {name: (kinds[name], GONE[name]) for name in GONE if name not in fields}
    if "args" in facts:
        defaults = {name: default for name, (_, default) in fields.items()}
        args = defaults | json.loads(facts["args"])  # a flag that is newer than the run
    else:
        args = parse(shlex.split(facts["command"])[1:], fields | gone)
    args = {k: v for k, v in args.items() if k not in gone or v != GONE[k]}
    patch = {"patch": facts["patch"]} if "patch" in facts else {}
    return args | {"script": facts["script"]} | patch


def differences(file: Path, script: Path, flags: list[str]) -> list[str]:
    """What the run of the file has, and what is asked for, where it is not the same."""
    fields = fields_of(script)
    asked = parse(flags, fields) | {"script": script.stem} | patch_in(script)
    stored = stored_args(file, fields)
    found = []
    for name in sorted((asked.keys() | stored.keys()) - FREE):
        old, new = (args.get(name, "nothing") for args in (stored, asked))
        if old != new and ... not in (old, new):
            found.append(f"{name} {old} (asked for: {new})")
    if file.suffix == ".csv" and (end := re.search("^# unfinished: (.*)", file.read_text(), re.M)):
        found.append(f"unfinished: {end[1]}")
    if file.suffix == ".json" and not found:  # to be resumed, so by the same script to the byte
        copy = copy_of_script(file)
        if not copy.exists() or copy.read_bytes() != script.read_bytes():
            found = ["another version of the script"]
    return found


def not_free(script: Path, flags: list[str]) -> list[str]:
    """Those of the flags that change what is learned, or which run of a suite it is."""
    fields = fields_of(script)
    given = parse(flags, {name: (kind, argparse.SUPPRESS) for name, (kind, _) in fields.items()})
    free = FREE - {"exp_name", "resume", "evaluate"}
    return [f"{name} {value}" for name, value in given.items() if name not in free]


def main() -> None:
    first, script, *flags = sys.argv[1:]
    if first == "--free":
        found = not_free(Path(script), flags)
    else:
        found = differences(Path(first), Path(script), flags)
    if found:
        print(", ".join(found))
        sys.exit(1)


if __name__ == "__main__":
    main()
