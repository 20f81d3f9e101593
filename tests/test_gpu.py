"""benchmark/gpu.sh without a GPU: its rehearsal, what it keeps and puts back, and how it ends."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from test_benchmark import ROOT, output_of, results, suite
from watch import scalars_of

PART = 2**20  # bytes of a part


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy without results and documents."""
    folder = tmp_path / "project"
    without = shutil.ignore_patterns("results", "figures", "__pycache__")
    for name in ("benchmark", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=without)
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    return folder


def gpu(folder: Path, *words: str, code: int = 0, **variables: str) -> str:
    return output_of(suite(folder, "benchmark/gpu.sh", *words, **variables), code=code)


def add_run(folder: Path, name: str, iteration: int, size: int = 0, **args) -> Path:
    run_dir = folder / "runs" / name
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps({"args": args}))
    (run_dir / "episodes.csv").write_text(f"of iteration {iteration}")
    (run_dir / "observations.bin").write_bytes(b"large")
    shutil.copy(folder / "ppo.py", run_dir)
    weights = torch.rand(size // 4)  # cannot be compressed
    torch.save({"iteration": iteration, "weights": weights}, run_dir / "checkpoint.pt")
    return run_dir


def staged(folder: Path) -> dict[str, str]:
    """Copies of runs -> what their episodes say."""
    copies = folder.glob(".gpu/staged/*/episodes.csv")
    return {path.parent.name: path.read_text() for path in copies}


def test_runs_are_copied_where_their_checkpoint_is_all_they_need(project):
    """PPG's only between two phases; one with a results file of its own no more."""
    done = project / "benchmark/results/atari/Pong-v5/ppo_atari__1.csv"
    done.parent.mkdir(parents=True)
    done.write_text("")
    os.utime(done, (1, 1))  # of an older run of that name
    atari = add_run(project, "Pong-v5__ppo_atari__1__1", iteration=3)
    ppg = add_run(project, "starpilot__ppg_procgen__1__2", iteration=32, n_iteration=32)
    stage = [sys.executable, "benchmark/gpu.py", ".gpu/staged"]
    subprocess.run(stage, cwd=project, check=True)
    first = {atari.name: "of iteration 3", ppg.name: "of iteration 32"}
    assert staged(project) == first
    names = {path.name for path in (project / ".gpu/staged" / ppg.name).iterdir()}
    assert names == {"checkpoint.pt", "config.json", "episodes.csv", "ppo.py"}

    for run_dir in (atari, ppg):
        shutil.rmtree(run_dir)
    add_run(project, atari.name, iteration=33)
    add_run(project, ppg.name, iteration=33, n_iteration=32)
    subprocess.run(stage, cwd=project, check=True)
    assert staged(project) == first | {atari.name: "of iteration 33"}
    done.write_text("")
    subprocess.run(stage, cwd=project, check=True)
    assert staged(project) == {ppg.name: "of iteration 32"}


def test_another_machine_goes_on_with_what_was_kept(project, tmp_path):
    """In files small enough to carry, with results that are newer than this copy of the project."""
    gpu(project, "pack", "--out", "kept")  # begins
    run_dir = add_run(project, "Pong-v5__ppo_atari__1__1", iteration=3, size=5 * PART // 4)
    csv = project / "benchmark/results/speed/ppo_gpu.csv"
    csv.parent.mkdir(parents=True)
    csv.write_text("# made: here\n")
    (project / ".gpu/kept/steps").write_text("speed/ppo done\ntests failed\n")
    gpu(project, "pack", "--out", "kept", PART=str(PART))
    parts = sorted((project / "kept").glob("runs.tar.gz.*"))
    assert len(parts) == 2 and all(path.stat().st_size <= PART for path in parts)
    with tarfile.open(project / "kept/results.tar.gz") as archive:
        names = [member.name for member in archive if member.isfile()]
    assert names == ["./benchmark/results/speed/ppo_gpu.csv"]

    before = (run_dir / "checkpoint.pt").read_bytes()
    for path in ("runs", ".gpu", "benchmark/results"):
        shutil.rmtree(project / path)
    assert "nothing was kept in" in gpu(project, "status", "--from", "kpt", code=2)
    late = parts[1].rename(project / "late")
    for _ in range(2):  # nothing begins without all that was kept
        assert "unexpected end of file" in gpu(project, "status", "--from", "kept", code=1)
    late.rename(parts[1])
    output = gpu(project, "status", "--from", "kept", "--only", "speed/ppo")
    assert "speed/ppo" in output and "all done" in output
    assert "left: tests, " in gpu(project, "status", code=1)
    assert csv.read_text() == "# made: here\n"
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert not (run_dir / "observations.bin").exists()
    csv.unlink()  # as in a new copy of the project on the same machine
    gpu(project, "pack", "--out", "kept again", PART=str(PART))
    assert csv.exists()
    assert len(list((project / "kept again").glob("runs.tar.gz.*"))) == 2


def test_a_machine_without_a_gpu_is_refused(project):
    output = gpu(project, "--only", "tests", code=1, CUDA_VISIBLE_DEVICES="")
    assert "torch finds no GPU" in output and "will not do" in output
    assert "left: tests\n" in output


@pytest.mark.e2e
def test_wheels_beside_the_project_are_installed_without_a_network(project):
    """In an environment that also sees the packages of PYTHON, which is one itself."""
    info = "Metadata-Version: 2.1\nName: {0}\nVersion: 1.0\n"

    def carry(folder: str, name: str, whole: bool = True) -> Path:
        (project / folder).mkdir(parents=True, exist_ok=True)
        made = project / "made" / name
        facts = made / f"{name}-1.0.dist-info"
        facts.mkdir(parents=True, exist_ok=True)
        (made / f"{name}.py").write_text("import torch\n")
        (facts / "METADATA").write_text(info.format(name))
        (facts / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
        (facts / "RECORD").write_text("")
        wheel = Path(shutil.make_archive(project / folder / name, "zip", made))
        wheel.write_bytes(wheel.read_bytes() if whole else b"a part of it")
        return wheel.rename(project / folder / f"{name}-1.0-py3-none-any.whl")

    carry("peer/.whl", "carried_for_peers")
    first = carry(".whl", "carried", whole=False)
    for _ in range(2):
        gpu(project, "step", "machine", code=1, REHEARSAL="yes")
    carry(".whl", "carried")
    output = gpu(project, "step", "machine", REHEARSAL="yes")
    assert f"torch {torch.__version__}" in output
    first.unlink()
    carry(".whl", "carried_later")  # another load
    gpu(project, "step", "machine", REHEARSAL="yes")
    for folder, name in (
        ("ours", "carried"),
        ("ours", "carried_later"),
        ("peer", "carried_for_peers"),
    ):
        python = [project / ".gpu" / folder / "bin/python", "-c", f"import {name}"]
        subprocess.run(python, check=True)


@pytest.mark.e2e
def test_the_rehearsal(project):
    """A measurement alone, one with a peer, a peer that is not there; nothing twice."""
    rehearse = ["--rehearse", "--out", "kept", "--only"]
    output = gpu(project, *rehearse, "speed/ppo", LIMIT="300")
    assert "speed/ppo: done" in output and "all done" in output
    assert "speed/ppo: " not in gpu(project, *rehearse, "speed/ppo")
    gpu(project, *rehearse, "speed/ppo_cleanrl", code=3, LIMIT="1")
    copy, begun = project / ".gpu/rehearsal", time.monotonic()
    while "speed/ppo_cleanrl done" not in (copy / ".gpu/kept/steps").read_text():
        assert time.monotonic() - begun < 300
        time.sleep(2)
    shutil.rmtree(copy / "benchmark/results")  # as a new copy of the project may do
    assert "all done" in gpu(project, *rehearse, "speed/ppo_cleanrl")
    output = gpu(project, *rehearse, "speed/atari_leanrl")
    assert "there is no peer/leanrl" in output and "speed/atari_leanrl: skipped" in output
    with tarfile.open(project / "kept/results.tar.gz") as archive:
        archive.extractall(project / "unpacked", filter="data")
    folder = project / "unpacked/benchmark/results/speed"
    assert {path.name for path in folder.iterdir()} == {"ppo_gpu.csv", "ppo_cleanrl_gpu.csv"}
    alone = results.read_curve(folder / "ppo_gpu.csv")
    shares = alone["ours_rollout_share"] + alone["ours_update_share"]
    assert 0 < shares[0] < 1.05 and alone["ours_peak_mb"][0] > 100
    assert "peer_peak_mb" not in alone and "peer" not in results.read_facts(folder / "ppo_gpu.csv")
    assert results.read_curve(folder / "ppo_cleanrl_gpu.csv")["peer_steps_per_second"][0] > 0
    assert list(project.glob("benchmark/results/*")) == []  # a rehearsal leaves none


@pytest.mark.e2e
def test_a_call_returns_and_the_step_runs_on_until_it_is_stopped(project):
    """A step that takes long: its tests wait."""
    (project / "tests/test_cuda.py").write_text(
        "import time, pytest\n\n@pytest.mark.cuda\ndef test_long():\n    time.sleep(300)\n"
    )
    begun = time.monotonic()
    rehearse = {"PYTEST_ADDOPTS": "-n 0", "LIMIT": "15"}
    said = gpu(project, "--rehearse", "--only", "tests", code=3, **rehearse)
    while "now: tests" not in said:  # the step before it, on a slow machine
        assert "now: machine" in said and time.monotonic() - begun < 200
        time.sleep(2)
        said = gpu(project, "status", "--rehearse", code=3)
    begun = time.monotonic()
    assert "nothing runs" in gpu(project, "stop", "--rehearse")
    assert "left: tests, " in gpu(project, "status", "--rehearse", code=1)
    assert time.monotonic() - begun < 200


def test_speed_of_leanrl_is_read_from_what_it_tells_wandb(tmp_path):
    script = 'import wandb\nwandb.init(project="x")\nfor step in (10, 20):\n'
    script += '    wandb.log({"speed": step / 2, "r": 0}, step=step)\n'
    (tmp_path / "ppo.py").write_text(script)
    there = {"cwd": tmp_path, "env": os.environ | {"LEANRL_SCRIPT": "ppo.py"}}
    subprocess.run([sys.executable, ROOT / "benchmark/peers/leanrl.py"], check=True, **there)
    events = scalars_of(tmp_path / "runs/leanrl")
    assert events == {"charts/SPS": [(10, 5.0), (20, 10.0)]}
