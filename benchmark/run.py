"""Train the runs of a suite that have no results yet, then print their tables and draw figures.

Run:  bash benchmark/SUITE.sh [RECIPE ...] [--dry-run]     the suites and recipes of recipes.csv

--dry-run prints one line for each run: the command that would train it, or `have FILE`.
Variables:
  ENVS, SEEDS, STEPS   instead of those of recipes.csv
  SUFFIX    of the folder of results, such as _mine: the same runs again, beside the old ones
  FLAGS     for every run, such as "--track"; what changes learning needs a SUFFIX
  WORKERS   runs side by side (all cores; if a recipe takes all cores, one for each of GPUS, or 1)
  THREADS   of each run (1; if a recipe takes all cores, its share of them)
  GPUS      of this machine, such as "0 1 2 3": the runs side by side have one each
  TASK      number of a run of the plan, from 0: only that one, see slurm.sbatch
  PYTHON    how bash starts Python (uv run python)

A suite may end in any way, and its runs end with it. Started again it skips what is done, resumes
what was interrupted and trains the rest. A script runs in runs/<folder>/, its output goes to a .log
there. A run that fails is one line, and the others go on.
"""

import ctypes
import fcntl
import importlib.util
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType

from collect import collect, is_finished, load_checkpoint, patch_in
from patches import script_of
from results import ROOT, environments_of, file_of, read_facts, read_recipes

# Flags that scripts have no more, and the value that they behave by; others were off.
GONE = {"v_value": 1, "n_aux_grad_accum": 1, "clip_obs": 10, "clip_reward": 10}
# What may differ between two runs: none of it changes what is learned.
FREE = set("exp_name resume evaluate cuda compile env_threads micro_batch capture_video".split())
FREE |= set("track wandb_project_name wandb_entity checkpoint_seconds".split())
FREE |= set("eval_episodes eval_deterministic eval_levels".split())
NAMES = {"exp_name", "seed", "env_id", "total_timesteps", "resume", "evaluate"}  # not for FLAGS
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
BAR = re.compile(r"[^\r\n]*/\d+ \[.*?\]\r?")  # a state of the progress bar
LIBC = ctypes.CDLL(None)


class Refused(Exception):
    """What the user can mend, in one line."""


@dataclass(frozen=True)
class Run:
    """One training of a plan."""

    folder: str  # of results/
    script: Path
    env: str
    exp: str
    seed: int
    flags: tuple[str, ...]
    cores: str = "one"

    @property
    def name(self) -> str:
        return f"{self.csv.parent.name}__{self.exp}__{self.seed}"

    @property
    def csv(self) -> Path:
        return file_of(self.folder, self.env, self.exp, self.seed)

    @property
    def home(self) -> Path:
        """Where the script starts, so runs of two folders never mix."""
        return ROOT / "runs" / self.folder


# -- what a run has learned from: its arguments, its script --
def load(script: Path) -> ModuleType:
    """A script as a module: importing it starts nothing."""
    name = f"run_{script.stem}"  # the script itself may have been imported, too
    spec = importlib.util.spec_from_file_location(name, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    sys.path.append(str(script.parent))  # for what it imports from beside it
    spec.loader.exec_module(module)
    return module


loaded = cache(load)


@cache
def parsed(script: Path, flags: tuple[str, ...]) -> dict:
    """The arguments that a script makes of flags, and whose they are."""
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            args = loaded(script).parse_args(list(flags))
    except SystemExit as error:
        lines = (errors.getvalue() or str(error)).splitlines()
        words = " ".join(line.strip("╭─╮│╰╯ ") for line in lines)
        raise Refused(f"{script.name} {shlex.join(flags)}: {words}") from error
    plain = json.loads(json.dumps(asdict(args), default=str))  # as config.json has them
    return plain | {"script": script.stem, "patch": patch_in(script)}


def names_of(flags: tuple[str, ...]) -> set[str]:
    """The arguments that flags set, to another value or to the same."""
    given = [flag.split("=")[0] for flag in flags if flag.startswith("--")]
    return {flag.removeprefix("--").replace("-", "_") for flag in given}


def with_whole_path(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The run of --init-from by its whole path, since a training starts in another folder."""
    words = [*flags]
    for i, word in enumerate(words):
        name, is_one_word, path = word.partition("=")
        if name == "--init-from" and is_one_word:
            words[i] = f"{name}={os.path.abspath(path)}"
        elif name == "--init-from" and words[i + 1 :]:
            words[i + 1] = os.path.abspath(words[i + 1])
    return tuple(words)


def asked_by(run: Run) -> dict:
    """The arguments of a run of the plan."""
    return parsed(run.script, run.flags) | {"seed": run.seed}


def differences(asked: dict, stored: dict, defaults: dict) -> list[str]:
    """What two runs do not share. A flag that is newer than a run had its default there."""
    found = []
    for name in sorted((asked.keys() | stored.keys()) - FREE):
        old, new = stored.get(name, defaults.get(name)), asked.get(name)
        gone = name not in asked and (not old or old == GONE.get(name))
        gone |= name == "discretize_actions" and old is None  # there were no Box actions
        if old != new and not gone:
            found.append(f"{name} {old} (asked for: {new})")
    return found


def differs(run: Run) -> list[str]:
    """What makes the results file of a run another run's."""
    facts, asked = read_facts(run.csv), asked_by(run)
    stored = json.loads(facts["args"]) | {"script": facts["script"]}
    stored |= {"patch": facts.get("patch", asked["patch"])}  # the oldest files do not name it
    stored |= {"unfinished": facts.get("unfinished")}
    return differences(asked, stored, parsed(run.script, ()))


def newest_run(run: Run, to_resume: bool) -> Path | None:
    """Its newest directory; to resume one it needs a checkpoint, these arguments, this script."""
    found = []
    for config in run.home.glob(f"runs/*__{run.exp}__{run.seed}__*/config.json"):
        run_dir = config.parent
        try:
            stored = json.loads(config.read_text())["args"]
        except (ValueError, KeyError):  # it ended while this was written
            continue
        copy = run_dir / run.script.name
        whose = {"script": run.script.stem, "patch": patch_in(copy)}
        fits = not differences(asked_by(run), stored | whose, parsed(run.script, ()))
        if to_resume and fits:
            fits = (run_dir / "checkpoint.pt").exists() and copy.exists()
            fits = fits and copy.read_bytes() == run.script.read_bytes()
        if fits:
            found.append(run_dir)
    return max(found, key=lambda run_dir: run_dir.stat().st_mtime, default=None)


# -- the plan --
def plan(suite: str, recipes: list[str]) -> list[Run]:
    """All runs of the recipes: every experiment with its first seed, then with its second."""
    rows = read_recipes()
    rows = rows[rows["suite"] == suite]
    known = list(dict.fromkeys(rows["recipe"]))
    if not recipes or not {*recipes} <= {*known}:
        raise Refused(f"recipes of {suite}: {', '.join(known)}")
    rows = rows[rows["recipe"].isin(recipes)]
    asked = os.environ.get("ENVS", "").split()
    named = {env for _, row in rows.iterrows() for env in environments_of(row)}
    runs = []
    for _, row in rows.iterrows():
        envs = environments_of(row)
        if asked:
            others = not row["environments"].startswith("only")
            envs = [env for env in asked if env in envs or (env not in named and others)]
        seeds = os.environ.get("SEEDS", row["seeds"]).split()
        if not all(seed.isdecimal() for seed in seeds):
            raise Refused(f"SEEDS ({' '.join(seeds)}) are numbers such as 1 2 10")
        steps = os.environ.get("STEPS", row["steps"])
        for env in envs:
            flags = ["--env-id", env, "--exp-name", row["experiment"], "--total-timesteps", steps]
            flags += row["flags"].split()
            folder = row["folder"] + os.environ.get("SUFFIX", "")
            about = (folder, script_of(row["script"]), env, row["experiment"])
            for turn, seed in enumerate(seeds):
                runs.append((turn, Run(*about, int(seed), tuple(flags), row["cores"])))
    once = {}
    for _, run in sorted(runs, key=lambda pair: pair[0]):
        once.setdefault(run.csv, run)
    return list(once.values())


def with_flags(runs: list[Run]) -> list[Run]:
    """The plan with FLAGS, which may not change what a folder's results stand for."""
    extra = with_whole_path(tuple(shlex.split(os.environ.get("FLAGS", ""))))
    suffix = os.environ.get("SUFFIX", "")
    folders = {*read_recipes()["folder"]}
    if clash := {run.folder for run in runs if suffix and run.folder in folders}:
        raise Refused(f"SUFFIX ({suffix}): {', '.join(clash)} is the folder of another recipe")
    changed = [replace(run, flags=run.flags + extra) for run in runs]
    for run, new in zip(runs, changed):
        plain, asked = parsed(run.script, run.flags), parsed(new.script, new.flags)
        found = {name for name in asked if asked[name] != plain[name]}
        if given := names_of(extra) & NAMES:
            names = ", ".join(sorted(given))
            raise Refused(f"FLAGS may not have {names}: ENVS, SEEDS and STEPS say which runs")
        if found - FREE and not suffix:
            names = ", ".join(sorted(found - FREE))
            raise Refused(f"FLAGS change {names}: with SUFFIX=_mine they are runs of their own")
    return changed


# -- training --
def say(lines: str) -> None:
    """Print in one piece, since threads print."""
    sys.stdout.write(f"{lines}\n")
    sys.stdout.flush()


def last_words(log: str) -> str:
    """Why a run ended: its own last error, which the output of other programs may follow."""
    lines = [line for line in BAR.sub("\n", log).splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("error: ")]
    is_exception = re.compile(r"(\[rank\d+\]: )?(?!.*ChildFailed)[\w.]*(Error|Exception)\b")
    exceptions = [line for line in lines if is_exception.match(line)]
    return (refusals or exceptions or lines or ["it printed nothing"])[-1]


def had(run: Run) -> str:
    """What a results file that exists is to the run; empty if there is none."""
    if not run.csv.exists():
        return ""
    path, found = run.csv.relative_to(ROOT), differs(run)
    if found:
        return f"FAIL {path} is of another run: {', '.join(found)}; delete it to run again"
    return f"have {path}"


class Pool:
    """Runs side by side."""

    def __init__(self, runs: list[Run]):
        self.runs, self.stopped, self.children = runs, False, set()
        self.texts = {run.script: run.script.read_bytes() for run in runs}
        for run in runs:  # before there are threads, which share stderr
            asked_by(run), parsed(run.script, ())
        cores, kind = len(os.sched_getaffinity(0)), runs[0].cores
        gpus = os.environ.get("GPUS", "").split()
        self.processes = int(kind) if kind.isdecimal() else 0  # of torchrun
        workers = {"one": cores, "all": len(gpus) or 1}.get(kind, 1)
        self.workers = int(os.environ.get("WORKERS") or workers)
        together = max(self.processes, 1) * max(self.workers, 1)
        threads = 1 if kind == "one" else -(-cores // together)
        self.threads = os.environ.get("THREADS") or str(threads)
        self.gpus = queue.SimpleQueue()
        for i in range(self.workers if gpus else 0):
            self.gpus.put(gpus[i % len(gpus)])

    def command(self, run: Run, old: Path | None) -> list[str]:
        """What trains a run, or goes on with an old one."""
        command = [sys.executable]
        if self.processes:
            torchrun = "-m torch.distributed.run --standalone --nproc-per-node"
            command += [*torchrun.split(), str(self.processes)]
        command += [str(run.script), "--seed", str(run.seed), *run.flags]
        return [*command, "--resume", str(old)] if old else command

    def train(self, run: Run) -> str:
        """One run up to its results file: what became of it, in a line."""
        if self.stopped or run.csv.exists():
            return had(run)
        if run.script.read_bytes() != self.texts[run.script]:
            changed = f"{run.script.name} has changed since this suite began: put it back"
            return f"FAIL {run.name}: {changed}, or take another SUFFIX"
        run.home.mkdir(parents=True, exist_ok=True)
        log = run.home / f"{run.name}.log"
        with open(log, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the run has ended
            except BlockingIOError:
                return f"FAIL {run.name} is just being run by another suite, see {log}"
            except OSError:  # a disk without locks, as some of a cluster are
                pass
            begin = file.tell()
            run_dir, code = newest_run(run, to_resume=True), 0
            if not (run_dir and is_finished(load_checkpoint(run_dir))):
                resumed = f", resumed from {run_dir}" if run_dir else ""
                say(f"run  {run.name}{resumed}")
                code = self.wait_for(self.command(run, run_dir), run.home, file)
                run_dir = newest_run(run, to_resume=False)
        end = last_words(log.read_bytes()[begin:].decode(errors="replace"))
        diverged = code != 0 and "losses are not finite" in end
        if code and not diverged:
            return f"FAIL {run.name}, exit code {code}: {end} ({log})"
        try:
            collect(run_dir, run.folder, diverged)
        except SystemExit as error:
            return f"FAIL {run.name}: {error}"
        facts = read_facts(run.csv)
        text = f"return {float(facts['final_return']):.1f} after {float(facts['seconds']):.0f} s"
        return f"done {run.csv.relative_to(ROOT)}: {text}"

    def wait_for(self, command: list[str], home: Path, log) -> int:
        """The exit code of a process that ends with this one, however this one ends."""
        folders = [str(Path.cwd()), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": ":".join(filter(None, folders))}
        gpu = None if self.gpus.empty() or self.processes else self.gpus.get()
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        process = subprocess.Popen(
            command,
            cwd=home,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: LIBC.prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG
        )
        self.children.add(process)
        if self.stopped:
            process.terminate()
        code = process.wait()
        self.children.discard(process)
        if gpu:
            self.gpus.put(gpu)
        return code

    def work(self) -> list[str]:
        """What became of each run, printed as it comes."""
        lines, start, trained = [], time.monotonic(), 0
        os.environ |= dict.fromkeys(THREADS, self.threads)
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {pool.submit(self.train, run): run for run in self.runs}
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    failed = f"FAIL {futures[future].name}: {error!r}"
                    lines.append(failed if error else future.result())
                    trained += lines[-1].startswith("done")
                    left = len(futures) - len(lines)
                    minutes = (time.monotonic() - start) / max(trained, 1) * left / 60
                    about = f", about {minutes:.0f} min" if trained and left else ""
                    say(f"{lines[-1]}\n{left} of {len(futures)} runs left{about}")
            except KeyboardInterrupt:
                self.stopped = True
                for process in [*self.children]:
                    with suppress(ProcessLookupError):  # it has just ended
                        os.killpg(process.pid, signal.SIGTERM)
                pool.shutdown(cancel_futures=True)
                sys.exit("stopped; start the suite again to go on")
        return lines


def train_all(runs: list[Run], dry_run: bool) -> list[str]:
    """The runs of a plan, or the one that TASK names; exit code 1 if one has no result."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not runs:
        raise Refused("these ENVS and SEEDS leave no run")
    task = os.environ.get("TASK")
    if task:
        if not int(task) < len(runs):
            raise Refused(f"no run has the number TASK ({task})")
        runs = [runs[int(task)]]
    if dry_run:
        commands = (Pool([run]).command(run, newest_run(run, to_resume=True)) for run in runs)
        lines = [had(run) or shlex.join(command) for run, command in zip(runs, commands)]
        print("\n".join(lines))
    else:
        lines = []
        for cores in dict.fromkeys(run.cores for run in runs):
            lines += Pool([run for run in runs if run.cores == cores]).work()
    if any(line.startswith("FAIL") for line in lines):
        sys.exit("error: not every run has a result, see above; start the suite again to go on")
    return lines


def main() -> None:
    suite, default, *words = sys.argv[1:]  # as the shell commands give them
    recipes = [word for word in words if word != "--dry-run"] or default.split()
    dry_run = "--dry-run" in words
    try:
        runs = with_flags(plan(suite, recipes))
        lines = train_all(runs, dry_run)
    except (Refused, ValueError) as error:
        sys.exit(f"error: {error}")
    if not dry_run and not os.environ.get("TASK"):
        import report

        for folder in dict.fromkeys(run.folder for run in runs):
            report.show(folder, drawn=any(line.startswith("done") for line in lines))


if __name__ == "__main__":
    main()
